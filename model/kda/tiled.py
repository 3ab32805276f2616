"""The chunk form of ``recurrence.py`` for machines that are fast at products and slow at many small steps.

Eight chunks make a tile of up to 128 tokens. Everything inside a tile is a product of its 128 rows, whichever sequences
the rows belong to: masks keep them apart. Only the state that runs on from one tile into the next is a chain, and each
of its links is one product.

With the terms of ``recurrence.py``, a row t of chunk a and a row i of chunk b <= a of the same run of chunks::

    <k_t exp(G_t), k_i exp(-G_i)>  =  <k_t grown_t, E_ab shrunk_i k_i>

where ``grown`` and ``shrunk`` are relative to the middle of their own chunk (within exp(±40) for the bound of -5) and
``E_ab <= 1`` is the decay from the middle of b to the middle of a: sums of decays only, no difference that would lose
digits, and one factor a chunk and key instead of one a row.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, BFloat16, Bool, Float32, Int32

from ling3export.model.geometry import CHUNK
from ling3export.model.kda.conv import picks_of

TILE = 8  # chunks: 128 rows are what a matrix unit takes
UNROLLED = 8  # links of the chain that are written out; more of them are a loop

HIGHEST = lax.Precision.HIGHEST  # the recurrence is an fp32 island


def island_precision(dtype: jnp.dtype) -> lax.Precision:
    """The precision of a tile's products: three passes, good to some 2^-16, where inputs were rounded to bf16."""
    return HIGHEST if dtype == jnp.float32 else lax.Precision.HIGH


class Runs(NamedTuple):
    """Which chunks of each tile belong together; the same in every layer. J tiles of n chunks of C rows."""

    here: Bool[Array, "J n"]  # whether the chunk's run starts in its tile
    sums: Float32[Array, "J m n*C"]  # which rows' decays make each of ``Factors``, one after the other
    closed: Float32[Array, "J m 1"]  # minus infinity for factors that are zero, else zero


def runs_of(first: Bool[Array, "N"], chunk: int) -> Runs:
    """:class:`Runs` of chunks of which ``first`` is true where a run starts; N is a multiple of the tile."""
    size = min(TILE, first.shape[0])
    # 0: goes on from the tile before. Not jnp.cumsum, whose form for cuda the processor's compiler ends at.
    number = jnp.sum(first.reshape(-1, 1, size) & np.tri(size, dtype=bool), axis=2, dtype=jnp.int32)
    same = number[:, :, None] == number[:, None]
    row = np.arange(size * chunk)
    of, at = row // chunk, row % chunk  # chunk of a row, place in it
    one = np.arange(size)[:, None]
    a, b = np.repeat(one, size, axis=0), np.tile(one, (size, 1))
    early, late = at < chunk // 2, at >= chunk // 2
    # Both halves of a chunk count from its middle; the early one backwards.
    forward = (of[:, None] == of) & late & late[:, None] & (row <= row[:, None])
    backward = (of[:, None] == of) & early & early[:, None] & (row > row[:, None])
    within = forward.astype(np.float32) - backward.astype(np.float32)
    pair = (a > b) & (((of == b) & late) | ((of > b) & (of < a)) | ((of == a) & early))
    leave = ((of == one) & late) | (of > one)
    rest = (of == one) & late
    run = jnp.repeat(same & (one >= np.arange(size)), chunk, axis=2)  # [J, a, rows]: of a's run, up to a
    count = number.shape[0]
    fixed = [np.broadcast_to(x.astype(np.float32), (count, *x.shape)) for x in (within, pair, leave, rest)]
    enter = run & ((of < one) | (early & (of == one)))
    sums = jnp.concatenate([*fixed[:2], enter.astype(jnp.float32), *fixed[2:], run.astype(jnp.float32)], axis=1)
    open_pair = (same & (one >= np.arange(size))).reshape(count, -1)
    open_leave = number == number[:, -1:]

    def always(factors: int) -> jax.Array:
        return jnp.ones((count, factors), bool)

    opened = [always(size * chunk), open_pair, always(size), open_leave, always(2 * size)]
    closed = jnp.where(jnp.concatenate(opened, axis=1), 0.0, -jnp.inf)[..., None]
    return Runs(number > 0, sums, closed)


class Tiles(NamedTuple):
    """The chunks of a call side by side in tiles, alike in every layer."""

    runs: Runs  # which chunks belong together
    picks: BFloat16[Array, "J picked known"]  # the rows that the convolution sees, by ``picks_of``


