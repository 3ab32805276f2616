"""``ling3-runner doctor``: each single, faked problem of a machine is reported once, with a hint and its exit code."""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
from click.testing import CliRunner
from msgspec import structs

from ling3export.artifacts.manifest import read_manifest
from ling3export.artifacts.schema import Target
from ling3export.machine.verdict import JaxRuntime
from ling3export.runners.cli import doctor
from ling3export.runners.cli.doctor import NEEDED, PLUGINS, of_machine, of_target
from ling3export.runners.cli.main import main
from tests.support import toy_artifact
from tests.support.builds import python

FOLDER = Path("a.ling3")
GB = 10**9


class Fitting(NamedTuple):
    """A target, and a machine that fits it in every way."""

    target: Target
    runtime: JaxRuntime
    platforms: list[str]


@pytest.fixture(scope="module")
def artifact():
    return toy_artifact.shared()


@pytest.fixture(scope="module")
def on_cpu(artifact):
    target = read_manifest(artifact).targets["cpu-tp2"]
    requires = target.requires
    runtime = JaxRuntime("cpu", requires.jaxlib, {}, "cpu", requires.machine, 1, requires.cpu_features, [0, 1])
    return Fitting(target, runtime, ["cpu"])


@pytest.fixture(scope="module")
def on_tpu(on_cpu):
    """The same programs for a slice of two hosts with two chips each, and a host that fits."""
    target = on_cpu.target
    requires = structs.replace(
        target.requires,
        platform="tpu",
        device_kind="TPU v6 lite",
        cpu_features=None,
        machine=None,
        plugins={"libtpu": "1"},
    )
    mesh = structs.replace(target.mesh, devices=(0, 1, 2, 3), hosts=(0, 0, 1, 1))
    chips = JaxRuntime(
        "tpu", requires.jaxlib, {"libtpu": "1"}, "TPU v6 lite", on_cpu.runtime.machine, 1, [], [0, 1], memory=31 * GB
    )
    target = structs.replace(target, platform="tpu", kind="v6e", topology="2x2", requires=requires, mesh=mesh)
    return Fitting(target, chips, ["tpu", "cpu"])


@pytest.fixture
def problems(monkeypatch):
    """The problems of a machine that fits except for ``changes`` of jax's report."""

    def found(fitting: Fitting, memory=4 * GB, platforms=None, **changes):
        monkeypatch.setattr(doctor, "platforms_here", lambda: platforms or fitting.platforms)
        monkeypatch.setattr(doctor.environment, "memory", lambda: (8 * GB, memory, 0))
        return [*of_target(fitting.target, replace(fitting.runtime, **changes), FOLDER)]

    return found


def test_a_machine_that_fits_has_no_problem(on_cpu, problems):
    assert problems(on_cpu) == []


def test_a_host_of_a_slice_gets_the_hint_to_start_with_the_others(on_tpu, problems):
    (note,) = problems(on_tpu)
    assert note[:2] == ("note", "hosts: this is one of the 2 that run together")
    assert "NNODES=2" in note.mend


