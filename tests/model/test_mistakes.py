"""Every mistake that docs/model.md lists, planted in the model: the comparison with the reference must show it."""

import pytest

from tests.support.direct import Direct
from tests.support.numerics import Case
from tests.support.tolerances import FLOAT32, MISTAKE
from tools.campaigns.mistakes import (
    FLASH,
    FLASH_MISTAKES,
    MISTAKES,
    PHASES,
    PLANTED,
    models,
    planted,
    recurrence,
    right_token,
)

pytestmark = [pytest.mark.extras, pytest.mark.jit]


@pytest.fixture(scope="module")
def without(tmp_path_factory: pytest.TempPathFactory) -> tuple[Case, Direct]:
    """The reference, and the model without a mistake; traced before any is planted."""
    return models(tmp_path_factory.mktemp("mistakes") / "checkpoint")


@pytest.mark.parametrize(("mistake", "phase"), PLANTED)
def test_a_mistake_moves_the_logits(without: tuple[Case, Direct], mistake: str, phase: str):
    assert planted(*without, phase, MISTAKES[mistake]) > MISTAKE


@pytest.fixture(scope="module")
def flash(tmp_path_factory: pytest.TempPathFactory) -> tuple[Case, Direct]:
    """The same with YaRN and limits of SwiGLU, as Ling-3.0-flash has them."""
    return models(tmp_path_factory.mktemp("mistakes") / "flash", **FLASH)


@pytest.mark.parametrize("mistake", FLASH_MISTAKES)
def test_a_mistake_in_what_flash_adds_moves_the_logits(flash: tuple[Case, Direct], mistake: str):
    assert planted(*flash, "prefill", FLASH_MISTAKES[mistake]) > MISTAKE


@pytest.mark.parametrize("phase", PHASES)
def test_a_right_recurrence_planted_moves_nothing(without: tuple[Case, Direct], phase: str):
    """So it is the mistake that shows, not the way in which it is planted."""
    assert planted(*without, phase, recurrence(right_token)) < FLOAT32
