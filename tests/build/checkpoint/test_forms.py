"""Quantized checkpoints are the numbers that they stand for, exactly, or are refused by name."""

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

from ling3export.checkpoint.forms import FP8, INT4


def fraction_of(code: int, exponent: int, digits: int) -> Fraction:
    """The number of a floating-point code, by its definition."""
    sign, power, low = code >> exponent + digits, code >> digits & (1 << exponent) - 1, code & (1 << digits) - 1
    whole = Fraction(low + (1 << digits if power else 0))
    number = whole * Fraction(2) ** (max(power, 1) - (1 << exponent - 1) + 1 - digits)
    return -number if sign else number


@pytest.mark.parametrize("scale", [0, 1, 2, 3, 60, 127, 246, 247, 254])
def test_every_e4m3_times_e8m0_is_exact_in_bfloat16_or_has_no_entry(scale: int):
    """Subnormal bf16 numbers among them: from scale byte 3 to 246 all are held, beyond those some."""
    numbers = {code: fraction_of(code, 4, 3) * Fraction(2) ** (scale - 127) for code in range(256) if code & 127 != 127}
    held = {number: bits for bits in range(1 << 16) if (number := finite(bits)) is not None}
    for code, number in numbers.items():
        found = int(FP8.table[scale, code])
        assert fraction_of(found, 8, 7) == number if number in held else found == 0x7FC0, (scale, code)
    missing = sum(number not in held for number in numbers.values())
    assert (missing == 0) == (3 <= scale <= 246)
    assert {int(FP8.table[scale, code]) for code in (127, 255)} == {0x7FC0}
    assert set(FP8.table[255].tolist()) == {0x7FC0}


def finite(bits: int) -> Fraction | None:
    return None if bits & 0x7F80 == 0x7F80 else fraction_of(bits, 8, 7)


def test_every_int4_times_its_scale_is_exact_in_float32_or_has_no_entry():
    found = INT4.table.view(np.float32)
    for bits in [0, 1, 0x7F, 0x80, 0x81, 0x3F80, 0xBF81, 0x7EFF, 0x7F00, 0x7F7F, 0x7F80, 0x7FC0]:
        for code in range(16):
            number = None if finite(bits) is None else finite(bits) * (code - 8)
            if number is None or abs(number) >= Fraction(2) ** 128:
                assert INT4.table[bits, code] == 0x7FC00000
            else:
                assert Fraction(float(found[bits, code])) == number


def test_codes_that_are_no_numbers_are_those_of_the_published_type():
    ours = np.isnan(FP8.table[127].view(ml_dtypes.bfloat16).astype(np.float32))
    theirs = np.isnan(np.arange(256).astype(np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32))
    np.testing.assert_array_equal(ours, theirs)
