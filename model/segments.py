"""A prefill call cut at its groups of layers, so that state can move group by group while later groups compute.

    embed@T     tokens -> hidden
    group@T     hidden, the group's number -> hidden; the state of its layers goes on
    unembed@T   the last hidden -> logits of each chunk's last token

Which group a call computes is a number of its batch: one program serves all of them. In the form ``loops`` it is the
body of the loop over groups; in the form ``tiles``, where layers are unrolled, every group is a branch of its own.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from ling3export.model.config import Config
from ling3export.model.decoder import Ling3
from ling3export.model.ffn.split_program import HEAD, SplitProgram
from ling3export.model.geometry import AXIS, CHUNK
from ling3export.model.inputs import last_tokens, valid_tokens
from ling3export.model.layers import State

P = PartitionSpec
Tree = dict[str, Any]

TABLE = "embeddings.word_embeddings"


def segment(config: Config, phase: str, padding: int) -> SplitProgram | None:
    """The segment that is called ``phase``, for ``padding`` tokens; None where the phase is another one."""
    hidden = {"hidden": jax.ShapeDtypeStruct((padding, config.hidden_size), jnp.float32)}
    if phase == "embed":
        return SplitProgram(lambda name: name == TABLE, False, {}, {"hidden": P()}, embed)
    if phase == "group":
        return SplitProgram(lambda name: name not in (TABLE, *HEAD), True, hidden, {"hidden": P()}, group)
    if phase == "unembed":
        return SplitProgram(lambda name: name in HEAD, False, hidden, {"logits": P(None, AXIS)}, unembed)
    return None


def embed(model: Ling3, state: State, fields: Tree, batch: Tree) -> tuple[State, Tree]:
    """``hidden [T, D]`` in fp32; padding is embedded as token 0."""
    valid = valid_tokens(jnp.arange(CHUNK, dtype=jnp.int32), fields["chunk_slot"], fields["chunk_len"])
    return state, {"hidden": model.embed(jnp.where(valid, fields["tokens"], 0))}


def group(model: Ling3, state: State, fields: Tree, batch: Tree) -> tuple[State, Tree]:
    """``hidden [T, D]`` behind the layers of the group ``group [1]``; other fields are those of ``prefill``."""
    fields = dict(fields)
    number = fields.pop("group")[0]
    hidden, state = model.run_group(number, batch["hidden"], state, model.chunks(fields))
    return state, {"hidden": hidden}


def unembed(model: Ling3, state: State, fields: Tree, batch: Tree) -> tuple[State, Tree]:
    """``logits [N, V/TP]``: one row a chunk, its last token's."""
    return state, {"logits": model.logits(batch["hidden"][last_tokens(fields["chunk_len"])])}
