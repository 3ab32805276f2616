"""A decode step that is split before the experts: its five programs give the results of the one program."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ling3export.foundation.dtypes import MASK
from ling3export.model.ffn.split_program import combine_rows, dispatch, expert_rows, quantized
from ling3export.model.moe import MixtureOfExperts, route
from ling3export.model.program import bind
from ling3export.runners.engine.inputs import decode_fields
from tests.support.direct import Direct, pack, relative
from tests.support.numerics import Case, Quick
from tests.support.tolerances import FLOAT32, SAME

pytestmark = pytest.mark.jit

ROWS = 3  # rows of a micro batch; one is padding
STEPS = 6


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """One group: KDA with a dense MLP, KDA with experts that limit SwiGLU, MLA with experts without a limit.

    test_split.py has a model without any limits.
    """
    limits = {"expert_swiglu_limit_list": [0, 0.01], "share_expert_swiglu_limit_list": [0, 0.02]}
    return Case(tmp_path_factory.mktemp("case") / "checkpoint", (STEPS,) * 4, num_hidden_layers=3, **limits).expect()


def test_limits_of_experts_change_what_the_split_is_compared_with(case: Case, tmp_path: Path):
    plain = Case(tmp_path / "checkpoint", (STEPS,) * 4, num_hidden_layers=3).expect()
    assert case.prompts == plain.prompts
    assert relative(np.array(case.expected[0]), np.array(plain.expected[0])) > 1e-2


class Split:
    """The five programs of one ``Direct``, called as attention processes and FFN workers call them."""

    def __init__(self, direct: Direct, pairs: int) -> None:
        self.direct, self.pairs = direct, pairs

    def run(self, phase: str, padding: int, batch: dict[str, Any], **fields: Any) -> dict[str, Any]:
        step, call = self.direct.step(phase, padding)
        takes = step.specs[0]
        params = {stack: {name: self.direct.params[stack][name] for name in rows} for stack, rows in takes.items()}
        if step.fields:
            batch = batch | {"packed": pack(step.fields, **fields)}
        state, out = call(params, self.direct.state if step.specs[1] else {}, batch)
        if step.specs[1]:
            self.direct.state = state
        return out

    def exchange(self, sent: list[tuple[int, dict[str, Any]]]) -> list[np.ndarray]:
        """Results of the FFN workers for several micro batches, which may be in different layers."""
        ids = np.full(self.pairs, MASK, np.int32)
        layers, data = np.zeros(self.pairs, np.int32), np.zeros((self.pairs, *sent[0][1]["tokens"].shape[1:]), "f4")
        at = 0
        for layer, out in sent:
            chosen = np.asarray(out["expert_ids"])
            part = slice(at, at + chosen.size)
            ids[part], layers[part] = chosen.reshape(-1), layer
            data[part] = np.repeat(np.asarray(out["tokens"]), chosen.shape[1], axis=0)
            at = part.stop
        found = self.run("dispatch", self.pairs, {"token_data": data}, expert_ids=ids, layer_ids=layers, out_num=at)
        done = self.run("experts", self.pairs, {"y": found["y"], "group_list": found["group_list"]})["results"]
        count, results = int(found["actual_token_num"][0]), np.full(data.shape, np.nan, "f4")
        results[np.asarray(found["gather_idx"])[:count]] = np.asarray(done)[:count]
        assert int(found["dropped"][0]) == 0
        shape = (len(sent), *sent[0][1]["expert_ids"].shape, -1)
        return list(results[:at].reshape(shape))

    def decode(self, batches: Sequence[Sequence[tuple[int, int, int]]], lag: int = 0) -> list[np.ndarray]:
        """One step of each micro batch of (slot, position, token), ``lag`` layers apart; returns the rows' logits."""
        config, fields = self.direct.config, []
        for rows in batches:
            slots, positions, tokens = zip(*rows, strict=True)
            fields.append(decode_fields(ROWS, slots, positions, self.direct.tables, tokens))
        hidden = [np.zeros((ROWS, config.hidden_size), "f4") for _ in batches]
        for turn in range(config.num_hidden_layers + lag * (len(batches) - 1)):
            sent = []
            for number, each in enumerate(fields):
                layer = turn - lag * number
                if 0 <= layer < config.num_hidden_layers:
                    out = self.run("attend", ROWS, {"hidden": hidden[number]}, **each, layer=layer)
                    hidden[number] = out["residual"]
                    if config.mlp_kinds[layer] == "moe":
                        sent.append((number, config.layers("moe").index(layer), out))
            back = self.exchange([(layer, out) for _, layer, out in sent]) if sent else []
            for (number, _, out), results in zip(sent, back, strict=True):
                names = ("residual", "expert_ids", "weights")
                batch = {name: out[name] for name in names} | {"results": results}
                hidden[number] = self.run("combine", ROWS, batch)["hidden"]
        return [
            np.asarray(self.run("head", ROWS, {"hidden": each})["logits"])[: len(rows)]
            for each, rows in zip(hidden, batches, strict=True)
        ]


