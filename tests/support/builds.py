"""Builds in processes of their own, small enough to be killed by the dozen; and the traces that they leave."""

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
# The smallest artifact: four cells, always compiled anew, by one process: a second one costs more than it saves.
SMALLEST = (
    "--cache off --jobs 1 --tp 1 --paddings 16 --decode-paddings 1 --max-running 1 --context 64 --page-size 16 "
    "--dtype float32"
).split()
# Runs the module that its second argument names; the first one is the largest file that it may write, 0 for any. A test
# that runs with SIGINT ignored hands that down.
SCRIPT = """
import resource, runpy, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
limit, module = int(sys.argv.pop(1)), sys.argv.pop(1)
if limit:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""
LONG = 300  # seconds: a machine may be busy
# A quarter of the processor seconds of compiling: without LLVM's optimization, and without XLA's emitters of fusions in
# MLIR, which are then half of the rest (docs/log/tests.md).
QUICKLY = "--xla_backend_optimization_level=0 --xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"
UNOPTIMIZED = {"XLA_FLAGS": f"{PATIENCE} {QUICKLY}"}


def environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Ours with ``variables``; a process of it finds the package from any working directory."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **variables}


def python(*words: object, **variables: str) -> subprocess.CompletedProcess[str]:
    """An interpreter of ours that was given these words, and has ended."""
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
    """``ling3export build`` of SMALLEST, running; killed at the end of the block. Its children carry the mark.

    Args:
        checkpoint: What to build.
        artifact: Where to; its name is the mark.
        options: More of the command line.
        limit: Largest file that it may write, in bytes; 0 for any.
        cwd: Where it runs.
        variables: Of its environment.
    """
    module = "ling3export.cli"
    # -P: the working directory is not on the path.
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
    """The exit code and stderr of a build that ends by itself; it must have written nothing to stdout."""
    out, err = process.communicate(timeout=LONG)
    assert out == ""
    return process.returncode, err


def wait_for(folder: Path, pattern: str, process: subprocess.Popen[Any]) -> Path:
    """The first file of ``pattern`` below ``folder``, as soon as it is there."""
    found = until(lambda: next(iter(folder.glob(pattern)), None), of=process, seconds=LONG)
    assert found is not None
    return found


def marked(artifact: Path, containing: str = "") -> list[int]:
    """Ids of the processes that belong to a build of ``artifact``, by their environment and command line."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if not entry.name.isdigit():
                continue
            variables = (entry / "environ").read_bytes().split(b"\0")
            if f"{MARK}={artifact}".encode() in variables and containing.encode() in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue  # it has ended, or is another user's
    return found


def wait_until_gone(artifact: Path, seconds: float = 120) -> None:
    """Waits until no process of a build of ``artifact`` is left."""
    until(lambda: not marked(artifact), seconds=seconds)


def kill_one(artifact: Path, module: str) -> None:
    """SIGKILL for a process of the build that runs ``module``."""
    os.kill(marked(artifact, module)[0], signal.SIGKILL)


def copying(programs: Path, target: Target):
    """In place of ``Compilers.run``: gives the programs that were compiled for another artifact."""

    def run(self, wanted, done):
        built = {}
        for cell in wanted:
            for tier in ("stablehlo", "exec", "hlo.xz"):
                shutil.copy(programs / f"{cell.name}.{tier}", self.job.folder)
            built[cell.name] = Built(target.cells[cell.name], target.requires, target.mesh)
            done()
        return BuildOutcome(self.plan, built, {})

    return run
