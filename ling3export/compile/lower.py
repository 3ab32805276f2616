"""From a cell of the plan to portable StableHLO and to a compiled executable, with all that the manifest says of both.

Runs in a process of its own (``compile/worker.py``): the number of virtual devices is fixed when jax starts.
"""

import re
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import export
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from ling3export.artifacts.schema import (
    Collective,
    Estimate,
    Executable,
    Experts,
    Field,
    Leaf,
    Lowering,
    Memory,
    Origin,
    Program,
    RooflineBound,
)
from ling3export.errors import PlanError
from ling3export.model.config import Config
from ling3export.model.geometry import AXIS, Geometry
from ling3export.model.program import Step, build_step
from ling3export.runners.load import pjrt

COLLECTIVES = ("all_reduce", "all_gather", "all_to_all", "collective_permute", "reduce_scatter")
# Source locations would put this checkout's path into every program and every key.
LOCATION_OPTIONS = {"jax_traceback_in_locations_limit": 0}


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """What a compiler made of one program, without its bytes; the fields are those of a manifest's cell.

    Attributes:
        collectives: None where only the lowered program was counted.
    """

    executable: Executable
    compile_seconds: float
    memory: Memory
    collectives: dict[str, Collective] | None = None
    flops: float | None = None
    bytes_accessed: float | None = None
    estimate: Estimate | None = None
    floor: RooflineBound | None = None
    experts: Experts | None = None
    lowering: Lowering | None = None


@dataclass(frozen=True)
class Lowered:
    """The portable tier of one cell.

    Attributes:
        blob: Serialized ``jax.export.Exported``, one platform.
        seconds: Of tracing and lowering. The other fields are those of a manifest's cell.
    """

    blob: bytes
    phase: str
    padding: int
    fields: tuple[Field, ...]
    inputs: tuple[Leaf, ...]
    outputs: tuple[Leaf, ...]
    collectives: dict[str, Collective]
    seconds: float

    def program(self, compiled: Compiled, origin: Origin | None = None) -> Program:
        """What the manifest says of the cell, once it is compiled."""
        return Program(
            phase=self.phase, padding=self.padding, fields=self.fields, inputs=self.inputs, outputs=self.outputs,
            collectives=self.collectives if compiled.collectives is None else compiled.collectives,
            lower_seconds=self.seconds, compile_seconds=compiled.compile_seconds, memory=compiled.memory,
            call=compiled.executable.call, flops=compiled.flops, bytes_accessed=compiled.bytes_accessed,
            estimate=compiled.estimate, floor=compiled.floor, experts=compiled.experts, lowering=compiled.lowering,
            origin=origin,
        )  # fmt: skip


def spec_list(spec: PartitionSpec) -> tuple[str | None, ...]:
    """A partition spec as the manifest writes it: one entry an axis, no trailing nulls."""
    entries = [str(entry) if entry is not None else None for entry in spec]
    while entries and entries[-1] is None:
        entries.pop()
    return tuple(entries)


def _leaves(groups: list[tuple[str, Any, Any]]) -> tuple[Leaf, ...]:
    """Names every leaf of nested dicts in flattening order."""
    rows = []
    for group, values, specs in groups:
        flat, _ = jax.tree_util.tree_flatten_with_path(values)
        flat_specs = jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, PartitionSpec))
        for (path, value), spec in zip(flat, flat_specs, strict=True):
            name = ".".join(str(key.key) for key in path)
            rows.append(Leaf(name, tuple(value.shape), str(value.dtype), spec_list(spec), group))
    return tuple(rows)


def _outputs(exported: export.Exported, step: Step) -> tuple[Leaf, ...]:
    values = jax.tree.unflatten(exported.out_tree, exported.out_avals)
    return _leaves([("state", values[0], step.out_specs[0]), ("out", values[1], step.out_specs[1])])


def collective_counts(text: str) -> dict[str, Collective]:
    """Collectives in a StableHLO module's text; those in a loop's body count once."""
    found = Counter(re.findall(r"stablehlo\.(" + "|".join(COLLECTIVES) + r")\b", text))
    return {kind: Collective(count) for kind, count in sorted(found.items())}


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
    blob, counted = bytes(exported.serialize()), collective_counts(exported.mlir_module())
    fields = tuple(Field(**vars(field)) for field in step.fields)
    seconds = round(time.perf_counter() - started, 3)
    return Lowered(blob, phase, padding, fields, inputs, _outputs(exported, step), counted, seconds)


def device_mesh(tp: int) -> Mesh:
    """The first ``tp`` devices of this process on the one axis.

    Raises:
        PlanError: There are fewer.
    """
    devices = jax.devices()
    if len(devices) < tp:
        raise PlanError(f"devices: expected at least {tp} for tp{tp}, found {len(devices)} in this process")
    return Mesh(np.array(devices[:tp]), (AXIS,), axis_types=(AxisType.Auto,))


def compile_cell(lowered: Lowered, mesh: Mesh) -> tuple[bytes, Compiled]:
    """Compiles the portable tier for ``mesh``: the serialized executable, and what describes it."""
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
    return raw, described(compiled, round(time.perf_counter() - started, 3))


def described(compiled: Any, seconds: float) -> Compiled:
    """How a program is called; flops, bytes and memory as the compiler counts them (a loop's body once)."""
    analysis, memory = compiled.cost_analysis() or {}, compiled.memory_analysis()
    return Compiled(
        executable=pjrt.call_record(compiled),
        compile_seconds=seconds,
        memory=Memory(
            memory.argument_size_in_bytes, memory.output_size_in_bytes, memory.temp_size_in_bytes,
            memory.alias_size_in_bytes, memory.generated_code_size_in_bytes,
        ),
        flops=analysis.get("flops"),
        bytes_accessed=analysis.get("bytes accessed"),
    )  # fmt: skip
