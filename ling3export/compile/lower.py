"""From a cell of the plan to portable StableHLO and to a compiled executable, with all that the manifest says of both.

Runs in a process of its own (``compile/worker.py``): the number of virtual devices is fixed when jax starts.
"""

import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax import export
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from msgspec import structs

from ling3export.artifacts import schema
from ling3export.artifacts.program_records import (
    Collective,
    Estimate,
    FieldRecord,
    Leaf,
    LoweredProgram,
    Lowering,
    Memory,
    Origin,
    Program,
    RooflineBound,
)
from ling3export.artifacts.records import Record
from ling3export.foundation.errors import PlanError
from ling3export.graph.hlo import packed
from ling3export.machine import pjrt, portable, untouched
from ling3export.model.config import Config
from ling3export.model.geometry import AXIS, Geometry
from ling3export.model.program import StepProgram, build_step
from ling3export.model.state import StateArray

COLLECTIVES = ("all_reduce", "all_gather", "all_to_all", "collective_permute", "reduce_scatter")


class Compiled(Record, frozen=True, kw_only=True):
    """A compiled program without its bytes. All fields but ``executable`` are those of a Program."""

    executable: schema.Executable
    compile_seconds: float
    memory: Memory
    collectives: dict[str, Collective] | None = None  # None where only the lowered program was counted
    flops: float | None = None
    bytes_accessed: float | None = None
    estimate: Estimate | None = None
    floor: RooflineBound | None = None
    lowering: Lowering | None = None


class Lowered(LoweredProgram, frozen=True, kw_only=True):
    """The portable tier of one cell."""

    blob: bytes  # as ``machine/portable.py`` writes it, for one platform

    def program(self, compiled: Compiled, origin: Origin | None = None) -> Program:
        """The manifest's record of the compiled cell; the compiler's counts replace the lowering's."""
        lowered = {name: getattr(self, name) for name in LoweredProgram.__struct_fields__}
        measured = {name: value for name, value in structs.asdict(compiled).items() if value is not None}
        executable: schema.Executable = measured.pop("executable")
        return Program(**lowered | measured, call=executable.call, origin=origin)


def _leaves(groups: Sequence[str], values: Sequence[Any], specs: Sequence[Any]) -> tuple[Leaf, ...]:
    """Every leaf of each group's nested dicts, in flattening order, named by its keys with dots between."""
    rows = []
    for group, value, spec in zip(groups, values, specs, strict=True):
        flat, _ = jax.tree_util.tree_flatten_with_path(value)
        flat_specs = jax.tree.leaves(spec, is_leaf=lambda x: isinstance(x, PartitionSpec))
        for (path, leaf), leaf_spec in zip(flat, flat_specs, strict=True):
            name = ".".join(str(key.key) for key in path)
            rows.append(Leaf(name, tuple(leaf.shape), str(leaf.dtype), tuple(leaf_spec), group))
    return tuple(rows)


def collective_counts(text: str) -> dict[str, Collective]:
    """Collectives in a StableHLO module's text; those in a loop's body count once."""
    counts = Counter(re.findall(r"stablehlo\.(" + "|".join(COLLECTIVES) + r")\b", text))
    return {kind: Collective(count) for kind, count in sorted(counts.items())}


def without_locations() -> None:
    """Keeps source locations out of later lowerings: they would put this checkout's path into programs and keys."""
    jax.config.update("jax_traceback_in_locations_limit", 0)


def prepared(
    config: Config, geometry: Geometry, phase: str, padding: int, mesh: Mesh | AbstractMesh
) -> tuple[StepProgram, Any, Any]:
    """The step of a cell, the jitted function to lower, which donates its state, and its abstract arguments."""
    without_locations()
    step = build_step(config, geometry, phase, padding, mesh)

    def sharded(value: jax.ShapeDtypeStruct, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=NamedSharding(mesh, spec))

    arguments = jax.tree.map(sharded, step.arguments, step.specs)
    return step, jax.jit(step.call, donate_argnums=(1,)), arguments


