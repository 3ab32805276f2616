"""Sampling: exact choices, exact kept sets, and draws that depend only on seed and position."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding

from ling3export.checkpoint.synth import config_fields
from ling3export.model.config import Config
from ling3export.model.geometry import AXIS, Geometry
from ling3export.model.program import build_step
from ling3export.model.sampling.sample import gumbel
from ling3export.model.sampling.thresholds import keep_mask, ordered
from tests.support.direct import pack
from tests.support.tolerances import CHI_SQUARE_5, KERNEL

pytestmark = pytest.mark.jit

CONFIG = Config.from_dict(config_fields("micro", {}))
VOCAB, SLOTS = CONFIG.vocab_size, 8


class Sampler:
    """``sample@rows`` at one tensor parallelism, or in the form for a card."""

    def __init__(self, tp: int | str, rows: int) -> None:
        form, tp = ("card", 1) if isinstance(tp, str) else ("loops", tp)
        sizes = {"slots": SLOTS, "pages": 1, "page_size": 16, "max_pages": 1, "latent_row": 1}
        geometry = Geometry(tp=tp, dtype="float32", form=form, **sizes)
        mesh = Mesh(np.array(jax.devices()[:tp]), (AXIS,), axis_types=(AxisType.Auto,))
        self.step, self.rows = build_step(CONFIG, geometry, "sample", rows, mesh), rows
        # unrolled loops take long to optimize
        quick = {"xla_backend_optimization_level": 0} if form == "card" else {}
        self.call = jax.jit(self.step.call, compiler_options=quick)
        self.shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), self.step.specs)

    def __call__(self, logits: np.ndarray, **fields: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(token, logprob, last_token); greedy by default. Rows without a sequence fill the call."""
        given = len(logits)
        values = {"slot": np.arange(1, given + 1), "top_p": np.ones(given)} | fields
        padded = {}
        for name, value in values.items():
            value = np.broadcast_to(value, (given,))
            padded[name] = np.concatenate([value, np.zeros(self.rows - given, value.dtype)])
        whole = np.concatenate([logits, np.full((self.rows - given, VOCAB), 7.0)]).astype(np.float32)
        batch = {"packed": pack(self.step.fields, **padded), "logits": whole}
        arguments: Any = ({}, {"last_token": np.full(SLOTS + 1, -9, np.int32)}, batch)
        state, out = self.call(*jax.tree.map(jax.device_put, arguments, self.shardings))
        tokens, logprobs = np.asarray(out["token"]), np.asarray(out["logprob"])
        return tokens[:given], logprobs[:given], np.asarray(state["last_token"])


@pytest.fixture(scope="module")
def samplers() -> dict[tuple[int | str, int], Sampler]:
    return {cell: Sampler(*cell) for cell in ((1, 8), (1, 3), (2, 8), (4, 8), ("card", 8))}


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.sum(np.exp(shifted), axis=-1, keepdims=True))


@pytest.mark.parametrize("tp", [1, 2, 4, "card"])
def test_greedy_finds_every_token(samplers: dict, tp: int | str):
    logits = np.random.default_rng(0).normal(size=(8, VOCAB)).astype(np.float32)
    for first in range(0, VOCAB, 8):
        raised = logits.copy()
        raised[np.arange(8), first + np.arange(8)] = 9
        token, logprob, last = samplers[tp, 8](raised)
        assert token.tolist() == list(range(first, first + 8))
        assert last.tolist() == [-9, *token]
        assert np.max(np.abs(logprob - log_softmax(raised)[np.arange(8), token])) < KERNEL


@pytest.mark.parametrize("tp", [1, 2, 4, "card"])
def test_greedy_ties_go_to_the_lowest_id(samplers: dict, tp: int | str):
    """Ties within a device's part of the vocabulary, across two devices, and among all tokens."""
    tied = [(0, 1), (5, 79), (79, 80), (80, 319), (159, 160, 239), (3, 240), (100, 101), tuple(range(VOCAB))]
    logits = np.full((8, VOCAB), -3.0)
    for row, ids in enumerate(tied):
        logits[row, list(ids)] = 2.5
    assert samplers[tp, 8](logits)[0].tolist() == [ids[0] for ids in tied]


