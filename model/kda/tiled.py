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

    starts: Bool[Array, "J n"]  # whether the chunk's run starts in its tile
    same: Bool[Array, "J n n"]  # whether two chunks are of one run
    sums: Float32[Array, "J 3*n n*C"]  # which rows' decays make ``enter``, ``leave`` and ``passed`` of each chunk
    closed: Float32[Array, "J n*n 1"]  # minus infinity for a ``pair`` that is zero, else zero


def runs_of(first: Bool[Array, "N"], chunk: int) -> Runs:
    """:class:`Runs` of chunks; ``first`` is true where a run starts, and N is a multiple of the tile."""
    size = min(TILE, first.shape[0])
    # 0: goes on from the tile before. Not jnp.cumsum, whose form for cuda the processor's compiler ends at.
    number = jnp.sum(first.reshape(-1, 1, size) & np.tri(size, dtype=bool), axis=2, dtype=jnp.int32)
    same = number[:, :, None] == number[:, None]
    one = np.arange(size)[:, None]
    of, early, late = _halves_of(size, chunk)
    enter = (of < one) | (early & (of == one))
    leave = (of > one) | (late & (of == one))
    counted = np.concatenate([enter, leave, of <= one]).astype(np.float32)
    # A chunk's run has the rows of its chunks: products with ones say so for all rows in one operation.
    spread = jnp.matmul(np.tile(np.eye(size, dtype=np.float32), (3, 1)), same.astype(jnp.float32), precision=HIGHEST)
    sums = jnp.matmul(spread, (of == one).astype(np.float32), precision=HIGHEST) * counted
    open_pair = (same & (one >= np.arange(size))).reshape(number.shape[0], -1)
    return Runs(number > 0, same, sums, jnp.where(open_pair, 0.0, -jnp.inf)[..., None])


