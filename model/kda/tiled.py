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

NEIGHBOURS = 4  # blocks that become one in a step of a triangular solve; of eight, fp32 loses a digit more

HIGHEST = lax.Precision.HIGHEST  # the recurrence is an fp32 island


def island_precision(dtype: jnp.dtype) -> lax.Precision:
    """The precision of a tile's products: three passes, good to some 2^-16, where inputs were rounded to bf16."""
    return HIGHEST if dtype == jnp.float32 else lax.Precision.HIGH


class Sums(NamedTuple):
    """Which rows' decays add up to exponents."""

    rows: Float32[Array, "J exponents rows"] | Float32[np.ndarray, "exponents rows"]  # ones where a row counts
    shut: Float32[Array, "J exponents 1"]  # minus infinity where the decay is zero, else zero


class Runs(NamedTuple):
    """Which chunks of each tile belong together; the same in every layer. J tiles of n chunks of C rows."""

    starts: Bool[Array, "J n"]  # whether the chunk's run starts in its tile
    same: Bool[Array, "J n n"]  # whether two chunks are of one run
    shut: tuple[Float32[Array, "J _ 1"], ...]  # of the sums of :func:`fixed_sums`
    last: tuple[Sums, Sums]  # the sums of :func:`to_ends` for the last end of each tile


def runs_of(first: Bool[Array, "N"], end: Bool[Array, "J n"], chunk: int) -> Runs:
    """:class:`Runs` of chunks; ``first`` is true where a run starts, and N is a multiple of the tile.

    ``end`` is true for at most one chunk of each tile, the last one where the run of a sequence ends.
    """
    tiles, size = end.shape
    # 0: goes on from the tile before. Not jnp.cumsum, whose form for cuda the processor's compiler ends at.
    number = jnp.sum(first.reshape(tiles, 1, size) & np.tri(size, dtype=bool), axis=2, dtype=jnp.int32)
    same = number[:, :, None] == number[:, None]
    starts = number > 0
    pairs = (same & np.tri(size, dtype=bool)).reshape(tiles, -1)
    shut = tuple(_shut(opened) for opened in (pairs, ~starts, same[:, -1], ~starts[:, -1:]))
    return Runs(starts, same, shut, to_ends(same, end, chunk))


def _shut(opened: Bool[Array, "J exponents"]) -> Float32[Array, "J exponents 1"]:
    return jnp.where(opened, 0.0, -jnp.inf)[..., None]


def to_ends(same: Bool[Array, "J n n"], ends: Bool[Array, "J n"], chunk: int) -> tuple[Sums, Sums]:
    """The decays from the middle of each chunk to the end of its run, and over the run.

    ``ends`` are as in :meth:`Ended.states`. The decays of other runs are zero.
    """
    size = ends.shape[1]
    mine = jnp.any(ends[:, :, None] & same, axis=1)  # chunks of the run that ends
    rows = _rows_of(mine, chunk)[:, None]
    _, leave = _middles(size, chunk)
    return Sums(rows * leave.astype(np.float32), _shut(mine)), Sums(rows, _shut(jnp.any(mine, axis=1, keepdims=True)))


def _rows_of(chunks: Bool[Array, "*tiles n"], chunk: int) -> Float32[Array, "*tiles rows"]:
    """Ones for the rows of some chunks. A product says so for all rows in one operation."""
    ones = np.repeat(np.eye(chunks.shape[-1], dtype=np.float32), chunk, axis=1)
    return jnp.matmul(chunks.astype(jnp.float32), ones, precision=HIGHEST)


