"""Plants every mistake that docs/model.md lists in the model; the comparison with the reference must show each."""

import pytest

from tests.support.direct import Direct
from tests.support.numerics import Case
from tests.support.tolerances import FLOAT32, MISTAKE
from tools.campaigns import mistakes

pytestmark = [pytest.mark.extras, pytest.mark.jit]


@pytest.fixture(scope="module")
def without(tmp_path_factory: pytest.TempPathFactory) -> tuple[Case, Direct]:
    """The reference and the correct model, traced before any mistake is planted."""
    return mistakes.models(tmp_path_factory.mktemp("mistakes") / "checkpoint")


@pytest.mark.parametrize(("mistake", "phase"), mistakes.PLANTED)
def test_a_mistake_moves_the_logits(without: tuple[Case, Direct], mistake: str, phase: str):
    assert mistakes.planted(*without, phase, mistakes.MISTAKES[mistake]) > MISTAKE


@pytest.fixture(scope="module")
def flash(tmp_path_factory: pytest.TempPathFactory) -> tuple[Case, Direct]:
    """The same with YaRN and limits of SwiGLU, like Ling-3.0-flash."""
    return mistakes.models(tmp_path_factory.mktemp("mistakes") / "flash", **mistakes.FLASH)


@pytest.mark.parametrize("mistake", mistakes.FLASH_MISTAKES)
def test_a_mistake_in_what_flash_adds_moves_the_logits(flash: tuple[Case, Direct], mistake: str):
    assert mistakes.planted(*flash, "prefill", mistakes.FLASH_MISTAKES[mistake]) > MISTAKE


@pytest.mark.parametrize("phase", mistakes.PHASES)
def test_a_right_recurrence_planted_moves_nothing(without: tuple[Case, Direct], phase: str):
    """This shows that the mistakes are detected, and not the planting itself."""
    assert mistakes.planted(*without, phase, mistakes.recurrence(mistakes.right_token)) < FLOAT32