def lower_cell(config: Config, geometry: Geometry, phase: str, padding: int, platform: str) -> Lowered:
    """Traces and lowers one cell for one of jax's platforms; needs no device of it.

    An export for several platforms would be slower and not bit-equal.
    """
    started = time.perf_counter()
    mesh = AbstractMesh((geometry.tp,), (AXIS,), axis_types=(AxisType.Auto,))
    geometry = replace(geometry, kernels="")  # what any machine can compile knows no kernels
    step, function, arguments = prepared(config, geometry, phase, padding, mesh)
    exported = export.export(function, platforms=(platform,))(*arguments)
    state, out = jax.tree.unflatten(exported.out_tree, exported.out_avals)
    return Lowered(
        blob=portable.packed(exported),
        phase=phase,
        padding=padding,
        fields=tuple(FieldRecord(**vars(field)) for field in step.fields),
        inputs=_leaves(("params", "state", "batch"), step.arguments, step.specs),
        outputs=_leaves(("state", "out"), (state, out), step.out_specs),
        collectives=collective_counts(exported.mlir_module()),
        lower_seconds=round(time.perf_counter() - started, 3),
    )


def mesh_of(devices: Any) -> Mesh:
    """``devices``, in their order, on the one mesh axis."""
    return Mesh(np.array(devices), (AXIS,), axis_types=(AxisType.Auto,))


def device_mesh(tp: int) -> Mesh:
    """The first ``tp`` devices of this process on the one mesh axis.

    Raises:
        PlanError: There are fewer.
    """
    devices = jax.devices()
    if len(devices) < tp:
        raise PlanError(f"devices: expected at least {tp} for tp{tp}, found {len(devices)} in this process")
    return mesh_of(devices[:tp])


def compile_cell(lowered: Lowered, mesh: Mesh) -> tuple[bytes, Compiled, bytes]:
    """Compiles the portable tier for ``mesh``: the serialized executable, its record, and its packed text."""
    raw, record, compiled = compiled_by(lambda: portable.compile_portable(lowered.blob, lowered, mesh))
    return raw, record, packed(compiled.as_text() or "")


def compile_with_kernels(
    config: Config, geometry: Geometry, phase: str, padding: int, mesh: Mesh
) -> tuple[bytes, Compiled, bytes]:
    """:func:`compile_cell` from a lowering that calls the geometry's native kernels, which must be registered."""
    _, function, arguments = prepared(config, geometry, phase, padding, mesh)
    raw, record, compiled = compiled_by(lambda: function.lower(*arguments).compile())
    record = structs.replace(record, lowering=Lowering(direct=True, forward_compatible=False))
    return raw, record, packed(compiled.as_text() or "")


def compile_state(rows: Sequence[StateArray], mesh: Mesh) -> bytes:
    """Compiles a program without inputs that gives the arrays ``rows`` on processors' devices, and writes none of them.

    Serialized it has about 5 KB. The arrays' bytes are whatever was in memory before: runners/load/fresh.py.
    """
    without_locations()
    untouched.register()
    specs = tuple(PartitionSpec(*row.spec) for row in rows)
    shards = [
        jax.ShapeDtypeStruct(NamedSharding(mesh, spec).shard_shape(row.shape), row.dtype)
        for row, spec in zip(rows, specs, strict=True)
    ]

    def state() -> tuple[jax.Array, ...]:
        return tuple(jax.ffi.ffi_call(untouched.NAME, shards)())

    step = jax.shard_map(state, mesh=mesh, in_specs=(), out_specs=specs, check_vma=False)
    with pjrt.no_compilation_cache():
        raw, _ = pjrt.serialized(jax.jit(step).lower().compile())
    return raw


def compiled_by(make: Callable[[], Any], seconds: float = 0.0) -> tuple[bytes, Compiled, Any]:
    """A serialized executable, its record, and jax's object.

    ``seconds`` were spent before ``make`` compiles.
    """
    started = time.perf_counter()
    with pjrt.no_compilation_cache():
        compiled = make()
        raw, executable = pjrt.serialized(compiled)
    memory = compiled.memory_analysis()
    sizes = ("argument_size", "output_size", "temp_size", "alias_size", "generated_code_size")
    counted = [getattr(memory, f"{size}_in_bytes") for size in sizes]
    peak = getattr(memory, "peak_memory_in_bytes", 0)  # older versions of jaxlib have none
    record = Compiled(
        executable=executable,
        compile_seconds=round(seconds + time.perf_counter() - started, 3),
        memory=Memory(*counted, compiler_peak=peak or None),  # type: ignore[misc]
    )
    return raw, record, compiled
