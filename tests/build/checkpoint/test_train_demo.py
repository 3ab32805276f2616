"""The demo's trainer, on a model of two layers: it goes on after a stop as if there had been none."""

import json
import shutil

import jax
import numpy as np
import pytest
from tokenizers import Tokenizer

from ling3export.checkpoint.synth import config_fields
from ling3export.compile.build import DEMO
from ling3export.model.config import Config
from ling3export.runners.evals.demo import is_kept_pair
from tests.support.demo_steps import pairs
from tools import train_demo
from tools.demo_checkpoint import SIZES
from tools.demo_data import Rows
from tools.train_demo import Trainer, balanced, rate

pytestmark = pytest.mark.jit

TINY = {
    "num_hidden_layers": 2,
    "layer_group_size": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "moe_shared_expert_intermediate_size": 8,
    "intermediate_size": 32,
}


@pytest.fixture
def small(monkeypatch):
    """Steps of four rows of 32 tokens. optax relies on jax's usual promotion; the model itself does not."""
    for name, value in {"LENGTH": 32, "ROWS": 4, "DRILLS": (2, 1), "DRILLED": 2, "WARM_UP": 1, "CHECKED": 2}.items():
        monkeypatch.setattr(train_demo, name, value)
    with jax.numpy_dtype_promotion("standard"):
        yield Config.from_dict(config_fields("micro", SIZES | TINY))


def test_training_goes_on_where_it_stopped(small, tmp_path):
    for name in ("whole", "resumed", "new"):
        (tmp_path / name).mkdir()
        shutil.copy(DEMO / "tokenizer.json", tmp_path / name)
    whole = Trainer(tmp_path / "whole", 4, small)
    options = {"xla_backend_optimization_level": 0}  # half the time to compile
    whole.update = jax.jit(whole._update, donate_argnums=(0,), compiler_options=options)
    first = jax.tree.map(np.asarray, whole.state[0])
    whole.run(2)
    shutil.copy(tmp_path / "whole/state.npz", tmp_path / "resumed")
    whole.run(4)
    resumed = Trainer(tmp_path / "resumed", 4, small)
    assert resumed.load()
    resumed.update = whole.update  # compiled once
    resumed.run(4)
    assert (whole.step, resumed.step) == (4, 4)
    same = jax.tree.map(lambda a, b: np.array_equal(a, b), whole.state, resumed.state)
    assert all(jax.tree.leaves(same))
    changed = jax.tree.map(lambda a, b: not np.array_equal(a, b), first, whole.state[0])
    assert all(jax.tree.leaves(changed)), changed
    logged = [json.loads(line) for line in (tmp_path / "whole/log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in logged] == [2, 4]
    assert logged[0]["loss"] == pytest.approx(np.log(small.vocab_size), abs=0.7)
    assert not Trainer(tmp_path / "new", 4, small).load()


def test_steps_train_on_nothing_that_is_kept():
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    rows = Rows(tokenizer, 240)
    for step in range(20):
        batch = rows.training(step, 16, 8)
        for place, ids in enumerate(batch["tokens"]):
            lines = tokenizer.decode(ids.tolist()).rpartition("\n")[0]  # a row may end within a step
            found = pairs(lines)
            assert len(found) >= (25 if place < 8 else 4)
            assert not any(is_kept_pair(*pair) for pair in found)
    np.testing.assert_array_equal(rows.training(7, 16, 8)["tokens"], rows.training(7, 16, 8)["tokens"])


def test_the_bias_moves_towards_equal_loads():
    bias, load = np.array([[0.5, 0.0, -0.5, 0.0]], np.float32), np.array([[4.0, 2.0, 1.0, 1.0]], np.float32)
    moved = balanced(bias, load, np.float32(0.01))
    np.testing.assert_allclose(moved, [[0.49, 0.0, -0.49, 0.01]], rtol=1e-6)


@pytest.mark.parametrize(("step", "share"), [(0, 1 / 60), (29, 0.5), (59, 1.0), (700, 1.0), (850, 0.5), (1000, 0.0)])
def test_the_rate_goes_up_stays_and_goes_down(step, share):
    assert float(rate(np.int32(step), 1000)) == pytest.approx(share, rel=1e-5)
