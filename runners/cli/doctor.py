"""``ling3-runner doctor``: a description of this machine, and each reason why an artifact does not run on it.

jax starts in a process of its own: the report appears also without jax, and with a plugin that ends the process.
"""

import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import click

from ling3export.artifacts.files import REBUILD
from ling3export.artifacts.manifest import named_target
from ling3export.artifacts.schema import Target
from ling3export.artifacts.signing import read_trusted
from ling3export.foundation.errors import ArtifactError
from ling3export.foundation.extras import install, installed
from ling3export.machine import environment
from ling3export.machine.targets import SIGNS, choose_target, on_all, platforms_here
from ling3export.machine.verdict import JaxRuntime, VerdictStatus, judge, misfits
from ling3export.runners.cli.command import Command
from ling3export.runners.cli.options import target_option
from ling3export.runners.cli.references import ARTIFACT

NEEDED = ("jax", "jaxlib", "numpy", "ml_dtypes", "safetensors", "tokenizers", "jinja2", "flatbuffers")
PLUGINS = ("libtpu", "jax-cuda13-plugin", "jax-cuda13-pjrt", "jax-cuda12-plugin", "jax-cuda12-pjrt")
VARIABLES = ("JAX_PLATFORMS", "XLA_FLAGS", "LIBTPU_INIT_ARGS", "TPU_VISIBLE_CHIPS", "CUDA_VISIBLE_DEVICES")
START_TIMEOUT = 120.0  # seconds
PROBE = """
import json
from dataclasses import asdict
from ling3export.machine.verdict import JaxRuntime
print("\\n" + json.dumps(asdict(JaxRuntime.here())))
"""
VERDICTS = {
    0: "fits this machine",
    1: "does not run here",
    3: "runs with --programs allow-compile, which compiles the portable programs here once",
}
SEVERITIES = {"note": 0, "compile": 3, "fault": 1}  # with their exit codes


class Problem(NamedTuple):
    """A difference between artifact and machine, and the command that mends it."""

    severity: str  # one of SEVERITIES: compile means that the start needs --programs allow-compile
    what: str
    mend: str


@click.command(cls=Command)
@click.argument("artifact", type=ARTIFACT, required=False)
@target_option
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def doctor(artifact: Path | None, target: str | None, as_json: bool) -> None:
    """Say what this machine is, and whether ARTIFACT runs on it.

    Names everything that does not fit, with the command that mends it. Exits with 0 where ARTIFACT fits, 3 where it
    runs with --programs allow-compile, 1 where it does not run. Files are not read; ling3export verify does that.
    """
    problems, record, label, devices = list[Problem](), None, str(artifact), 1
    if artifact is not None:
        try:
            manifest = read_trusted(artifact, lambda text: click.echo(text, err=True))
            only = next(iter(manifest.targets)) if len(manifest.targets) == 1 else None
            name = only or choose_target(manifest.targets, None, platforms_here())
            name = name if target is None else named_target(manifest.targets, target)
            record, label = manifest.targets[name], f"{artifact}, target {name}"
            devices = record.mesh.hosts.count(0)
        except ArtifactError as error:
            problems.append(Problem("fault", error.message, error.hint or REBUILD))
    packages = {name: installed(name) for name in (*NEEDED, *PLUGINS)}
    runtime = start_jax(devices)
    problems += of_machine(packages, runtime)
    if artifact is not None and record is not None and not isinstance(runtime, str):
        problems += of_target(record, runtime, artifact)
    codes = {SEVERITIES[problem.severity] for problem in problems}
    code = 1 if 1 in codes else max(codes, default=0)
    facts = machine_facts(packages, runtime)
    if as_json:
        listed = [problem._asdict() for problem in problems]
        click.echo(json.dumps({"machine": facts, "problems": listed, "exit_code": code}))
        sys.exit(code)
    for what, text in facts.items():
        click.echo(f"{what + ':':12}{text}")
    for problem in problems:
        click.echo(f"{problem.severity}: {problem.what}\n  mend: {problem.mend}")
    if artifact is None:
        click.echo(f"this machine: {'jax does not run here' if code else 'jax runs here'}")
    else:
        click.echo(f"{label}: {VERDICTS[code]}")
    sys.exit(code)


