"""The short causal convolution of KDA: over a chunk, over one token, and over tiles of chunks.

In the form ``tiles`` the rows before each row are taken in one product with zeros and ones, wherever they are: in the
tile, at the end of the tile before it, or in the pool. The product is exact, since each row of ones and zeros has at
most a single one. Which rows those are is the same in every layer.

Axis letters: N chunks, C tokens of a chunk, W taps, J tiles of ``size`` chunks or L = size C rows, X channels of a
head.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, BFloat16, Bool, Float, Float32, Int32

from ling3export.model.products import einsum


def causal_conv(
    history: Float[Array, "N before *channels"], raw: Float[Array, "N C *channels"], taps: Float[Array, "W *channels"]
) -> Float32[Array, "N C *channels"]:
    """Depthwise causal convolution and SiLU of ``raw``; the last tap multiplies the current token.

    ``history`` holds the W-1 inputs before the first of ``raw``.
    """
    length, width = raw.shape[1], taps.shape[0]
    sequence = jnp.concatenate([history, raw], axis=1).astype(jnp.float32)
    taps = taps.astype(jnp.float32)
    out = sum(taps[w] * sequence[:, w : w + length] for w in range(width))
    return jax.nn.silu(out)


def step_conv(
    window: Float[Array, "B H WX"], raw: Float[Array, "B H X"], taps: Float32[Array, "W _ H X"]
) -> tuple[Float32[Array, "B H X"], Float[Array, "B H WX"]]:
    """:func:`causal_conv` of one token of each sequence: the outputs, and the window after the token.

    ``window`` holds the W-1 inputs before it, one after the other.
    """
    width = raw.shape[-1]
    window = jnp.concatenate([window, raw], axis=-1)
    inputs = jnp.split(window, taps.shape[0], axis=-1)
    out = sum(taps[w] * value.astype(jnp.float32) for w, value in enumerate(inputs))
    return jax.nn.silu(out), window[..., width:]


def picks_of(
    first: Bool[Array, "N"], fresh: Bool[Array, "N"], length: Int32[Array, "N"], size: int, chunk: int, width: int
) -> BFloat16[Array, "J picked known"]:
    """Which rows a convolution of tiles takes, as zeros and ones.

    It picks ``width·L + size·width`` rows: for each row of a tile the row 1, 2 … ``width`` before it, then the
    ``width`` inputs up to the end of each chunk, the first one of all chunks before the second one. They come from
    ``L + width + size·width`` known rows: the tile's, the last ones of the tile before it, and the pool's, in that
    order.

    Args:
        first: A run of chunks starts here; N is a multiple of ``size``.
        fresh: It starts from zero state.
        length: Tokens of the chunk.
        size: Chunks of a tile.
        chunk: Rows of a chunk.
        width: Rows before each one that the convolution sees.
    """
    rows = size * chunk
    row = np.arange(rows)
    back = np.repeat(np.arange(1, width + 1), rows)
    kept = np.repeat(np.arange(width), size)
    of = np.concatenate([np.tile(row // chunk, width), np.tile(np.arange(size), width)])
    fixed = np.concatenate([np.tile(row % chunk, width) - back, kept - width])
    # Facts about each picked row's chunk: one product with ones, exact, instead of dozens of small operations.
    facts = jnp.stack([fact.astype(jnp.float32) for fact in (first, fresh, length)]).reshape(3, -1, size)
    facts = jnp.matmul(facts, (of == np.arange(size)[:, None]).astype(np.float32), precision=lax.Precision.HIGHEST)
    facts = facts.astype(jnp.int32)
    place = fixed + facts[2] * (np.arange(of.size) >= width * rows).astype(np.int32)  # in its chunk, negative before it
    at = of * chunk + place
    inside = jnp.where(at >= 0, at, rows + width + at)
    pooled = jnp.where(facts[1] > 0, -1, rows + width + (width + place) * size + of)
    index = jnp.where((place < 0) & (facts[0] > 0), pooled, inside)
    return jax.nn.one_hot(index, rows + width + size * width, dtype=jnp.bfloat16)


def convolve_tiles(
    raw: Float[Array, "J L H X"],
    window: Float[Array, "J size H WX"],
    taps: Float32[Array, "W H X"],
    picks: BFloat16[Array, "J picked known"],
) -> tuple[Float32[Array, "J L H X"], Float[Array, "J size H WX"]]:
    """:func:`causal_conv` of all tiles, with the picks of :func:`picks_of`.

    Args:
        raw: Inputs, in the model dtype.
        window: The pool's row for each chunk's sequence, W-1 inputs one after the other.

    Returns:
        The outputs, and the last inputs after each chunk, like ``window``.
    """
    rows, width = raw.shape[1], taps.shape[0] - 1
    # By a product with ones: three rows have no layout in one piece, and are two operations of XLA:TPU's otherwise.
    tiles = raw.shape[0]
    at = np.arange(tiles)[:, None] * rows - width + np.arange(width)
    ones = jnp.asarray(at[..., None] == np.arange(tiles * rows), raw.dtype)
    before = einsum("jwr,rhx->jwhx", ones, raw.reshape(-1, *raw.shape[2:])).astype(raw.dtype)
    known = jnp.concatenate([raw, before, *jnp.split(window, width, axis=-1)], axis=1)
    taken = einsum("jmr,jrhx->jmhx", picks.astype(raw.dtype), known)
    out = taps[width] * raw.astype(jnp.float32)
    for back in range(1, width + 1):
        out += taps[width - back] * taken[:, (back - 1) * rows : back * rows]
    kept = jnp.split(taken[:, width * rows :].astype(raw.dtype), width, axis=1)
    return jax.nn.silu(out), jnp.concatenate(kept, axis=-1)
