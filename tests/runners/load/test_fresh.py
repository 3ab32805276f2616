"""State begins as zeros, takes no memory before its first use, is written in place, and is refused if it cannot fit."""

import json
import re
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest
from msgspec.structs import replace

from ling3export.artifacts import schema
from ling3export.artifacts.manifest import file_record, read_manifest
from ling3export.compile.lower import compile_state, device_mesh
from ling3export.foundation.errors import ArtifactError
from ling3export.machine import pjrt
from ling3export.machine.environment import requirements
from ling3export.model.state import StateArray
from ling3export.runners.cli import main as runner_cli
from ling3export.runners.engine.engine import Engine
from ling3export.runners.load import fresh
from ling3export.runners.load.loader import load
from tests.support.manifests import changed_targets
from tests.support.refusals import refusal
from tests.support.toy_artifact import PROMPTS, TARGET, answer, check_tokens, shared

SCRIPT = """
import ctypes, json
from msgspec.structs import replace
from ling3export.machine.environment import prepare_cpu, requirements
prepare_cpu(16)
import jax, numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from ling3export.artifacts import schema
from ling3export.compile.lower import compile_state, device_mesh
from ling3export.model.state import StateArray
from ling3export.runners.load import fresh
from ling3export.machine.pjrt import CompileCounter

def anonymous():
    with open("/proc/self/status") as status:
        return int(next(line for line in status if line.startswith("RssAnon")).split()[1]) << 10

def pointers(array):
    return [shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards]

mesh = device_mesh(16)
rows = (
    StateArray("small", (5,), "int32", ("slots",), None),
    StateArray("odd", (3, 16, 1021), "bfloat16", ("a", "heads", "c"), "heads"),
    StateArray("large", (64, 1 << 18), "float32", ("heads", "b"), "heads"),
    StateArray("everywhere", (1 << 22,), "bfloat16", ("a",), None),
)
raw = compile_state(rows, mesh)
file = schema.FileRecord("state.exec", len(raw), "0" * 64)
arrays = tuple(schema.StateArrayRecord(row.name, row.shape, row.dtype, row.spec, row.axes) for row in rows)
target = schema.Target(
    platform="cpu", portable="1.18.0",
    mesh=schema.Mesh("tp", tuple(range(16)), (0,) * 16), requires=requirements(jax.devices(), raw),
    toolchain={}, fingerprint="0" * 64, state_abi="0" * 64, geometry={}, parameters=(), cells={},
    state=schema.State("replicated", 1, 1, 16, 1, 16, arrays),
    state_program=file,
)
shardings = {row.name: NamedSharding(mesh, PartitionSpec(*row.spec)) for row in rows}
add = jax.jit(lambda state: {name: array + 1 for name, array in state.items()}, donate_argnums=0,
              out_shardings=shardings)
result = {"bytes": target.state_bytes * 16, "sizes": len(raw) < 20_000}
before = anonymous()
kept = fresh.state_source({}, replace(target, state_program=None), mesh)()
written = anonymous() - before
source, taken, compiles = fresh.state_source({file: raw}, target, mesh), [], 0
for time in range(3):
    # Memory that is not zero where small arrays and large ones may come to lie.
    used = [np.full(size, 255, np.uint8) for size in (16, 64, 2048, 6144, 1 << 16, 1 << 25)]
    del used
    events, before = CompileCounter(), anonymous()
    state = source()
    taken.append(anonymous() - before)
    compiles += events.count + events.traces
    places = {name: pointers(array) for name, array in state.items()}
    for array in state.values():  # no numpy array may refer to the memory that is donated then
        for shard in array.addressable_shards:
            found = ctypes.string_at(shard.data.unsafe_buffer_pointer(), shard.data.nbytes)
            assert found.count(0) == shard.data.nbytes == len(found), time
    forms = [[name, *each.shape, each.dtype.name, *each.sharding.spec] for name, each in state.items()]
    state = add(state)
    donated = sorted(name for name, array in state.items() if pointers(array) == places[name])
    ones = sorted({float(value) for array in state.values() for value in (array.min(), array.max())})
    del state
print(json.dumps(result | {"taken": max(taken), "written": written, "compiles": compiles, "forms": forms,
                           "donated": donated, "ones": ones}))
"""


def test_state_on_sixteen_devices_is_zeros_without_memory_and_written_in_place():
    """The state is zero each time, although the last one was written; writing takes all of the memory."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    whole = found.pop("bytes")
    assert whole > 192 << 20
    assert found.pop("taken") < whole / 10 < whole * 0.9 < found.pop("written")
    assert found == {
        "sizes": True,
        "compiles": 0,
        "forms": [
            ["small", 5, "int32"],
            ["odd", 3, 16, 1021, "bfloat16", None, "tp"],
            ["large", 64, 1 << 18, "float32", "tp"],
            ["everywhere", 1 << 22, "bfloat16"],
        ],
        "donated": ["everywhere", "large", "odd", "small"],
        "ones": [1.0],
    }


@pytest.fixture
def toy(tmp_path):
    """A copy that may be damaged."""
    return shutil.copytree(shared(), tmp_path / "toy.ling3")


def program(folder):
    return folder / "programs" / TARGET / schema.STATE


def test_a_second_engine_and_a_runner_that_is_reset_begin_with_zeros():
    """The toy's logits follow from the sum in its state."""
    for _ in range(2):
        with Engine(shared(), report=lambda _: None) as engine:
            check_tokens(engine)
    runner = load(shared(), report=lambda _: None).runner
    for _ in range(2):
        assert not any(np.asarray(array).any() for array in runner.state.values())
        runner.state = jax.tree.map(lambda array: array + 1, runner.state)
        runner.reset()


