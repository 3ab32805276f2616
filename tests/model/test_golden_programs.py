"""The true Ling3-Tiny, compiled for a v6e 4x4 slice: its cells keep every rule and stay within their budgets.

This takes minutes on two cores, and seconds if no source has changed. After an intended change, run ``make budgets``.
"""

import os

import pytest

from ling3export.graph.audit import Budgets, audit, budgets, quantities
from tests.support.golden_programs import ALLOWED, BUDGETS, MODELS, MOVED, compile_cells, moved, toolchain

RECORDED = [name for name, (_, _, cells) in MODELS.items() if cells]


def limits_of(model: str) -> Budgets:
    path = BUDGETS / f"{model}.toml"
    return budgets(path.read_text(), path.name)


@pytest.mark.extras
@pytest.mark.parametrize("model", RECORDED)
def test_the_programs_keep_their_budgets(model):
    """No cell may be so much cheaper than its budget that the budget would hide the next regression."""
    recorded = (BUDGETS / f"{model}.toml").read_text().partition("\n")[0]
    if recorded != toolchain():
        # Another toolchain writes other programs. CI installs the budget's versions and does not skip.
        assert os.environ.get("LING3_BUDGETS") != "required", f"{toolchain()}, recorded with {recorded}: make budgets"
        pytest.skip(f"{toolchain()}, recorded with {recorded}")
    limits = limits_of(model)
    for name, golden in compile_cells(model).items():
        assert audit(golden.graph, golden.expected, limits) == []
        amounts = quantities(golden.graph)
        loose = {key: (limit, amounts[key]) for key, limit in limits.cells[name].items() if limit > 1.11 * amounts[key]}
        assert not loose, f"{name}: make budgets"


@pytest.mark.extras
def test_programs_that_move_states_move_few_other_bytes():
    """Regression: `fetch` moved 1.9 times as many bytes."""
    times = {name: moved(golden.program) for name, golden in compile_cells("snapshots").items()}
    assert set(times) == {"copy@8", "offload@16", "onload@16"}
    assert max(times.values()) <= MOVED, times


@pytest.mark.parametrize("model", RECORDED)
def test_a_budgets_file_names_the_cells_and_the_toolchain(model):
    assert set(limits_of(model).cells) == set(MODELS[model][2])
    assert (BUDGETS / f"{model}.toml").read_text().startswith("# jax ")
    assert ALLOWED == 1.05
