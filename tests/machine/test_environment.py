"""The environment before jax starts."""

import json
import os
import signal
import subprocess
import sys

import pytest

from ling3export.foundation.errors import Ling3Error
from ling3export.machine import environment

LIMIT = environment.PATIENCE.partition("=")[0]
SHOW = """
import json, os, sys
names = ["JAX_NUM_CPU_DEVICES", "JAX_PLATFORMS", "NPROC", "OPENBLAS_NUM_THREADS"]
print(json.dumps([os.environ[name] for name in names] + ["jax" in sys.modules]))
"""


def run(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_", "NPROC", "OPENBLAS_"))}
    code = "from ling3export.machine.environment import prepare_cpu\n" + code
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=kept | variables)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, ["500", "cpu", "502", "1", False]),
        ({"NPROC": "600", "JAX_NUM_CPU_DEVICES": "2"}, ["500", "cpu", "600", "1", False]),
        ({"NPROC": "3", "JAX_PLATFORMS": "tpu,cpu"}, ["500", "tpu,cpu", "502", "1", False]),
        ({"OPENBLAS_NUM_THREADS": "4"}, ["500", "cpu", "502", "4", False]),
    ],
)
def test_variables_that_prepare_cpu_sets_and_keeps(given, expected):
    assert json.loads(run("prepare_cpu(500)" + SHOW, **given).stdout) == expected


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, environment.PATIENCE),
        ({"XLA_FLAGS": " --xla_cpu_max_isa=AVX2"}, f"--xla_cpu_max_isa=AVX2 {environment.PATIENCE}"),
        ({"XLA_FLAGS": f"{LIMIT}=9"}, f"{LIMIT}=9"),
        ({"XLA_FLAGS": "flags.txt"}, "flags.txt"),
    ],
)
def test_a_late_device_is_waited_for_unless_the_user_says_how_long(given, expected):
    """Regression: ``generate`` ended with SIGABRT at XLA's own limit of 40 s.

    A file of flags is the user's own choice.
    """
    assert run("prepare_cpu(2); import os; print(os.environ['XLA_FLAGS'])", **given).stdout == f"{expected}\n"


def test_the_patience_decides_no_program(monkeypatch):
    """Otherwise every key of the caches would change with it, and a run of an evaluation could not be resumed."""
    for flags, kept in (
        (environment.PATIENCE, {}),
        ("", {}),
        (f"--a=1 {environment.PATIENCE}", {"XLA_FLAGS": "--a=1"}),
    ):
        monkeypatch.setenv("XLA_FLAGS", flags)
        monkeypatch.setenv("LIBTPU_INIT_ARGS", "--b")
        assert environment.compiler_flags() == {"LIBTPU_INIT_ARGS": "--b", **kept}


def test_jax_that_was_imported_before_starts_on_the_processor_too():
    """Regression: programs for cpu were refused on a machine with a card, where jax was imported before the target."""
    said = run("import jax; prepare_cpu(3); print(jax.config.jax_platforms, jax.devices())")
    assert said.stdout == "cpu [CpuDevice(id=0), CpuDevice(id=1), CpuDevice(id=2)]\n"
    said = run("import jax; prepare_cpu(3); print(jax.config.jax_platforms)", JAX_PLATFORMS="tpu,cpu")
    assert said.stdout == "tpu,cpu\n"


def test_receipts_leave_the_import_of_jax_to_the_loader():
    """The loader knows jax's environment only after it has chosen the target."""
    imports = "import sys, ling3export.verify.measure, ling3export.runners.calibrate.vectors"
    said = run(f"{imports}; print('jax' in sys.modules)")
    assert said.stdout == "False\n"


LATE = """
prepare_cpu(2)
import time, jax, numpy as np
from jax.sharding import Mesh, PartitionSpec as P
def wait(number):
    time.sleep(6 * int(number))
    return np.int32(1)
def add(x):
    late = jax.pure_callback(wait, jax.ShapeDtypeStruct((), np.int32), jax.lax.axis_index("tp"))
    return jax.lax.psum(x + late, "tp")
mesh = Mesh(np.array(jax.devices()), ("tp",))
print(jax.jit(jax.shard_map(add, mesh=mesh, in_specs=P("tp"), out_specs=P()))(np.arange(2)))
"""


@pytest.mark.jit
@pytest.mark.parametrize(("seconds", "code", "said"), [(1, -signal.SIGABRT, ""), (60, 0, "[3]\n")])
def test_xla_obeys_the_limit_for_a_device_that_is_six_seconds_late(seconds, code, said):
    """Checks that this jaxlib knows both flags, and that the second one ends such a process."""
    done = run(LATE, XLA_FLAGS=f"--xla_cpu_collective_call_warn_stuck_timeout_seconds=1 {LIMIT}={seconds}")
    assert (done.returncode, done.stdout) == (code, said), done.stderr
    assert ("Termination timeout" in done.stderr) == (code != 0)


@pytest.mark.parametrize(
    ("code", "flags", "count"),
    [
        ("import jax; prepare_cpu(3); print(jax.local_device_count()); prepare_cpu(3)", "", 3),
        (
            "import jax; jax.devices(); prepare_cpu(2); print(jax.local_device_count())",
            "--xla_force_host_platform_device_count=2",
            2,
        ),
    ],
)
def test_jax_imported_takes_the_number_and_jax_started_may_have_it(code, flags, count):
    done = run(code, JAX_PLATFORMS="cpu", XLA_FLAGS=flags)
    assert (done.stdout, done.stderr) == (f"{count}\n", "")


def test_jax_started_with_another_number_is_an_error():
    code = """
import jax
jax.devices()
try:
    prepare_cpu(4)
except Exception as error:
    print(f"{type(error).__name__}: {error}")
"""
    assert run(code, JAX_PLATFORMS="cpu", JAX_NUM_CPU_DEVICES="2").stdout == (
        "Ling3Error: CPU devices: expected 4, found 2 in this process, where jax runs already\n"
        "hint: set JAX_NUM_CPU_DEVICES=4 and NPROC=6 before jax's first operation, or start a new process\n"
    )


def test_no_devices_is_an_error():
    with pytest.raises(Ling3Error, match=r"^CPU devices: expected 1 or more, found 0$"):
        environment.prepare_cpu(0)


@pytest.mark.parametrize(
    ("machine", "text", "found"),
    [
        (
            "x86_64",
            "processor\t: 0\nflags\t\t: fpu sse2 pni hypervisor avx512_bf16 erms avx\nbugs\t\t: spectre\n",
            ["avx", "avx512_bf16", "pni", "sse2"],
        ),
        ("aarch64", "processor\t: 0\nFeatures\t: fp asimd evtstrm atomics cpuid\n", ["asimd", "atomics"]),
    ],
)
def test_features_are_those_that_code_can_depend_on(machine, text, found, tmp_path, monkeypatch):
    monkeypatch.setattr(environment.platform, "machine", lambda: machine)
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(text)
    assert environment.cpu_features(cpuinfo) == found
    assert environment.cpu_features(tmp_path / "none") == []
