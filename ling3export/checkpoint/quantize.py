"""Rounds matrices to a few bits: a weight becomes ``q * scale``.

A matrix is ``[out, in]``, as in checkpoints. In the forms ``int8`` and ``int4`` a group of neighbouring inputs of one
output shares a scale, in ``int8-channel`` all inputs of an output. A scale is rounded to its stored dtype before
anything is divided by it, and values to the nearest even. A group of zeros, or one whose scale underflows, has scale 0
and q 0.
"""

import numpy as np
from numpy.typing import NDArray

from ling3export.artifacts.parameters import FORMS
from ling3export.foundation.dtypes import BY_NAME
from ling3export.foundation.errors import CheckpointError

Pair = tuple[NDArray[np.int8], NDArray[np.generic]]  # q [out, in], and scale: bf16 [out, in / group] or fp32 [out]

BLOCK = 1 << 19  # values at a time: intermediate values stay in the caches
SMALLEST = 2.0**-126  # processors may treat smaller scales, which are subnormal, as 0
# int4 tries three scales, the value of the largest magnitude divided by each of these, and takes the one with the least
# sum of squared errors, the first of equal ones. The largest value becomes 7, or -8 by a negative scale, or a little
# beyond either, which is clipped: the other 31 are then rounded finer.
CANDIDATES = (7.0, -8.0, -8.7)  # 0.73 of the squared error of 7 alone, on normal values; a fourth gains nothing


def quantize(values: NDArray[np.generic], form: str, group: int) -> Pair:
    """The pair of a matrix.

    Args:
        values: ``[out, in]``, of any float dtype.
        form: A key of FORMS; q of a form of 4 bits is from -8 to 7.
        group: Values that share a scale, a divisor of ``in``.

    Raises:
        CheckpointError: A value is not finite.
    """
    rows, width = values.shape
    q = np.empty((rows, width), np.int8)
    by_channel, rounded = FORMS[form].group is None, _rounded_to_4 if FORMS[form].values == 2 else _rounded_to_8
    scale = np.empty((rows, 1 if by_channel else width // group), BY_NAME[FORMS[form].scale].numpy)
    step = max(1, BLOCK // width)
    for start in range(0, rows, step):
        block = values[start : start + step].astype(np.float32)
        groups = block.reshape(len(block), -1, width if by_channel else group)
        q_block, scales = rounded(groups, scale.dtype)
        q[start : start + step] = q_block.reshape(block.shape)
        scale[start : start + step] = scales
    return q, scale[:, 0] if by_channel else scale


def dequantized(pair: Pair) -> NDArray[np.float32]:
    """``q * scale``, exact in fp32."""
    q, scale = pair
    wide = scale.astype(np.float32).reshape(len(q), -1, 1)
    return (q.reshape(len(q), wide.shape[1], -1) * wide).reshape(q.shape)


def packed(q: NDArray[np.int8], group: int) -> NDArray[np.uint8]:
    """Values of int4 as bytes: in each group the first half in the low nibbles, the second in the high, each plus 8."""
    pairs = (q + np.int8(8)).view(np.uint8).reshape(len(q), -1, 2, group // 2)
    return np.bitwise_or(pairs[:, :, 0], np.left_shift(pairs[:, :, 1], 4), dtype=np.uint8).reshape(len(q), -1)


def _scales(numbers: NDArray[np.float32], dtype: np.dtype) -> NDArray[np.float32]:
    """Scales as they are stored, in fp32; 0 if too small."""
    if not np.isfinite(numbers).all():
        raise CheckpointError("weights: expected finite values in all that is quantized, found NaN or infinity")
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
