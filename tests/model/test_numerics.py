"""The steps in fp32 against the float64 reference, however a prompt is padded, cut, packed, batched or split."""

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from ling3export.model import products
from ling3export.model.geometry import Form
from ling3export.model.layers import swiglu
from ling3export.model.mla import layer as mla
from tests.support.direct import Direct, relative
from tests.support.numerics import Case, Quick
from tests.support.tolerances import BFLOAT16_MEDIAN, FLOAT32, SAME

pytestmark = pytest.mark.jit

PADDINGS = (16, 48, 128)
ROWS = 6  # rows of a decode step: more than the four slots, so that some are always padding
# Lengths around the borders of conv taps (4), chunks (16), pages (32) and paddings.
LENGTHS = (1, 2, 3, 4, 15, 16, 17, 31, 32, 33, 47, 48, 49, 63, 64, 65, 95, 96, 97, 127, 128, 129, 200, 250)


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """Ten layers: a group with a dense layer, a loop over two more groups, an incomplete last group."""
    return Case(tmp_path_factory.mktemp("case") / "checkpoint", (250,) * 4, num_hidden_layers=10).expect()


@pytest.fixture(scope="module")
def direct(case: Case) -> Direct:
    return case.direct()


@pytest.mark.parametrize("padding", PADDINGS)
def test_prompts_of_every_length_through_every_padding(case: Case, direct: Direct, padding: int):
    direct.reset()
    for number, length in enumerate(LENGTHS):
        which, slot = number % 4, number % 3 + 1  # slots and pages still hold the state of the prompt before
        found = direct.sequence(padding, case.prompts[which][:length], slot=slot)
        assert relative(found, case.expected[which][length - 1]) < FLOAT32, length


@pytest.mark.parametrize("cut", [1, 5, 16, 17, 31, 32, 40])
def test_prefill_cut_into_equal_parts(case: Case, direct: Direct, cut: int):
    length = 40 if cut < 5 else 200
    direct.reset()
    found = direct.sequence(48, case.prompts[1][:length], cut=cut)
    assert relative(found, case.expected[1][length - 1]) < FLOAT32


