"""The function of every phase, and the program of one cell: ``(params, state, batch) -> (state, out)``.

The records of the phases are in ``foundation/phases.py``; STEPS binds a function to each. ``build_step`` returns a
global function (``shard_map`` over one axis, ``tp``) of plain nested dicts, with the abstract values and partition
specs of its inputs and outputs.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from ling3export.foundation.phases import PHASES, ArraySpec
from ling3export.model.config import Config
from ling3export.model.decoder import Ling3
from ling3export.model.exchange import copy, offload, onload
from ling3export.model.ffn.dispatch import SCALE_BYTES
from ling3export.model.ffn.split_program import attend, combine, dispatch, experts
from ling3export.model.geometry import AXIS, CHUNK, Geometry
from ling3export.model.inputs import Field, batch_fields, decode_rows, edits_width, last_tokens, packed_size, unpack
from ling3export.model.parameters import parameters
from ling3export.model.sampling.logits_processor import TOP, process_logits
from ling3export.model.sampling.sample import sample, score_next
from ling3export.model.state import state_arrays

P = PartitionSpec
Tree = dict[str, Any]
Fields = dict[str, jax.Array]


class Unfilled(NamedTuple):
    """Stands for the model in phases that take no parameters."""

    config: Config
    geometry: Geometry


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
    for parameter in parameters(config, geometry):
        put(values, parameter.path, jax.ShapeDtypeStruct(parameter.shape, jnp.dtype(parameter.dtype)))
        put(specs, parameter.path, P(*parameter.spec))
    return values, specs


def put(tree: Tree, path: tuple[str, ...], value: Any) -> None:
    """Sets a leaf of nested dicts."""
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
    tree[path[-1]] = value


def _chosen(tree: Tree, takes: Callable[[str], bool]) -> Tree:
    """The parameters that a program takes, of ``{stack: {name: ...}}``."""
    kept = {
        stack: {name: leaf for name, leaf in rows.items() if takes(f"{stack}.{name}")} for stack, rows in tree.items()
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


def prefill(model: Ling3, state: Tree, fields: Fields, batch: Tree) -> tuple[Tree, Tree]:
    """``logits [N, V/TP]``: one row a chunk, its last token's.

    The phase ``score`` has a ``next_token``, and gives its ``logprob [T]``, the ``best [T]`` token and
    ``best_logprob [T]`` too: see :func:`score_next`.
    """
    chunks = model.chunks(fields)
    x, state = model.run_layers(model.embed(jnp.where(chunks.valid, fields["tokens"], 0)), state, chunks)
    out = {"logits": model.logits(x[last_tokens(chunks.length)])}
    if "next_token" in fields:
        out["logprob"], out["best"], out["best_logprob"] = score_next(
            model.logits, x, fields["next_token"], model.geometry
        )
    return state, out


def decode(model: Ling3, state: Tree, fields: Fields, batch: Tree) -> tuple[Tree, Tree]:
    """``logits [B, V/TP]``; a token of -1 is taken from ``last_token``."""
    rows = decode_rows(fields, state["last_token"], model.geometry)
    x, state = model.run_layers(model.embed(rows.token), state, rows)
    return state, {"logits": model.logits(x[: fields["slot"].shape[0]])}


def sample_rows(model: Unfilled, state: Tree, fields: Fields, batch: Tree) -> tuple[Tree, Tree]:
    """``token [R]`` and ``logprob [R]`` from ``logits [R, V/TP]``; each slot's ``last_token`` is what it drew."""
    token, logprob = sample(batch["logits"], fields, model.geometry)
    return {"last_token": state["last_token"].at[fields["slot"]].set(token)}, {"token": token, "logprob": logprob}


def processed_logits(model: Unfilled, state: Tree, fields: Fields, batch: Tree) -> tuple[Tree, Tree]:
    """``logits [R, V/TP]`` to sample from, ``logprob [R]`` of ``token``, ``top_token`` and ``top_logprob [R, TOP]``."""
    logits, edits, mask, token = (batch[name] for name in ("logits", "edits", "mask", "token"))
    return state, process_logits(logits, fields, edits, mask, token, model.geometry.unrolled)


