"""The packed fields of a call, and what follows from them for its rows.

Every field of a step travels in one int32 vector (one transfer a step instead of six). ``DecodeRows`` and ``Chunks``
are derived from the fields once a step, for all layers.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int32, Shaped

from ling3export.foundation.phases import PHASES
from ling3export.model.config import Config
from ling3export.model.geometry import CHUNK, Geometry
from ling3export.model.kda.tiled import Tiles, tiles_of
from ling3export.model.layers import IN_BOUNDS, fill_rows
from ling3export.model.mla.paged import PageList, is_at_once, list_pages, tile_pages
from ling3export.model.sampling.logits_processor import BLOCK

BIASES = 1024  # tokens with a logit bias that one request may name


@dataclass(frozen=True)
class Field:
    """A named range of the packed vector. Floats are bit-cast."""

    name: str  # field name of the step contract
    offset: int  # first element in the vector
    shape: tuple[int, ...]  # shape after unpacking; ``()`` never occurs
    dtype: str  # ``"int32"`` or ``"float32"``

    @property
    def size(self) -> int:
        """Elements taken in the vector."""
        return math.prod(self.shape)


def batch_fields(phase: str, padding: int, max_pages: int) -> tuple[Field, ...]:
    """The fields of ``phase`` at ``padding``, in packing order."""
    sizes = {"padding": padding, "chunks": padding // CHUNK, "max_pages": max_pages}
    fields, offset = [], 0
    for name, row in PHASES[phase].fields.items():
        fields.append(Field(name, offset, row.shape(sizes), row.dtype))
        offset += fields[-1].size
    return tuple(fields)


def edits_width(config: Config, geometry: Geometry) -> int:
    """Edits of a row that ``logits_processor`` takes: one of every token that a context can hold, and BIASES more."""
    most = min(config.vocab_size, geometry.max_pages * geometry.page_size + BIASES)
    return -(-most // BLOCK) * BLOCK


def packed_size(fields: tuple[Field, ...]) -> int:
    """Elements of the packed vector."""
    return sum(field.size for field in fields)


def unpack(packed: Int32[Array, "size"], fields: tuple[Field, ...]) -> dict[str, Shaped[Array, "..."]]:
    """Splits the packed vector into its named fields."""
    out = {}
    for field in fields:
        piece = packed[field.offset : field.offset + field.size].reshape(field.shape)
        out[field.name] = lax.bitcast_convert_type(piece, jnp.float32) if field.dtype == "float32" else piece
    return out


class DecodeRows(NamedTuple):
    """The rows of a decode step, B of them: a token of each sequence."""

    slot: Int32[Array, "B"]  # state slot, 0 for a padding row
    token: Int32[Array, "B"]  # the token to embed
    position: Int32[Array, "B"]  # the token's position in its sequence
    page_table: Int32[Array, "B M"]  # page numbers of the sequence
    valid: Bool[Array, "B"]  # False for a padding row
    used: Int32[Array, ""]  # one past the last row that is valid
    pages: PageList | None  # what the forms for accelerators attend, alike in every layer; None: all at once


def decode_rows(
    fields: dict[str, Int32[Array, "..."]], last_token: Int32[Array, "slots"], geometry: Geometry
) -> DecodeRows:
    """Derives :class:`DecodeRows` from the unpacked decode fields; a token of -1 is taken from ``last_token``."""
    tile = tile_pages(fields["slot"].shape[0])  # by the sequences, not by the rows that they are filled up to
    fields = {name: fill_rows(value, geometry.fewest_rows) for name, value in fields.items()}
    slot = fields["slot"]
    valid = slot > 0
    token = jnp.where(fields["token"] < 0, last_token.at[slot].get(mode=IN_BOUNDS), fields["token"])
    position, table = fields["position"], fields["page_table"]
    listed = geometry.tiled and not is_at_once(slot.shape[0], geometry)
    pages = list_pages(position, table, valid, tile, geometry) if listed else None
    used = jnp.max(jnp.where(valid, jnp.arange(1, slot.shape[0] + 1, dtype=jnp.int32), 0))
    token = jnp.where(valid, token, 0)
    return DecodeRows(slot, token, position, table, valid, used, pages)


class Chunks(NamedTuple):
    """The call's chunks, N of them, and its T = 16 N padded tokens."""

    slot: Int32[Array, "N"]  # state slot, 0 for a chunk that is padding
    length: Int32[Array, "N"]  # tokens in the chunk, 0 to 16
    fresh: Bool[Array, "N"]  # whether the chunk starts from zero state
    first: Bool[Array, "N"]  # whether the chunk is the first of its sequence in this call
    last: Bool[Array, "N"]  # whether the chunk is the last of its sequence in this call
    from_zero: Bool[Array, "N"]  # whether its run of chunks starts from zero state
    run_start: Int32[Array, "N"]  # position at which its sequence starts in this call: tokens already in the pools
    page_table: Int32[Array, "N M"]  # page numbers of the chunk's sequence
    used: Int32[Array, ""]  # one past the last chunk that is not padding
    token_slot: Int32[Array, "T"]  # the state slot of each padded token
    position: Int32[Array, "T"]  # the position of each padded token in its sequence
    valid: Bool[Array, "T"]  # whether a padded token is a token of a sequence
    tiles: Tiles | None  # what KDA's form ``tiles`` needs besides, alike in every layer


def chunks_of(fields: dict[str, Int32[Array, "..."]], conv_history: int | None = None) -> Chunks:
    """Derives :class:`Chunks` from the unpacked prefill fields. Chunks of one slot stand together.

    Args:
        fields: ``chunk_slot, chunk_start, chunk_len, fresh``, each ``[N]``, and ``page_table [N, M]``.
        conv_history: Tokens before each one that KDA's convolution sees; None where KDA has not the form ``tiles``.
    """
    slot, start, length = fields["chunk_slot"], fields["chunk_start"], fields["chunk_len"]
    fresh = (fields["fresh"] != 0) & (slot > 0)
    index = jnp.arange(slot.shape[0], dtype=jnp.int32)
    changed = slot[1:] != slot[:-1]
    edge = jnp.ones((1,), bool)
    first = jnp.concatenate([edge, changed]) | fresh
    last = jnp.concatenate([first[1:], edge]) & (slot > 0)
    head = lax.cummax(jnp.where(first, index, 0))
    within = jnp.arange(CHUNK, dtype=jnp.int32)
    return Chunks(
        slot,
        length,
        fresh,
        first,
        last,
        from_zero=fresh[head] | (slot == 0),
        run_start=start[head],
        page_table=fields["page_table"],
        used=jnp.max(jnp.where(slot > 0, index + 1, 0)),
        token_slot=jnp.repeat(slot, CHUNK),
        position=(start[:, None] + within).reshape(-1),
        valid=valid_tokens(within, slot, length),
        tiles=None if conv_history is None else tiles_of(first, last, fresh, length, conv_history),
    )


def valid_tokens(within: Int32[Array, "16"], slot: Int32[Array, "N"], length: Int32[Array, "N"]) -> Bool[Array, "T"]:
    """Which padded tokens of chunks are tokens of a sequence; ``within`` counts those of a chunk."""
    return ((within < length[:, None]) & (slot > 0)[:, None]).reshape(-1)


def last_tokens(length: Int32[Array, "N"]) -> Int32[Array, "N"]:
    """The place of each chunk's last token among the padded tokens; of an empty chunk its first."""
    return jnp.arange(length.shape[0]) * CHUNK + jnp.maximum(length - 1, 0)
