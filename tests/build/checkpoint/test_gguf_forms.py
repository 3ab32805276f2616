"""llama.cpp's forms in numpy: properties that follow from their definitions."""

import numpy as np
import pytest

from ling3export.checkpoint.reader import Checkpoint
from ling3export.checkpoint.synth import synthesize
from tests.support.gguf_forms import FORMS, Rounded, compared, q4_0, q8_0, rounded


def values(seed, scale=1.0):
    return np.random.default_rng(seed).normal(0, scale, (64, 512)).astype(np.float32)


@pytest.mark.parametrize(("form", "most"), [("Q8_0", 0.006), ("Q4_0", 0.095)])
def test_normal_values_lose_what_the_form_s_bits_say(form, most):
    """The relative L2 error of rounding errors that are uniform over a step: 1/127 or 1/8 of a block's range."""
    for scale in (1e-2, 1.0, 30.0):
        x = values(1, scale)
        error = np.linalg.norm(rounded(x, form) - x) / np.linalg.norm(x)
        assert most / 2 < error < most


@pytest.mark.parametrize("form", FORMS)
def test_zeros_stay_and_a_second_time_changes_next_to_nothing(form):
    assert not rounded(np.zeros((2, 512), np.float32), form).any()
    once = rounded(values(2), form)
    twice = rounded(once, form)
    assert np.linalg.norm(twice - once) < 0.05 * np.linalg.norm(once - values(2)) + 1e-3 * np.linalg.norm(once)


def test_values_that_a_block_can_have_are_kept_exactly():
    """d is a power of two, which fp16 represents exactly."""
    q8 = np.arange(-127, 127, 8, dtype=np.float32)[None] / 64
    q8[0, 0] = -127 / 64
    assert np.array_equal(q8_0(q8), q8)
    q4 = np.resize(np.arange(-8, 8, dtype=np.float32), (1, 32)) / 16
    assert np.array_equal(q4_0(q4), q4)


def test_a_checkpoint_is_read_through_a_form(tmp_path):
    synthesize(tmp_path / "a", "micro", 1)
    plain = Checkpoint.open(tmp_path / "a")
    read = Rounded(plain, "Q8_0")
    for name in ("model.layers.1.mlp.experts.0.up_proj.weight", "lm_head.weight"):
        assert np.array_equal(read.tensor(name), rounded(plain.tensor(name), "Q8_0"))
        assert not np.array_equal(read.tensor(name), plain.tensor(name))
    for name in ("model.layers.1.mlp.gate.weight", "model.norm.weight"):
        assert np.array_equal(read.tensor(name), plain.tensor(name))


def test_more_bits_are_nearer_to_the_plain_model(tmp_path):
    synthesize(tmp_path / "a", "micro", 1)
    ids = np.random.default_rng(0).integers(0, 256, 512).tolist()
    q8, q4, int8, int4 = compared(Checkpoint.open(tmp_path / "a"), ids, ("Q8_0", "Q4_0", "int8", "int4"))
    assert 0 < q8.kl_mean < q4.kl_mean / 10 and 0 < int8.kl_mean < int4.kl_mean and q8.tokens == 256