def tiles_of(first: Bool[Array, "N"], fresh: Bool[Array, "N"], length: Int32[Array, "N"], conv_history: int) -> Tiles:
    """:class:`Tiles` of N chunks; the last tile is filled up.

    ``first``, ``fresh`` and ``length`` are as in :func:`picks_of`, whose ``width`` is ``conv_history``.
    """
    count, size = first.shape[0], min(TILE, first.shape[0])

    def fill(y: jax.Array, value: int) -> jax.Array:
        return jnp.pad(y, (0, -count % size), constant_values=value)

    first = fill(first, 1)
    picks = picks_of(first, fill(fresh, 1), fill(length, 0), size, CHUNK, conv_history)
    return Tiles(runs_of(first, CHUNK), picks)


def unit_lower_inverse_blocks(
    strict: Float32[Array, "*heads L L"], exact: lax.Precision = HIGHEST
) -> Float32[Array, "*heads L L"]:
    """``(I + A)^-1`` for a strictly lower triangular ``A``, L a power of two.

    By blocks of 1, 2, 4 …: of two neighbours P, R with Q below P it is ``[[P', 0], [-R' Q P', R']]``. As exact as
    substitution, in 2 log2(L) products of the whole matrix: matrix units take 128 rows as fast as 2.
    """
    size = strict.shape[-1]
    index = np.arange(size)
    inverse = jnp.broadcast_to(jnp.eye(size, dtype=strict.dtype), strict.shape)
    width = 1
    while width < size:
        row, column = index[:, None] // width, index // width
        below = jnp.where((row == column + 1) & (column % 2 == 0), strict, 0.0)
        # Blocks of one are their own inverses.
        change = below if width == 1 else _product(inverse, _product(below, inverse, exact), exact)
        inverse = inverse - change
        width *= 2
    return inverse


def _product(a: jax.Array, b: jax.Array, exact: lax.Precision) -> jax.Array:
    return jnp.matmul(a, b, precision=exact)


class Rows(NamedTuple):
    """Rows of tiles: queries, keys, values, log decays, and the write strengths with an axis of one."""

    q: Float32[Array, "J h n C K"]
    k: Float32[Array, "J h n C K"]
    v: Float32[Array, "J h n C V"]
    g: Float32[Array, "J h n C K"]
    beta: Float32[Array, "J h n C 1"]


class Factors(NamedTuple):
    """Decays of a tile, all at most one but ``grown`` and ``shrunk``."""

    grown: Float32[Array, "J h n C K"]  # from the middle of its chunk to each row
    shrunk: Float32[Array, "J h n C K"]  # the inverse of ``grown``
    pair: Float32[Array, "J h a b K"]  # from the middle of chunk b to that of a; zero for another run and for b > a
    enter: Float32[Array, "J h n K"]  # from the start of the run or tile to the middle of the chunk
    leave: Float32[Array, "J h n K"]  # from the middle of the chunk to the end of the tile; zero if its run ends before
    rest: Float32[Array, "J h n K"]  # from the middle of the chunk to its end
    passed: Float32[Array, "J h n K"]  # from the start of the run or tile to the end of the chunk


def factors(g: Float32[Array, "J h n C K"], runs: Runs) -> Factors:
    """The decays that log decays ``g`` add up to: products with masks add up all exponents."""
    tiles, heads, size, chunk, key = g.shape
    rows = size * chunk
    g_rows = g.reshape(tiles, heads, rows, key)

    def added(start: int, stop: int) -> jax.Array:
        """``[J, h, stop - start, K]``. XLA:TPU would transpose the result of one product for all of them."""
        sums = jnp.einsum("jms,jhsk->jhmk", runs.sums[:, start:stop], g_rows, precision=HIGHEST)
        return sums + runs.closed[:, None, start:stop]

    shift, pair = added(0, rows).reshape(g.shape), jnp.exp(added(rows, rows + size * size))
    others = jnp.split(jnp.exp(added(rows + size * size, runs.sums.shape[1])), 4, axis=2)
    return Factors(jnp.exp(shift), jnp.exp(-shift), pair.reshape(tiles, heads, size, size, key), *others)


