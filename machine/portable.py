"""Portable programs: StableHLO's own portable form of one device's computation, without a container around it.

A cell is one ``shard_map`` over the mesh, and its body is StableHLO alone: no custom call, and none of Shardy's
operations, which StableHLO promises nothing about. So the body is what an artifact keeps. Mesh, shardings and donation
are in the manifest, and the jax that compiles it puts them around it again (docs/decisions/0014-portable-programs.md).
"""

import dataclasses
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export, stages
from jax._src.interpreters import mlir
from jax._src.lib import xla_client
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import func, stablehlo

from ling3export.artifacts.program_records import Leaf, LoweredProgram

# Custom calls that every compiler turns into something else: shardings, and what StableHLO has no operation for.
EXPANDED = {"Sharding", "SPMDFullToShardShape", "SPMDShardToFullShape", "mhlo.topk", "mhlo.erf", "chlo.top_k"}
CUSTOM_CALL = re.compile(r"stablehlo\.custom_call @\"?([\w.$]+)")


def packed(exported: export.Exported) -> bytes:
    """The body of an exported ``shard_map``, in the portable form of the StableHLO of four weeks ago.

    Raises:
        ValueError: The program is more than one ``shard_map`` over one axis, or its body is more than StableHLO.
    """
    with mlir.make_ir_context() as context, ir.Location.unknown():
        module: Any = stablehlo.deserialize_portable_artifact(context, exported.mlir_module_serialized)
        main: Any = ir.SymbolTable(module.operation)["main"]
        block = main.regions[0].blocks[0]
        manual = [operation for operation in block.operations if operation.operation.name == "sdy.manual_computation"]
        # jax makes no shard_map of one device. Constants of the program stand outside, and are whole on each device.
        outside = [operation for operation in block.operations if operation not in manual] if manual else []
        constants = [operation for operation in outside if operation.operation.name == "stablehlo.constant"]
        outer = [operation.result for operation in constants]
        body = manual[0].regions[0].blocks[0] if manual else block
        operands = [*manual[0].operands] if manual else [*block.arguments]
        taken = [old for old, operand in zip(body.arguments, operands, strict=True) if operand not in outer]
        if manual and (
            len(manual) > 1
            or [operation.operation.name for operation in outside if operation not in constants] != ["func.return"]
            or [operation for operation in operands if operation not in outer] != [*block.arguments]
            or [*outside[-1].operands] != [*manual[0].results]
            or any(
                old.type != operation.type
                for old, operation in zip(body.arguments, operands, strict=True)
                if operation in outer
            )
        ):
            raise ValueError("program: expected one shard_map with nothing but constants around it")
        *operations, last = body.operations
        with ir.InsertionPoint(module.body):
            types = [operation.type for operation in taken], [operation.type for operation in last.operands]
            local = func.FuncOp("local", types)
        entry = local.add_entry_block()
        news = iter([*entry.arguments])
        for old, operand in zip([*body.arguments], operands, strict=True):
            old.replace_all_uses_with(operand if operand in outer else next(news))
        for operation in (*constants, *operations):
            entry.append(operation)
        with ir.InsertionPoint(entry):
            func.ReturnOp([*last.operands])
        main.operation.erase()
        for operation in [operation for operation in module.body.operations if operation.operation.name == "sdy.mesh"]:
            operation.operation.erase()
        local.attributes["sym_name"] = ir.StringAttr.get("main")
        _name_devices(module, exported.nr_devices)
        _call_decompositions(module)
        version = stablehlo.get_version_from_compatibility_requirement(
            stablehlo.StablehloCompatibilityRequirement.WEEK_4
        )
        return bytes(stablehlo.serialize_portable_artifact(module, version))


def _name_devices(module: Any, count: int) -> None:
    """Has collectives name their devices, all of the one axis, where they name an axis of Shardy's mesh."""
    groups = ir.DenseElementsAttr.get(np.arange(count, dtype=np.int64)[None])

    def visit(operation: Any) -> Any:
        if "replica_groups" in operation.attributes and "mesh_axes" in str(operation.attributes["replica_groups"]):
            operation.attributes["replica_groups"] = groups
        return ir.WalkResult.ADVANCE

    module.operation.walk(visit)


