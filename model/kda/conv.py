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

    ``width·L + size·width`` rows are picked: for each row of a tile the row 1, 2 … ``width`` before it, then the
    ``width`` inputs up to the end of each chunk, the first one of all chunks before the second one. They are picked out
    of ``L + width + size·width`` known rows: the tile's, the last ones of the tile before it, and what the pool holds,
    in the same order.

    Args:
        first: A run of chunks starts here; N is a multiple of ``size``.
        fresh: It starts from zero state.
        length: Tokens of the chunk.
        size: Chunks of a tile.
        chunk: Rows of a chunk.
        width: Rows before each one that the convolution sees.
    """
    first, fresh, length = (y.reshape(-1, size, 1) for y in (first, fresh, length))
    rows = size * chunk
    of = np.arange(size)[:, None]

    def source(place: jax.Array | np.ndarray) -> jax.Array:
        """Row numbers of places in their chunks, negative before it, ``[J or 1, size, x]``; -1 for none."""
        at = of * chunk + place
        inside = jnp.where(at >= 0, at, rows + width + at)
        pooled = jnp.where(fresh, -1, rows + width + (width + place) * size + of)
        return jnp.where((place < 0) & first, pooled, inside)

    place = np.arange(chunk)
    before = [source(np.broadcast_to(place - back, (1, size, chunk))) for back in range(1, width + 1)]
    kept = jnp.swapaxes(source(length - width + np.arange(width)), 1, 2)
    index = jnp.concatenate([*(y.reshape(-1, rows) for y in before), kept.reshape(-1, size * width)], axis=1)
    return jax.nn.one_hot(index, rows + width + size * width, dtype=jnp.bfloat16)


def convolve_tiles(
    raw: Float[Array, "J L H X"], window: Float[Array, "J size H WX"], taps: Float32[Array, "W H X"],
    picks: BFloat16[Array, "J picked known"],
) -> tuple[Float32[Array, "J L H X"], Float[Array, "J size H WX"]]:  # fmt: skip
    """:func:`causal_conv` of all tiles, with the picks of :func:`picks_of`.

    Args:
        raw: Inputs, in the model dtype.
        window: What the pool holds for each chunk's sequence, W-1 inputs one after the other.

    Returns:
        The outputs, and the last inputs after each chunk, like ``window``.
    """
    rows, width = raw.shape[1], taps.shape[0] - 1
    # Three rows, which no layout has in one piece: of whole pieces XLA:TPU would make a copy instead of fusing them.
    before = jnp.pad(raw[:-1, -width:], ((1, 0), (0, 0), (0, 0), (0, 0)))
    known = jnp.concatenate([raw, before, *jnp.split(window, width, axis=-1)], axis=1)
    taken = einsum("jmr,jrhx->jmhx", picks.astype(raw.dtype), known)
    out = taps[width] * raw.astype(jnp.float32)
    for back in range(1, width + 1):
        out += taps[width - back] * taken[:, (back - 1) * rows : back * rows]
    kept = jnp.split(taken[:, width * rows :].astype(raw.dtype), width, axis=1)
    return jax.nn.silu(out), jnp.concatenate(kept, axis=-1)
