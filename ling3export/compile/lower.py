"""From a cell of the plan to portable StableHLO and to a compiled executable, with all that the manifest says of both.

Runs in a process of its own (``compile/worker.py``): the number of virtual devices is fixed when jax starts.
"""

import re
import time
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

import jax
import numpy as np
from jax import export
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from ling3export.errors import PlanError
from ling3export.model.config import Config
from ling3export.model.geometry import AXIS, Geometry
from ling3export.model.program import Step, build_step
from ling3export.runners.load import pjrt

COLLECTIVES = ("all_reduce", "all_gather", "all_to_all", "collective_permute", "reduce_scatter")
# Source locations would put this checkout's path into every program and every key.
LOCATION_OPTIONS = {"jax_traceback_in_locations_limit": 0}


@dataclass(frozen=True)
class Lowered:
    """The portable tier of one cell.

    Attributes:
        blob: Serialized ``jax.export.Exported``, one platform.
        record: The cell's manifest fields that do not depend on a compiler.
    """

    blob: bytes
    record: dict[str, Any]


def spec_list(spec: PartitionSpec) -> list[str | None]:
    """A partition spec as the manifest writes it: one entry an axis, no trailing nulls."""
    entries = [str(entry) if entry is not None else None for entry in spec]
    while entries and entries[-1] is None:
        entries.pop()
    return entries


def _leaves(groups: list[tuple[str, Any, Any]]) -> list[dict[str, Any]]:
    """Names every leaf of nested dicts in flattening order."""
    rows = []
    for group, values, specs in groups:
        flat, _ = jax.tree_util.tree_flatten_with_path(values)
        flat_specs = jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, PartitionSpec))
        for (path, value), spec in zip(flat, flat_specs, strict=True):
            name = ".".join(str(key.key) for key in path)
            rows.append({"group": group, "name": name, "shape": list(value.shape), "dtype": str(value.dtype),
                         "spec": spec_list(spec)})  # fmt: skip
    return rows


def _outputs(exported: export.Exported, step: Step) -> list[dict[str, Any]]:
    values = jax.tree.unflatten(exported.out_tree, exported.out_avals)
    return _leaves([("state", values[0], step.out_specs[0]), ("out", values[1], step.out_specs[1])])


def collective_counts(text: str) -> dict[str, int]:
    """Collectives in a StableHLO module's text; those in a loop's body count once."""
    found = Counter(re.findall(r"stablehlo\.(" + "|".join(COLLECTIVES) + r")\b", text))
    return dict(sorted(found.items()))


def with_shardings(tree: Any, specs: Any, mesh: Mesh | AbstractMesh) -> Any:
    """Abstract values that carry their shardings."""
    return jax.tree.map(
        lambda value, spec: jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=NamedSharding(mesh, spec)),
        tree, specs,
    )  # fmt: skip


def lower_cell(config: Config, geometry: Geometry, phase: str, padding: int, platform: str) -> Lowered:
    """Traces and lowers one cell; needs no device of the platform.

    Args:
        config: The model.
        geometry: Parallelism, pools, dtype.
        phase: ``prefill``, ``score``, ``decode`` or ``sample``.
        padding: Its padding.
        platform: jax's platform name; one a file (a multi-platform export is slower and not bit-equal).
    """
    for name, value in LOCATION_OPTIONS.items():
        jax.config.update(name, value)
    started = time.perf_counter()
    mesh = AbstractMesh((geometry.tp,), (AXIS,), axis_types=(AxisType.Auto,))
    step = build_step(config, geometry, phase, padding, mesh)
    arguments = with_shardings(step.arguments, step.specs, mesh)
    exported = export.export(jax.jit(step.call, donate_argnums=(1,)), platforms=(platform,))(*arguments)
    inputs = _leaves(list(zip(("params", "state", "batch"), step.arguments, step.specs, strict=True)))
    blob = bytes(exported.serialize())
    rows = next(row["shape"][0] for row in inputs + _outputs(exported, step) if row["name"] in ("logits", "token"))
    record = {
        "phase": phase,
        "padding": padding,
        "rows": rows,
        "fields": [asdict(field) | {"shape": list(field.shape)} for field in step.fields],
        "packed": next(row["shape"][0] for row in inputs if row["name"] == "packed"),
        "inputs": inputs,
        "outputs": _outputs(exported, step),
        "donated": [index for index, row in enumerate(inputs) if row["group"] == "state"],
        "collectives": collective_counts(exported.mlir_module()),
        "lower_seconds": round(time.perf_counter() - started, 3),
    }
    return Lowered(blob, record)


def device_mesh(tp: int) -> Mesh:
    """The first ``tp`` devices of this process on the one axis.

    Raises:
        PlanError: There are fewer.
    """
    devices = jax.devices()
    if len(devices) < tp:
        raise PlanError(f"devices: expected at least {tp} for tp{tp}, found {len(devices)} in this process")
    return Mesh(np.array(devices[:tp]), (AXIS,), axis_types=(AxisType.Auto,))


def compile_cell(lowered: Lowered, mesh: Mesh) -> tuple[bytes, dict[str, Any]]:
    """Compiles the portable tier for ``mesh``.

    Returns:
        The serialized executable, and the manifest fields that describe it: ``call``, seconds, flops, bytes, memory.
    """
    started = time.perf_counter()
    exported = export.deserialize(bytearray(lowered.blob))
    shardings = exported.in_shardings_jax(mesh)
    flat = [
        jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding)
        for aval, sharding in zip(exported.in_avals, shardings, strict=True)
    ]
    arguments, _ = jax.tree.unflatten(exported.in_tree, flat)
    with pjrt.no_compilation_cache():
        compiled = jax.jit(exported.call, donate_argnums=(1,)).lower(*arguments).compile()
        raw = pjrt.executable_bytes(compiled)
    record = {
        "call": pjrt.call_record(compiled),
        "compile_seconds": round(time.perf_counter() - started, 3),
        **costs(compiled),
    }
    return raw, record


def costs(compiled: Any) -> dict[str, Any]:
    """Flops, bytes and memory as the compiler counts them (a loop's body once)."""
    analysis = compiled.cost_analysis() or {}
    memory = compiled.memory_analysis()
    return {
        "flops": analysis.get("flops"),
        "bytes_accessed": analysis.get("bytes accessed"),
        "memory": {
            "arguments": memory.argument_size_in_bytes,
            "outputs": memory.output_size_in_bytes,
            "temporaries": memory.temp_size_in_bytes,
            "alias": memory.alias_size_in_bytes,
            "code": memory.generated_code_size_in_bytes,
        },
        "estimated_seconds": None,
    }
