"""Mistakes that a rewrite of the model could make, planted one by one: the numeric comparison of the tests must fail.

    python -m tools.campaigns.mistakes [NAME …]

tests/model/test_mistakes.py plants each of them, too, in `make extras`.

A mistake replaces a function of the model while a step is traced. The program prints the largest relative error of the
logits for each mistake. It must be at least MISTAKE of tests/support/tolerances.py. The numbers in comments are those
of 2026-11-21.
"""

import sys
import tempfile
from collections.abc import Callable, Sequence
from copy import copy
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from ling3export.model import moe
from ling3export.model.kda import layer as kda
from ling3export.model.kda import recurrence as delta
from ling3export.model.layers import rms_norm, take
from ling3export.model.mla import layer as mla
from ling3export.model.products import dot_merged
from ling3export.model.yarn import Yarn
from tests.support.direct import Direct, relative
from tests.support.numerics import Case, Quick
from tests.support.tolerances import FLOAT32, MISTAKE

Plant = Callable[[pytest.MonkeyPatch], None]


def replace(owner: Any, name: str, wrong: Callable[..., Any]) -> Plant:
    """Replaces ``owner.name`` by ``wrong``, which gets the right function first, then its arguments."""

    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        original = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args: wrong(original, *args))

    return plant


def recurrence(token: Callable[[jax.Array, delta.Inputs], tuple[jax.Array, jax.Array]]) -> Plant:
    """Replaces both KDA forms by ``token`` (state [H, K, V] and one token in; state and o [H, V] out)."""

    def terms(x: delta.Inputs, factored: bool) -> delta.ChunkTerms:
        return delta.ChunkTerms(*x, x.beta)

    def chunk_step(state: jax.Array, x: delta.ChunkTerms) -> tuple[jax.Array, jax.Array]:
        state, o = lax.scan(lambda state, y: token(state, delta.Inputs(*y)), state, x[:5])
        return state, jnp.swapaxes(o, 0, 1)

    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(kda, "chunk_terms", terms)
        monkeypatch.setattr(kda, "chunk_step", chunk_step)
        monkeypatch.setattr(kda, "recurrent_step", jax.vmap(token))

    return plant


def write(state: jax.Array, x: delta.Inputs, seen: jax.Array) -> jax.Array:
    """The decayed state with beta k (v - kᵀ seen) added."""
    rest = x.v - jnp.einsum("hk,hkv->hv", x.k, seen)
    return jnp.exp(x.g)[..., None] * state + (x.beta[:, None] * x.k)[..., None] * rest[:, None]


def read(state: jax.Array, x: delta.Inputs) -> jax.Array:
    return jnp.einsum("hk,hkv->hv", x.q, state)


def right_token(state: jax.Array, x: delta.Inputs) -> tuple[jax.Array, jax.Array]:
    state = write(state, x, jnp.exp(x.g)[..., None] * state)
    return state, read(state, x)


def undecayed(state: jax.Array, x: delta.Inputs) -> tuple[jax.Array, jax.Array]:
    state = write(state, x, state)
    return state, read(state, x)


def read_first(state: jax.Array, x: delta.Inputs) -> tuple[jax.Array, jax.Array]:
    decayed = jnp.exp(x.g)[..., None] * state
    return write(state, x, decayed), read(decayed, x)


def bare_conv(_: Any, history: jax.Array, raw: jax.Array, taps: jax.Array) -> jax.Array:
    sequence = jnp.concatenate([history, raw], axis=1)
    taps = taps.astype(raw.dtype)
    return sum(taps[w] * sequence[:, w : w + raw.shape[1]] for w in range(taps.shape[0]))  # type: ignore[return-value]


def reversed_conv(original: Any, history: jax.Array, raw: jax.Array, taps: jax.Array) -> jax.Array:
    return original(history, raw, taps[::-1])


def late_conv(original: Any, history: jax.Array, raw: jax.Array, taps: jax.Array) -> jax.Array:
    """Every token sees the next one; the last one sees nothing."""
    sequence = jnp.concatenate([history, raw, jnp.zeros_like(raw[:, :1])], axis=1)
    width = history.shape[1]
    return original(sequence[:, 1 : width + 1], sequence[:, width + 1 :], taps)


def output(gated: Callable[[jax.Array, jax.Array, Callable[[jax.Array], jax.Array]], jax.Array]) -> Plant:
    """Replaces KDA's norm and gate by ``gated(o, gate, norm)``."""

    def wrong(_: Any, self: kda.KimiDeltaAttention, o: jax.Array, gate: jax.Array, layer: Any, dtype: Any) -> jax.Array:
        weight = take(self.o_norm[...], layer, split=False)
        y = gated(o, gate, lambda x: rms_norm(x, weight, self.config.rms_norm_eps))
        return dot_merged(
            y.reshape(o.shape[0], -1).astype(dtype), take(self.o_proj[...], layer, split=True), self.geometry
        )

    return replace(kda.KimiDeltaAttention, "_output", wrong)


