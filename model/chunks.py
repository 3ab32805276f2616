"""What the chunks of a prefill call say about its token slots."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ling3export.model.geometry import CHUNK
from ling3export.model.kda.conv import picks_of
from ling3export.model.kda.tiled import TILE, Runs, runs_of


class Chunks(NamedTuple):
    """The call's chunks, N of them, and its T = 16 N token slots.

    Attributes:
        slot: ``[N]`` int32, 0 for a chunk that is padding.
        length: ``[N]`` int32, tokens in the chunk, 0 … C.
        fresh: ``[N]`` bool, the chunk starts from zero state.
        first: ``[N]`` bool, the chunk is the first of its sequence in this call.
        last: ``[N]`` bool, the last one.
        from_zero: ``[N]`` bool, its run of chunks starts from zero state.
        run_start: ``[N]`` int32, position at which its sequence starts in this call: tokens already in the pools.
        page_table: ``[N, M]`` int32.
        used: int32 scalar, one past the last chunk that is not padding.
        token_slot: ``[T]`` int32, the slot of each token slot.
        position: ``[T]`` int32.
        valid: ``[T]`` bool, the token slot holds a token.
        tiles: What the recurrence form ``together`` needs besides, alike in every layer.
    """

    slot: jax.Array
    length: jax.Array
    fresh: jax.Array
    first: jax.Array
    last: jax.Array
    from_zero: jax.Array
    run_start: jax.Array
    page_table: jax.Array
    used: jax.Array
    token_slot: jax.Array
    position: jax.Array
    valid: jax.Array
    tiles: "Tiles | None" = None


class Tiles(NamedTuple):
    """Chunks side by side in tiles, see ``model/kda/tiled.py`` and ``model/kda/conv.py``."""

    runs: Runs
    picks: jax.Array


def with_tiles(chunks: Chunks, width: int) -> Chunks:
    """Adds :class:`Tiles` for a convolution that sees ``width`` tokens before each; the last tile is filled up."""
    count = chunks.slot.shape[0]
    size = min(TILE, count)

    def fill(y: jax.Array, value: int) -> jax.Array:
        return jnp.pad(y, (0, -count % size), constant_values=value)

    first = fill(chunks.first, 1)
    picks = picks_of(first, fill(chunks.fresh, 1), fill(chunks.length, 0), size, CHUNK, width)
    return chunks._replace(tiles=Tiles(runs_of(first, CHUNK), picks))


def chunks_of(batch: dict[str, jax.Array]) -> Chunks:
    """Derives :class:`Chunks` from the unpacked prefill fields. Chunks of one slot stand together."""
    slot, start, length = batch["chunk_slot"], batch["chunk_start"], batch["chunk_len"]
    fresh = (batch["fresh"] != 0) & (slot > 0)
    index = jnp.arange(slot.shape[0], dtype=jnp.int32)
    changed = slot[1:] != slot[:-1]
    edge = jnp.ones((1,), bool)
    first = jnp.concatenate([edge, changed]) | fresh
    last = jnp.concatenate([first[1:], edge]) & (slot > 0)
    head = lax.cummax(jnp.where(first, index, 0))
    within = jnp.arange(CHUNK, dtype=jnp.int32)
    return Chunks(
        slot=slot,
        length=length,
        fresh=fresh,
        first=first,
        last=last,
        from_zero=fresh[head],
        run_start=start[head],
        page_table=batch["page_table"],
        used=jnp.max(jnp.where(slot > 0, index + 1, 0)),
        token_slot=jnp.repeat(slot, CHUNK),
        position=(start[:, None] + within).reshape(-1),
        valid=((within < length[:, None]) & (slot > 0)[:, None]).reshape(-1),
    )
