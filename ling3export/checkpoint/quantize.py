"""Rounds matrices to a few bits: a weight becomes a value times a scale.

A matrix is ``[out, in]``, as in checkpoints. In the forms ``int8`` and ``int4`` a group of neighbouring inputs of one
output shares a scale, in ``int8-channel`` all inputs of an output. A scale is rounded to its stored dtype before
anything is divided by it, and values to the nearest even. A group of zeros, or one whose scale underflows, has scale 0
and q 0.

In ``code4`` and ``code6`` each half of a group has a factor, an integer of 5 bits, and both share a power of two
(docs/decisions/0017-four-bits-everywhere.md). Values are rounded to the nearest one of the form's table, up where two
are equally near.
"""

import functools

import numpy as np
from numpy.typing import NDArray

from ling3export.artifacts.parameters import FORMS, UNIT, Form
from ling3export.foundation.dtypes import BY_NAME
from ling3export.foundation.errors import CheckpointError

# Values [out, in], and scales: bf16 or uint16 [out, in / group], or fp32 [out].
Pair = tuple[NDArray[np.int8], NDArray[np.generic]]

INFINITE = "weights: expected finite values in all that is quantized, found NaN or infinity"
BLOCK = 1 << 19  # values at a time: intermediate values stay in the caches
SMALLEST = 2.0**-126  # processors may treat smaller scales, which are subnormal, as 0
# int4 tries three scales, the value of the largest magnitude divided by each of these, and takes the one with the least
# sum of squared errors, the first of equal ones. The largest value becomes 7, or -8 by a negative scale, or a little
# beyond either, which is clipped: the other 31 are then rounded finer.
CANDIDATES = (7.0, -8.0, -8.7)  # 0.73 of the squared error of 7 alone, on normal values; a fourth gains nothing
# The same of a half's factor, by bits; each is followed by the factor that fits the values found with it best.
CODE_CANDIDATES = {4: (-72.0, -62.0, -54.0, 66.0, 57.0), 6: (-32.0, -33.5, -35.0, -30.5, 31.5, 33.0, 30.0)}
FACTOR = 15  # the largest factor; the least is -16


