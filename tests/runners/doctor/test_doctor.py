"""``ling3-runner doctor``: each single fault of a machine, faked, is told once with what mends it and its exit code."""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from ling3export.artifacts.manifest import read_manifest
from ling3export.machine.verdict import JaxRuntime
from ling3export.runners import doctor
from ling3export.runners.cli.main import main
from ling3export.runners.doctor import (
    EXTRA,
    NEEDED,
    MachineReport,
    Severity,
    exit_code,
    of_files,
    of_machine,
    of_target,
)
from tests.support import toy_artifact
from tests.support.builds import python

FOLDER = Path("a.ling3")
GB = 10**9


@pytest.fixture(scope="module")
def artifact():
    return toy_artifact.shared()


@pytest.fixture(scope="module")
def on_cpu(artifact):
    """The toy's manifest, and a machine that fits it in every way."""
    manifest = read_manifest(artifact)
    requires = manifest.targets["cpu-tp2"].requires
    packages = {name: requires.jaxlib if name in ("jax", "jaxlib") else "1" for name in NEEDED} | dict.fromkeys(EXTRA)
    runtime = JaxRuntime("cpu", requires.jaxlib, {}, "cpu", requires.machine, 1, requires.cpu_features, [0, 1])
    return manifest, MachineReport(
        cores=2,
        memory=(8 * GB, 4 * GB),
        packages=packages,
        variables={},
        signs={"tpu": (False, False), "cuda": (False, False)},
        platforms=["cpu"],
        cache=None,
        runtime=runtime,
    )


@pytest.fixture(scope="module")
def on_tpu(on_cpu):
    """The same programs as a slice's of two hosts with two chips each, and a host that fits."""
    manifest, here = on_cpu
    target = manifest.targets["cpu-tp2"]
    requires = replace(
        target.requires,
        platform="tpu",
        device_kind="TPU v6 lite",
        cpu_features=None,
        machine=None,
        plugins={"libtpu": "1"},
    )
    mesh = replace(target.mesh, devices=(0, 1, 2, 3), hosts=(0, 0, 1, 1))
    slice_ = replace(target, platform="tpu", kind="v6e", topology="2x2", requires=requires, mesh=mesh)
    chips = JaxRuntime(
        "tpu", requires.jaxlib, {"libtpu": "1"}, "TPU v6 lite", here.runtime.machine, 1, [], [0, 1], memory=31 * GB
    )
    host = replace(here, platforms=["tpu", "cpu"], signs={"tpu": (True, True)}, runtime=chips)
    return replace(manifest, targets={"tpu-v6e-2x2-tp4": slice_}), host


def faults(pair, **changes):
    manifest, here = pair
    here = replace(here, **changes)
    (name,) = manifest.targets
    return [*of_machine(here), *of_target(manifest, name, here, FOLDER)]


def runtime(pair, **changes):
    return {"runtime": replace(pair[1].runtime, **changes)}


def packages(pair, **changes):
    return {"packages": pair[1].packages | {name.replace("_", "-"): version for name, version in changes.items()}}


def test_a_machine_that_fits_has_no_fault(on_cpu):
    assert faults(on_cpu) == []
    assert exit_code([]) == 0


def test_a_host_of_a_slice_is_told_to_start_with_the_others(on_tpu):
    (note,) = faults(on_tpu)
    assert (note.severity, note.what) == (Severity.NOTE, "hosts: this is one of the 2 that run together")
    assert "NNODES=2" in note.mend


