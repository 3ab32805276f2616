"""The step contract: ``(params, state, batch) -> (state, out)`` for prefill, score, decode, sample, the logits
processor, and for state that moves.

``build_step`` returns a global function (``shard_map`` over one axis, ``tp``) of plain nested dicts, with the abstract
values and partition specs of everything that it takes and gives.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from ling3export.model import exchange
from ling3export.model.config import Config
from ling3export.model.decoder import Ling3
from ling3export.model.ffn.split_program import split_program
from ling3export.model.geometry import AXIS, Geometry
from ling3export.model.inputs import (
    Field,
    batch_fields,
    decode_rows,
    last_tokens,
    logits_processor_shapes,
    packed_size,
    unpack,
)
from ling3export.model.parameters import arguments
from ling3export.model.sampling.logits_processor import process_logits
from ling3export.model.sampling.sample import sample, score_next
from ling3export.model.state import state_arrays

P = PartitionSpec
Tree = dict[str, Any]

LOGITS = P(None, AXIS)  # cut over the vocabulary
OUTPUTS: dict[str, Tree] = {
    "prefill": {"logits": LOGITS},
    "score": {"logits": LOGITS, "logprob": P(), "best": P(), "best_logprob": P()},
    "decode": {"logits": LOGITS},
    "sample": {"token": P(), "logprob": P()},
    "logits_processor": {"logits": LOGITS, "logprob": P(), "top_token": P(), "top_logprob": P()},
}


@dataclass(frozen=True)
class StepProgram:
    """A program before lowering."""

    call: Callable[[Tree, Tree, Tree], tuple[Tree, Tree]]  # ``(params, state, batch) -> (state, out)`` on global arrays
    arguments: tuple[Tree, Tree, Tree]  # abstract values of (params, state, batch)
    specs: tuple[Tree, Tree, Tree]  # their partition specs, of the same structure
    out_specs: tuple[Tree, Tree]  # partition specs of (state, out)
    fields: tuple[Field, ...]  # layout of ``batch["packed"]``


def parameter_tree(config: Config, geometry: Geometry) -> tuple[Tree, Tree]:
    """(abstract values, partition specs) of the parameters, ``{stack: {name: ...}}``."""
    values: Tree = {}
    specs: Tree = {}
    for argument in arguments(config, geometry):
        put(values, argument.path, jax.ShapeDtypeStruct(argument.shape, jnp.dtype(argument.dtype)))
        put(specs, argument.path, P(*argument.spec))
    return values, specs


def put(tree: Tree, path: tuple[str, ...], value: Any) -> None:
    """Sets a leaf of nested dicts."""
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
    tree[path[-1]] = value


def _chosen(tree: Tree, takes: Callable[[str], bool]) -> Tree:
    """The parameters that a program takes, of ``{stack: {name: ...}}``."""
    kept = {
        stack: {name: each for name, each in rows.items() if takes(f"{stack}.{name}")} for stack, rows in tree.items()
    }
    return {stack: rows for stack, rows in kept.items() if rows}


def state_tree(config: Config, geometry: Geometry) -> tuple[Tree, Tree]:
    """(abstract values, partition specs) of the state."""
    rows = state_arrays(config, geometry)
    values = {row.name: jax.ShapeDtypeStruct(row.shape, jnp.dtype(row.dtype)) for row in rows}
    return values, {row.name: P(*row.spec) for row in rows}


def bind(config: Config, geometry: Geometry) -> Callable[[Tree], Ling3]:
    """Builds the model's structure once, without a byte of weights, and returns what fills it with local params."""
    graph, state = nnx.split(nnx.eval_shape(lambda: Ling3(config, geometry)))

    def fill(params: Tree) -> Ling3:
        filled = nnx.State(state)
        nnx.replace_by_pure_dict(filled, params)
        return nnx.merge(graph, filled)

    return fill


def prefill(model: Ling3, state: Tree, fields: dict[str, jax.Array]) -> tuple[Tree, Tree]:
    """``logits [N, V/TP]``: one row a chunk, its last token's.

    Where there is a ``next_token``, in the phase ``score``, also its ``logprob [T]``, the ``best [T]`` token and
    ``best_logprob [T]``: see
    :func:`score_next`.
    """
    chunks = model.chunks(fields)
    x, state = model.run_layers(model.embed(jnp.where(chunks.valid, fields["tokens"], 0)), state, chunks)
    out = {"logits": model.logits(x[last_tokens(chunks.length)])}
    if "next_token" in fields:
        out["logprob"], out["best"], out["best_logprob"] = score_next(
            model.logits, x, fields["next_token"], model.geometry
        )
    return state, out