def half_split_rope(_: Any, x: jax.Array, position: jax.Array, frequency: Any, *_rest: Any) -> jax.Array:
    half = x.shape[-1] // 2
    angle = position.reshape(-1, *[1] * (x.ndim - 1)).astype(jnp.float32) * frequency
    low, high = x[..., :half], x[..., half:]
    return jnp.concatenate(
        [low * jnp.cos(angle) - high * jnp.sin(angle), high * jnp.cos(angle) + low * jnp.sin(angle)], axis=-1
    )


def gate_after_dense(original: Any, self: mla.GatedMLA, heads: jax.Array, p: mla.Projected, layer: Any) -> jax.Array:
    """One head's gate for each equal part of the output."""
    out = original(self, heads, p._replace(gate=jnp.ones_like(p.gate)), layer)
    return out * jnp.repeat(p.gate, out.shape[1] // p.gate.shape[1], axis=1)


def silu_head_gate(original: Any, *args: Any) -> mla.Projected:
    p = original(*args)
    return p._replace(gate=p.gate * jnp.log(p.gate / (1 - p.gate)))


def biased_weights(original: Any, scores: jax.Array, bias: jax.Array, config: Any) -> tuple[jax.Array, jax.Array]:
    chosen, _ = original(scores, bias, config)
    weights = jnp.take_along_axis(scores + bias, chosen, axis=1)
    return chosen, weights / jnp.sum(weights, axis=1, keepdims=True) * config.routed_scaling_factor


def scaled_weights(factor: float) -> Plant:
    def wrong(original: Any, *args: Any) -> tuple[jax.Array, jax.Array]:
        chosen, weights = original(*args)
        return chosen, weights * factor

    return replace(moe, "route", wrong)


def scaled_shared(factor: float) -> Plant:
    return replace(moe.MixtureOfExperts, "shared", lambda original, *args: factor * original(*args))


def softplus_gate(_: Any, f: jax.Array, a_log: jax.Array, dt_bias: jax.Array, config: Any) -> jax.Array:
    return -jnp.exp(a_log)[:, None] * jax.nn.softplus(f + dt_bias)


def bias_after_rate(_: Any, f: jax.Array, a_log: jax.Array, dt_bias: jax.Array, config: Any) -> jax.Array:
    return config.kda_lower_bound * jax.nn.sigmoid(jnp.exp(a_log)[:, None] * f + dt_bias)


def inputs(change: Callable[[delta.Inputs, float], delta.Inputs]) -> Plant:
    """Applies ``change(inputs, K)`` to the right inputs."""

    def wrong(original: Any, self: kda.KimiDeltaAttention, *args: Any) -> delta.Inputs:
        return change(original(self, *args), float(self.config.head_dim))

    return replace(kda.KimiDeltaAttention, "_inputs", wrong)


MISTAKES: dict[str, Plant] = {
    "softplus gate": replace(kda, "log_decay", softplus_gate),  # 0.83
    "dt_bias after the multiplication": replace(kda, "log_decay", bias_after_rate),  # 0.74
    "l2norm missing": replace(kda, "l2_norm", lambda _, x, *rest: x),  # 1.09
    "q scale missing": inputs(lambda x, width: x._replace(q=x.q * width**0.5)),  # 0.48
    "beta missing": inputs(lambda x, _: x._replace(beta=jnp.sign(x.beta))),  # 0.67
    "delta against the undecayed state": recurrence(undecayed),  # 0.27
    "read before write": recurrence(read_first),  # 0.72
    "conv without SiLU": replace(kda, "causal_conv", bare_conv),  # 1.00
    "conv reversed": replace(kda, "causal_conv", reversed_conv),  # 1.21
    "conv not causal": replace(kda, "causal_conv", late_conv),  # 1.07
    "gate before the norm": output(lambda o, gate, norm: norm(o * jax.nn.sigmoid(gate))),  # 0.62
    "SiLU instead of sigmoid gate, KDA": output(lambda o, gate, norm: norm(o) * jax.nn.silu(gate)),  # 1.01
    "SiLU instead of sigmoid gate, MLA": replace(mla.GatedMLA, "_project", silu_head_gate),  # 0.88
    "NeoX-style rope": replace(mla, "rope", half_split_rope),  # 0.47
    "MLA gate after dense": replace(mla.GatedMLA, "_output", gate_after_dense),  # 0.46
    "bias in the expert weights": replace(moe, "route", biased_weights),  # 0.35
    "group score by max": replace(moe, "group_score", lambda _, biased: jnp.max(biased, axis=-1)),  # 0.51
    "scaling twice": scaled_weights(2.5),  # 0.92
    "scaling missing": scaled_weights(1 / 2.5),  # 0.41
    "shared expert missing": scaled_shared(0),  # 0.74
    "shared expert scaled": scaled_shared(2.5),  # 0.85
}


def constant(owner: Any, name: str, value: float) -> Plant:
    """A property that is ``value``."""
    return lambda monkeypatch: monkeypatch.setattr(owner, name, property(lambda _: value))


def limited_gate(_: Any, gate: jax.Array, up: jax.Array, limit: jax.Array) -> jax.Array:
    return jax.nn.silu(jnp.minimum(gate, limit)) * jnp.clip(up, -limit, limit)


def limited_above(_: Any, gate: jax.Array, up: jax.Array, limit: jax.Array) -> jax.Array:
    return jnp.minimum(jax.nn.silu(gate), limit) * jnp.minimum(up, limit)


def limit_of_stack(_: Any, self: moe.MixtureOfExperts, limits: tuple[float, ...] | None, layer: Any) -> Any:
    """Counts layers from the first one that has experts."""
    return None if limits is None else jnp.array([limit or jnp.inf for limit in limits])[layer]


# Mistakes in prefill of a model with YaRN and limits.
FLASH_MISTAKES: dict[str, Plant] = {
    "limits missing": replace(moe, "swiglu", lambda right, gate, up, _: right(gate, up)),  # 0.38
    "limit before SiLU": replace(moe, "swiglu", limited_gate),  # 0.11
    "up limited from above alone": replace(moe, "swiglu", limited_above),  # 0.21
    "limits of the wrong layers": replace(moe.MixtureOfExperts, "limit", limit_of_stack),  # 0.36
    "YaRN without interpolated frequencies": replace(Yarn, "frequencies", lambda _, self, plain, theta: plain),  # 0.61
    "YaRN without the scale of the softmax": constant(Yarn, "softmax_factor", 1.0),  # 0.46
    "YaRN without the factor of the rotation": constant(Yarn, "rope_factor", 1.0),  # 0.47
}
FLASH = {
    "first_k_dense_replace": 2,
    "rope_scaling": {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 16, "mscale_all_dim": 4},
    "expert_swiglu_limit_list": [0, 0, 1, 1, 1, 1, 1, 0],
}
LENGTHS = (16, 29, 40)  # prefilled in calls of 16 token slots, so that state and history pass between calls
DECODED = range(29, 40)
PHASES = ("prefill", "decode")
# Mistakes in the code that only decode uses.
DECODE = ("delta against the undecayed state", "read before write", "NeoX-style rope")
PLANTED = [(name, "prefill") for name in MISTAKES] + [(name, "decode") for name in DECODE]


def error(case: Case, direct: Direct, phase: str) -> float:
    """Largest relative error of a few positions, prefilled, or decoded after a prefill."""
    ids, expected = case.prompts[0], case.expected[0]
    if phase == "prefill":
        return max(relative(direct.sequence(16, ids[:length]), expected[length - 1]) for length in LENGTHS)
    direct.sequence(16, ids[: DECODED[0]])
    return max(relative(direct.decode(1, [(1, at, ids[at])])[0], expected[at]) for at in DECODED)


def planted(case: Case, right: Direct, phase: str, plant: Plant) -> float:
    """The error of a model with a mistake in ``phase``, which is traced again; the parameters are shared."""
    direct = copy(right)
    direct.steps = {cell: step for cell, step in right.steps.items() if cell[0] != phase}
    direct.reset()
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        return error(case, direct, phase)


def models(folder: Path, **fields: Any) -> tuple[Case, Direct]:
    """The expected logits, and a model without a mistake, which passes the comparison."""
    # Six KDA and two MLA layers; v is tiny in every second KDA layer. The loop over them compiles each kind once.
    case = Case(folder, (LENGTHS[-1],), num_hidden_layers=8, layer_group_size=4, **fields).expect()
    right = Quick(case.config, case.read)
    for phase in PHASES:
        assert error(case, right, phase) < FLOAT32
    return case, right


def main(names: Sequence[str]) -> None:
    """Prints the error of each mistake.

    Raises:
        SystemExit: A mistake does not show, or the comparison fails without one.
    """
    hidden = []
    jax.config.update("jax_platforms", "cpu")
    with tempfile.TemporaryDirectory() as folder:
        case, right = models(Path(folder, "checkpoint"))
        for phase in PHASES:
            # This shows that the mistakes are detected, and not the planting itself.
            assert planted(case, right, phase, recurrence(right_token)) < FLOAT32
        flash = models(Path(folder, "flash"), **FLASH)
        every = [(name, phase, MISTAKES[name], (case, right)) for name, phase in PLANTED]
        every += [(name, "prefill", plant, flash) for name, plant in FLASH_MISTAKES.items()]
        for name, phase, plant, both in every:
            if name in (names or [row[0] for row in every]):
                error = planted(*both, phase, plant)
                print(f"{error:.3f}  {phase}: {name}", flush=True)
                hidden += [name] * (error <= MISTAKE)
    if hidden:
        raise SystemExit(f"these mistakes do not show: {hidden}")


if __name__ == "__main__":
    main(sys.argv[1:])