def _call_decompositions(module: Any) -> None:
    """Replaces composites with regions by calls of their decompositions: the portable form has no regions.

    Such is ``chlo.scan``, as which jax lowers cumulative sums for a card. The decomposition is a plain loop.
    """
    composites: list[Any] = []

    def visit(operation: Any) -> Any:
        if operation.name == "stablehlo.composite" and len(operation.regions):
            composites.append(operation)
        return ir.WalkResult.ADVANCE

    module.operation.walk(visit)
    for operation in composites:
        with ir.InsertionPoint(operation):
            results = [result.type for result in operation.results]
            call = func.CallOp(results, operation.attributes["decomposition"], [*operation.operands])
        for old, new in zip(operation.results, call.operation.results, strict=True):
            old.replace_all_uses_with(new)
        operation.erase()


def compile_portable(blob: bytes, program: LoweredProgram, mesh: Mesh) -> stages.Compiled:
    """Compiles a portable program for ``mesh``.

    The processor's compiler takes those of other platforms, too, as they stand: their operations are StableHLO's, apart
    from the custom calls that ``lacking`` names.

    Args:
        blob: The program of parameters, state and batch, whose state is donated: StableHLO's portable form.
        program: The shapes, dtypes and specs of its inputs and outputs, in flattening order.
    """
    local = _callable(blob, program, mesh)
    specs = [PartitionSpec(*leaf.spec) for leaf in program.inputs]
    inputs = [
        jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))
        for leaf, spec in zip(program.inputs, specs, strict=True)
    ]
    groups, results = ("params", "state", "batch"), ("state", "out")
    outputs = [PartitionSpec(*leaf.spec) for leaf in program.outputs]
    whole = jax.shard_map(
        lambda *arguments: _trees(program.outputs, local(*jax.tree.leaves(arguments)), results),
        mesh=mesh,
        in_specs=_trees(program.inputs, specs, groups),
        out_specs=_trees(program.outputs, outputs, results),
        check_vma=False,
    )
    arguments = _trees(program.inputs, inputs, groups)
    return jax.jit(whole, donate_argnums=(1,), keep_unused=True).lower(*arguments).compile()


def _callable(blob: bytes, program: LoweredProgram, mesh: Mesh) -> Callable[..., Any]:
    """A module of StableHLO as a function that jax can trace: an export with this module in it."""

    def of_a_device(rows: Sequence[Leaf]) -> list[jax.ShapeDtypeStruct]:
        return [
            jax.ShapeDtypeStruct(NamedSharding(mesh, PartitionSpec(*row.spec)).shard_shape(row.shape), row.dtype)
            for row in rows
        ]

    outputs = of_a_device(program.outputs)
    empty = jax.jit(lambda *_: [jnp.zeros(leaf.shape, leaf.dtype) for leaf in outputs], keep_unused=True)
    exported = export.export(empty, platforms=(mesh.devices.flat[0].platform,))(*of_a_device(program.inputs))
    return dataclasses.replace(exported, mlir_module_serialized=blob).call


def _trees(rows: Sequence[Leaf], values: Sequence[Any], groups: Sequence[str]) -> tuple[Any, ...]:
    """The nested dicts of each group, whose flattening order the rows have."""
    trees: dict[str, Any] = {group: {} for group in groups}
    for row, value in zip(rows, values, strict=True):
        *path, last = [row.group, *row.name.split(".")] if row.name else [row.group]
        place: dict[str, Any] = trees
        for key in path:
            place = place.setdefault(key, {})
        place[last] = value
    return tuple(trees[group] for group in groups)


@contextmanager
def module(blob: bytes) -> Iterator[Any]:
    """A portable program as an MLIR module, within the ``with`` block.

    Raises:
        ValueError: The bytes are no portable program of a version that this jaxlib reads.
    """
    with mlir.make_ir_context() as context:
        yield stablehlo.deserialize_portable_artifact(context, blob)


def text(blob: bytes) -> str:
    """A portable program as StableHLO's text."""
    with module(blob) as parsed:
        return str(parsed)


def lacking(blob: bytes) -> tuple[str, ...]:
    """The custom calls of a portable program that the processor has no code for."""
    return tuple(sorted({*CUSTOM_CALL.findall(text(blob))} - EXPANDED - {*xla_client.custom_call_targets("Host")}))
