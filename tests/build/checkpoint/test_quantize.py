"""Rounding to q and scale, against plain loops over every value."""

import math

import ml_dtypes
import numpy as np
import pytest

from ling3export.artifacts.parameters import FORMS
from ling3export.checkpoint.quantize import CANDIDATES, dequantized, of_parts, packed, quantize, unpacked
from ling3export.foundation.errors import CheckpointError


def bf16(value: float) -> float:
    return float(np.float32(value).astype(ml_dtypes.bfloat16))


def nearest(value: float, scale: float, least: int, most: int) -> int:
    """Rounds to the nearest integer, ties to even, like Python's ``round``."""
    return 0 if scale == 0 else max(least, min(most, round(float(np.float32(value) / np.float32(scale)))))


def loop_8(values: list[float]) -> tuple[list[int], float]:
    scale = bf16(max(abs(each) for each in values) / 127)
    return [nearest(each, scale, -127, 127) for each in values], scale


def loop_4(values: list[float]) -> tuple[list[int], float]:
    extreme = max(values, key=abs)
    tried = [bf16(float(np.float32(extreme) / np.float32(divisor))) for divisor in CANDIDATES]
    found = [([nearest(each, scale, -8, 7) for each in values], scale) for scale in tried]
    return min(found, key=lambda pair: sum((q * pair[1] - each) ** 2 for q, each in zip(pair[0], values, strict=True)))


def matrix(seed: int, group: int = 32) -> np.ndarray:
    values = np.random.default_rng(seed).normal(0, 0.02, (6, 3 * group)).astype(np.float32)
    values[0, :group] = 0
    values[1, :group] = 1e-40  # its scale underflows
    values[2, :group] = np.arange(group) - 127 + 0.5  # ties
    values[3, 3] = 3.0  # all others are far smaller
    return values.astype(ml_dtypes.bfloat16)


@pytest.mark.parametrize("group", [32, 16, 8])
@pytest.mark.parametrize(("form", "loop"), [("int8", loop_8), ("int4", loop_4)])
def test_groups_are_rounded_as_a_plain_loop_rounds_them(form: str, loop, group: int):
    values = matrix(5, group)
    q, scale = quantize(values, form, group)
    assert (q.shape, scale.shape, scale.dtype) == (values.shape, (6, 3), ml_dtypes.bfloat16)
    for row in range(6):
        for at in range(3):
            part = slice(at * group, (at + 1) * group)
            wanted, number = loop([float(each) for each in values[row, part]])
            if abs(number) < 2.0**-126:
                wanted, number = [0] * group, 0.0
            assert (q[row, part].tolist(), float(scale[row, at])) == (wanted, number), (row, at)


def test_a_channel_is_rounded_by_one_fp32_scale():
    values = matrix(6)
    q, scale = quantize(values, "int8-channel", 32)
    assert (scale.shape, scale.dtype) == ((6,), np.float32)
    for row in range(6):
        number = np.float32(max(abs(float(each)) for each in values[row])) / np.float32(127)
        assert scale[row] == (number if number >= 2.0**-126 else 0)
        assert q[row].tolist() == [nearest(float(each), float(scale[row]), -127, 127) for each in values[row]]


def test_quantizing_dequantized_weights_changes_nothing():
    for form in ("int8", "int4"):
        values = dequantized(quantize(matrix(7), form, 32))
        assert np.array_equal(dequantized(quantize(values, form, 32)), values) or form == "int8"
        assert np.array_equal(dequantized(quantize(values, "int8", 32)), values) or form == "int4"


def test_nibbles_lie_as_the_kernels_read_them():
    q = np.random.default_rng(0).integers(-8, 8, (3, 64)).astype(np.int8)
    found = packed(q, "int4", 32)
    assert (found.shape, found.dtype) == ((3, 32), np.uint8)
    for row in range(3):
        for byte in range(32):
            group, j = divmod(byte, 16)
            assert found[row, byte] & 15 == q[row, 32 * group + j] + 8
            assert found[row, byte] >> 4 == q[row, 32 * group + j + 16] + 8


def half(values: list[float], form: str, unit: float) -> float:
    """The least squared error of half a group over all scales."""
    errors = []
    for factor in range(-16, 16):
        scale = factor * unit
        near = [min((value * scale - each) ** 2 for value in FORMS[form].values) for each in values]
        errors.append(sum(near))
    return min(errors)


@pytest.mark.parametrize(("form", "most", "group"), [("code4", 1.1, 32), ("code6", 1.1, 32), ("code4", 1.2, 8)])
def test_halves_are_rounded_nearly_as_well_as_their_best_factors_allow(form: str, most: float, group: int):
    values = np.random.default_rng(8).normal(0, 0.02, (12, 3 * group)).astype(np.float32)
    values[0, :group], values[1, :group] = 0, 1e-40
    q, words = quantize(values, form, group)
    assert set(np.unique(q)) <= {*FORMS[form].values} and words.dtype == np.uint16
    found, best = np.square(dequantized((q, words)) - values.astype(np.float32), dtype=np.float64), 0.0
    for (row, at), word in np.ndenumerate(words):
        for start in (at * group, at * group + group // 2):
            part = [float(each) for each in values[row, start : start + group // 2]]
            scale = dequantized((np.ones((1, group), np.int8), words[row : row + 1, at : at + 1]))[0, start % group]
            near = [min(FORMS[form].values, key=lambda value: abs(value * scale - each)) * scale for each in part]
            own = dequantized((q, words))[row, start : start + group // 2]
            assert np.allclose(np.abs(own - part), np.abs(np.subtract(near, part)), rtol=1e-5, atol=0)
            best += half(part, form, 2.0 ** ((int(word) >> 10) - 48))
    assert not dequantized((q, words))[:2, :group].any()  # zeros, and values below any scale
    assert best * (1 - 1e-6) <= found.sum() < most * best


@pytest.mark.parametrize("form", list(FORMS))
@pytest.mark.parametrize("group", [32, 16, 8])
def test_values_come_back_from_bytes_and_parts_of_groups_have_their_scales(form: str, group: int):
    q, scale = pair = quantize(matrix(9, group), form, group)
    stored = packed(q, form, group)
    assert stored.nbytes == q.size * FORMS[form].bits // 8
    assert np.array_equal(unpacked(stored, form, group), q)
    if scale.ndim == 2:
        for count in (2, group // 8):
            assert np.array_equal(dequantized((q, of_parts(scale, count))), dequantized(pair))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("form", list(FORMS))
def test_weights_that_are_not_finite_are_refused(form: str, bad: float):
    values = np.zeros((2, 64), np.float32)
    values[1, 40] = bad
    with pytest.raises(CheckpointError, match="expected finite values"):
        quantize(values, form, 32)