def random_prefill(
    rng: np.random.Generator, case: Case, done: list[int], padding: int
) -> list[tuple[int, int, list[int]]]:
    """Parts of random sequences in random order that fit into a call; sequence n is in slot n + 1."""
    free, parts = padding // 16, []
    for n in rng.permutation(4).tolist():
        left = len(case.prompts[n]) - done[n]
        if left and free and rng.random() < 0.7:
            size = int(rng.integers(1, min(left, free * 16) + 1))
            parts.append((n + 1, done[n], case.prompts[n][done[n] : done[n] + size]))
            done[n] += size
            free -= -(-size // 16)
    if free and rng.random() < 0.3:  # padding with tokens, before real chunks
        parts.insert(0, (0, 0, [3] * 16))
    return parts


def random_decode(rng: np.random.Generator, case: Case, done: list[int]) -> list[tuple[int, int, int]]:
    """Rows for some of the running sequences and padding rows, in random order."""
    rows = []
    for n in range(4):
        if 0 < done[n] < len(case.prompts[n]) and rng.random() < 0.7:
            rows.append((n + 1, done[n], case.prompts[n][done[n]]))
            done[n] += 1
    rows += [(0, 7, 5)] * (ROWS - len(rows))
    return [rows[i] for i in rng.permutation(ROWS)]


@pytest.mark.parametrize("seed", range(4))
def test_random_schedules(case: Case, direct: Direct, seed: int):
    """Four sequences, cut and packed at random, with prefill and decode in turn: every logit is right."""
    rng = np.random.default_rng(seed)
    direct.reset()
    done, errors = [0] * 4, []
    while any(count < len(prompt) for count, prompt in zip(done, case.prompts, strict=True)):
        for _ in range(int(rng.integers(0, 12))):
            rows = random_decode(rng, case, done)
            found = zip(rows, direct.decode(ROWS, rows), strict=True)
            errors += [relative(logits, case.expected[s - 1][p]) for (s, p, _), logits in found if s]
        padding = int(rng.choice(PADDINGS))
        if parts := random_prefill(rng, case, done, padding):
            out = direct.prefill(padding, parts)
            errors += [relative(out[s], case.expected[s - 1][p + len(ids) - 1]) for s, p, ids in parts if s]
    assert len(errors) > 30
    assert max(errors) < FLOAT32


def test_packed_sequences_equal_single_ones(case: Case, direct: Direct):
    lengths = (1, 20, 33, 16)
    direct.reset()
    packed = direct.prefill(128, [(n + 1, 0, case.prompts[n][:size]) for n, size in enumerate(lengths)])
    for n, size in enumerate(lengths):
        direct.reset()
        assert relative(packed[n + 1], direct.prefill(128, [(2, 0, case.prompts[n][:size])])[2]) < SAME


def test_a_sequence_that_is_not_finite_leaves_the_others_of_its_calls_as_they_are(
    case: Case, direct: Direct, monkeypatch: pytest.MonkeyPatch
):
    """Regression: in a prefill call, attention kept one sequence's NaN in all others, at a weight of zero."""
    ids = [case.prompts[n][:size] for n, size in enumerate((20, 33, 5))]
    bad = next(token for token in ids[0] if token not in ids[1] + ids[2])
    parts = [(n + 1, 0, one) for n, one in enumerate(ids)]
    direct.reset()
    right = direct.prefill(128, parts)
    table = direct.params["embeddings"]["word_embeddings"]
    spoiled = table.at[bad // table.shape[1], bad % table.shape[1]].set(np.nan)
    embeddings = direct.params["embeddings"] | {"word_embeddings": spoiled}
    monkeypatch.setattr(direct, "params", direct.params | {"embeddings": embeddings})
    direct.reset()
    found = direct.prefill(128, parts)
    assert np.isnan(found[1]).all()
    assert all(np.array_equal(found[slot], right[slot]) for slot in (2, 3))
    assert [np.isfinite(row).all() for row in direct.decode(ROWS, [(1, 20, 3), (2, 33, 3)])] == [False, True]


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(tmp_path_factory.mktemp("short") / "checkpoint", (80,) * 4, num_hidden_layers=4).expect()


@pytest.mark.parametrize(("tp", "form"), [(2, "tiles"), (4, "loops")])
def test_tensor_parallelism_changes_nothing(short: Case, tp: int, form: Form):
    """Also compares the form for accelerators, with unrolled layers, with the form for cpu."""
    case, direct = short, Quick(short.config, short.read)
    split = Quick(case.config, case.read, tp=tp, form=form)
    found: list[np.ndarray] = []
    one: list[np.ndarray] = []
    for model, out in ((direct, one), (split, found)):
        model.reset()
        for n in range(4):
            out += model.prefill(48, [(n + 1, 0, case.prompts[n][:40])]).values()
            out += model.prefill(48, [(n + 1, 40, case.prompts[n][40 : 60 + n])]).values()
        for step in range(8):
            rows = [(n + 1, 60 + n + step, case.prompts[n][60 + n + step]) for n in range(4)]
            out += model.decode(ROWS, rows)
    assert relative(np.array(found), np.array(one)) < SAME
    expected = [case.expected[n][67 + n] for n in range(4)]
    assert relative(np.array(found[-4:]), np.array(expected)) < FLOAT32


def test_nan_reaches_no_later_call_and_no_other_row_of_a_step(short: Case):
    """Regression: in the form ``tiles``, a NaN spoiled later calls, in padding and in the slot's next sequence."""
    direct = Quick(short.config, short.read, tp=2, form="tiles")
    ids = [short.prompts[n][:size] for n, size in enumerate((20, 33))]
    bad = next(token for token in ids[0] if token not in [*ids[1], 3])
    right, stepped = direct.prefill(48, [(2, 0, ids[1])])[2], direct.decode(ROWS, [(2, 33, 3)])[0]
    table = direct.params["embeddings"]["word_embeddings"]
    spoiled = table.at[bad // table.shape[1], bad % table.shape[1]].set(np.nan)
    direct.params = direct.params | {"embeddings": direct.params["embeddings"] | {"word_embeddings": spoiled}}
    direct.reset()
    assert np.isnan(direct.prefill(48, [(1, 0, ids[0])])[1]).all()
    assert relative(direct.prefill(48, [(2, 0, ids[1])])[2], right) < SAME
    found = direct.decode(ROWS, [(1, 20, 3), (2, 33, 3)])
    assert np.isnan(found[0]).all() and relative(found[1], stepped) < SAME
    assert relative(direct.prefill(48, [(1, 0, ids[1])])[1], right) < SAME


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 20, "beta_fast": 4, "mscale_all_dim": 1}
# A small Ling-3.0-flash: two dense layers, flat queries, an incomplete last group, YaRN, and limits that change values.
FLASH = {
    "num_hidden_layers": 7, "layer_group_size": 3, "first_k_dense_replace": 2, "q_lora_rank": None,
    "rope_scaling": YARN | {"mscale": 0.7},
    "expert_swiglu_limit_list": [9, 9, 0.01, None, 0.03, 0, 0.02], "share_expert_swiglu_limit_list": [9, 9, 0.02, 0.01],
}  # fmt: skip

VARIANTS: dict[str, dict[str, Any]] = {
    "yarn, below and beyond the original context": {"num_hidden_layers": 4, "rope_scaling": YARN},
    "limits of experts": {"num_hidden_layers": 4, "expert_swiglu_limit_list": [0, 0.01, 0.02, 0.01]},
    "flash in small": FLASH,
    "flat query, gate without a bound": {"num_hidden_layers": 4, "q_lora_rank": None, "kda_safe_gate": False},
    "dense layers past a group": {"num_hidden_layers": 5, "layer_group_size": 2, "first_k_dense_replace": 3},
    "all MLA, two shared experts": {"num_hidden_layers": 3, "layer_group_size": 1, "num_shared_experts": 2},
    "no whole group": {"num_hidden_layers": 2, "layer_group_size": 4, "first_k_dense_replace": 0},
    "all dense, three taps": {"num_hidden_layers": 3, "first_k_dense_replace": 3, "short_conv_kernel_size": 3},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_of_the_structure(variant: str, tmp_path: Path):
    case = Case(tmp_path / "checkpoint", (60,), **VARIANTS[variant]).expect()
    assert case.error_of_prompt(Quick(case.config, case.read), 48, 1, lengths=(1, 33, 54), until=60) < FLOAT32


@pytest.mark.parametrize("fields", [VARIANTS["limits of experts"], {"num_hidden_layers": 4, "rope_scaling": YARN}])
def test_fields_of_the_variants_change_the_numbers(fields: dict[str, Any], tmp_path: Path):
    """Otherwise the comparison with the reference would not test these fields."""
    case = Case(tmp_path / "with", (60,), **fields).expect()
    plain = Case(tmp_path / "without", (60,), num_hidden_layers=4).expect()
    assert case.prompts == plain.prompts
    assert relative(np.array(case.expected[0][40]), np.array(plain.expected[0][40])) > 1e-2


def test_swiglus_limit_is_after_silu_and_on_both_sides_of_up():
    """min(silu(gate), L) · clip(up, -L, L), like vLLM's SwigluStepAndMul; a limit of 4 before SiLU would give 3.93."""
    gate, up = (jnp.array(values, jnp.float32) for values in ([10, 10, -1, 1], [3, -9, 9, 2]))
    silu = -1 / (1 + np.e), 1 / (1 + np.exp(-1))
    found = swiglu(gate, up, jnp.float32(4))
    np.testing.assert_allclose(found, [4 * 3, 4 * -4, silu[0] * 4, silu[1] * 2], rtol=1e-6)


@pytest.mark.parametrize(("tp", "form"), [(2, "tiles"), (16, "tiles"), (2, "loops")])
def test_flash_in_small_is_the_same_on_several_devices(tp: int, form: Form, tmp_path: Path):
    wide = {"num_attention_heads": 16, "num_experts": 64}  # two devices read only some of these experts for one row
    case = Case(tmp_path / "checkpoint", (60,), **FLASH | wide).expect()
    split = Quick(case.config, case.read, tp=tp, form=form)
    assert case.error_of_prompt(split, 48, 1, lengths=(17, 50), until=56) < FLOAT32


def test_queries_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A call with more token slots than ``QUERY_BLOCK`` attends block by block; 96 splits into blocks of 32."""
    monkeypatch.setattr(mla, "QUERY_BLOCK", 40)
    case = Case(tmp_path / "checkpoint", (90, 90), num_hidden_layers=1).expect()
    direct = case.direct()
    first = direct.prefill(96, [(1, 0, case.prompts[0][:30]), (2, 0, case.prompts[1][:50])])
    second = direct.prefill(96, [(2, 50, case.prompts[1][50:])])
    assert relative(first[1], case.expected[0][29]) < FLOAT32
    assert relative(second[2], case.expected[1][89]) < FLOAT32


def test_one_tp_shard_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Layers larger than the caches are multiplied TP shard by TP shard; one row decodes without copying a pool."""
    monkeypatch.setattr(products, "CACHED", 0)
    case = Case(tmp_path / "checkpoint", (60,), num_hidden_layers=4).expect()
    assert case.error_of_prompt(Quick(case.config, case.read), 48, 1, lengths=(33, 54), until=60) < FLOAT32


GATES = {
    # dt_bias of every fourth channel, with f_proj zero and A_log 0: log decays of -2.6, -5 and -1e-5 a token.
    "bounded": ({"kda_safe_gate": True}, (np.log(2.6 / 2.4), 40.0, -13.1)),
    # The same with -60 a token, which reaches e^-960 over a chunk.
    "unbounded": ({"kda_safe_gate": False}, (np.log(np.expm1(2.6)), 60.0, -11.5)),
}


@pytest.mark.parametrize("gate", GATES)
def test_strong_decay(gate: str, tmp_path: Path):
    """700 tokens with channels of strong, full and hardly any decay, and every fourth channel varying between them."""
    overrides, biases = GATES[gate]
    case = Case(tmp_path / "checkpoint", (700,), num_hidden_layers=2, layer_group_size=2, **overrides)
    original, width = case.read, case.config.head_dim * case.config.num_attention_heads

    def read(name: str) -> np.ndarray:
        value = original(name)
        if name.endswith("A_log"):
            return np.zeros_like(value)
        if name.endswith("f_proj.weight"):
            # the last one changes by ten and more from token to token
            scale = np.tile([0, 0, 0, 20], width // 4)[:, None]
            return (value * scale.astype(value.dtype)).astype(value.dtype)
        if name.endswith("dt_bias"):
            return np.tile(np.array([*biases, -2.0], value.dtype), width // 4)
        return value

    case.read = read
    case.expect()
    direct = Quick(case.config, case.read)
    error = case.error_of_prompt(direct, 128, 1, lengths=(16, 100, 300, 690), until=700)
    assert error < FLOAT32


def test_bfloat16(case: Case):
    """Only the median is compared: a flipped route moves its position by up to 0.4 (measured)."""
    direct = Quick(case.config, case.read, dtype="bfloat16")
    errors = []
    for n in range(4):
        out = direct.prefill(128, [(n + 1, 0, case.prompts[n][:100])])
        errors.append(relative(out[n + 1], case.expected[n][99]))
    for position in range(100, 250):
        found = direct.decode(ROWS, [(n + 1, position, case.prompts[n][position]) for n in range(4)])
        errors += [relative(logits, case.expected[n][position]) for n, logits in enumerate(found)]
    assert float(np.median(errors)) < BFLOAT16_MEDIAN
