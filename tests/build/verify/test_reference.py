"""The reference's formulas on numbers that can be checked by hand, and its streaming against one sequence at a time."""

import math
from collections.abc import Callable

import numpy as np
import pytest

from ling3export.foundation.errors import RequestError
from ling3export.model.config import Config
from ling3export.verify import formulas
from ling3export.verify import reference as reference_module
from ling3export.verify.reference import Reference
from tests.support.tiny import tiny_fields, tiny_weights

# Two orders of the same sums in float64; a wrong formula gives an error ten orders of magnitude larger.
FLOAT64_NOISE = 1e-12
# fp32 rounding over seven micro layers; the largest position's measured error is 4e-6.
FLOAT32_NOISE = 2e-5


def relative(found: np.ndarray, expected: np.ndarray) -> float:
    """Largest relative L2 error of a row."""
    return float(np.max(np.linalg.norm(found - expected, axis=-1) / np.linalg.norm(expected, axis=-1)))


def tiny_reference(dtype: type = np.float64, **changes) -> Reference:
    fields = tiny_fields(**changes)
    return Reference(Config.from_dict(fields), tiny_weights(fields).__getitem__, dtype)


def test_sigmoid_is_exact_on_both_sides_and_never_overflows():
    x = np.array([-1000.0, -40.0, 0.0, math.log(3), 1000.0])
    np.testing.assert_allclose(formulas.sigmoid(x), [0, math.exp(-40), 0.5, 0.75, 1], rtol=1e-15)


def test_norms_add_eps_to_the_mean_and_to_the_sum():
    x = np.array([3e-3, 4e-3])
    np.testing.assert_allclose(
        formulas.rms_norm(x, np.array([1.0, 10.0]), 1e-6), x / math.sqrt(12.5e-6 + 1e-6) * [1, 10]
    )
    np.testing.assert_allclose(formulas.l2_norm(x), x / math.sqrt(25e-6 + 1e-6))


def test_last_conv_tap_multiplies_the_current_token():
    x = np.array([[1.0], [10.0], [100.0], [1000.0], [10000.0]])
    taps = np.array([[4.0, 3.0, 2.0, 1.0]])
    np.testing.assert_array_equal(formulas.causal_conv(x, taps)[:, 0], [1, 12, 123, 1234, 12340])


def test_conv_of_a_sequence_shorter_than_its_taps():
    np.testing.assert_array_equal(formulas.causal_conv(np.array([[2.0]]), np.array([[5.0, 6.0, 7.0, 8.0]])), [[16.0]])


def test_bounded_decay_adds_the_bias_before_the_rate():
    decay = formulas.kda_log_decay(np.array([[[1.0, -2.0]]]), np.array([math.log(2)]), np.array([[0.5, 2.0]]), -5.0)
    np.testing.assert_allclose(decay, [[[-5 / (1 + math.exp(-3)), -2.5]]], rtol=1e-15)


def test_unbounded_decay_is_a_softplus():
    decay = formulas.kda_log_decay(np.array([[[1.0, -2.0]]]), np.array([math.log(2)]), np.array([[0.5, 2.0]]), None)
    np.testing.assert_allclose(decay, [[[-2 * math.log(1 + math.exp(1.5)), -2 * math.log(2)]]], rtol=1e-15)


def test_recurrence_of_two_tokens_by_hand():
    """One head, K = 2, V = 1. Token 0 writes 0.5 * 6 along (1, 0), so S = (3, 0).

    Token 1 halves channel 0 and quarters channel 1: S = (1.5, 0). It reads kᵀS = 0.9; r = 10 - 0.9 = 9.1; S += 1 *
    (0.6, 0.8) * 9.1 = (6.96, 7.28).
    """
    q = np.array([[[1.0, 1.0]], [[1.0, 2.0]]])
    k = np.array([[[1.0, 0.0]], [[0.6, 0.8]]])
    v = np.array([[[6.0]], [[10.0]]])
    log_decay = np.log([[[0.125, 0.125]], [[0.5, 0.25]]])
    beta = np.array([[0.5], [1.0]])
    np.testing.assert_allclose(
        formulas.kda_recurrence(q, k, v, log_decay, beta)[0][:, 0, 0], [3, 6.96 + 2 * 7.28], rtol=1e-14
    )


