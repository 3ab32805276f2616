"""A small sharded program, saved in one process and run in another: ``toy_program.py save|load FOLDER DEVICES``.

It has the parts of a step: dots, collectives, a loop, a sort, random bits, donated state, an unused parameter. It
prints one JSON line. ``load`` neither traces nor compiles: it must also work where nothing was compiled before.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

from ling3export.machine.environment import prepare_cpu

DEVICES = int(sys.argv[3]) if __name__ == "__main__" else 1
if __name__ == "__main__":
    prepare_cpu(DEVICES)

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax import export, lax  # noqa: E402
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec  # noqa: E402

from ling3export.artifacts.records import from_json, to_json  # noqa: E402
from ling3export.artifacts.schema import Executable  # noqa: E402
from ling3export.machine import pjrt  # noqa: E402
from ling3export.runners.load.fresh import fresh_zeros  # noqa: E402
from ling3export.runners.load.model_runner import device_array  # noqa: E402

P = PartitionSpec
WIDTH, ROWS = 64, 8


def program(params, state, batch):
    """On each device: ``w`` [1, 64, 64], ``cache`` [1, 8, 64] and ``count`` [4]; ``batch`` [8] is on every device."""
    key = jax.random.key(batch[0])
    x = jax.random.normal(key, (ROWS, WIDTH)) + jnp.sort(batch).astype(jnp.float32)[:, None]

    def layer(i, x):
        return jnp.tanh(lax.psum(x @ params["w"][0], "tp") + i.astype(jnp.float32))

    x = lax.fori_loop(0, batch[1] % 4 + 2, layer, x) @ params["w"][0]
    cache = state["cache"].at[0, batch[2] % ROWS].add(x[0])
    token = jnp.argmax(lax.all_gather(x.sum(0), "tp", axis=0, tiled=True))
    return {"cache": cache, "count": state["count"] + 1}, {"logits": x, "token": token}


def specs() -> tuple[Any, Any]:
    """Partition specs of inputs and outputs."""
    state = {"cache": P("tp"), "count": P()}
    return ({"unused": P(), "w": P("tp")}, state, P()), (state, {"logits": P(None, "tp"), "token": P()})


def mesh_of(devices: int) -> Mesh:
    return Mesh(np.array(jax.devices()[:devices]), ("tp",), axis_types=(AxisType.Auto,))


def sharded(mesh: Mesh) -> Any:
    inputs, outputs = specs()
    return jax.shard_map(program, mesh=mesh, in_specs=inputs, out_specs=outputs, check_vma=False)


def shapes(mesh: Mesh) -> Any:
    n = mesh.size
    rows = (
        {"unused": ((3,), "bfloat16"), "w": ((n, WIDTH, WIDTH), "float32")},
        {"cache": ((n, ROWS, WIDTH), "float32"), "count": ((4,), "int32")},
        ((ROWS,), "int32"),
    )
    return jax.tree.map(
        lambda row, spec: jax.ShapeDtypeStruct(*row, sharding=NamedSharding(mesh, spec)),
        rows,
        specs()[0],
        is_leaf=lambda leaf: isinstance(leaf, tuple) and isinstance(leaf[-1], str),
    )


def leaves(mesh: Mesh, record: Executable) -> list[jax.Array]:
    """Makes the inputs from the record only: weights from memory, new state."""
    values = []
    for row in record.call.inputs:
        sharding = NamedSharding(mesh, P(*row.spec))
        if row.donated:
            values.append(fresh_zeros(row.shape, row.dtype, sharding))
        else:
            count = np.arange(np.prod(row.shape))
            value = count if row.dtype == "int32" else np.sin(count) / 8
            values.append(device_array(value.reshape(row.shape).astype(jnp.dtype(row.dtype)), sharding))
    return values


def pointers(array: jax.Array) -> list[int]:
    return [shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards]


def run(call: Any, mesh: Mesh, record: Executable) -> dict[str, Any]:
    """Runs two steps with the same state; reports whether its memory was reused."""
    values = leaves(mesh, record)
    donated = [index for index, row in enumerate(record.call.inputs) if row.donated]
    before, first = [values[i] for i in donated], [pointers(values[i]) for i in donated]
    outputs = call(*values)
    for index, output in zip(donated, outputs[: len(donated)], strict=True):
        values[index] = output
    outputs = call(*values)
    return {
        "digests": [np.asarray(output).tobytes().hex()[:64] for output in outputs],
        "sums": [float(np.asarray(output, np.float64).sum()) for output in outputs],
        "deleted": all(array.is_deleted() for array in before),
        "same_memory": [pointers(output) for output in outputs[: len(donated)]] == first,
        "specs": [list(output.sharding.spec) for output in outputs],
        "on_mesh": all(output.sharding.mesh == mesh for output in outputs),
    }


def save(folder: Path, mesh: Mesh) -> dict[str, Any]:
    blob = export.export(jax.jit(sharded(mesh)), platforms=["cpu"])(*shapes(mesh)).serialize()
    exported = export.deserialize(bytearray(blob))
    with pjrt.no_compilation_cache() as compiles:
        compiled = jax.jit(exported.call, donate_argnums=(1,)).lower(*shapes(mesh)).compile()
        raw, record = pjrt.serialized(compiled)
        counted = {"compiles": compiles.count, "hits": compiles.cache_hits}
    (folder / "toy.exec").write_bytes(raw)
    (folder / "toy.json").write_text(json.dumps(to_json(record)))
    tree = jax.tree.structure(shapes(mesh))
    return run(lambda *flat: jax.tree.leaves(compiled(*jax.tree.unflatten(tree, flat))), mesh, record) | counted


def load(folder: Path) -> dict[str, Any]:
    record = from_json(Executable, json.loads((folder / "toy.json").read_text()))
    compiles = pjrt.CompileCounter()
    mesh = pjrt.recorded_mesh(record.mesh)
    started = time.perf_counter()
    call = pjrt.load_executable((folder / "toy.exec").read_bytes(), record)
    seconds = time.perf_counter() - started
    result = run(call, mesh, record)
    return result | {"compiles": compiles.count, "traces": compiles.traces, "load_seconds": seconds}


if __name__ == "__main__":
    target = Path(sys.argv[2])
    print(json.dumps(save(target, mesh_of(DEVICES)) if sys.argv[1] == "save" else load(target)))