def test_a_step_through_the_split_equals_the_fused_one(case: Case):
    """Two micro batches in different layers at once; state, logits and the next step agree.

    This tests the form for accelerators; test_split.py has an artifact in the form for cpu.
    """
    direct = Quick(case.config, case.read, tp=2, form="tiles")
    split = Split(direct, 2 * ROWS * case.config.num_experts_per_tok)
    prompts, found = case.prompts, {}
    for way in ("fused", "split"):
        direct.reset()
        direct.state = jax.tree.map(jnp.zeros_like, direct.state)  # sequences begin here, without a prefill
        for at in range(STEPS):
            rows = [(slot, at, ids[at]) for slot, ids in enumerate(prompts[:3], 1)]
            if way == "fused":
                logits = direct.decode(ROWS, rows)
            else:
                first, second = split.decode([rows[:2], rows[2:]], lag=at % 2)
                logits = [*first, *second]
            expected = [ids[at] for ids in case.expected[:3]]
            assert max(relative(one, wanted) for one, wanted in zip(logits, expected, strict=True)) < FLOAT32
            found[way, at] = np.array(logits)
    assert max(relative(found["split", at], found["fused", at]) for at in range(STEPS)) < SAME


@pytest.mark.parametrize(
    ("layer", "weights"),
    [(0, "bf16"), (1, "bf16"), (1, "int4"), (1, "int4-small")],
    ids=["limited", "not limited", "int4", "int4-small"],
)
def test_dispatch_experts_and_combine_equal_the_fused_experts(case: Case, layer: int, weights: str):
    """One layer of many rows, so that tiles hold several; the output of padding rows is zero."""
    config, rng = case.config, np.random.default_rng(0)
    direct = Quick(config, case.read, weights=weights)
    tokens, top = 40, config.num_experts_per_tok
    x = jnp.asarray(rng.standard_normal((tokens, config.hidden_size)), jnp.float32)
    valid, residual = jnp.arange(tokens) < 37, jnp.asarray(rng.standard_normal(x.shape), jnp.float32)

    def through(moe: MixtureOfExperts, data: jax.Array, chosen: jax.Array, weights: jax.Array) -> jax.Array:
        pairs = tokens * top
        fields = {"expert_ids": chosen.reshape(-1), "layer_ids": jnp.full(pairs, layer), "out_num": jnp.array([pairs])}
        _, found = dispatch(direct, {}, fields, {"token_data": jnp.repeat(data, top, axis=0)})
        done = expert_rows(moe, found["y"], found["group_list"], found.get("dynamic_scale"))
        place = jnp.where(jnp.arange(pairs) < found["actual_token_num"], found["gather_idx"], pairs)
        results = jnp.full(done.shape, jnp.nan).at[place].set(done, mode="drop")
        return combine_rows(residual, results.reshape(tokens, top, -1), chosen, weights) - residual

    def both(params: Any) -> tuple[jax.Array, ...]:
        moe = bind(config, direct.geometry)(params).moe
        assert isinstance(moe, MixtureOfExperts)
        fused = moe(x, layer, valid) - moe.shared(x, layer)
        chosen, weights = route(*moe.scores(x, layer), config)
        chosen = jnp.where(valid[:, None], chosen, MASK)
        return fused, through(moe, x, chosen, weights), through(moe, quantized(x), chosen, weights)

    alone = jax.vmap(both, in_axes=None, axis_name="tp", axis_size=1)
    fused, split, int8 = (np.asarray(value)[0] for value in jax.jit(alone)(direct.params))
    assert not split[37:].any() and not int8[37:].any()
    assert relative(split[:37], fused[:37]) < SAME
    # Rounding adds at most half of 1/127 of a row's largest number; where a limit cuts values off, it may change more.
    assert layer == 0 or 1e-3 < relative(int8[:37], fused[:37]) < 3e-2


def test_tokens_of_8_bits_are_as_near_as_their_scale_says():
    """Also a row of zeros, and one whose largest magnitude is negative."""
    x = np.random.default_rng(0).standard_normal((5, 7)).astype(np.float32) * 10.0 ** np.arange(-12, 13, 6)[:, None]
    x[2], x[3, 4] = 0, -9e9
    rows = np.asarray(jax.jit(quantized)(x.astype(np.float32)))
    assert rows.shape == (5, 11) and rows.dtype == np.uint8
    values, scale = rows[:, :7].view(np.int8), rows[:, 7:].copy().view("<f4")
    assert values[3, 4] == -127 and np.abs(values).max(axis=1).tolist() == [127, 127, 0, 127, 127]
    assert (np.abs(values * scale - x) <= scale * (0.5 + 1e-4)).all()