ON_CPU = {
    "no jax": (lambda pair: packages(pair, jax=None), 1, "package `jax`", "in the checkout: pip install ."),
    "no numpy": (lambda pair: packages(pair, numpy=None), 1, "package `numpy`", "in the checkout: pip install ."),
    "jax beside another jaxlib": (
        lambda pair: packages(pair, jax="0.1"), 1, "jax: expected the version of jaxlib", "pip install jax=="),
    "another jaxlib": (lambda pair: runtime(pair, jaxlib="0.1"), 3, "jaxlib: built for", "pip install jax=="),
    "a broken plugin": (
        lambda pair: {"runtime": "ImportError: bad plugin"} | packages(pair, jax_cuda13_plugin="1"), 1,
        "jax: expected it to start, found ImportError: bad plugin", "pip uninstall jax-cuda13-plugin"),
    "jax that ends with a signal": (
        lambda pair: {"runtime": "signal 11: "}, 1, "found signal 11", "pip install --force-reinstall"),
    "an accelerator in use": (
        lambda pair: {"runtime": "libtpu lockfile"}, 1, "found libtpu lockfile", "end the process that holds"),
    "another kind of device": (
        lambda pair: runtime(pair, device_kind="gpu"), 3, "device kind: built for cpu, found gpu",
        "ling3export build --into"),
    "too few devices": (lambda pair: runtime(pair, devices=[0]), 1, "devices: built for 2, found 1",
        "ling3export build"),
    "other device ids": (lambda pair: runtime(pair, devices=[0, 7]), 3, "(without ids 1)", "ling3export build --into"),
    "another instruction set": (
        lambda pair: runtime(pair, machine="linux-riscv64"), 3, "machine: built for",
        "ling3export build --into a.ling3 --target cpu"),
    "a processor without a feature": (
        lambda pair: runtime(pair, cpu_features=pair[1].runtime.cpu_features[1:]), 3, "processor: built for",
        "ling3export build --into"),
    "too little memory": (
        lambda pair: {"memory": (8 * GB, 1)}, 1, "memory: expected", "build for fewer sequences: --max-running 1"),
    "JAX_PLATFORMS without the platform": (
        lambda pair: {"platforms": [], "variables": {"JAX_PLATFORMS": "tpu"}}, 1, "JAX_PLATFORMS: expected cpu",
        "unset"),
    "XLA_FLAGS that names no file": (
        lambda pair: {"variables": {"XLA_FLAGS": "/nowhere"}}, 1, "XLA_FLAGS: expected flags or a file",
        "unset XLA_FLAGS"),
    "flags of TPUs in XLA_FLAGS": (
        lambda pair: {"variables": {"XLA_FLAGS": "--xla_tpu_x=1"}}, 1, "expected none of TPU's flags",
        "LIBTPU_INIT_ARGS"),
    "a cache that cannot be written": (
        lambda pair: {"cache": "Permission denied, at /c"}, 0, "cache folder", "LING3_CACHE"),
    "an accelerator without its packages": (
        lambda pair: {"signs": {"tpu": (True, False)}}, 0, "tpu: found the device and none of libtpu",
        "in the checkout: pip install '.[tpu]'"),
}  # fmt: skip


@pytest.mark.parametrize("name", ON_CPU)
def test_each_single_fault_is_told_once(name, on_cpu):
    change, code, what, mend = ON_CPU[name]
    (fault,) = faults(on_cpu, **change(on_cpu))
    assert what in fault.what and mend in fault.mend
    assert exit_code([fault]) == code


ON_TPU = {
    "no TPU": (
        lambda pair: {"platforms": ["cpu"], "signs": {"tpu": (False, True)}}, 1, "platform: built for tpu, found cpu",
               "ling3export build --into a.ling3 --target cpu"),
    "another libtpu": (
        lambda pair: runtime(pair, plugins={"libtpu": "2"}), 3, "libtpu: built for 1, found 2",
        "pip install libtpu==1"),
    "no libtpu": (
        lambda pair: runtime(pair, plugins={}), 3, "libtpu: built for 1, found none", "pip install libtpu==1"),
    "another chip": (
        lambda pair: runtime(pair, device_kind="TPU v5"), 3, "device kind: built for TPU v6 lite", "build --into"),
    "a chip that is missing": (
        lambda pair: runtime(pair, devices=[0]), 1, "built for 2 on each host, found 1", "build --into"),
    "little memory": (lambda pair: runtime(pair, memory=1), 1, "memory of a device: expected", "--max-running 1"),
    "another number of hosts": (
        lambda pair: runtime(pair, processes=4), 1, "hosts: built for 2 (a process on each), found 4", "NNODES=2"),
}  # fmt: skip