def test_rows_without_a_sequence_write_only_to_the_dummy_slot(samplers: dict):
    token, _, last = samplers[1, 8](np.random.default_rng(0).normal(size=(2, VOCAB)), slot=np.array([5, 2]))
    assert last[[5, 2]].tolist() == token.tolist()
    assert last[[1, 3, 4, 6, 7, 8]].tolist() == [-9] * 6


def kept_by_numpy(scaled: np.ndarray, top_k: int, top_p: float) -> np.ndarray:
    """The contract's rule: the ``top_k`` best, equal ones by id; of these the fewest whose sum reaches ``top_p``."""
    order = np.argsort(-scaled, kind="stable")[: top_k or None]
    probability = np.exp(log_softmax(scaled[order]))
    count = len(order) if top_p >= 1 else int(np.searchsorted(np.cumsum(probability), top_p)) + 1
    kept = np.zeros(len(scaled), bool)
    kept[order[:count]] = True
    return kept


def borders(scaled: np.ndarray, top_k: int, rng: np.random.Generator) -> float:
    """A top_p half way between two cumulated probabilities, so that fp32 cannot land on the other side."""
    ranked = np.sort(scaled)[::-1][: top_k or None]
    cumulated = np.cumsum(np.exp(log_softmax(ranked)))
    wide = np.flatnonzero(np.diff(cumulated) > 1e-4)
    at = int(rng.choice(wide)) if len(wide) else 0
    return float((cumulated[at] + cumulated[at + 1]) / 2) if len(wide) else 0.5


@pytest.mark.parametrize(("width", "unrolled"), [(8, False), (320, False), (320, True)])
def test_kept_set_is_exact(width: int, unrolled: bool):
    rng = np.random.default_rng(width)
    mask = jax.jit(lambda *given: keep_mask(*given, unrolled))
    for _ in range(12):
        scaled = (rng.normal(size=(8, width)) * rng.choice([0.2, 1, 4])).astype(np.float32)
        scaled[0] = np.round(scaled[0])  # ties
        scaled -= scaled.max(axis=1, keepdims=True)
        top_k = np.array([0, 1, 2, 5, width, width + 3, 0, 3])
        top_p = np.array([borders(scaled[row], top_k[row], rng) for row in range(8)])
        top_p[[1, 2]] = [0.0, 1e-9]  # the best token is always kept
        found = mask(jnp.asarray(scaled), jnp.asarray(top_k, jnp.int32), jnp.asarray(top_p, jnp.float32))
        expected = [kept_by_numpy(*row) for row in zip(scaled, top_k, top_p, strict=True)]
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("parts", [2, 4])
def test_kept_set_of_rows_in_parts_is_that_of_whole_rows(parts: int):
    """Half of the values are equal, so that borders fall among equal ones, in any part of a row."""
    rng = np.random.default_rng(parts)
    scaled = np.where(rng.random((8, 64)) < 0.5, 1.5, rng.normal(size=(8, 64))).astype(np.float32)
    scaled -= scaled.max(axis=1, keepdims=True)
    top_k = np.array([0, 5, 20, 30, 40, 0, 0, 64])
    top_p = np.array([1, 1, 1, 0.5, 0.7, 0.3, 0.9, 0.6])
    expected = np.array([kept_by_numpy(*row) for row in zip(scaled, top_k, top_p, strict=True)])
    lines = scaled.reshape(8, parts, -1).swapaxes(0, 1).reshape(8 * parts, -1)
    found = jax.jit(keep_mask)(jnp.asarray(lines), jnp.asarray(top_k, jnp.int32), jnp.asarray(top_p, jnp.float32))
    np.testing.assert_array_equal(np.asarray(found).reshape(parts, 8, -1).swapaxes(0, 1).reshape(8, 64), expected)


