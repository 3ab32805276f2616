"""Which padding a call takes: where a token costs least, and no longer call than pays beside who waits."""

import pytest

from ling3export.runners.engine.inputs import Shapes, fitting


@pytest.mark.parametrize(
    ("work", "padding"), [(1, 16), (17, 16), (48, 16), (64, 128), (128, 128), (130, 128), (432, 128), (448, 512),
                          (512, 512), (4000, 512)],
)  # fmt: skip
def test_the_padding_that_pays(work, padding):
    assert Shapes((16, 128, 512), (16,), 16, 4).paying(work) == padding


@pytest.mark.parametrize(("work", "padding"), [(17, 16), (64, 128), (130, 128), (4000, 128)])
def test_no_longer_call_than_pays_beside_running_sequences(work, padding):
    """A slot costs 3, 1.25 and 1.0625: 128 loses less than a quarter."""
    assert Shapes((16, 128, 512), (16,), 16, 4).paying(work, beside_decode=True) == padding
    assert Shapes((16, 512), (16,), 16, 4).paying(4000, beside_decode=True) == 512


def test_the_padding_that_pays_by_the_compilers_estimates():
    """Where a call costs the same at any padding, the largest always pays; a manifest says so."""
    cells = {
        f"{phase}@{padding}": {"phase": phase, "padding": padding, "estimated_seconds": cost}
        for phase, padding, cost in (("prefill", 16, 2e-3), ("prefill", 512, 2e-3), ("decode", 8, 1e-3))
    }
    shapes = Shapes.of({"cells": cells, "state": {"chunk": 16, "max_pages": 4}})
    assert [shapes.paying(work) for work in (16, 17, 600)] == [512, 512, 512]


def test_fitting():
    assert [fitting(work, (16, 128, 512)) for work in (1, 16, 17, 512, 513)] == [16, 16, 128, 512, 512]