def test_a_damaged_or_missing_state_program_is_refused_before_it_is_deserialized(toy, monkeypatch):
    monkeypatch.setattr(pjrt, "load_executable", lambda *arguments: pytest.fail("deserialized"))
    raw = program(toy).read_bytes()
    program(toy).write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    with pytest.raises(ArtifactError, match=rf"file `programs/{TARGET}/state.exec`: expected sha256 [0-9a-f]+, found"):
        load(toy, report=lambda _: None)
    program(toy).unlink()
    with pytest.raises(ArtifactError, match=rf"file `programs/{TARGET}/state.exec`: expected a readable file, found"):
        load(toy, report=lambda _: None)


@pytest.mark.parametrize(
    ("rows", "found"),
    [
        (
            [("last_token", 4, "int32"), ("seen", 2, "int32")],
            "found int32 (2,) on a device in place of int32 (4,) as `seen` of its outputs",
        ),
        (
            [("last_token", 4, "float32"), ("seen", 4, "int32")],
            "found float32 (4,) on a device in place of int32 (4,) as `last_token` of its outputs",
        ),
        ([("last_token", 4, "int32")], "found 1 outputs in place of 2"),
        (None, f"program `programs/{TARGET}/state.exec`: expected an executable that gives the state, found "),
    ],
)
def test_a_state_program_of_other_arrays_is_refused(toy, rows, found):
    """Also bytes with a right digest that are not a program."""
    arrays = [StateArray(name, (size,), dtype, ("slots",), None) for name, size, dtype in rows or ()]
    program(toy).write_bytes(compile_state(arrays, device_mesh(2)) if rows else b"\0" * 5000)
    record = file_record(toy, f"programs/{TARGET}/{schema.STATE}")
    changed_targets(toy, lambda target: replace(target, state_program=record))
    with pytest.raises(ArtifactError, match=re.escape(found)):
        load(toy, report=lambda _: None)


def test_another_cells_executable_as_the_state_program_is_refused(toy):
    """Regression: it was loaded, and its first call ended in jax's own error."""
    changed_targets(toy, lambda target: replace(target, state_program=target.cells["decode@2"].exec))
    with pytest.raises(
        ArtifactError, match=r"decode@2\.exec`: expected an executable that gives the state, found \d+ in"
    ):
        load(toy, report=lambda _: None)


@pytest.mark.parametrize("devices", [1, 2])
def test_zeros_are_written_into_no_array_that_is_smaller_than_the_manifest_says(devices):
    """Regression: with rows in another order, a write took its size from the manifest: beyond a buffer, SIGSEGV."""
    mesh = device_mesh(devices)
    rows = [StateArray("small", (4,), "int32", ("slots",), None), StateArray("large", (64,), "int32", ("slots",), None)]
    raw = compile_state(rows, mesh)
    file = schema.FileRecord("state.exec", len(raw), "0" * 64)
    arrays = [schema.StateArrayRecord(row.name, row.shape, row.dtype, row.spec, row.axes) for row in rows]
    target = replace(
        read_manifest(shared()).targets[TARGET],
        mesh=schema.Mesh("tp", tuple(range(devices)), (0,) * devices),
        requires=requirements(list(mesh.devices.flat), raw),
        state_program=file,
    )

    def source(order):
        state = replace(target.state, arrays=tuple(order))
        return fresh.state_source({file: raw}, replace(target, state=state), mesh)

    assert [*source(arrays)()] == ["small", "large"]
    with pytest.raises(ArtifactError, match=r"found int32 \(4,\) on a device in place of int32 \(64,\) as `large`"):
        source(arrays[::-1])


def test_an_artifact_without_the_program_answers_as_before(toy):
    changed_targets(toy, lambda target: replace(target, state_program=None))
    program(toy).unlink()
    with Engine(toy, report=lambda _: None) as engine:
        check_tokens(engine)


def test_a_state_that_memory_has_no_room_for_is_refused_at_the_start(monkeypatch):
    """Pages of the state are taken later: without this check, the kernel would end the process in a request."""
    needed = read_manifest(shared()).targets[TARGET].state_bytes * 2
    monkeypatch.setattr(fresh, "memory", lambda: (1 << 40, needed - 2, 1))
    said = refusal(runner_cli.main, "generate", shared(), "--prompt-ids", "1,2,3", "--max-tokens", "2")
    assert "state: expected 0.00 GB of memory for it, found 0.00 GB" in said
    assert "build for fewer sequences: a smaller --max-running, --context or --state-memory" in said
    monkeypatch.setattr(fresh, "memory", lambda: (1 << 40, needed - 1, 1))
    with Engine(shared(), report=lambda _: None) as engine:
        assert [each.token_ids for each in engine.generate(PROMPTS[:1], max_tokens=1)] == [answer(PROMPTS[0], 1)[0]]