def test_order_of_floats_is_kept_as_integers():
    values = np.array([-np.inf, -3e38, -2.5, -1e-30, 0, 1e-30, 1, np.nextafter(np.float32(1), 2), 2.5, 3e38, np.inf])
    found = np.asarray(ordered(jnp.asarray(values, jnp.float32))).astype(np.int64)
    assert np.all(np.diff(found) > 0)
    zeros = np.asarray(ordered(jnp.asarray([0.0, -0.0], jnp.float32)))
    assert zeros[0] == zeros[1]


def test_top_p_of_one_keeps_all():
    """Even for tiny probabilities: their cumulated sum rounds to one long before the end."""
    scaled = np.array([np.linspace(0, -40, 320)], np.float32)
    mask = jax.jit(keep_mask)
    for top_k in (0, 200):
        found = mask(jnp.asarray(scaled), jnp.array([top_k], jnp.int32), jnp.ones(1, jnp.float32))
        np.testing.assert_array_equal(found[0], kept_by_numpy(scaled[0], top_k, 1.0))


@pytest.mark.parametrize(("devices", "width"), [(1, 1000), (4, 250), (3, 7)])
def test_noise_is_that_of_jax_bit_for_bit(devices: int, width: int):
    seed = jnp.array([0, 1, -1, 2**31 - 1, -(2**31), 12345], jnp.int32)
    position = jnp.array([0, 7, 131071, 2**31 - 1, 5, 0], jnp.int32)

    def own(seed: jax.Array, position: jax.Array) -> jax.Array:
        return jax.random.gumbel(jax.random.fold_in(jax.random.key(seed), position), (devices, width), jnp.float32)

    expected = jax.jit(jax.vmap(own, out_axes=1))(seed, position)
    noise = jax.jit(gumbel, static_argnums=(2, 3))(seed, position, devices, width)
    np.testing.assert_array_equal(np.asarray(noise).view(np.uint32), np.asarray(expected).view(np.uint32))


def test_draws_depend_only_on_seed_and_position(samplers: dict):
    """They do not depend on the row, neighbours, number of rows, tensor parallelism or form."""
    logits = np.random.default_rng(1).normal(size=(8, VOCAB)).astype(np.float32)
    fields = {
        "temperature": np.full(8, 1.3),
        "top_k": np.array([0, 50] * 4),
        "top_p": np.array([1, 0.9, 0.8, 1] * 2),
        "seed": np.arange(8) * 1000 - 3,
        "position": np.arange(8) * 7,
    }
    token, logprob, _ = samplers[1, 8](logits, **fields)
    assert len(set(token)) > 4
    assert np.max(np.abs(logprob - log_softmax(logits)[np.arange(8), token])) < KERNEL
    for cell in ((1, 8), (1, 3), (2, 8), (4, 8), ("card", 8)):
        for rows in ([7, 2, 0], [5], [1, 4]):
            assert samplers[cell](logits[rows], **{k: v[rows] for k, v in fields.items()})[0].tolist() == [*token[rows]]
    moved = samplers[1, 8](logits, **fields | {"position": fields["position"] + 1})[0]
    other = samplers[1, 8](logits, **fields | {"seed": fields["seed"] + 1})[0]
    assert np.sum(moved == token) < 3
    assert np.sum(other == token) < 3


def test_greedy_rows_next_to_sampled_ones(samplers: dict):
    logits = np.random.default_rng(2).normal(size=(8, VOCAB)).astype(np.float32)
    temperature = np.array([0, 5, 0, 5, 0, 5, 0, 5.0])
    token, logprob, _ = samplers[4, 8](logits, temperature=temperature, seed=np.arange(8))
    np.testing.assert_array_equal(token[::2], logits.argmax(axis=1)[::2])
    assert np.any(token[1::2] != logits.argmax(axis=1)[1::2])
    assert np.max(np.abs(logprob - log_softmax(logits)[np.arange(8), token])) < KERNEL


def assert_follows(drawn: list[int], best: np.ndarray, probability: np.ndarray) -> None:
    """Compares the counts of 2000 draws with the probabilities of ``best``; no other token may be drawn."""
    counts = np.array([drawn.count(token) for token in best])
    assert counts.sum() == 2000
    assert np.sum((counts - 2000 * probability) ** 2 / (2000 * probability)) < CHI_SQUARE_5


