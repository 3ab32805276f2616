"""Executables as files: saved by this process, run in processes that have compiled nothing."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import jaxlib
import pytest
from msgspec.structs import replace

from ling3export.artifacts.program_records import CallInput
from ling3export.artifacts.records import from_json, to_json
from ling3export.artifacts.schema import Executable, Mesh, Requirements
from ling3export.foundation.errors import ArtifactError
from ling3export.machine import environment, pjrt, verdict
from tests.support import toy_program

pytestmark = pytest.mark.jit

TOY = Path(toy_program.__file__)
# A process without this one's settings of jax, which imports the packages of this checkout.
CLEAN = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_"))} | {
    "PYTHONPATH": str(TOY.parents[2])
}


def run(*arguments: object, **variables: str) -> dict:
    """The JSON line that a fresh process prints; XLA's log lines on stderr are ignored."""
    command = [sys.executable, "-W", "error", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=CLEAN | variables, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def saved():
    """The toy program on one device of this process: executable, record."""
    mesh = toy_program.mesh_of(1)
    with pjrt.no_compilation_cache():
        program = jax.jit(toy_program.sharded(mesh), donate_argnums=(1,))
        compiled = program.lower(*toy_program.shapes(mesh)).compile()
        raw, executable = pjrt.serialized(compiled)
        return raw, from_json(Executable, json.loads(json.dumps(to_json(executable))))


@pytest.fixture
def record(saved):
    return saved[1]


@pytest.mark.parametrize("devices", [4, 16])
def test_a_fresh_process_computes_the_same_without_compiling(tmp_path, devices):
    first = run(TOY, "save", tmp_path, devices)
    again = run(TOY, "load", tmp_path, devices)
    assert (first["compiles"], first["hits"]) == (1, 0)
    assert (again["compiles"], again["traces"]) == (0, 0)
    for result in (first, again):
        assert result["deleted"], "a donated input lives on"
        assert result["same_memory"], "a donated input's memory is not the output's"
        assert result["on_mesh"]
        assert result["specs"] == [["tp"], [], [None, "tp"], []]
    assert again["digests"] == first["digests"]
    assert again["sums"] == first["sums"]
    assert json.loads((tmp_path / "toy.json").read_text())["mesh"]["devices"] == list(range(devices))


def test_the_record(record):
    assert record.requires == Requirements(
        jaxlib.__version__, "cpu", "cpu", machine=environment.machine(), cpu_features=tuple(environment.cpu_features())
    )
    assert record.mesh == Mesh("tp", (jax.devices()[0].id,), (0,))
    assert record.call.inputs == (
        CallInput("[0][0]['unused']", (3,), "bfloat16", (), donated=False, kept=False),
        CallInput("[0][0]['w']", (1, 64, 64), "float32", ("tp",), donated=False, kept=True),
        CallInput("[0][1]['cache']", (1, 8, 64), "float32", ("tp",), donated=True, kept=True),
        CallInput("[0][1]['count']", (4,), "int32", (), donated=True, kept=True),
        CallInput("[0][2]", (8,), "int32", (), donated=False, kept=True),
    )
    names = [row.name for row in record.call.outputs]
    assert names == ["[0]['cache']", "[0]['count']", "[1]['logits']", "[1]['token']"]
    assert record.call.outputs[2].shape == (8, 64)
    assert record.call.custom_calls == ()


def test_inputs_of_another_kind_are_refused_by_name(saved, record):
    mesh = pjrt.recorded_mesh(record.mesh)
    call = pjrt.load_executable(saved[0], record)
    leaves = toy_program.leaves(mesh, record)
    with pytest.raises(
        TypeError, match=re.escape("'[0][0]['w']' compiled with float32[1,64,64] and called with float32[1]")
    ):
        call(leaves[0], jnp.zeros(1), *leaves[2:])
    with pytest.raises(TypeError, match="tuple of length 5 but now given tuple of length 1"):
        call(leaves[0])
    assert len(call(*leaves)) == 4


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("platform", "tpu", "platform: built for tpu, found cpu"),
        ("jaxlib", "0.1.2", f"jaxlib: built for 0.1.2, found {jaxlib.__version__}"),
        ("plugins", {"libtpu": "1"}, "libtpu: built for 1, found none"),
        ("device_kind", "TPU v6 lite", "device kind: built for TPU v6 lite, found cpu"),
        ("machine", "linux-riscv64", f"machine: built for linux-riscv64, found {environment.machine()}"),
        ("cpu_features", ("avx1024", "sse9"), "processor: built for avx1024, sse9, which this one lacks"),
    ],
)
def test_why_an_executable_does_not_fit(saved, record, field, value, reason):
    record = replace(record, requires=replace(record.requires, **{field: value}))
    assert verdict.executable_fits(record.requires, record.mesh) == reason
    with pytest.raises(ArtifactError, match=f"^executable: {re.escape(reason)}\nhint: compile the portable program"):
        pjrt.load_executable(saved[0], record)


