"""Which tokens may be drawn, without sorting them.

What is kept is a set of best tokens, so it has a border: a value, and among tokens of just that value a number. A
border is found digit by digit, from the highest, by counting what lies above each digit's candidates.

A row of V values lies in S lines of V/S: line l of L is part l // R of row l % R. Machines with tiled layouts want two
long axes, however few the rows.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

BITS = 4  # of a digit: that many are found in one look at all values


def numbers(shape: tuple[int, ...], rows: int) -> jax.Array:
    """int32 ``[L, W]``: the place of each value of the lines in its row."""
    line, place = (lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1))
    return line // rows * shape[1] + place


def by_row(reduce: Callable[..., jax.Array], lines: jax.Array, rows: int) -> jax.Array:
    """``reduce`` over all values of each row: ``[L, W]`` to ``[R]``."""
    return reduce(reduce(lines, axis=1).reshape(-1, rows), axis=0)


def to_lines(values: jax.Array, lines: int) -> jax.Array:
    """``[R]`` to ``[L, 1]``."""
    return jnp.tile(values, lines // len(values))[:, None]


def ordered(values: jax.Array) -> jax.Array:
    """fp32 as uint32 of the same order; both zeros are alike."""
    bits = lax.bitcast_convert_type(jnp.where(values == 0, 0.0, values), jnp.uint32)
    return bits ^ jnp.where(bits >> 31 == 1, jnp.uint32(0xFFFFFFFF), jnp.uint32(0x80000000))


def add_up(terms: list[jax.Array], axis: int) -> list[jax.Array]:
    """The sum of each along an axis, all in one pass: as many reductions would read what they share as often."""
    zeros = [jnp.zeros((), term.dtype) for term in terms]
    return list(lax.reduce(terms, zeros, lambda a, b: [x + y for x, y in zip(a, b, strict=True)], (axis,)))


def largest(lines: jax.Array, what: jax.Array, wanted: jax.Array) -> jax.Array:
    """The largest border ``[R]`` from which on a row has at least ``wanted`` of ``what``; all ones if that is nothing.

    Args:
        lines: uint32 ``[L, W]``.
        what: ``[L, W]``, not negative.
        wanted: ``[R]``, of the same type, and no more than there is.
    """
    rows, zero = len(wanted), jnp.zeros((), what.dtype)
    digits = [jnp.uint32(digit) for digit in range(1, 2**BITS)]

    def look(i: jax.Array, found: jax.Array) -> jax.Array:
        shift = (32 - BITS * (i + 1)).astype(jnp.uint32)
        above = [jnp.where(lines >= to_lines(found | (digit << shift), len(lines)), what, zero) for digit in digits]
        sums = add_up([part.reshape(-1, rows) for part in add_up(above, 1)], 0)
        held = [(value >= wanted).astype(jnp.uint32) for value in sums]
        return found | (functools.reduce(jnp.add, held) << shift)

    return lax.fori_loop(0, 32 // BITS, look, jnp.zeros((rows,), jnp.uint32))


def keep_mask(scaled: jax.Array, top_k: jax.Array, top_p: jax.Array) -> jax.Array:
    """Which values of a row may be drawn: the ``top_k`` best (0 = all), and of these the fewest that hold ``top_p``.

    Lower numbers come first among equals. The best one is always kept.

    Args:
        scaled: fp32 ``[L, W]``, logits below the best one of their row, which is 0, over the temperature.
        top_k: int32 ``[R]``.
        top_p: fp32 ``[R]``, of the probability of the ``top_k`` best; from 1 on all of them.

    Returns:
        bool ``[L, W]``.
    """
    rows, count = len(top_k), len(scaled)
    order, size = ordered(scaled), scaled.size // len(top_k)
    ones = jnp.ones(scaled.shape, jnp.int32)
    highest = by_row(jnp.max, order, rows)
    weight = jnp.exp(scaled)

    def sums(border: jax.Array, what: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(above a border ``[R]``, at it)."""
        at = to_lines(border, count)
        above, equal = (jnp.where(inside, what, 0) for inside in (order > at, order == at))
        return by_row(jnp.sum, above, rows), by_row(jnp.sum, equal, rows)

    # Value of the last one of the top k, and how many of that value are among them.
    limited = (top_k > 0) & (top_k < size)
    limit = jnp.where(limited, top_k, size)
    with jax.named_scope("top_k"):
        lowest = by_row(jnp.min, order, rows)
        last = lax.cond(jnp.any(limited), lambda: largest(order, ones, limit), lambda: lowest)
        last = jnp.where(limited, last, lowest)
    before, alike = sums(last, ones)
    share = limit - before
    weight_before, weight_alike = sums(last, weight)
    inside = weight_before + weight_alike / alike.astype(jnp.float32) * share.astype(jnp.float32)

    cut = top_p < 1
    wanted = top_p * inside
    with jax.named_scope("top_p"):
        found = lax.cond(jnp.any(cut), lambda: largest(order, weight, wanted), lambda: last)
        border = jnp.where(cut, jnp.clip(found, last, highest), last)
    # Of those with the value of the border: as many as begin below what is wanted.
    weight_before, weight_alike = sums(border, weight)
    alike = by_row(jnp.sum, jnp.where(order == to_lines(border, count), 1, 0), rows)
    each = weight_alike / alike.astype(jnp.float32)
    fits = jnp.where(each > 0, jnp.ceil((wanted - weight_before) / jnp.where(each > 0, each, 1.0)), jnp.inf)
    fits = jnp.clip(fits, 1, alike.astype(jnp.float32)).astype(jnp.int32)
    held = jnp.where(cut, fits, alike)
    held = jnp.where(border == last, jnp.minimum(held, share), held)

    equal = order == to_lines(border, count)
    with jax.named_scope("ties"):
        equal = lax.cond(jnp.any(held < alike), lambda: equal & first_of(equal, held), lambda: equal)
    return (order > to_lines(border, count)) | equal


def first_of(chosen: jax.Array, held: jax.Array) -> jax.Array:
    """Of the values ``chosen [L, W]``, the first ``held [R]`` of each row, and perhaps others that are not chosen."""
    backwards = jnp.uint32(chosen.size) - numbers(chosen.shape, len(held)).astype(jnp.uint32)
    end = largest(backwards, jnp.where(chosen, 1, 0), held)
    return backwards >= to_lines(end, len(chosen))
