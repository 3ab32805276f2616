"""Cases in which other ports of this or a related model gave wrong numbers."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ling3export.checkpoint.reader import Checkpoint
from ling3export.model.kda import recurrence as delta
from ling3export.model.layers import l2_norm
from ling3export.verify import formulas
from ling3export.verify.dequantized import Dequantized
from ling3export.verify.reference import Reference
from tests.support.direct import relative
from tests.support.kda_oracle import close, delta_rule
from tests.support.numerics import Case, Quick
from tests.support.tolerances import FLOAT32, KERNEL, MARGIN

pytestmark = pytest.mark.jit
LENGTH, ROWS = 130, 6


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """A layer of KDA, one of MLA; pages of 32 tokens, chunks of 16."""
    folder = tmp_path_factory.mktemp("ports") / "checkpoint"
    return Case(folder, (LENGTH,) * 4, num_hidden_layers=3, layer_group_size=2).expect()


@pytest.fixture(scope="module")
def direct(case: Case) -> Quick:
    return Quick(case.config, case.read)


def prefilled(case: Case, direct: Quick, lengths: tuple[int, ...]) -> None:
    direct.reset()
    for n, length in enumerate(lengths):
        direct.sequence(48, case.prompts[n][:length], slot=n + 1)


def test_rows_of_unequal_positions_have_their_own_rope_and_convolution(case: Case, direct: Quick):
    lengths = (1, 15, 33, 128)
    prefilled(case, direct, lengths)
    found = direct.decode(ROWS, [(n + 1, at, case.prompts[n][at]) for n, at in enumerate(lengths)])
    for n, at in enumerate(lengths):
        assert relative(found[n], case.expected[n][at]) < FLOAT32


def test_single_tokens_go_on_next_to_prompts_that_begin(case: Case, direct: Quick):
    lengths = (31, 64)
    prefilled(case, direct, lengths)
    parts = [(3, 0, case.prompts[2][:17]), (1, 31, case.prompts[0][31:32]), (2, 64, case.prompts[1][64:65])]
    found = direct.prefill(128, parts)
    for slot, at, ids in parts:
        assert relative(found[slot], case.expected[slot - 1][at + len(ids) - 1]) < FLOAT32


@pytest.mark.parametrize("cut", [16, 40])
def test_a_token_is_read_across_chunks_pages_and_calls(case: Case, direct: Quick, cut: int):
    """The needle is the sixth token; the last token's logits must be those of the whole prompt with it."""
    ids = list(case.prompts[0])
    ids[5] = (ids[5] + 1) % case.config.vocab_size
    (expected,) = Reference(case.config, case.read).logits_many([ids])
    direct.reset()
    found = direct.sequence(48, ids, cut=cut)
    assert relative(found, expected[-1]) < FLOAT32
    assert relative(expected[-1], case.expected[0][-1]) > 10 * FLOAT32, "the needle counts"


def test_a_slot_full_of_nan_is_begun_anew(case: Case, direct: Quick):
    """Regression: a freed slot's recurrent and convolution state reached the next sequence, at a weight of zero."""
    direct.reset()
    for name in ("kda_recurrent", "kda_conv"):
        direct.state[name] = jnp.full_like(direct.state[name], np.nan)
    found = direct.sequence(48, case.prompts[1][:20], slot=2)
    assert relative(found, case.expected[1][19]) < FLOAT32
    assert relative(direct.decode(ROWS, [(2, 20, case.prompts[1][20])])[0], case.expected[1][20]) < FLOAT32


@pytest.mark.parametrize("size", [1e-2, 1e-4, 1e-20])
def test_the_epsilon_of_tiny_queries_and_keys_is_added_to_the_sum(size: float):
    x = size * np.random.default_rng(0).normal(size=(20, 4, 32))
    found = l2_norm(jnp.asarray(x, jnp.float32))
    assert close(found, formulas.l2_norm(x)) < KERNEL


def test_4096_steps_of_slow_decay_keep_the_state():
    """A constant decay, rounded to fp32, has the same error in each step; these add up, but no other error may.

    e^-0.0001 is rounded by 2.16e-8: 4,096 times that is 8.85e-5, and the error is 8.84e-5. Without it, the state's own
    roundings remain, a random walk of 64 steps of 2^-24 (3.3e-6 here). A plain loop of numpy in fp32 has 8.82e-5 and
    3.4e-6, so 1e-6 is out of reach of fp32.
    """
    rng, steps, heads, size = np.random.default_rng(0), 4096, 2, 16
    q, k = rng.normal(size=(2, steps, heads, size))
    q, k = (y / np.linalg.norm(y, axis=-1, keepdims=True) for y in (q, k))
    v, beta = rng.normal(size=(steps, heads, size)), rng.random((steps, heads)) / 100
    x = delta.Inputs(q, k, v, np.full((steps, heads, size), -1e-4), beta)
    start = rng.normal(size=(heads, size, size))

    @jax.jit
    def run(state: jax.Array, x: delta.Inputs) -> jax.Array:
        def step(state: jax.Array, x: delta.Inputs) -> tuple[jax.Array, None]:
            return delta.recurrent_step(state, jax.tree.map(lambda y: y[None], x))[0], None

        return jax.lax.scan(step, state[None], x)[0][0]

    as_float32 = jax.tree.map(lambda y: jnp.asarray(y, jnp.float32), (start, x))
    state, rows = jax.tree.map(lambda y: np.asarray(y, np.float64), as_float32)
    found = run(*as_float32)
    held = rows._replace(g=np.log(np.asarray(jnp.exp(as_float32[1].g), np.float64)))
    walk = 2 * steps**0.5 * 2.0**-24
    assert close(found, delta_rule(state, held)[0]) < walk
    assert close(found, delta_rule(state, rows)[0]) < steps * np.abs(held.g - rows.g).max() + walk


SIXTEEN = {"num_attention_heads": 16, "num_key_value_heads": 16, "num_experts": 16, "moe_intermediate_size": 512}
SIXTEEN |= {"intermediate_size": 1024, "num_hidden_layers": 2, "layer_group_size": 2}


@pytest.mark.extras
@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_quantized_weights_at_every_tp_are_what_they_stand_for(tmp_path: Path, weights: str):
    """Against float64 on the dequantized values, which another implementation computes."""
    case = Case(tmp_path / "checkpoint", (24,), **SIXTEEN)
    reference = Reference(case.config, Dequantized(Checkpoint.open(tmp_path / "checkpoint"), weights).tensor)
    expected = reference.logits(case.prompts[0])
    assert min(reference.margins) > MARGIN
    for tp in (1, 2, 4, 16):
        model = Quick(case.config, case.read, weights=weights, tp=tp)
        errors = [relative(model.sequence(16, case.prompts[0][:12]), expected[11])]
        for at in range(12, 24):
            errors.append(relative(model.decode(4, [(1, at, case.prompts[0][at])])[0], expected[at]))
        assert max(errors) < FLOAT32, tp
