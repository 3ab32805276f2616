"""``logits_processor``: edits and masks of logits, and the most likely tokens, against numpy, at any TP."""

from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding

from ling3export.checkpoint.synth import config_fields
from ling3export.model.config import Config
from ling3export.model.geometry import AXIS, Form, Geometry
from ling3export.model.inputs import BIASES
from ling3export.model.program import build_step
from ling3export.model.sampling.logits_processor import TOP
from ling3export.runners.engine import validation
from tests.support.direct import pack

pytestmark = pytest.mark.jit

VOCAB, ROWS = 320, 3  # 80 tokens on each of four devices, which begin in the middle of a mask's word
CONFIG = Config.from_dict(config_fields("micro", {}))
KERNEL = 1e-5


class Adjuster:
    """``logits_processor@3`` at one tensor parallelism and in one form."""

    def __init__(self, tp: int, form: Form) -> None:
        sizes = {"slots": 8, "pages": 1, "page_size": 16, "max_pages": 1, "latent_row": 1}
        geometry = Geometry(tp=tp, dtype="float32", form=form, **sizes)
        mesh = Mesh(np.array(jax.devices()[:tp]), (AXIS,), axis_types=(AxisType.Auto,))
        self.step = build_step(CONFIG, geometry, "logits_processor", ROWS, mesh)
        self.call = jax.jit(self.step.call)
        self.shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), self.step.specs)

    def __call__(self, logits: np.ndarray, **values: Any) -> dict[str, np.ndarray]:
        shapes = {name: value.shape for name, value in self.step.arguments[2].items()}
        batch = {name: np.zeros(shapes[name], np.int32) for name in ("edits", "mask", "token")}
        for name in batch.keys() & values.keys():
            value = np.asarray(values[name])
            batch[name][tuple(map(slice, value.shape))] = value
        fields = {name: values[name] for name in ("edited", "masked", "top") if name in values}
        batch |= {"packed": pack(self.step.fields, **fields), "logits": logits.astype(np.float32)}
        arguments: Any = ({}, {}, batch)
        state, out = self.call(*jax.tree.map(jax.device_put, arguments, self.shardings))
        assert state == {}
        return {name: np.asarray(value) for name, value in out.items()}


@pytest.fixture(scope="module", params=[(1, "loops"), (4, "loops"), (1, "card")])
def adjuster(request: pytest.FixtureRequest) -> Adjuster:
    return Adjuster(*request.param)


@pytest.fixture
def logits() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(ROWS, VOCAB)).astype(np.float32)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


def test_edits_scale_by_sign_then_add_and_rows_count_their_own(adjuster: Adjuster, logits: np.ndarray):
    """More edits than a block has, in any order, on all devices; row 1 has none, row 2 fewer than its block lists."""
    rng = np.random.default_rng(1)
    ids = np.stack([rng.permutation(VOCAB)[:200] for _ in range(ROWS)])
    scale, add = rng.uniform(0.5, 2, ids.shape), rng.normal(size=ids.shape)
    edits = np.stack([ids, *(each.astype(np.float32).view(np.int32) for each in (scale, add))]).astype(np.int32)
    counts = [200, 0, 7]
    out = adjuster(logits, edits=edits, edited=counts)
    expected = logits.copy()
    for row, count in enumerate(counts):
        at = ids[row, :count]
        old, s, a = logits[row, at], scale[row, :count].astype(np.float32), add[row, :count].astype(np.float32)
        expected[row, at] = np.where(old > 0, old / s, old * s) + a
    np.testing.assert_allclose(out["logits"], expected, rtol=1e-6)


def test_a_mask_forbids_every_token_without_its_bit(adjuster: Adjuster, logits: np.ndarray):
    allowed = np.random.default_rng(2).random((ROWS, VOCAB)) < 0.3
    bits = np.pad(allowed, ((0, 0), (0, -VOCAB % 32)))
    mask = np.packbits(bits, axis=1, bitorder="little").view(np.int32)
    out = adjuster(logits, mask=mask, masked=[1, 0, 1])
    allowed[1] = True
    np.testing.assert_array_equal(out["logits"], np.where(allowed, logits, -np.inf))


def test_nan_passes_through_a_mask(adjuster: Adjuster, logits: np.ndarray):
    logits[0, 5] = np.nan
    out = adjuster(logits, masked=[1, 1, 1])
    assert np.isnan(out["logits"][0, 5])
    assert np.isneginf(out["logits"][1:]).all()


def test_the_most_likely_tokens_are_those_of_a_stable_sort(adjuster: Adjuster, logits: np.ndarray):
    """Ties within a device and across devices; log-probabilities are those of the logits before edits and masks."""
    logits[0] = np.round(logits[0])
    logits[1] = 2.5
    out = adjuster(logits, top=[TOP, 1, 5], token=[7, VOCAB - 1, 100], masked=[1, 1, 1])
    best = np.argsort(-logits, axis=1, kind="stable")[:, :TOP]
    np.testing.assert_array_equal(out["top_token"], best)
    expected = log_softmax(logits)
    assert np.max(np.abs(out["top_logprob"] - np.take_along_axis(expected, best, axis=1))) < KERNEL
    assert np.max(np.abs(out["logprob"] - expected[np.arange(ROWS), [7, VOCAB - 1, 100]])) < KERNEL


def test_only_so_many_are_ranked_as_a_row_of_the_call_asks_for(adjuster: Adjuster, logits: np.ndarray):
    out = adjuster(logits, top=[0, 3, 0])
    assert (out["top_token"][:, :3] >= 0).all()
    assert (out["top_token"][:, 3:] == -1).all()
    assert (adjuster(logits)["top_token"] == -1).all()


def test_there_is_room_for_what_a_request_may_ask():
    assert validation.BIASES == BIASES
    assert validation.TOP_LOGPROBS.high == TOP
