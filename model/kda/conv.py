"""The short causal convolution of a prefill call as products with zeros and ones.

A machine that is fast at products and slow at many small steps takes the rows before each row, wherever they are, in
one product: in the tile, at the end of the tile before it, or in the pool. The product is exact, since each row of ones
and zeros has at most a single one. Which rows those are is the same in every layer.
"""

import jax
import jax.numpy as jnp
import numpy as np

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
        ``width`` before it, then of each chunk the ``width`` inputs up to its end, the first of all chunks before the
        second; out of the tile's rows, the last rows of the tile before it, and what the pool holds, in the same order.
    """
    first, fresh, length = (y.reshape(-1, size, 1) for y in (first, fresh, length))
    rows = size * chunk
    of = np.arange(size)[:, None]

    def source(place: jax.Array | np.ndarray) -> jax.Array:
        """Of a place in its chunk, negative before it; ``[J or 1, size, x]`` to row numbers, -1 for none."""
        at = of * chunk + place
        inside = jnp.where(at >= 0, at, rows + width + at)
        pooled = jnp.where(fresh, -1, rows + width + (width + place) * size + of)
        return jnp.where((place < 0) & first, pooled, inside)

    place = np.arange(chunk)
    before = [source(np.broadcast_to(place - back, (1, size, chunk))) for back in range(1, width + 1)]
    kept = jnp.swapaxes(source(length - width + np.arange(width)), 1, 2)
    index = jnp.concatenate([*(y.reshape(-1, rows) for y in before), kept.reshape(-1, size * width)], axis=1)
    return jax.nn.one_hot(index, rows + width + size * width, dtype=jnp.bfloat16)


def convolve(raw: jax.Array, window: jax.Array, taps: jax.Array, picks: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Convolution and SiLU; the last tap multiplies the current row.

    Args:
        raw: ``[J, L, H, X]``, model dtype.
        window: ``[J, size, H, (W-1)·X]``, what the pool holds for each chunk's sequence.
        taps: ``[W, H, X]`` fp32.
        picks: See :func:`picks_of`.

    Returns:
        fp32 ``[J, L, H, X]``, and the last inputs after each chunk, as ``window``.
    """
    rows, width = raw.shape[1], taps.shape[0] - 1
    # Three rows, which no layout has in one piece: of whole pieces XLA:TPU would make a copy instead of fusing them.
    before = jnp.pad(raw[:-1, -width:], ((1, 0), (0, 0), (0, 0), (0, 0)))
    known = jnp.concatenate([raw, before, *jnp.split(window, width, axis=-1)], axis=1)
    taken = jnp.einsum("jmr,jrhx->jmhx", picks.astype(raw.dtype), known, precision=precision(raw.dtype),
                       preferred_element_type=jnp.float32)  # fmt: skip
    out = taps[width] * raw.astype(jnp.float32)
    for back in range(1, width + 1):
        out += taps[width - back] * taken[:, (back - 1) * rows : back * rows]
    kept = jnp.split(taken[:, width * rows :].astype(raw.dtype), width, axis=1)
    return jax.nn.silu(out), jnp.concatenate(kept, axis=-1)