def test_recurrence_equals_scalar_loops():
    rng = np.random.default_rng(0)
    tokens, heads, width, values = 5, 2, 3, 4
    q, k = rng.normal(size=(2, tokens, heads, width))
    v, log_decay = rng.normal(size=(tokens, heads, values)), -rng.uniform(0, 5, (tokens, heads, width))
    beta = rng.uniform(size=(tokens, heads))
    expected = np.zeros((tokens, heads, values))
    for h in range(heads):
        state = [[0.0] * values for _ in range(width)]
        for t in range(tokens):
            state = [[math.exp(log_decay[t, h, i]) * s for s in state[i]] for i in range(width)]
            rest = [v[t, h, j] - sum(k[t, h, i] * state[i][j] for i in range(width)) for j in range(values)]
            for i in range(width):
                for j in range(values):
                    state[i][j] += beta[t, h] * k[t, h, i] * rest[j]
            expected[t, h] = [sum(q[t, h, i] * state[i][j] for i in range(width)) for j in range(values)]
    np.testing.assert_allclose(formulas.kda_recurrence(q, k, v, log_decay, beta)[0], expected, rtol=FLOAT64_NOISE)


def test_rope_rotates_neighbouring_pairs():
    """Position 1, theta 100, width 4: pair (0, 1) turns by 1, pair (2, 3) by 100^(-2/4) = 0.1."""
    angles = formulas.rope_angles(2, 4, 100.0)
    assert angles.dtype == np.float32
    x = np.array([[1.0, 0.0, 0.0, 1.0]] * 2)
    turned = [math.cos(1), math.sin(1), -math.sin(0.1), math.cos(0.1)]
    np.testing.assert_allclose(formulas.rope(x, angles), [x[0], turned], atol=1e-8)


def test_rope_scores_depend_only_on_distance():
    rng = np.random.default_rng(0)
    q, k = rng.normal(size=(2, 1, 8)).repeat(40, axis=1)
    angles = formulas.rope_angles(40, 8, 10000.0)
    scores = formulas.rope(q, angles) @ formulas.rope(k, angles).T
    np.testing.assert_allclose(scores[30, 20:], scores[10, :20], atol=1e-5)


def test_attention_sees_the_past_and_itself(monkeypatch):
    """With equal keys, each output is the mean of the values so far, also over several query blocks."""
    monkeypatch.setattr("ling3export.verify.formulas.QUERY_BLOCK", 2)
    values = np.array([1.0, 3.0, 8.0, 0.0, 13.0]).reshape(5, 1, 1)
    out = formulas.causal_attention(np.ones((5, 1, 2)), np.zeros((5, 1, 2)), values, 1.0)
    np.testing.assert_allclose(out.ravel(), [1, 2, 4, 3, 5])


def test_attention_scale_multiplies_the_scores():
    q, k = np.array([[[1.0]], [[2.0]]]), np.array([[[0.0]], [[math.log(3)]]])
    out = formulas.causal_attention(q, k, np.array([[[0.0]], [[1.0]]]), 0.5)
    np.testing.assert_allclose(out.ravel(), [0, 0.75])


def routed(scores: list[float], bias: list[float], chosen: int = 2):
    return formulas.route(np.array([scores]), np.array(bias), 3, 2, chosen, 2.5)


def test_groups_are_ranked_by_their_two_best_scores():
    """Group sums 0.9 + 0.1, 0.6 + 0.5, 0.55 + 0.5: the group with the best single expert is dropped."""
    routing = routed([0.9, 0.1, 0.6, 0.5, 0.55, 0.5], [0.0] * 6)
    assert routing.experts.tolist() == [[2, 4]]
    np.testing.assert_allclose(routing.weights, [[0.6 / 1.15 * 2.5, 0.55 / 1.15 * 2.5]])
    np.testing.assert_allclose(routing.margins, (0.05, 0.05))


def test_bias_chooses_but_does_not_weigh():
    """The bias of 0.5 makes expert 0 and its group chosen; the expert's weight is still its score of 0.2."""
    routing = routed([0.2, 0.1, 0.6, 0.3, 0.4, 0.15], [0.5, 0.0, 0.0, 0.0, 0.0, 0.0])
    assert routing.experts.tolist() == [[0, 2]]
    np.testing.assert_allclose(routing.weights, [[0.2 / 0.8 * 2.5, 0.6 / 0.8 * 2.5]])
    np.testing.assert_allclose(routing.margins, (0.3, 0.25))


