"""Every mistake that docs/model.md lists, planted in the product: the comparison of test_numerics.py must fail.

A mistake is a function that replaces a function of the model while a step is traced. The numbers in comments are the
largest relative errors that each one gave.
"""

from copy import copy

import pytest

from tests.support.direct import Direct, relative
from tests.support.mistakes import MISTAKES, recurrence, right_token
from tests.support.numerics import Case, Quick
from tests.support.tolerances import FLOAT32, MISTAKE

pytestmark = pytest.mark.jit

LENGTHS = (16, 29, 40)  # prefilled in calls of 16 token slots, so that state and history are handed over
DECODED = range(29, 40)


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """Six KDA and two MLA layers; v is tiny in every second KDA layer. The loop over them compiles each kind once."""
    folder = tmp_path_factory.mktemp("mistakes") / "checkpoint"
    return Case(folder, (LENGTHS[-1],), num_hidden_layers=8, layer_group_size=4).expect()


def error(case: Case, direct: Direct, phase: str) -> float:
    """Largest relative error of a few positions, prefilled, or decoded after a prefill."""
    ids, expected = case.prompts[0], case.expected[0]
    if phase == "prefill":
        return max(relative(direct.sequence(16, ids[:length]), expected[length - 1]) for length in LENGTHS)
    direct.sequence(16, ids[: DECODED[0]])
    return max(
        relative(direct.decode(1, [(1, position, ids[position])])[0], expected[position]) for position in DECODED
    )


@pytest.fixture(scope="module")
def right(case: Case) -> Direct:
    """Without a mistake, where the comparison holds; traced before any is planted."""
    direct = Quick(case.config, case.read)
    assert error(case, direct, "prefill") < FLOAT32
    assert error(case, direct, "decode") < FLOAT32
    return direct


def planted(right: Direct, phase: str) -> Direct:
    """A model of which ``phase`` alone is traced anew; it shares the parameters."""
    direct = copy(right)
    direct.steps = {cell: step for cell, step in right.steps.items() if cell[0] != phase}
    direct.reset()
    return direct


# What decode computes by code of its own.
DECODE = ("delta against the undecayed state", "read before write", "NeoX-style rope")


@pytest.mark.parametrize(
    ("mistake", "phase"), [(name, "prefill") for name in MISTAKES] + [(name, "decode") for name in DECODE]
)
def test_a_mistake_moves_the_logits(
    case: Case, right: Direct, mistake: str, phase: str, monkeypatch: pytest.MonkeyPatch
):
    MISTAKES[mistake](monkeypatch)
    found = error(case, planted(right, phase), phase)
    print(f"{found:.3f}")
    assert found > MISTAKE


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_a_right_recurrence_planted_moves_nothing(
    case: Case, right: Direct, phase: str, monkeypatch: pytest.MonkeyPatch
):
    """So it is the mistake that shows, not the way in which it was planted."""
    recurrence(right_token)(monkeypatch)
    assert error(case, planted(right, phase), phase) < FLOAT32