ON_CPU = {
    "another jaxlib": ({"jaxlib": "0.1"}, "compile", "jaxlib: built for", "pip install jax=="),
    "another kind": (
        {"device_kind": "gpu"},
        "compile",
        "device kind: built for cpu, found gpu",
        "build --into a.ling3",
    ),
    "too few devices": ({"devices": [0]}, "fault", "devices: built for 2, found 1", "ling3export build --into"),
    "other device ids": ({"devices": [0, 7]}, "compile", "(without ids 1)", "ling3export build --into"),
    "another instruction set": ({"machine": "linux-riscv64"}, "compile", "machine: built for", "--target cpu"),
    "without a feature": ({"cpu_features": []}, "compile", "processor: built for", "ling3export build --into"),
    "too little memory": ({"memory": 1}, "fault", "memory: expected", "--max-running"),
}
ON_TPU = {
    "no TPU": ({"platform": "cpu", "platforms": ["cpu"]}, "fault", "platform: built for tpu, found cpu",
        "ling3export build --into a.ling3 --target cpu"),
    "another libtpu": ({"plugins": {"libtpu": "2"}}, "compile", "libtpu: built for 1, found 2", "install libtpu==1"),
    "no libtpu": ({"plugins": {}}, "compile", "libtpu: built for 1, found none", "pip install libtpu==1"),
    "another chip": ({"device_kind": "TPU v5"}, "compile", "device kind: built for TPU v6 lite", "build --into"),
    "a missing chip": ({"devices": [0]}, "fault", "built for 2 on each host, found 1", "build --into"),
    "another number of hosts": ({"processes": 4}, "fault", "hosts: built for 2 (a process on each), found 4",
        "NNODES=2"),
    "little memory of a chip": ({"memory": 1}, "fault", "memory: expected", "--max-running"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("machine", "name"), [*(("on_cpu", name) for name in ON_CPU), *(("on_tpu", name) for name in ON_TPU)]
)
def test_each_single_problem_is_named_once(request, problems, machine, name):
    """On a host of a slice, the report also says that other hosts belong to it."""
    changes, severity, what, mend = (ON_CPU if machine == "on_cpu" else ON_TPU)[name]
    fitting = request.getfixturevalue(machine)
    if name == "little memory of a chip":
        fitting, changes = fitting._replace(runtime=replace(fitting.runtime, **changes)), {}
    (problem,) = [each for each in problems(fitting, **changes) if each.severity != "note"]
    assert problem.severity == severity and what in problem.what and mend in problem.mend


@pytest.mark.parametrize(
    ("packages", "runtime", "what", "mend"),
    [
        ({"jax": None}, None, "package `jax`: not installed", "in the checkout: pip install ."),
        ({"numpy": None}, None, "package `numpy`: not installed", "in the checkout: pip install ."),
        ({"jax": "0.1"}, None, "jax: expected the version of jaxlib", "pip install jax==0.12.0 jaxlib=="),
        ({}, "ImportError: bad plugin", "jax: did not start: ImportError: bad plugin", "pip install jax=="),
        ({}, "signal 11: ", "jax: did not start: signal 11", "pip install jax=="),
        ({}, "libtpu lockfile", "did not start: libtpu lockfile", "end the process that holds"),
    ],
)
def test_each_single_problem_of_packages_is_named_once(on_cpu, packages, runtime, what, mend):
    whole = dict.fromkeys(NEEDED, "1") | dict.fromkeys(PLUGINS) | {"jax": "0.12.0", "jaxlib": "0.12.0"} | packages
    (problem,) = of_machine(whole, runtime or on_cpu.runtime)
    assert problem.severity == "fault" and what in problem.what and mend in problem.mend


def test_a_version_of_jax_that_needs_another_python_is_not_recommended(monkeypatch):
    """`pip install jax==0.11.2` cannot work on Python 3.11."""
    monkeypatch.setattr(sys, "version_info", (3, 11, 9))
    assert doctor.jax_of("0.11.2") == "run with Python 3.12 or 3.13, or with --programs allow-compile"
    assert doctor.jax_of("0.10.2") == "pip install jax==0.10.2 jaxlib==0.10.2"
    monkeypatch.setattr(sys, "version_info", (3, 12, 0))
    assert doctor.jax_of("0.11.2") == "pip install jax==0.11.2 jaxlib==0.11.2"


def test_jax_is_started_in_a_process_of_its_own():
    runtime = doctor.start_jax(3)
    assert isinstance(runtime, JaxRuntime)
    assert (runtime.platform, runtime.devices, runtime.processes) == ("cpu", [0, 1, 2], 1)
    assert doctor.start_jax(1, probe="import os; os.abort()").startswith("signal 6")
    assert doctor.start_jax(1, probe="raise ImportError('bad plugin')") == "ImportError: bad plugin"
    assert doctor.start_jax(1, 0.2, "import time; time.sleep(60)") == "no answer within 0.2 s"


def run(*arguments):
    return CliRunner().invoke(main, ["doctor", *map(str, arguments)])


def test_the_command_describes_the_machine_and_gives_the_verdict(artifact, on_cpu, monkeypatch):
    monkeypatch.setattr(doctor, "start_jax", lambda devices: on_cpu.runtime)
    monkeypatch.setenv("XLA_FLAGS", "--xla_x=1")
    done = run(artifact)
    assert done.exit_code == 0 and "XLA_FLAGS=--xla_x=1" in done.stdout
    assert done.stdout.endswith(f"{artifact}, target cpu-tp2: fits this machine\n")
    monkeypatch.setattr(doctor, "start_jax", lambda devices: replace(on_cpu.runtime, jaxlib="0.1"))
    done = run(artifact)
    assert done.exit_code == 3
    assert "compile: jaxlib: built for" in done.stdout and "  mend: pip install jax==" in done.stdout
    done = run(artifact, "--json")
    assert (done.exit_code, json.loads(done.stdout)["problems"][0]["severity"]) == (3, "compile")
    done = run(artifact, "--target", "tpu")
    assert done.exit_code == 1 and "fault: target `tpu`: the artifact has only cpu-tp2" in done.stdout
    done = run("nowhere.ling3")
    assert done.exit_code == 1 and "fault: artifact `nowhere.ling3`" in done.stdout


def test_it_reports_without_jax(artifact, tmp_path):
    """The first folder on the path hides jax, as if it were not installed."""
    for name in ("jax", "jaxlib"):
        (tmp_path / f"{name}.py").write_text(f"raise ModuleNotFoundError(\"No module named '{name}'\")\n")
    path = os.pathsep.join([str(tmp_path), *(each for each in sys.path if each)])
    done = python("-m", "ling3export.runners.cli", "doctor", artifact, PYTHONPATH=path)
    assert done.returncode == 1, done.stderr
    assert "devices:    jax did not start: ModuleNotFoundError: No module named 'jax'" in done.stdout
    assert "fault: jax: did not start: ModuleNotFoundError" in done.stdout
    assert "Traceback" not in done.stderr