def test_negative_biased_scores_still_beat_dropped_groups():
    routing = routed([0.1, 0.1, 0.2, 0.2, 0.3, 0.3], [-1.0] * 6, chosen=3)
    assert routing.experts.tolist() == [[4, 5, 2]]
    assert routing.margins.expert == 0


def test_margins_are_infinite_where_nothing_is_chosen():
    routing = formulas.route(np.array([[0.1, 0.2, 0.3, 0.4]]), np.zeros(4), 2, 2, 4, 1.0)
    assert routing.margins == (math.inf, math.inf)


VARIANTS = pytest.mark.parametrize(
    "changes",
    [
        {},
        {"q_lora_rank": None},
        {"kda_safe_gate": False},
        {"first_k_dense_replace": 3, "num_hidden_layers": 8},
        {"num_shared_experts": 2, "short_conv_kernel_size": 3},
    ],
    ids=["published", "flat query", "softplus gate", "three dense layers", "two shared experts"],
)


@VARIANTS
def test_sequences_do_not_see_each_other_nor_their_future(changes: dict):
    reference = tiny_reference(**changes)
    prompts = [np.random.default_rng(n).integers(0, 96, n).tolist() for n in (1, 9, 20)]
    together = reference.logits_many([*prompts, prompts[2][:7]])
    for prompt, logits in zip(prompts, together, strict=False):
        assert logits.shape == (len(prompt), 96)
        assert relative(logits, reference.logits(prompt)) < FLOAT64_NOISE
    assert relative(together[3], together[2][:7]) < FLOAT64_NOISE


def test_positions_choose_rows():
    reference = tiny_reference()
    prompts = [[5, 6, 7, 8], [9, 10]]
    everything = reference.logits_many(prompts)
    chosen = reference.logits_many(prompts, positions=[[3, 1], []])
    assert relative(chosen[0], everything[0][[3, 1]]) < FLOAT64_NOISE
    assert chosen[1].shape == (0, 96)


def test_lm_head_in_blocks_equals_one_product(monkeypatch):
    whole = tiny_reference().logits([1, 2, 3])
    monkeypatch.setattr(reference_module, "VOCAB_BLOCK", 40)
    assert relative(tiny_reference().logits([1, 2, 3]), whole) < FLOAT64_NOISE


def test_float32_stays_float32_and_close():
    prompt = np.random.default_rng(1).integers(0, 96, 70).tolist()
    exact, rounded = tiny_reference(), tiny_reference(np.float32)
    expected, found = exact.logits(prompt), rounded.logits(prompt)
    assert found.dtype == np.float32
    assert min(exact.margins) > 5e-6
    assert relative(found, expected) < FLOAT32_NOISE


def test_margins_are_those_of_the_last_call():
    reference = tiny_reference()
    long, short = list(range(60)), [1]
    reference.logits(long)
    first = reference.margins
    reference.logits(short)
    assert min(reference.margins) > min(first) > 0
    reference.logits(long)
    assert reference.margins == first


def test_only_chosen_experts_are_read_and_lm_head_once():
    fields = tiny_fields()
    weights, read = tiny_weights(fields), []

    def recorded(name: str) -> np.ndarray:
        read.append(name)
        return weights[name]

    Reference(Config.from_dict(fields), recorded).logits([3])
    experts = {name.split(".")[5] for name in read if name.startswith("model.layers.1.mlp.experts.")}
    assert len(experts) == fields["num_experts_per_tok"]
    assert read.count("lm_head.weight") == 1
    assert len(set(read)) == len(read)


@pytest.mark.parametrize("call", [lambda r: r.logits([1, 96, -1]), lambda r: r.logits_many([[0], [-1, 96]])])
def test_unknown_tokens_are_refused(call: Callable[[Reference], object]):
    with pytest.raises(
        RequestError, match=r"^token `token_ids`: expected 0 to 95, found (96, -1|-1, 96), in the prompt$"
    ):
        call(tiny_reference())
