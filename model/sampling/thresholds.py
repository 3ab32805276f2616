"""Which tokens may be drawn, without sorting them.

The kept tokens are the best ones, so they have a threshold: a value, and among tokens of that value a number. Radix
select finds a threshold digit by digit, from the highest, by counting the values above each digit's candidates.

A row of V values is laid out as S lines of V/S values: line l holds part ``l // R`` of row ``l % R``. Machines with
tiled layouts want two long axes, however few the rows. Axis letters: R rows, L = S R lines, W = V/S values of a line.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float32, Int32, Shaped, UInt32

BITS = 4  # a digit has this many values; one look at all values finds them


def numbers(shape: tuple[int, ...], rows: int) -> Int32[Array, "L W"]:
    """The place of each value of the lines in its row."""
    line, place = (lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1))
    return line // rows * shape[1] + place


def by_row(reduce: Callable[..., jax.Array], lines: Shaped[Array, "L W"], rows: int) -> Shaped[Array, "R"]:
    """``reduce`` over all values of each row."""
    return reduce(reduce(lines, axis=1).reshape(-1, rows), axis=0)


def to_lines(values: Shaped[Array, "R"], lines: int) -> Shaped[Array, "{lines} 1"]:
    """A value of each row, repeated for each of its lines."""
    return jnp.tile(values, lines // len(values))[:, None]


def ordered(values: Float32[Array, "*shape"]) -> UInt32[Array, "*shape"]:
    """Unsigned integers in the order of the floats; both zeros are alike."""
    bits = lax.bitcast_convert_type(jnp.where(values == 0, 0.0, values), jnp.uint32)
    return bits ^ jnp.where(bits >> 31 == 1, jnp.uint32(0xFFFFFFFF), jnp.uint32(0x80000000))


def sums_in_one_pass(terms: list[jax.Array], axis: int) -> list[jax.Array]:
    """The sum of each term along an axis. One reduction reads what the terms share once; several would read it each."""
    zeros = [jnp.zeros((), term.dtype) for term in terms]
    return list(lax.reduce(terms, zeros, lambda a, b: [x + y for x, y in zip(a, b, strict=True)], (axis,)))


def either(
    predicate: jax.Array, yes: Callable[[], jax.Array], no: Callable[[], jax.Array], unrolled: bool
) -> jax.Array:
    """``yes()`` where the predicate is true, else ``no()``; with ``unrolled`` without a branch."""
    return jnp.where(predicate, yes(), no()) if unrolled else lax.cond(predicate, yes, no)


def radix_select(
    lines: UInt32[Array, "L W"], weights: Shaped[Array, "L W"], wanted: Shaped[Array, "R"], unrolled: bool = False
) -> UInt32[Array, "R"]:
    """The largest threshold of each row at which values of at least ``wanted`` weight are not below it.

    Args:
        lines: The values that are compared.
        weights: The weight of each value, not negative.
        wanted: The weight to reach, of the same type, and no more than a row has. Zero gives a threshold of all ones.
        unrolled: Unrolls the loop over digits.
    """
    rows, zero = len(wanted), jnp.zeros((), weights.dtype)
    digits = [jnp.uint32(digit) for digit in range(1, 2**BITS)]

    def look(i: jax.Array, prefix: jax.Array) -> jax.Array:
        shift = (32 - BITS * (i + 1)).astype(jnp.uint32)
        above = [jnp.where(lines >= to_lines(prefix | (digit << shift), len(lines)), weights, zero) for digit in digits]
        sums = sums_in_one_pass([part.reshape(-1, rows) for part in sums_in_one_pass(above, 1)], 0)
        held = [(value >= wanted).astype(jnp.uint32) for value in sums]
        return prefix | (functools.reduce(jnp.add, held) << shift)

    start = jnp.zeros((rows,), jnp.uint32)
    if unrolled:
        return functools.reduce(lambda prefix, i: look(jnp.int32(i), prefix), range(32 // BITS), start)
    return lax.fori_loop(0, 32 // BITS, look, start)


def keep_mask(
    scaled: Float32[Array, "L W"], top_k: Int32[Array, "R"], top_p: Float32[Array, "R"], unrolled: bool = False
) -> Bool[Array, "L W"]:
    """Which values of a row may be drawn: the ``top_k`` best, and of these the fewest that hold ``top_p``.

    Lower numbers come first among equals. The best one is always kept.

    Args:
        scaled: Logits below the best one of their row, which is 0, over the temperature.
        top_k: 0 keeps all.
        top_p: The share of the probability of the ``top_k`` best; from 1 on all of them are kept.
        unrolled: Neither loops nor conditions, for machines whose host waits for the end of each.
    """
    rows, count = len(top_k), len(scaled)
    order, size = ordered(scaled), scaled.size // len(top_k)
    ones = jnp.ones(scaled.shape, jnp.int32)
    highest = by_row(jnp.max, order, rows)
    weight = jnp.exp(scaled)

    def sums(threshold: jax.Array, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(the weight above each row's threshold, the weight at it)."""
        at = to_lines(threshold, count)
        above, equal = (jnp.where(inside, weights, 0) for inside in (order > at, order == at))
        return by_row(jnp.sum, above, rows), by_row(jnp.sum, equal, rows)

    # Value of the last one of the top k, and how many of that value are among them.
    limited = (top_k > 0) & (top_k < size)
    limit = jnp.where(limited, top_k, size)
    with jax.named_scope("top_k"):
        lowest = by_row(jnp.min, order, rows)
        last = either(jnp.any(limited), lambda: radix_select(order, ones, limit, unrolled), lambda: lowest, unrolled)
        last = jnp.where(limited, last, lowest)
    before, alike = sums(last, ones)
    share = limit - before
    weight_before, weight_alike = sums(last, weight)
    inside = weight_before + weight_alike / alike.astype(jnp.float32) * share.astype(jnp.float32)

    cut = top_p < 1
    wanted = top_p * inside
    with jax.named_scope("top_p"):
        lower = either(jnp.any(cut), lambda: radix_select(order, weight, wanted, unrolled), lambda: last, unrolled)
        threshold = jnp.where(cut, jnp.clip(lower, last, highest), last)
    # How many values at the threshold begin below the wanted weight.
    weight_before, weight_alike = sums(threshold, weight)
    alike = by_row(jnp.sum, jnp.where(order == to_lines(threshold, count), 1, 0), rows)
    one = weight_alike / alike.astype(jnp.float32)
    fits = jnp.where(one > 0, jnp.ceil((wanted - weight_before) / jnp.where(one > 0, one, 1.0)), jnp.inf)
    fits = jnp.clip(fits, 1, alike.astype(jnp.float32)).astype(jnp.int32)
    held = jnp.where(cut, fits, alike)
    held = jnp.where(threshold == last, jnp.minimum(held, share), held)

    equal = order == to_lines(threshold, count)
    with jax.named_scope("ties"):
        equal = either(jnp.any(held < alike), lambda: equal & first_of(equal, held, unrolled), lambda: equal, unrolled)
    return (order > to_lines(threshold, count)) | equal


def first_of(chosen: Bool[Array, "L W"], held: Int32[Array, "R"], unrolled: bool = False) -> Bool[Array, "L W"]:
    """The first ``held`` chosen values of each row; values that are not chosen may be among them."""
    backwards = jnp.uint32(chosen.size) - numbers(chosen.shape, len(held)).astype(jnp.uint32)
    end = radix_select(backwards, jnp.where(chosen, 1, 0), held, unrolled)
    return backwards >= to_lines(end, len(chosen))