@pytest.mark.parametrize("along", ["seed", "position"])
def test_draws_follow_the_distribution(samplers: dict, along: str):
    """Six tokens are kept at temperature 0.7."""
    logits = np.random.default_rng(3).normal(size=VOCAB).astype(np.float32)
    best = np.argsort(-logits, kind="stable")[:6]
    probability = np.exp(log_softmax(logits[best] / 0.7))
    drawn = []
    for start in range(0, 2000, 8):
        fields = {"seed": 11, "position": 5} | {along: np.arange(start, start + 8)}
        drawn += samplers[1, 8](np.tile(logits, (8, 1)), temperature=0.7, top_k=6, **fields)[0].tolist()
    assert_follows(drawn, best, probability)


def kept_in_vllms_order(scaled: np.ndarray, min_p: float, top_k: int, top_p: float) -> np.ndarray:
    """First min_p over the whole softmax, then the ``top_k`` best, then the fewest whose sum reaches top_p."""
    probability = np.exp(log_softmax(scaled))
    left = np.flatnonzero(probability >= min_p * probability.max())
    kept = np.zeros(len(scaled), bool)
    kept[left[kept_by_numpy(scaled[left], top_k, top_p)]] = True
    return kept


@pytest.mark.parametrize(("tp", "width"), [(1, 2000), (2, 400), (4, 400), ("card", 400)])
def test_min_p_keeps_what_vllm_keeps_and_draws_follow_the_distribution(samplers: dict, tp: int | str, width: int):
    """One row of the call has all settings, one only min_p, one none, and one is greedy."""
    logits = np.random.default_rng(5).normal(size=VOCAB).astype(np.float32) * 1.5
    scaled = logits.astype(np.float64) / 0.8
    ranked = np.sort(scaled)[::-1]
    min_p = [float(np.exp((ranked[n - 1] + ranked[n]) / 2 - ranked[0])) for n in (12, 9)]  # between two tokens
    top_p = borders(scaled[kept_in_vllms_order(scaled, min_p[0], 8, 1.0)], 0, np.random.default_rng(0))
    settings = [(min_p[0], 8, top_p), (min_p[1], 0, 1.0), (1.0, 0, 1.0), (0.0, 8, 1.0)]
    kept = [kept_in_vllms_order(scaled, *each) for each in settings]
    assert [int(each.sum()) for each in kept][1:] == [9, 1, 8] and 1 < kept[0].sum() < 8
    drawn: list[list[int]] = [[] for _ in settings]
    fields = {name: np.tile([each[n] for each in settings], 2) for n, name in enumerate(("min_p", "top_k", "top_p"))}
    temperature = np.array([0.8] * 7 + [0])
    for start in range(0, width, 2):
        seed = np.repeat([start, start + 1], 4)
        tokens, *_ = samplers[tp, 8](np.tile(logits, (8, 1)), temperature=temperature, seed=seed, **fields)
        for row, token in enumerate(tokens[:7]):
            drawn[row % 4].append(int(token))
        assert tokens[7] == logits.argmax()
    for tokens, mask in zip(drawn, kept, strict=True):
        assert set(tokens) <= set(np.flatnonzero(mask)), "never another token"
    for row in (0, 1) if width == 2000 else ():
        best = np.flatnonzero(kept[row])
        assert_follows(drawn[row], best, np.exp(log_softmax(scaled[best])))


def test_a_min_p_of_0_draws_what_was_drawn_before_it(samplers: dict):
    """Also for a denormal, whose logarithm a device may compute like that of zero."""
    logits = np.random.default_rng(8).normal(size=(8, VOCAB)).astype(np.float32) * 4
    fields: dict[str, Any] = {"temperature": 1.4, "top_p": 0.999, "seed": np.arange(8)}
    plain = samplers[1, 8](logits, **fields)[0].tolist()
    assert len(set(plain)) > 4
    for min_p in (0.0, 1e-42, 1e-12):
        assert samplers[2, 8](logits, min_p=min_p, **fields)[0].tolist() == plain