def _halves_of(size: int, chunk: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Each row's chunk, and whether it stands before or after the chunk's middle."""
    row = np.arange(size * chunk)
    return row // chunk, row % chunk < chunk // 2, row % chunk >= chunk // 2


def fixed_sums(size: int, chunk: int) -> tuple[Float32[np.ndarray, "rows rows"], Float32[np.ndarray, "pairs rows"]]:
    """Which rows' decays make ``grown`` and ``pair`` of :class:`Factors`, the same in every tile."""
    of, early, late = _halves_of(size, chunk)
    row, one = np.arange(size * chunk), np.arange(size)[:, None]
    a, b = np.repeat(one, size, axis=0), np.tile(one, (size, 1))
    # Both halves of a chunk count from its middle; the early one backwards.
    forward = (of[:, None] == of) & late & late[:, None] & (row <= row[:, None])
    backward = (of[:, None] == of) & early & early[:, None] & (row > row[:, None])
    pair = (a > b) & (((of == b) & late) | ((of > b) & (of < a)) | ((of == a) & early))
    return forward.astype(np.float32) - backward.astype(np.float32), pair.astype(np.float32)


class Tiles(NamedTuple):
    """The chunks of a call side by side in tiles, alike in every layer."""

    runs: Runs  # which chunks belong together
    picks: BFloat16[Array, "J picked known"]  # the rows that the convolution sees, by ``picks_of``
    place: Int32[Array, "J n"]  # ends of runs are numbered in each tile, from its last one on; -1 for no end


def tiles_of(
    first: Bool[Array, "N"],
    last: Bool[Array, "N"],
    fresh: Bool[Array, "N"],
    length: Int32[Array, "N"],
    conv_history: int,
) -> Tiles:
    """:class:`Tiles` of N chunks; the last tile is filled up.

    ``last`` is true where the run of a sequence ends. ``first``, ``fresh`` and ``length`` are as in :func:`picks_of`,
    whose ``width`` is ``conv_history``.
    """
    count, size = first.shape[0], min(TILE, first.shape[0])

    def fill(y: jax.Array, value: int) -> jax.Array:
        return jnp.pad(y, (0, -count % size), constant_values=value)

    first = fill(first, 1)
    picks = picks_of(first, fill(fresh, 1), fill(length, 0), size, CHUNK, conv_history)
    end = fill(last, 0).reshape(-1, size)
    after = jnp.sum(end[:, None] & np.triu(np.ones((size, size), bool), 1), axis=2, dtype=jnp.int32)
    return Tiles(runs_of(first, CHUNK), picks, jnp.where(end, after, -1))


def unit_lower_inverse_blocks(
    strict: Float32[Array, "*heads L L"], exact: lax.Precision = HIGHEST
) -> Float32[Array, "*heads L L"]:
    """``(I + A)^-1``, L a power of two, where ``A`` is what of ``strict`` lies below the diagonal.

    By blocks of 1, 2, 8, 32 …: with the inverses X of all blocks side by side and B what lies below them within four
    neighbours, N = X B has no fourth power, and the next X is ``(I + N²) (X - N X)``. That is three products of the
    whole matrix, the first two of twice its width (X times [B | I] is [N | X]), which matrix units take as fast.
    """
    size = strict.shape[-1]
    row, column = np.arange(size)[:, None], np.arange(size)
    inverse = jnp.eye(size, dtype=strict.dtype)
    width = 1
    while width < size:
        many = 2 if width == 1 or size < 4 * width else 4
        inside = (row // width > column // width) & (row // (many * width) == column // (many * width))
        if width == 1:  # Blocks of one are their own inverses.
            inverse = inverse - strict * inside.astype(np.float32)
        elif many == 2:
            below = strict * inside.astype(np.float32)
            inverse = inverse - _product(inverse, _product(below, inverse, exact), exact)
        else:
            wide = jnp.pad(strict, [(0, 0)] * (strict.ndim - 1) + [(0, size)])
            wide = wide * np.pad(inside, ((0, 0), (0, size))).astype(np.float32)
            both = _product(inverse, wide + np.eye(size, 2 * size, size, dtype=np.float32), exact)
            again = _product(both[..., :size], both, exact)
            half = both[..., size:] - again[..., size:]
            inverse = half + _product(again[..., :size], half, exact)
        width *= many
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
    leave: Float32[Array, "J h n K"]  # from the middle of the chunk to the end of the run or tile
    passed: Float32[Array, "J h n K"]  # from the start of the run or tile to the end of the chunk


def factors(g: Float32[Array, "J h n C K"], runs: Runs) -> Factors:
    """The decays that log decays ``g`` add up to: products with masks add up all exponents."""
    tiles, heads, size, chunk, key = g.shape
    rows = size * chunk
    g_rows = g.reshape(tiles, heads, rows, key)

    # XLA:TPU would transpose the result of one product for all of them.
    def added(equation: str, sums: jax.Array | np.ndarray) -> jax.Array:
        return jnp.einsum(equation, sums, g_rows, precision=HIGHEST)

    within, pairs = fixed_sums(size, chunk)
    shift = added("ms,jhsk->jhmk", within).reshape(g.shape)
    pair = jnp.exp(added("ms,jhsk->jhmk", pairs) + runs.closed[:, None])
    others = jnp.split(jnp.exp(added("jms,jhsk->jhmk", runs.sums)), 3, axis=2)
    return Factors(jnp.exp(shift), jnp.exp(-shift), pair.reshape(tiles, heads, size, size, key), *others)


class Ended(NamedTuple):
    """The terms of states at the ends of runs."""

    runs: Runs
    gained: Float32[Array, "J h n C K"]  # what each row writes, as it is at the end of its run or tile
    r: Float32[Array, "J h n C V"]  # with which difference
    passed: Float32[Array, "J h n K"]  # as in ``Factors``
    carry: Float32[Array, "J h K V"]  # the state that each tile takes over; zero for the first
    exact: lax.Precision

    def states(self, ends: Bool[Array, "J n"], start: Float32[Array, "J h K V"]) -> Float32[Array, "J h K V"]:
        """The states after the chunks ``ends``, at most one of each tile, each the last of its run or tile.

        ``start`` are the states before their runs, which count where the run starts in the tile.
        """
        mine = jnp.any(ends[:, :, None] & self.runs.same, axis=1).astype(jnp.float32)  # chunks of its run
        end = ends.astype(jnp.float32)
        passed = jnp.sum(self.passed * end[:, None, :, None], axis=2)
        begun = jnp.any(ends & self.runs.starts, axis=1)[:, None, None, None]
        tiles, heads, size, chunk, key = self.gained.shape
        gained = (self.gained * mine[:, None, :, None, None]).reshape(tiles, heads, size * chunk, key)
        r = self.r.reshape(tiles, heads, size * chunk, -1)
        added = jnp.einsum("jhik,jhiv->jhkv", gained, r, precision=self.exact)
        return passed[..., None] * jnp.where(begun, start, self.carry) + added


def tile_scan(
    read_start: Callable[[], jax.Array], held: Bool[Array, ""], runs: Runs, x: Rows, exact: lax.Precision = HIGHEST
) -> tuple[Ended, Float32[Array, "J h n C V"]]:
    """(what makes states at ends of runs, o) of all chunks of a call; padding has zero ``g`` and ``beta``.

    Args:
        read_start: Gives ``[J, h, n, K, V]``, for every chunk the state before its run.
        held: Where it is False, all runs start from zero and nothing is read.
        exact: The precision of products; decays are always added up at the highest.
    """
    tiles, heads, size, chunk, key = x.k.shape
    rows, value = size * chunk, x.v.shape[-1]
    f = factors(x.g, runs)
    k_reads, q_reads = x.k * f.grown, x.q * f.grown
    writes = x.k * f.shrunk * x.beta  # [J, h, n, C, K]
    seen = (writes[:, :, None] * f.pair[..., None, :]).reshape(tiles, heads, size, rows, key)

    def square(y: jax.Array) -> jax.Array:
        return y.reshape(tiles, heads, rows, rows)

    def flat(y: jax.Array) -> jax.Array:
        return y.reshape(tiles, heads, rows, -1)

    index = np.arange(rows)
    q_scores = square(jnp.einsum("jhatk,jhaik->jhati", q_reads, seen, precision=exact))
    mix = jnp.where(index[:, None] >= index, q_scores, 0.0)
    inverse = unit_lower_inverse_blocks(square(jnp.einsum("jhatk,jhaik->jhati", k_reads, seen, precision=exact)), exact)

    starts = runs.starts[:, None, :, None, None]
    enter = f.enter[..., None, :]

    def from_start() -> tuple[jax.Array, jax.Array, jax.Array]:
        start = jnp.where(starts, read_start(), 0.0)
        known = [jnp.einsum("jhatk,jhakv->jhatv", y * enter, start, precision=exact) for y in (k_reads, q_reads)]
        return flat(known[0]), flat(known[1]), f.passed[:, :, -1, :, None] * start[:, :, -1]

    def from_zero() -> tuple[jax.Array, jax.Array, jax.Array]:
        none = jnp.zeros((tiles, heads, rows, value))
        return none, none, jnp.zeros((tiles, heads, key, value))

    with jax.named_scope("cached"):
        k_known, q_known, before = lax.cond(held, from_start, from_zero)  # for runs that start in their tile
    own = flat(x.v) - k_known
    gained = writes * f.leave[..., None, :]
    if tiles == 1:
        r = _product(inverse, own, exact)
        o = _product(mix, r, exact)
        carry = jnp.zeros_like(before)
    else:
        k_in, q_in = (flat(jnp.where(starts, 0.0, y * enter)) for y in (k_reads, q_reads))
        both = _product(inverse, jnp.concatenate([k_in, own], axis=-1), exact)  # r = both[V] - both[K] S
        last = runs.same[:, -1, :][:, None, :, None, None]
        link = jnp.einsum("jhik,jhix->jhkx", flat(jnp.where(last, gained, 0.0)), both, precision=exact)
        through = jnp.where(starts[:, :, -1, :, 0], 0.0, f.passed[:, :, -1])
        carry = _chain(link, through, before, exact)
        r = both[..., key:] - _product(both[..., :key], carry, exact)
        o = _product(q_in, carry, exact) + _product(mix, r, exact)
    ended = Ended(runs, gained, r.reshape(x.v.shape), f.passed, carry, exact)
    return ended, (o + q_known).reshape(x.v.shape)


def _chain(
    link: Float32[Array, "J h K KV"],
    through: Float32[Array, "J h K"],
    before: Float32[Array, "J h K V"],
    exact: lax.Precision,
) -> Float32[Array, "J h K V"]:
    """The state that each tile takes over from the one before it.

    Args:
        link: The tile's writes that depend on the state it takes over (negated), K wide, then those that do not.
        through: Decay of the state it takes over; zero where another run is the last.
        before: The decayed state from which the last run started in the tile.
    """
    key = link.shape[2]
    of_carry = through[..., None] * np.eye(key, dtype=np.float32) - link[..., :key]
    of_own = before + link[..., key:]

    def step(carry: jax.Array, x: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        return _product(x[0], carry, exact) + x[1], carry

    return lax.scan(step, jnp.zeros_like(before[0]), (of_carry, of_own), unroll=min(UNROLLED, link.shape[0]))[1]