@pytest.mark.parametrize("name", ON_TPU)
def test_each_single_fault_of_a_slices_host_is_told_once(name, on_tpu):
    change, code, what, mend = ON_TPU[name]
    found = [fault for fault in faults(on_tpu, **change(on_tpu)) if fault.severity is not Severity.NOTE]
    (fault,) = found
    assert what in fault.what and mend in fault.mend
    assert exit_code(found) == code


def test_files_that_are_missing_or_short_are_named(artifact, tmp_path):
    manifest = read_manifest(artifact)
    assert list(of_files(manifest, "cpu-tp2", artifact)) == []
    found = [fault.what for fault in of_files(manifest, "cpu-tp2", tmp_path)]
    assert len(found) == len(set(found)) > 6
    assert all(text.endswith("expected it readable, found No such file or directory") for text in found)
    assert sum("`programs/cpu-tp2/state.exec`" in text for text in found) == 1
    weights = next(iter(manifest.weights.files))
    (tmp_path / weights).parent.mkdir(parents=True)
    (tmp_path / weights).write_bytes(b"short")
    texts = [fault.what for fault in of_files(manifest, "cpu-tp2", tmp_path)]
    assert f"file `{weights}`: expected {manifest.weights.files[weights]:,} bytes, found 5" in texts


def test_jax_is_started_in_a_process_of_its_own():
    found = doctor.start_jax(3)
    assert isinstance(found, JaxRuntime)
    assert (found.platform, found.devices, found.processes) == ("cpu", [0, 1, 2], 1)
    assert doctor.start_jax(1, probe="import os; os.abort()").startswith("signal 6")
    assert doctor.start_jax(1, probe="raise ImportError('bad plugin')") == "ImportError: bad plugin"
    assert doctor.start_jax(1, 0.2, "import time; time.sleep(60)") == "no answer within 0.2 s"


def run(*arguments):
    return CliRunner().invoke(main, ["doctor", *map(str, arguments)])


def test_the_command_tells_the_machine_and_the_verdict(artifact, on_cpu, monkeypatch):
    monkeypatch.setattr(doctor, "look", lambda devices: on_cpu[1])
    done = run(artifact)
    assert done.exit_code == 0
    assert done.stdout.endswith(f"{artifact}, target cpu-tp2: fits this machine\n")
    monkeypatch.setattr(doctor, "look", lambda devices: replace(on_cpu[1], **runtime(on_cpu, jaxlib="0.1")))
    done = run(artifact)
    assert done.exit_code == 3
    assert "compile: jaxlib: built for" in done.stdout and "  mend: pip install jax==" in done.stdout
    done = run(artifact, "--json")
    assert (done.exit_code, json.loads(done.stdout)["faults"][0]["weight"]) == (3, "compile")
    done = run(artifact, "--target", "tpu")
    assert done.exit_code == 1 and "fault: target `tpu`: expected one of cpu-tp2" in done.stdout
    done = run("nowhere.ling3")
    assert done.exit_code == 1 and "fault: artifact `nowhere.ling3`" in done.stdout


def test_it_reports_without_jax(artifact, tmp_path):
    """A folder before all others on the path hides jax, as if it were not installed."""
    for name in ("jax", "jaxlib"):
        (tmp_path / f"{name}.py").write_text(f"raise ModuleNotFoundError(\"No module named '{name}'\")\n")
    path = os.pathsep.join([str(tmp_path), *(each for each in sys.path if each)])
    done = python("-m", "ling3export.runners.cli", "doctor", artifact, PYTHONPATH=path)
    assert done.returncode == 1, done.stderr
    assert "devices:    jax did not start: ModuleNotFoundError: No module named 'jax'" in done.stdout
    assert "fault: jax: expected it to start, found ModuleNotFoundError" in done.stdout
    assert "Traceback" not in done.stderr
