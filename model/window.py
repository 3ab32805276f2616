"""The short causal convolution of a prefill call as products with zeros and ones.

A machine that is fast at products and slow at many small steps takes the rows before each row, wherever they are, in one
product: in the tile, at the end of the tile before it, or in the pool. The product is exact, since each row of ones and
zeros has at most a single one. Which rows those are is the same in every layer.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ling3export.model.layers import precision


def picks_of(first: jax.Array, fresh: jax.Array, length: jax.Array, size: int, chunk: int, width: int) -> jax.Array:
    """Which rows to take, as zeros and ones.

    Args:
        first: ``[N]`` bool, a run of chunks starts here; N is a multiple of ``size``.
        fresh: ``[N]`` bool, it starts from nothing.
        length: ``[N]`` int32, tokens of the chunk.
        size: Chunks of a tile.
        chunk: Rows of a chunk.
        width: Rows before each one that the convolution sees.

    Returns:
        bf16 ``[J, width·L + size·width, L + width + size·width]``: for each of the L rows of a tile the row 1, 2 …
        ``width`` before it, then the last ``width`` inputs after each chunk; out of the tile's rows, the last rows of
        the tile before it, and what the pool holds for each chunk.
    """
    first, fresh, length = (y.reshape(-1, size, 1) for y in (first, fresh, length))
    rows = size * chunk
    of = np.arange(size)[:, None]

    def source(place: jax.Array | np.ndarray) -> jax.Array:
        """Of a place in its chunk, negative before it; ``[J or 1, size, x]`` to row numbers, -1 for none."""
        at = of * chunk + place
        inside = jnp.where(at >= 0, at, rows + width + at)
        pooled = jnp.where(fresh, -1, rows + width + of * width + width + place)
        return jnp.where((place < 0) & first, pooled, inside)

    place = np.arange(chunk)
    before = [source(np.broadcast_to(place - back, (1, size, chunk))) for back in range(1, width + 1)]
    kept = source(length - width + np.arange(width))
    index = jnp.concatenate([*(y.reshape(-1, rows) for y in before), kept.reshape(-1, size * width)], axis=1)
    return jax.nn.one_hot(index, rows + width + size * width, dtype=jnp.bfloat16)


def convolve(
    raw: jax.Array, pooled: jax.Array, taps: jax.Array, picks: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Convolution and SiLU; the last tap multiplies the current row.

    Args:
        raw: ``[J, L, X]``, model dtype.
        pooled: ``[J, size·(W-1), X]``, what the pool holds for each chunk's sequence.
        taps: ``[W, X]`` fp32.
        picks: See :func:`picks_of`.

    Returns:
        fp32 ``[J, L, X]``, and the last inputs after each chunk ``[J, size·(W-1), X]`` of the model dtype.
    """
    rows, width = raw.shape[1], taps.shape[0] - 1
    before = jnp.pad(raw[:-1, -width:], ((1, 0), (0, 0), (0, 0)))
    known = jnp.concatenate([raw, before, pooled], axis=1)
    exact = precision(raw.dtype)
    dims = (((2,), (1,)), ((0,), (0,)))
    taken = lax.dot_general(picks.astype(raw.dtype), known, dims, precision=exact, preferred_element_type=jnp.float32)
    out = taps[width] * raw.astype(jnp.float32)
    for back in range(1, width + 1):
        out += taps[width - back] * taken[:, (back - 1) * rows : back * rows]
    return jax.nn.silu(out), taken[:, width * rows :].astype(raw.dtype)
