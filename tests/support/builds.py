"""Builds in processes of their own, small enough to be killed often, and checks for what they leave."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ling3export.artifacts.schema import Target
from ling3export.cache.cells import Built
from ling3export.compile.pool import BuildOutcome
from ling3export.machine.environment import PATIENCE
from tests.support.waiting import until

ROOT = Path(__file__).parents[2]
MARK = "LING3_TEST_MARK"
# The smallest artifact: four cells, compiled without a cache by one process; a second process costs more than it saves.
SMALLEST = (
    "--cache off --jobs 1 --tp 1 --paddings 16 --decode-paddings 1 --max-running 1 --context 64 --page-size 16 "
    "--dtype float32"
).split()
# Runs the module named by its second argument. The first argument is the largest file that it may write, 0 for no
# limit. The module runs with the default handler of SIGINT, even if the tests ignore SIGINT.
SCRIPT = """
import resource, runpy, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
limit, module = int(sys.argv.pop(1)), sys.argv.pop(1)
if limit:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""
LONG = 300  # seconds; the machine may be busy
# These flags cut the time of compiling to a quarter: no optimization by LLVM, and none of XLA's MLIR emitters of
# fusions, which take half of the remaining time (docs/log/tests.md).
QUICKLY = "--xla_backend_optimization_level=0 --xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"
UNOPTIMIZED = {"XLA_FLAGS": f"{PATIENCE} {QUICKLY}"}


def environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Our environment with ``variables`` added, in which Python finds the package from any working directory."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **variables}


def python(*words: object, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs our Python interpreter with these arguments until it ends."""
    command, env = [sys.executable, *map(str, words)], environment(variables)
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=LONG)


@contextmanager
def building(
    checkpoint: Path,
    artifact: Path,
    *,
    options: Sequence[object] = (),
    limit: int = 0,
    cwd: Path | None = None,
    variables: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[subprocess.Popen[str]]:
    """Starts ``ling3export build`` of SMALLEST and kills it at the end of the block. Its children carry the mark.

    Args:
        checkpoint: The checkpoint to build.
        artifact: The output; its name is the mark.
        options: Further options of the command.
        limit: Largest file that it may write, in bytes; 0 for no limit.
        cwd: Its working directory.
        variables: Its additional environment variables.
    """
    module = "ling3export.cli"
    # -P: do not import from the working directory
    command = [sys.executable, "-P", "-c", SCRIPT, limit, module, "build", checkpoint, artifact, *SMALLEST, *options]
    process = subprocess.Popen(
        [str(part) for part in command],
        env=environment({MARK: str(artifact), **variables}),
        cwd=cwd or artifact.parent,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Waits for a build to end; returns its exit code and stderr, and checks that stdout is empty."""
    out, err = process.communicate(timeout=LONG)
    assert out == ""
    return process.returncode, err


def wait_for(folder: Path, pattern: str, process: subprocess.Popen[Any]) -> Path:
    """Waits until a file below ``folder`` matches ``pattern``, and returns the first one."""
    found = until(lambda: next(iter(folder.glob(pattern)), None), of=process, seconds=LONG)
    assert found is not None
    return found


def marked(artifact: Path, containing: str = "") -> list[int]:
    """Ids of the processes of a build of ``artifact``, found by their environment and command line."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if not entry.name.isdigit():
                continue
            variables = (entry / "environ").read_bytes().split(b"\0")
            if f"{MARK}={artifact}".encode() in variables and containing.encode() in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue  # the process has ended, or belongs to another user
    return found


def wait_until_gone(artifact: Path, seconds: float = 120) -> None:
    """Waits until no process of a build of ``artifact`` is left."""
    until(lambda: not marked(artifact), seconds=seconds)


def kill_one(artifact: Path, module: str) -> None:
    """Sends SIGKILL to a process of the build that runs ``module``."""
    os.kill(marked(artifact, module)[0], signal.SIGKILL)


def copying(programs: Path, target: Target):
    """Replaces ``Compilers.run``: returns the programs that were compiled for another artifact."""

    def run(self, wanted, done):
        built = {}
        for cell in wanted:
            for tier in ("stablehlo", "exec", "hlo.xz"):
                shutil.copy(programs / f"{cell.name}.{tier}", self.job.folder)
            built[cell.name] = Built(target.cells[cell.name], target.requires, target.mesh)
            done()
        return BuildOutcome(self.plan, built, {})

    return run