def test_devices_that_are_not_there(record):
    assert verdict.executable_fits(record.requires, record.mesh) is None
    hosts = Mesh("tp", (0, 1, 2, 3), (0, 1, 2, 3))
    assert verdict.executable_fits(record.requires, hosts) == "processes: built for 4, found 1"
    wide = Mesh("tp", (0, *range(2048, 2055)), (0,) * 8)
    assert verdict.executable_fits(record.requires, wide) == (
        f"devices: built for 8, found {len(jax.devices())} (without ids 2048, 2049, 2050, 2051, 2052 and 2 more)"
    )


def test_a_processor_with_more_features_will_do(record, monkeypatch):
    monkeypatch.setattr(environment, "cpu_features", lambda: [*record.requires.cpu_features, "avx1024"])
    assert verdict.executable_fits(record.requires, record.mesh) is None


@pytest.mark.skipif("avx512f" not in environment.cpu_features(), reason="needs a processor with AVX-512")
def test_only_features_that_the_compiler_may_use_are_required(tmp_path):
    run(TOY, "save", tmp_path, 1, XLA_FLAGS="--xla_cpu_max_isa=AVX2")
    features = json.loads((tmp_path / "toy.json").read_text())["requires"]["cpu_features"]
    assert {"avx2", "fma", "sse4_2"} <= set(features)
    assert [name for name in features if name.startswith("avx512")] == []


def test_bytes_are_given_only_where_the_cache_is_off():
    compiled = jax.jit(lambda x: x + 1).lower(1.0).compile()
    with pytest.raises(ValueError, match="expected to be called within no_compilation_cache"):
        pjrt.serialized(compiled)


def test_an_executable_never_comes_from_the_persistent_cache(tmp_path):
    """Regression: an executable from jax's cache is serialized without its code, and fails in every other process."""
    names = (
        "jax_compilation_cache_dir",
        "jax_persistent_cache_min_compile_time_secs",
        "jax_persistent_cache_min_entry_size_bytes",
    )
    before = {name: getattr(jax.config, name) for name in names}
    mesh = toy_program.mesh_of(1)
    program = jax.jit(toy_program.sharded(mesh), donate_argnums=(1,))
    compiles = pjrt.CompileCounter()
    try:
        with pjrt.no_compilation_cache():
            pass  # leaves the folder that the tests keep
        for name, value in zip(names, (str(tmp_path), 0, -1), strict=True):
            jax.config.update(name, value)
        for _ in range(2):
            jax.clear_caches()
            tainted = program.lower(*toy_program.shapes(mesh)).compile()
        assert (compiles.count, compiles.cache_hits) == (2, 1)
        with pjrt.no_compilation_cache() as fresh:
            folder_within = jax.config.jax_compilation_cache_dir
            compiled = program.lower(*toy_program.shapes(mesh)).compile()
            raw, lost = pjrt.serialized(compiled)[0], pjrt.serialized(tainted)[0]
        assert (fresh.count, fresh.cache_hits) == (1, 0)
        assert (folder_within, jax.config.jax_compilation_cache_dir) == (None, str(tmp_path))
        assert len(lost) < len(raw)
        assert str(tmp_path).encode() not in raw
        with pytest.raises(RuntimeError, match="expected it off, found 1 programs taken"), pjrt.no_compilation_cache():
            jax.monitoring.record_event("/jax/compilation_cache/cache_hits")
    finally:
        with pjrt.no_compilation_cache():
            pass  # leaves the folder
        for name, value in before.items():
            jax.config.update(name, value)


def test_a_program_that_needs_this_process_is_refused():
    def program(x):
        return jax.pure_callback(lambda v: v, jax.ShapeDtypeStruct((), jnp.float32), x)

    with pytest.raises(ValueError, match="expected only arrays in and out, found host callbacks"):
        pjrt.serialized(jax.jit(program).lower(jnp.float32(1)).compile())


SOLVE = """
import json, sys
from ling3export.machine.environment import prepare_cpu
prepare_cpu(1)
import numpy as np
from ling3export.artifacts.records import from_json
from ling3export.artifacts.schema import Executable
from ling3export.machine import pjrt
with open(sys.argv[1] + "/solve.exec", "rb") as raw, open(sys.argv[1] + "/solve.json") as text:
    raw, record = raw.read(), from_json(Executable, json.load(text))
matrix = np.tril(np.ones((9, 9), np.float32))
(inverse,) = pjrt.load_executable(raw, record)(matrix, matrix)
print(json.dumps({"error": float(abs(np.asarray(inverse) - np.eye(9)).max()), "calls": record.call.custom_calls}))
"""


def test_lapack_works_in_a_process_that_traced_nothing(tmp_path):
    """Regression: XLA's LAPACK calls are null pointers until jax traces one; the first call was a segfault."""
    with pjrt.no_compilation_cache():
        shape = jax.ShapeDtypeStruct((9, 9), jnp.float32)
        solve = jax.jit(lambda a, b: jax.scipy.linalg.solve_triangular(a, b, lower=True))
        compiled = solve.lower(shape, shape).compile()
        raw, record = pjrt.serialized(compiled)
        (tmp_path / "solve.exec").write_bytes(raw)
        (tmp_path / "solve.json").write_text(json.dumps(to_json(record)))
    assert run("-c", SOLVE, tmp_path) == {"error": 0.0, "calls": ["lapack_strsm_ffi"]}