def quantize(values: NDArray[np.generic], form: str, group: int) -> Pair:
    """The pair of a matrix.

    Args:
        values: ``[out, in]``, of any float dtype.
        form: A key of FORMS.
        group: Values that share a scale, a divisor of ``in``.

    Raises:
        CheckpointError: A value is not finite.
    """
    rows, width = values.shape
    q = np.empty((rows, width), np.int8)
    by_channel = FORMS[form].group is None
    scale = np.empty((rows, 1 if by_channel else width // group), BY_NAME[FORMS[form].scale].numpy)
    step = max(1, BLOCK // width)
    for start in range(0, rows, step):
        block = values[start : start + step].astype(np.float32)
        groups = block.reshape(len(block), -1, width if by_channel else group)
        q_block, scales = _rounded(groups, FORMS[form])
        q[start : start + step] = q_block.reshape(block.shape)
        scale[start : start + step] = scales
    return q, scale[:, 0] if by_channel else scale


def dequantized(pair: Pair) -> NDArray[np.float32]:
    """Values times scales, exact in fp32."""
    q, scale = pair
    factors = _factors(scale) if scale.dtype == np.uint16 else scale.astype(np.float32)
    wide = factors.reshape(len(q), -1, 1)
    return (q.reshape(len(q), wide.shape[1], -1) * wide).reshape(q.shape)


def packed(q: NDArray[np.int8], form: str, group: int) -> NDArray[np.generic]:
    """Values ``[out, in]`` as they are stored; artifacts/FORMAT.md says how those of less than 8 bits lie."""
    bits, values = FORMS[form].bits, FORMS[form].values
    if bits == 8:
        return q
    codes = np.searchsorted(values, q).astype(np.uint8) if values else (q + np.int8(8)).view(np.uint8)
    halves = (codes & 15).reshape(len(q), -1, 2, group // 2)
    low = np.bitwise_or(halves[:, :, 0], np.left_shift(halves[:, :, 1], 4), dtype=np.uint8).reshape(len(q), -1)
    if bits == 4:
        return low
    quarters = (codes >> 4).reshape(len(q), -1, 4, group // 4) << np.array([0, 2, 4, 6], np.uint8)[:, None]
    return np.concatenate([low, np.bitwise_or.reduce(quarters, axis=2).reshape(len(q), -1)], axis=1)


def unpacked(stored: NDArray[np.generic], form: str, group: int) -> NDArray[np.int8]:
    """The values ``[out, in]`` that :func:`packed` stored."""
    bits, values = FORMS[form].bits, FORMS[form].values
    if bits == 8:
        return stored.astype(np.int8)
    width = 8 * stored.shape[1] // bits
    low, high = np.split(stored, [width // 2], axis=1)
    pairs = low.reshape(len(low), -1, group // 2)
    codes = np.concatenate([pairs & 15, pairs >> 4], axis=-1)
    if bits == 6:
        quarters = high.reshape(len(high), -1, group // 4)
        codes |= np.concatenate([(quarters >> shift & 3) << 4 for shift in (0, 2, 4, 6)], axis=-1)
    q = np.array(values, np.int8)[codes] if values else codes.astype(np.int8) - np.int8(8)
    return q.reshape(len(stored), -1)


def of_parts(scale: NDArray[np.generic], count: int) -> NDArray[np.generic]:
    """The scales ``[out, groups]`` of ``count`` equal parts of each group, which is even."""
    repeated = np.repeat(scale, count, axis=1)
    if scale.dtype != np.uint16 or count == 1:
        return repeated
    second = np.arange(repeated.shape[1]) % count >= count // 2  # a part lies in one half, and both its own are alike
    own = np.where(second, repeated, repeated >> 5) & 31
    return (repeated & 0xFC00 | own << 5 | own).astype(np.uint16)


def _factors(words: NDArray[np.generic]) -> NDArray[np.float32]:
    """The scales of the halves of groups ``[out, 2 * groups]``."""
    wide = words.astype(np.int32)[..., None]
    factors = np.concatenate([wide >> 5, wide], axis=-1) << 27 >> 27  # five bits with their sign
    return np.ldexp(factors.astype(np.float32), (wide >> 10) + UNIT).reshape(len(words), -1)


def _rounded(groups: NDArray[np.float32], form: Form) -> tuple[NDArray[np.int8], NDArray[np.generic]]:
    if form.values:
        return _rounded_to_codes(groups, form)
    return (_rounded_to_4 if form.bits == 4 else _rounded_to_8)(groups, BY_NAME[form.scale].numpy)


def _scales(numbers: NDArray[np.float32], dtype: np.dtype) -> NDArray[np.float32]:
    """Scales as they are stored, in fp32; 0 if too small."""
    if not np.isfinite(numbers).all():
        raise CheckpointError(INFINITE)
    stored = numbers.astype(dtype).astype(np.float32)
    return np.where(np.abs(stored) < SMALLEST, np.float32(0), stored)


def _divided(groups: NDArray[np.float32], scales: NDArray[np.float32], least: int, most: int) -> NDArray[np.float32]:
    wide = np.where(scales == 0, np.float32(np.inf), scales)[..., None]
    return np.clip(np.rint(groups / wide), least, most)


def _rounded_to_8(groups: NDArray[np.float32], dtype: np.dtype) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    scales = _scales(np.divide(np.max(np.abs(groups), axis=-1), np.float32(127), dtype=np.float32), dtype)
    return _divided(groups, scales, -127, 127).astype(np.int8), scales


def _rounded_to_4(groups: NDArray[np.float32], dtype: np.dtype) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    at = np.argmax(np.abs(groups), axis=-1, keepdims=True)
    extreme = np.take_along_axis(groups, at, axis=-1)[..., 0]
    best, scales, least = (np.zeros(shape, np.float32) for shape in (groups.shape, extreme.shape, extreme.shape))
    for number, divisor in enumerate(CANDIDATES):
        tried = _scales(extreme / np.float32(divisor), dtype)
        q = _divided(groups, tried, -8, 7)
        rest = q * tried[..., None] - groups
        error = np.einsum("...g,...g->...", rest, rest)
        better = error < least if number else np.full(error.shape, True)
        least, scales = np.where(better, error, least), np.where(better, tried, scales)
        np.copyto(best, q, where=better[..., None])
    return best.astype(np.int8), scales


def _rounded_to_codes(groups: NDArray[np.float32], form: Form) -> tuple[NDArray[np.int8], NDArray[np.uint16]]:
    halves = groups.reshape(*groups.shape[:-1], 2, -1)
    table, most = _nearest(form.values), max(map(abs, form.values))
    at = np.argmax(np.abs(halves), axis=-1, keepdims=True)
    extreme = np.take_along_axis(halves, at, axis=-1)[..., 0]
    if not np.isfinite(extreme).all():
        raise CheckpointError(INFINITE)
    largest = np.max(np.abs(extreme), axis=-1) / np.float32(most * (FACTOR + 0.5))
    exponent = np.where(largest > 0, np.frexp(largest)[1], UNIT)
    if exponent.max() > UNIT + 63:
        raise CheckpointError("weights: expected magnitudes below 1e7 in all that is quantized, found a larger one")
    exponent = np.maximum(exponent, UNIT)
    unit = np.ldexp(np.float32(1), exponent)[..., None]
    best, factors = np.zeros(halves.shape, np.int8), np.zeros(extreme.shape, np.float32)
    least = np.full(extreme.shape, np.inf, np.float32)
    for divisor in CODE_CANDIDATES[form.bits]:
        tried = extreme / np.float32(divisor)
        for _ in range(2):
            factor = np.clip(np.rint(tried / unit), -FACTOR - 1, FACTOR)
            scale = (factor * unit)[..., None]
            steps = np.floor(2 * halves / np.where(scale == 0, np.float32(np.inf), scale))
            values = table[(np.clip(steps, -2 * most, 2 * most) + 2 * most).astype(np.uint8)]
            wide = values.astype(np.float32)
            rest = wide * scale - halves
            error = np.einsum("...g,...g->...", rest, rest)
            better = error < least
            least, factors = np.where(better, error, least), np.where(better, factor, factors)
            np.copyto(best, values, where=better[..., None])
            squares = np.einsum("...g,...g->...", wide, wide)
            tried = np.einsum("...g,...g->...", wide, halves) / np.maximum(squares, np.float32(1))
    own = factors.astype(np.int32) & 31
    words = (exponent - UNIT) << 10 | own[..., 0] << 5 | own[..., 1]
    return best.reshape(groups.shape), words.astype(np.uint16)


@functools.cache
def _nearest(values: tuple[int, ...]) -> NDArray[np.int8]:
    """The nearest one of ``values`` for each multiple of a half from the least to the most that there are."""
    most = max(map(abs, values))
    middles = np.add(values[1:], values[:-1])  # in halves
    return np.array(values, np.int8)[np.searchsorted(middles, np.arange(-2 * most, 2 * most + 1), side="right")]