def _halves_of(size: int, chunk: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Each row's chunk, and whether it stands before or after the chunk's middle."""
    row = np.arange(size * chunk)
    return row // chunk, row % chunk < chunk // 2, row % chunk >= chunk // 2


def _middles(size: int, chunk: int) -> tuple[np.ndarray, np.ndarray]:
    """Which rows of a tile stand before, and which after, the middle of each chunk."""
    of, early, late = _halves_of(size, chunk)
    one = np.arange(size)[:, None]
    return (of < one) | (early & (of == one)), (of > one) | (late & (of == one))


def fixed_sums(size: int, chunk: int) -> list[Float32[np.ndarray, "exponents rows"]]:
    """Which rows' decays make ``grown`` and the others of :class:`Factors`, the same in every tile."""
    of, early, late = _halves_of(size, chunk)
    row, one = np.arange(size * chunk), np.arange(size)[:, None]
    a, b = np.repeat(one, size, axis=0), np.tile(one, (size, 1))
    # Both halves of a chunk count from its middle; the early one backwards.
    forward = (of[:, None] == of) & late & late[:, None] & (row <= row[:, None])
    backward = (of[:, None] == of) & early & early[:, None] & (row > row[:, None])
    pair = (a > b) & (((of == b) & late) | ((of > b) & (of < a)) | ((of == a) & early))
    sums = [pair, *_middles(size, chunk)]
    return [forward.astype(np.float32) - backward.astype(np.float32), *(rows.astype(np.float32) for rows in sums)]


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
    return Tiles(runs_of(first, end & (after == 0), CHUNK), picks, jnp.where(end, after, -1))


def unit_lower_solve_blocks(
    strict: Float32[Array, "*heads L L"], y: Float32[Array, "*heads L Y"], exact: lax.Precision = HIGHEST
) -> Float32[Array, "*heads L Y"]:
    """``(I + A)^-1 y``, L > 2, where ``A`` is what of ``strict`` lies below the diagonal.

    By blocks of 1, 2, 8, 32 …: with the inverses X of all blocks side by side and B what lies below them within four
    neighbours, N = X B has no fourth power, and the next X is ``(I + N²) (X - N X)``. That is three products of the
    whole matrix, the first two of twice its width ([N | X] is X times [B | I]), which matrix units take as fast. The
    last time, the rows ``y`` stand for I.
    """
    size = strict.shape[-1]
    row, column = np.arange(size)[:, None], np.arange(size)
    identity = np.eye(size, dtype=np.float32)

    def beside(width: int, many: int, right: jax.Array | np.ndarray) -> jax.Array:
        """``strict`` below the blocks, within ``many`` neighbours, and ``right``: a sum, which XLA:TPU fuses."""
        inside = (row // width > column // width) & (row // (many * width) == column // (many * width))
        columns, more = right.shape[-1], [(0, 0)] * (strict.ndim - 1)
        left = jnp.pad(strict, [*more, (0, columns)]) * np.pad(inside, ((0, 0), (0, columns))).astype(np.float32)
        return left + (jnp.pad(right, [*more, (size, 0)]) if right is y else np.pad(right, ((0, 0), (size, 0))))

    # Blocks of one are their own inverses.
    inverse, width = identity - strict * ((row == column + 1) & (row % 2 == 1)).astype(np.float32), 2
    while width < size:
        many = min(NEIGHBOURS, -(-size // width))  # fewer only the last time
        wide = _product(inverse, beside(width, many, y if width * many >= size else identity), exact)
        if many == 2:
            inverse = wide[..., size:] - _product(wide[..., :size], wide[..., size:], exact)
        else:
            again = _product(wide[..., :size], wide, exact)
            half = wide[..., size:] - again[..., size:]
            inverse = half + _product(again[..., :size], half, exact)
        width *= NEIGHBOURS
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
    enter: Float32[Array, "J h n K"]  # from the tile's start to the chunk's middle; zero if its run starts in the tile
    leave: Float32[Array, "J h n K"]  # from the middle of the chunk to the end of the tile; zero if its run ends before
    through: Float32[Array, "J h K"]  # over the tile; zero if its last run starts in it


def factors(g: Float32[Array, "J h n C K"], runs: Runs) -> Factors:
    """The decays that log decays ``g`` add up to: products with masks add up all exponents.

    Each has a product of its own, for XLA:TPU a shorter operation than to take a part of another one's result.
    """
    tiles, heads, size, chunk, key = g.shape
    within, *sums = fixed_sums(size, chunk)
    shift = _added(within, g).reshape(g.shape)
    pair, enter, leave = (_decays(Sums(*of), g) for of in zip(sums, runs.shut[:3], strict=True))
    through = _decays(Sums(jnp.ones((tiles, 1, size * chunk)), runs.shut[3]), g)
    pair = pair.reshape(tiles, heads, size, size, key)
    return Factors(jnp.exp(shift), jnp.exp(-shift), pair, enter, leave, through[:, :, 0])


def _decays(sums: Sums, g: Float32[Array, "J h n C K"]) -> Float32[Array, "J h exponents K"]:
    return jnp.exp(_added(sums.rows, g) + sums.shut[:, None])


def _added(
    rows: Float32[Array, "J exponents rows"] | Float32[np.ndarray, "exponents rows"], g: Float32[Array, "J h n C K"]
) -> Float32[Array, "J h exponents K"]:
    tiles, heads, _, _, key = g.shape
    flat = g.reshape(tiles, heads, -1, key)
    if rows.ndim == 2:
        return jnp.einsum("ms,jhsk->jhmk", rows, flat, precision=HIGHEST)
    # Over the rows of all tiles: with an axis of tiles XLA:TPU would turn the result.
    own = np.eye(tiles, dtype=np.float32).reshape(tiles, 1, tiles, 1)
    added = jnp.einsum(
        "mjs,jhsk->mhk", (rows[:, :, None] * own).reshape(-1, tiles, rows.shape[2]), flat, precision=HIGHEST
    )
    return jnp.moveaxis(added.reshape(tiles, -1, heads, key), 2, 1)


class Ended(NamedTuple):
    """The terms of states at the ends of runs."""

    runs: Runs
    g: Float32[Array, "J h n C K"]
    writes: Float32[Array, "J h n C K"]  # what each row writes, as it is at the middle of its chunk
    r: Float32[Array, "J h n C V"]  # with which difference
    carry: tuple[Float32[Array, "h K V"], ...]  # the state that each tile takes over; zero for the first
    # Of the last end of each tile, both at the end of its run: what each row writes, and the decay over the run.
    last: tuple[Float32[Array, "J h n C K"], Float32[Array, "J h 1 K"]]
    exact: lax.Precision

    def last_states(self, ends: Bool[Array, "J n"], start: Float32[Array, "J h K V"]) -> Float32[Array, "J h K V"]:
        """:meth:`states` for the last end of each tile."""
        return self._states(*self.last, ends, start)

    def states(self, ends: Bool[Array, "J n"], start: Float32[Array, "J h K V"]) -> Float32[Array, "J h K V"]:
        """The states after the chunks ``ends``, at most one of each tile, each the last of its run or tile.

        ``start`` are the states before their runs, which count where the run starts in the tile.
        """
        leave, passed = (_decays(of, self.g) for of in to_ends(self.runs.same, ends, self.writes.shape[3]))
        return self._states(self.writes * leave[..., None, :], passed, ends, start)

    def _states(
        self,
        gained: Float32[Array, "J h n C K"],
        passed: Float32[Array, "J h 1 K"],
        ends: Bool[Array, "J n"],
        start: Float32[Array, "J h K V"],
    ) -> Float32[Array, "J h K V"]:
        tiles, heads = gained.shape[:2]
        begun = jnp.any(ends & self.runs.starts, axis=1)[:, None, None, None]
        gained, r = (y.reshape(tiles, heads, -1, y.shape[-1]) for y in (gained, self.r))
        added = jnp.einsum("jhik,jhiv->jhkv", gained, r, precision=self.exact)
        return passed[:, :, 0, :, None] * jnp.where(begun, start, jnp.stack(self.carry)) + added


def tile_scan(
    read_start: Callable[[], jax.Array],
    held: Bool[Array, ""],
    runs: Runs,
    x: Rows,
    exact: lax.Precision = HIGHEST,
    few: bool = True,
) -> tuple[Ended, Float32[Array, "J h n C V"]]:
    """(what makes states at ends of runs, o) of all chunks of a call; padding has zero ``g`` and ``beta``.

    Args:
        read_start: Gives ``[J, h, n, K, V]``, for every chunk the state before its run.
        held: Where it is False, all runs start from zero and nothing is read.
        exact: The precision of products; decays are always added up at the highest.
        few: Whether few operations count more than few bytes, as on TPU.
    """
    tiles, heads, size, chunk, key = x.k.shape
    rows, value = size * chunk, x.v.shape[-1]
    f = factors(x.g, runs)
    k_reads, q_reads = x.k * f.grown, x.q * f.grown
    writes = x.k * f.shrunk * x.beta  # [J, h, n, C, K]
    enter, leave = f.enter[..., None, :], f.leave[..., None, :]
    last_leave, last_passed = (_decays(of, x.g) for of in runs.last)
    last_leave = last_leave[..., None, :]
    factored = k_reads, q_reads, k_reads * enter, q_reads * enter, writes, writes * leave, writes * last_leave
    # One operation: XLA:TPU would make several, and compute parts twice.
    k_reads, q_reads, k_in, q_in, writes, gained, last_gained = lax.optimization_barrier(factored) if few else factored
    seen = (writes[:, :, None] * f.pair[..., None, :]).reshape(tiles, heads, size, rows, key)

    def square(y: jax.Array) -> jax.Array:
        return y.reshape(tiles, heads, rows, rows)

    def flat(y: jax.Array) -> jax.Array:
        return y.reshape(tiles, heads, rows, -1)

    index = np.arange(rows)
    reads = jnp.concatenate([q_reads, k_reads], axis=3)
    q_scores, k_scores = jnp.split(jnp.einsum("jhatk,jhaik->jhati", reads, seen, precision=exact), 2, axis=3)
    mix, strict = jnp.where(index[:, None] >= index, square(q_scores), 0.0), square(k_scores)

    def values() -> jax.Array:
        """The values that reads of the start are subtracted from; zeros if a conditional would copy the values."""
        return flat(x.v) if few else jnp.zeros((tiles, heads, rows, value))

    def from_start() -> tuple[jax.Array, jax.Array, jax.Array]:
        """For runs that start in their tile."""
        start = jnp.where(runs.starts[:, None, :, None, None], read_start(), 0.0)
        sums = _rows_of(runs.same, chunk) * _middles(size, chunk)[0].astype(np.float32)
        enter = jnp.exp(_added(sums, x.g))[..., None, :]
        known = [jnp.einsum("jhatk,jhakv->jhatv", y * enter, start, precision=exact) for y in (k_reads, q_reads)]
        passed = jnp.exp(_added(_rows_of(runs.same[:, -1:], chunk), x.g))[:, :, 0, :, None]
        return values() - flat(known[0]), flat(known[1]), passed * start[:, :, -1]

    def from_zero() -> tuple[jax.Array, jax.Array, jax.Array]:
        return values(), jnp.zeros((tiles, heads, rows, value)), jnp.zeros((tiles, heads, key, value))

    with jax.named_scope("cached"):
        own, q_known, before = lax.cond(held, from_start, from_zero)
    own = own if few else flat(x.v) + own
    if tiles == 1:
        r = unit_lower_solve_blocks(strict, own, exact)
        o = _product(mix, r, exact)
        carry: tuple[jax.Array, ...] = (jnp.zeros_like(before[0]),)
    else:
        # r = both[V] - both[K] S
        both = unit_lower_solve_blocks(strict, jnp.concatenate([flat(k_in), own], axis=-1), exact)
        link = jnp.einsum("jhik,jhix->jhkx", flat(gained), both, precision=exact)
        through = f.through[..., None] * np.eye(key, dtype=np.float32)
        sign = np.where(np.arange(key + value) < key, -1, 1).astype(np.float32)
        more = [(0, 0)] * 3
        carry = _chain(link * sign + jnp.pad(through, [*more, (0, value)]) + jnp.pad(before, [*more, (key, 0)]), exact)
        carried = jnp.stack(carry)
        r = both[..., key:] - _product(both[..., :key], carried, exact)
        o = _product(flat(q_in), carried, exact) + _product(mix, r, exact)
    ended = Ended(runs, x.g, writes, r.reshape(x.v.shape), carry, (last_gained, last_passed), exact)
    return ended, (o + q_known).reshape(x.v.shape)


def _chain(link: Float32[Array, "J h K KV"], exact: lax.Precision) -> tuple[Float32[Array, "h K V"], ...]:
    """The state that each of J tiles takes over from the one before it.

    ``link`` has, K wide, what the tile makes of the state that it takes over, then what it adds.
    """
    key = link.shape[2]

    def step(carry: jax.Array, kept: jax.Array, added: jax.Array) -> jax.Array:
        return _product(kept, carry, exact) + added

    carry = [jnp.zeros_like(link[0, ..., key:])]
    if len(link) > UNROLLED:
        both = link[..., :key], link[..., key:]
        return tuple(lax.scan(lambda old, x: (step(old, *x), old), carry[0], both, unroll=UNROLLED)[1])
    for n in range(len(link) - 1):
        carry.append(step(carry[-1], link[n, ..., :key], link[n, ..., key:]))
    return tuple(carry)