@pytest.mark.parametrize("tp", [1, 2, 4, "card"])
@pytest.mark.parametrize("temperature", [1e-5, 1e-9, 1e-30, 1e-42])
def test_temperatures_next_to_zero_take_the_best_token(samplers: dict, tp: int | str, temperature: float):
    """Regression: logits over a temperature of 1e-9 lost the best token's lead, and top_p below 1 then took token 0.

    1e-42 is a denormal, which a device may treat as zero.
    """
    logits = np.random.default_rng(4).normal(size=(8, VOCAB)).astype(np.float32)
    fields: dict[str, Any] = {"top_k": np.array([0, 5] * 4), "top_p": np.array([0.9, 0.5, 1e-6, 1.0] * 2)}
    token, logprob, _ = samplers[tp, 8](logits, temperature=temperature, seed=np.arange(8), **fields)
    np.testing.assert_array_equal(token, logits.argmax(axis=1))
    assert np.max(np.abs(logprob - log_softmax(logits)[np.arange(8), token])) < KERNEL


def test_draws_from_large_logits_at_a_small_temperature_follow_the_distribution(samplers: dict):
    """Regression: logits of 4096 over a temperature of 2^-11 are 2^23, where fp32 had no digits for the noise."""
    temperature = 2.0**-11
    best = np.arange(6) * 50 + 7
    logits = np.zeros(VOCAB, np.float32)
    logits[best] = 4096 + np.array([2, 0, 1, 2, 1, 3]) * temperature  # exact in fp32
    probability = np.exp(log_softmax((logits[best] - 4096) / temperature))
    drawn = []
    for start in range(0, 2000, 8):
        fields = {"seed": 11, "position": np.arange(start, start + 8)}
        drawn += samplers[1, 8](np.tile(logits, (8, 1)), temperature=temperature, **fields)[0].tolist()
    assert_follows(drawn, best, probability)


@pytest.mark.parametrize("tp", [1, 2, 4, "card"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_whose_logits_are_not_usable_are_marked(samplers: dict, tp: int | str, temperature: float):
    """Regression: NaN logits gave token 2147483647, and a row of -inf token 0. Neighbours keep their tokens."""
    logits = np.random.default_rng(6).normal(size=(8, VOCAB)).astype(np.float32)
    fields: dict[str, Any] = {"temperature": temperature, "top_p": 0.9, "top_k": 40, "seed": np.arange(8)}
    expected = samplers[tp, 8](logits, **fields)[0]
    bad = {1: (5, np.nan), 2: (VOCAB - 1, np.nan), 4: (slice(None), -np.inf), 5: (80, np.inf), 6: (slice(None), np.nan)}
    spoiled = logits.copy()
    for row, (place, value) in bad.items():
        spoiled[row, place] = value
    token, logprob, last = samplers[tp, 8](spoiled, **fields)
    assert token.tolist() == [-1 if row in bad else expected[row] for row in range(8)]
    assert last[1:].tolist() == token.tolist()
    assert np.isfinite(logprob).tolist() == [row not in bad for row in range(8)]


@pytest.mark.parametrize("tp", [1, 2, 4, "card"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_tokens_that_may_not_be_taken_make_no_nan(samplers: dict, tp: int | str, temperature: float):
    """Regression: a device with only -inf in its part of the vocabulary, as from a mask, gave a NaN log-probability."""
    logits = np.random.default_rng(7).normal(size=(8, VOCAB)).astype(np.float32)
    allowed = np.zeros((8, VOCAB), bool)
    for row in range(8):  # a few neighbours, so that other devices have none; the last row allows a single token
        allowed[row, 40 * row : 40 * row + (1 if row == 7 else 9)] = True
    masked = np.where(allowed, logits, -np.inf).astype(np.float32)
    token, logprob, _ = samplers[tp, 8](masked, temperature=temperature, top_p=0.95, seed=np.arange(8))
    assert allowed[np.arange(8), token].all()
    if not temperature:
        np.testing.assert_array_equal(token, masked.argmax(axis=1))
    assert np.max(np.abs(logprob - log_softmax(masked)[np.arange(8), token])) < KERNEL
