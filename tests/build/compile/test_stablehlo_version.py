"""The StableHLO version of a portable program."""

from contextlib import suppress
from random import Random

import pytest

from ling3export.compile.target_record import stablehlo_version


def test_the_form_of_a_program_is_read_from_its_first_bytes():
    head = b"ML\xefR\x0dStableHLO_v1.18.0\0"
    assert stablehlo_version(head + b"\x01") == "1.18.0"
    rng = Random(0)
    for _ in range(2000):
        damaged = bytearray(head)
        damaged[rng.randrange(len(head))] = rng.randrange(256)
        with suppress(ValueError):
            assert stablehlo_version(bytes(damaged[: rng.randrange(len(head) + 1)])).replace(".", "").isdigit()
    with pytest.raises(ValueError, match="expected StableHLO's portable form, found b'ML'"):
        stablehlo_version(b"ML")