def tile_scan(
    read_start: Callable[[], jax.Array], held: Bool[Array, ""], runs: Runs, x: Rows, exact: lax.Precision = HIGHEST
) -> tuple[Float32[Array, "J h n K V"], Float32[Array, "J h n C V"]]:
    """(state after each chunk, o) of all chunks of a call; padding has zero ``g`` and ``beta``.

    Args:
        read_start: Gives ``[J, h, n, K, V]``, for every chunk the state before its run.
        held: Where it is False, all runs start from zero and nothing is read.
        exact: The precision of products; decays are always added up at the highest.
    """
    tiles, heads, size, chunk, key = x.k.shape
    rows, value = size * chunk, x.v.shape[-1]
    f = factors(x.g, runs)
    reads = jnp.concatenate([x.k * f.grown, x.q * f.grown], axis=3)  # [J, h, n, 2C, K]
    writes = x.k * f.shrunk * x.beta  # [J, h, n, C, K]
    seen = (writes[:, :, None] * f.pair[..., None, :]).reshape(tiles, heads, size, rows, key)
    scores = jnp.einsum("jhatk,jhaik->jhati", reads, seen, precision=exact)
    index = np.arange(rows)
    mix = jnp.where(index[:, None] >= index, scores[:, :, :, chunk:].reshape(tiles, heads, rows, rows), 0.0)
    strict = jnp.where(index[:, None] > index, scores[:, :, :, :chunk].reshape(tiles, heads, rows, rows), 0.0)
    inverse = unit_lower_inverse_blocks(strict, exact)

    here = runs.here[:, None, :, None, None]

    def from_start() -> tuple[jax.Array, jax.Array]:
        start = jnp.where(here, read_start(), 0.0)
        known = jnp.einsum("jhatk,jhakv->jhatv", reads * f.enter[..., None, :], start, precision=exact)
        return known, f.passed[..., None] * start

    def from_zero() -> tuple[jax.Array, jax.Array]:
        return jnp.zeros((*reads.shape[:-1], value)), jnp.zeros((*f.passed.shape, value))

    with jax.named_scope("cached"):
        known, before = lax.cond(held, from_start, from_zero)  # for runs that start in their tile
    own = (x.v - known[:, :, :, :chunk]).reshape(tiles, heads, rows, value)
    if tiles == 1:
        r = _product(inverse, own, exact)
        o = _product(mix, r, exact)
    else:
        entered = jnp.where(here, 0.0, reads * f.enter[..., None, :])
        k_in = entered[:, :, :, :chunk].reshape(tiles, heads, rows, key)
        q_in = entered[:, :, :, chunk:].reshape(tiles, heads, rows, key)
        both = _product(inverse, jnp.concatenate([k_in, own], axis=-1), exact)  # r = both[V] - both[K] S
        ends = (writes * f.leave[..., None, :]).reshape(tiles, heads, rows, key)
        link = jnp.einsum("jhik,jhix->jhkx", ends, both, precision=exact)
        through = jnp.where(here[:, :, -1, :, 0], 0.0, f.passed[:, :, -1])
        carry = _chain(link, through, before[:, :, -1], exact)
        r = both[..., key:] - _product(both[..., :key], carry, exact)
        o = _product(q_in, carry, exact) + _product(mix, r, exact)
        before += jnp.where(here, 0.0, f.passed[..., None] * carry[:, :, None])
    gained = jnp.einsum("jhaik,jhiv->jhakv", seen, r, precision=exact)
    return before + f.rest[..., None] * gained, o.reshape(x.v.shape) + known[:, :, :, chunk:]


def _chain(
    link: Float32[Array, "J h K KV"], through: Float32[Array, "J h K"], before: Float32[Array, "J h K V"],
    exact: lax.Precision,
) -> Float32[Array, "J h K V"]:  # fmt: skip
    """The state that each tile takes over from the one before it.

    Args:
        link: What the tile writes of the state that it takes over (negated), K wide, beside what it writes itself.
        through: Decay of the state it takes over; zero where another run is the last.
        before: What is left of the state from which the last run started in the tile.
    """
    key = link.shape[2]
    of_carry = through[..., None] * np.eye(key, dtype=np.float32) - link[..., :key]
    of_own = before + link[..., key:]

    def step(carry: jax.Array, x: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        return _product(x[0], carry, exact) + x[1], carry

    return lax.scan(step, jnp.zeros_like(before[0]), (of_carry, of_own), unroll=min(UNROLLED, link.shape[0]))[1]