def start_jax(cpu_devices: int, timeout: float = START_TIMEOUT, probe: str = PROBE) -> JaxRuntime | str:
    """Starts jax in a process of its own; returns its report, or why it did not start."""
    variables = dict(os.environ)
    variables["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    if "cpu" in platforms_here()[:1]:
        variables |= {"JAX_NUM_CPU_DEVICES": str(cpu_devices), "NPROC": str(cpu_devices + 2), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", probe]
    try:
        done = subprocess.run(
            command, env=variables, capture_output=True, text=True, timeout=timeout, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        return f"no answer within {timeout:g} s"
    last = " ".join(done.stderr.strip().splitlines()[-1:])[:600]
    if done.returncode < 0:
        return f"signal {-done.returncode}: {last}"
    try:
        return JaxRuntime(**json.loads(done.stdout.splitlines()[-1]))
    except (ValueError, IndexError, TypeError):
        return last or f"exit code {done.returncode}"


def machine_facts(packages: dict[str, str | None], runtime: JaxRuntime | str) -> dict[str, str]:
    total, free, _ = environment.memory()
    system = f"{environment.machine()}, {environment.cores()} cores, {platform.release()}"
    devices = f"jax did not start: {runtime}"
    if not isinstance(runtime, str):
        memory = "" if runtime.memory is None else f", {runtime.memory / 1e9:.1f} GB each"
        devices = f"{len(runtime.devices)} × {runtime.device_kind} ({runtime.platform}){memory}"
    return {
        "machine": f"{system}, Python {platform.python_version()}",
        "memory": f"{free / 1e9:.1f} GB available of {total / 1e9:.1f} GB",
        "processor": " ".join(environment.cpu_features()) or "features unknown",
        "packages": ", ".join(f"{name} {version}" for name, version in packages.items() if version is not None),
        "variables": " ".join(f"{name}={os.environ[name]}" for name in VARIABLES if name in os.environ) or "none",
        "devices": devices,
    }


def of_machine(packages: dict[str, str | None], runtime: JaxRuntime | str) -> Iterator[Problem]:
    """Problems of a machine, whatever it is to run."""
    jax, jaxlib = packages["jax"], packages["jaxlib"]
    for name in NEEDED:
        if packages[name] is None:
            yield Problem("fault", f"package `{name}`: not installed", install())
    if jax and jaxlib and jax != jaxlib:
        yield Problem("fault", f"jax: expected the version of jaxlib, {jaxlib}, found {jax}", jax_of(jaxlib))
    for name, (files, modules) in SIGNS.items():
        if any(Path(file).exists() for file in files) and not any(find_spec(module) for module in modules):
            yield Problem("note", f"{name}: the device is here, but none of {', '.join(modules)}", install(name))
    if isinstance(runtime, str) and jax and jaxlib:
        busy = "already in use" in runtime or "lockfile" in runtime
        mend = "end the process that holds the accelerator, then start again" if busy else jax_of(jaxlib)
        yield Problem("fault", f"jax: did not start: {runtime}", mend)


def of_target(target: Target, runtime: JaxRuntime, artifact: Path) -> Iterator[Problem]:
    """Requirements of a target that the machine lacks; the verdicts are the loader's."""
    build = f"ling3export build --into {artifact} --target {platforms_here()[0]}"
    if target.processes > 1 and runtime.processes == 1 and target.platform in platforms_here():
        count = target.mesh.hosts.count(0)
        if len(runtime.devices) < count:
            yield Problem("fault", f"devices: built for {count} on each host, found {len(runtime.devices)}", build)
            return
        text = f"hosts: this is one of the {target.processes} that run together"
        yield Problem("note", text, on_all(target.processes))
        runtime = replace(runtime, processes=target.processes, devices=target.mesh.devices)  # the others are alike
    verdict = next(iter(judge(target, runtime).values()))
    if verdict.status is VerdictStatus.UNSUPPORTED:
        yield Problem("fault", verdict.reason, verdict.hint or build)
        return
    differences = list(misfits(target.requires, target.mesh, runtime))
    for text in differences:
        what = text.partition(":")[0]
        plugin = (target.requires.plugins or {}).get(what)
        mend = jax_of(target.requires.jaxlib) if what == "jaxlib" else f"pip install {what}=={plugin}"
        yield Problem("compile", text, mend if what == "jaxlib" or plugin else build)
    if not differences and verdict.status is VerdictStatus.RECOMPILE:
        yield Problem("compile", verdict.reason, build)
    if target.platform == "cpu":  # weights are mapped files
        needed = target.state_bytes + max((cell.memory.passing for cell in target.cells.values()), default=0)
        needed, free = needed * target.tp // target.processes, environment.memory()[1]
    else:
        needed, free = max(cell.memory.peak for cell in target.cells.values()), runtime.memory or 0
    if 0 < free < needed:
        text = f"memory: expected {needed / 1e9:.2f} GB for state and programs, found {free / 1e9:.2f} GB"
        yield Problem("fault", text, "build for fewer sequences (--max-running) or a smaller --context")


def jax_of(version: str) -> str:
    """The way to a version of jax, which needs Python 3.12 since 0.11."""
    if sys.version_info < (3, 12) and [int(part) for part in version.split(".")[:2]] >= [0, 11]:
        return "run with Python 3.12 or 3.13, or with --programs allow-compile"
    return f"pip install jax=={version} jaxlib=={version}"