def head(model: Ling3, state: Tree, fields: Fields, batch: Tree) -> tuple[Tree, Tree]:
    """``logits [B, V/TP]`` of a decode step that is cut at the experts."""
    return state, {"logits": model.logits(batch["hidden"])}


# By phase: ``(model, state, fields, batch) -> (state, out)``, where ``model`` has the parameters that the phase takes.
STEPS: Mapping[str, Callable[[Any, Tree, Fields, Tree], tuple[Tree, Tree]]] = {
    "prefill": prefill,
    "score": prefill,
    "decode": decode,
    "sample": sample_rows,
    "logits_processor": processed_logits,
    "copy": copy,
    "offload": offload,
    "onload": onload,
    "attend": attend,
    "combine": combine,
    "head": head,
    "dispatch": dispatch,
    "experts": experts,
}


def sizes_of(config: Config, geometry: Geometry, padding: int) -> dict[str, int]:
    """The size of every word that the records of phases use for an axis, or as a condition."""
    sent = config.hidden_size + SCALE_BYTES if geometry.token_dtype == "int8" else config.hidden_size
    sizes = {
        "padding": padding,
        "chunks": padding // CHUNK,
        "max_pages": geometry.max_pages,
        "vocab": config.vocab_size,
        "hidden": config.hidden_size,
        "chosen": config.num_experts_per_tok,
        "experts": len(config.layers("moe")) * config.num_experts,
        "sent": sent,
        "latent": config.latent_dim,
        "edits": edits_width(config, geometry),
        "mask_words": -(-config.vocab_size // 32),
        "top": TOP,
    }
    for row in state_arrays(config, geometry):
        sizes |= {f"{row.name}.{axis}": size for axis, size in zip(row.axes, row.shape, strict=True)}
    return sizes | ({"int8": 1} if geometry.token_dtype == "int8" else {})


def sharded(
    body: Callable[..., tuple[Tree, Tree]],
    mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh | None,
    specs: Any,
    out_specs: Any,
) -> Callable[[Tree, Tree, Tree], tuple[Tree, Tree]]:
    if mesh is None:
        single = jax.vmap(body, in_axes=None, axis_name=AXIS, axis_size=1)
        return lambda *arguments: jax.tree.map(lambda value: value[0], single(*arguments))
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
        phase: A key of PHASES.
        padding: Number of units that the record's ``sizes`` names.
        mesh: One axis ``tp`` of ``geometry.tp`` devices, abstract or real; None for a program of one device without
            collectives, for readers that know none.
    """
    record, sizes = PHASES[phase], sizes_of(config, geometry, padding)
    int8 = geometry.token_dtype == "int8"
    dtypes = {"model": geometry.dtype, "token": "int8" if int8 else geometry.dtype}
    dtypes["sent"] = "uint8" if int8 else geometry.dtype

    def arrays(rows: Mapping[str, ArraySpec]) -> tuple[Tree, Tree]:
        rows = {name: row for name, row in rows.items() if row.exists(sizes)}
        values = {
            name: jax.ShapeDtypeStruct(row.shape(sizes), jnp.dtype(dtypes.get(row.dtype, row.dtype)))
            for name, row in rows.items()
        }
        return values, {name: P(*row.spec(striped=geometry.striped)) for name, row in rows.items()}

    params, param_specs = (_chosen(tree, record.takes_parameter) for tree in parameter_tree(config, geometry))
    state, state_specs = (
        {name: leaf for name, leaf in tree.items() if record.takes_state(name)} for tree in state_tree(config, geometry)
    )
    batch, batch_specs = arrays(record.batch)
    _, out_specs = arrays(record.out)
    fields = batch_fields(phase, padding, geometry.max_pages)
    if fields:
        batch["packed"], batch_specs["packed"] = jax.ShapeDtypeStruct((packed_size(fields),), jnp.int32), P()
    fill = bind(config, geometry) if params else None

    def body(params: Tree, state: Tree, batch: Tree) -> tuple[Tree, Tree]:
        model = fill(params) if fill else Unfilled(config, geometry)
        return STEPS[phase](model, state, unpack(batch["packed"], fields) if fields else {}, batch)

    specs, gives = (param_specs, state_specs, batch_specs), (state_specs, out_specs)
    return StepProgram(sharded(body, mesh, specs, gives), (params, state, batch), specs, gives, fields)