def decode(model: Ling3, state: Tree, fields: dict[str, jax.Array]) -> tuple[Tree, Tree]:
    """``logits [B, V/TP]``; a token of -1 is taken from ``last_token``."""
    rows = decode_rows(fields, state["last_token"], model.geometry)
    x, state = model.run_layers(model.embed(rows.token), state, rows)
    return state, {"logits": model.logits(x[: fields["slot"].shape[0]])}


def sample_rows(logits: jax.Array, state: Tree, fields: dict[str, jax.Array], geometry: Geometry) -> tuple[Tree, Tree]:
    """``token [R]`` and ``logprob [R]`` from ``logits [R, V/TP]``; each slot's ``last_token`` is what it drew."""
    token, logprob = sample(logits, fields, geometry)
    return {"last_token": state["last_token"].at[fields["slot"]].set(token)}, {"token": token, "logprob": logprob}


def sharded(
    body: Callable[..., tuple[Tree, Tree]],
    mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh | None,
    specs: Any,
    out_specs: Any,
) -> Callable[[Tree, Tree, Tree], tuple[Tree, Tree]]:
    if mesh is None:
        alone = jax.vmap(body, in_axes=None, axis_name=AXIS, axis_size=1)
        return lambda *arguments: jax.tree.map(lambda value: value[0], alone(*arguments))
    return jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=out_specs, check_vma=False)


def build_step(
    config: Config,
    geometry: Geometry,
    phase: str,
    padding: int,
    mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh | None,
) -> StepProgram:
    """The program of one cell.

    Args:
        config: The model.
        geometry: Parallelism, pools and dtype.
        phase: ``prefill``, ``score``, ``decode``; ``sample`` or ``logits_processor``, which take no parameters, the
            logits in the batch, and of the state only ``last_token``, or nothing; or one of ``exchange.PHASES``, which
            take no parameters, or of ``model/ffn/split_program.py``.
        padding: Padded tokens, sequences or rows; pairs of slots or pages; pairs of a token and an expert.
        mesh: One axis ``tp`` of ``geometry.tp`` devices, abstract or real; None for a program of one device without
            collectives, for readers that know none.
    """
    fields = batch_fields(phase, padding, geometry.max_pages)
    batch: Tree = {"packed": jax.ShapeDtypeStruct((packed_size(fields),), jnp.int32)}
    batch_specs: Tree = {"packed": P()}
    params, param_specs = parameter_tree(config, geometry)
    state, state_specs = state_tree(config, geometry)
    out = OUTPUTS.get(phase, {})
    if phase in ("sample", "logits_processor"):
        params, param_specs = {}, {}
        batch["logits"], batch_specs["logits"] = jax.ShapeDtypeStruct((padding, config.vocab_size), jnp.float32), LOGITS
    if phase == "sample":
        state, state_specs = ({"last_token": tree["last_token"]} for tree in (state, state_specs))
    if phase == "logits_processor":
        for name, shape in logits_processor_shapes(padding, config.vocab_size, geometry).items():
            batch[name], batch_specs[name] = jax.ShapeDtypeStruct(shape, jnp.int32), P()
        state, state_specs = {}, {}
    if phase in exchange.PHASES:
        names = [row.name for row in exchange.pools(config, geometry, phase)]
        params, param_specs = {}, {}
        state, state_specs = ({name: tree[name] for name in names} for tree in (state, state_specs))
        values, value_specs = exchange.moved(config, geometry, padding)
        if phase == "onload":
            batch, batch_specs = batch | values, batch_specs | value_specs
        out = value_specs if phase == "offload" else {}
    part = split_program(config, geometry, phase, padding)
    if part is not None:
        batch, batch_specs = (tree if fields else {} for tree in (batch, batch_specs))
        batch, batch_specs = batch | part.batch, batch_specs | dict.fromkeys(part.batch, P())
        params, param_specs = (_chosen(tree, part.takes) for tree in (params, param_specs))
        state, state_specs = (tree if part.stateful else {} for tree in (state, state_specs))
        out = part.out
    fill = bind(config, geometry) if params else None

    def body(params: Tree, state: Tree, batch: Tree) -> tuple[Tree, Tree]:
        values = unpack(batch["packed"], fields) if fields else {}
        if phase in exchange.PHASES:
            return exchange.body(config, geometry, phase)(state, batch, values)
        if phase == "logits_processor":
            edits, mask, token = (batch[name] for name in ("edits", "mask", "token"))
            return state, process_logits(batch["logits"], values, edits, mask, token, geometry.unrolled)
        if part is not None:
            return part.call(fill and fill(params), state, values, batch)
        if fill is None:
            return sample_rows(batch["logits"], state, values, geometry)
        return (decode if phase == "decode" else prefill)(fill(params), state, values)

    specs, out_specs = (param_specs, state_specs, batch_specs), (state_specs, out)
    return StepProgram(sharded(body, mesh, specs, out_specs), (params, state, batch), specs, out_specs, fields)
