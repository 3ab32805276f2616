"""The plan: the meaning of its options, and the exact errors for plans that cannot be built."""

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from ling3export.checkpoint.synth import config_fields
from ling3export.foundation.errors import PlanError
from ling3export.model.config import Config
from ling3export.plan.memory import weight_bytes
from ling3export.plan.options import Options, parse_bytes, parse_paddings
from ling3export.plan.plan import PlannedCell, derive_decode_paddings, make_plan
from ling3export.savedmodel.export import build_savedmodel
from tests.support.tiny import tiny_fields

CONFIG = Config.from_dict(tiny_fields())
# One page of 16 tokens on one device: 3 MLA layers x 16 tokens x (20 + 4) values x 2 bytes.
PAGE = 3 * 16 * 24 * 2
# 4 KDA layers, fp32 state [4, 16, 16] and three bf16 windows [3, 64] a slot, and its last token.
SLOT = 4 * (4 * 16 * 16 * 4 + 3 * 3 * 64 * 2) + 4
MULTIPLE = "--paddings: expected a positive multiple of 16"
SMALL = Options((16,), tp=1, max_running=1, page_size=16, context=64)


def refusal(**changes: Any) -> str:
    with pytest.raises(PlanError) as caught:
        make_plan(CONFIG, replace(SMALL, **changes), "cpu")
    return str(caught.value)


def test_cells_of_the_default_plan():
    plan = make_plan(CONFIG, Options(tp=4), "cpu")
    assert [cell.name for cell in plan.cells] == [
        *(f"prefill@{padding}" for padding in (512, 128, 16)),
        *(f"decode@{padding}" for padding in (64, 16, 1)),
        *(f"{phase}@{rows}" for phase in ("sample", "logits_processor") for rows in (64, 32, 16, 8, 1)),
    ]
    assert (plan.context, plan.geometry.max_pages, plan.geometry.pages) == (512, 2, 128)
    assert plan.notes == (
        "decode paddings 1,16,64: from one sequence alone to all 64 running",
        "latent pool: 128 pages of 256 tokens (replicated), all that 64 full sequences need; 19.44 MiB of state on 4 "
        "devices together",
    )


def test_a_split_model_has_experts_for_each_micro_batch():
    plan = make_plan(CONFIG, replace(SMALL, decode_paddings=(2, 8), afd=True), "cpu")
    split = [cell.name for cell in plan.cells if cell.phase not in ("prefill", "decode", "sample", "logits_processor")]
    assert split == [
        *(f"{phase}@{rows}" for phase in ("attend", "combine", "head") for rows in (8, 2)),
        *(f"{phase}@{pairs}" for phase in ("dispatch", "experts") for pairs in (32, 8)),
    ]
    whole = make_plan(CONFIG, replace(SMALL, decode_paddings=(2, 8)), "cpu")
    assert [cell for cell in plan.cells if cell.name not in split] == list(whole.cells)
    assert "ffn_paddings" not in whole.record() and plan.record()["ffn_paddings"] == [8, 32]
    dtypes = "expected --dtype bfloat16 and --afd, found --dtype"
    assert refusal(afd=True, afd_dtype="int8", dtype="float32") == f"--afd-dtype int8: {dtypes} float32"
    assert refusal(afd_dtype="int8", dtype="bfloat16") == f"--afd-dtype int8: {dtypes} bfloat16 and no --afd"
    with pytest.raises(PlanError, match="--afd: expected none with --format savedmodel, found it"):
        build_savedmodel(Path("checkpoint"), Path("model"), Options(afd=True), Mock())
    dense = Config.from_dict(tiny_fields(first_k_dense_replace=7))
    with pytest.raises(PlanError, match="--afd: expected a model with experts, found only dense layers"):
        make_plan(dense, replace(SMALL, afd=True), "cpu")


@pytest.mark.parametrize(
    ("paddings", "running", "expected", "why"),
    [
        ((16, 128, 512), 64, (1, 16, 64), "1,16,64: from one sequence alone to all 64 running"),
        ((16, 128, 512), 128, (1, 16, 128), "1,16,128: from one sequence alone to all 128 running"),
        ((16, 128), 16, (1, 16), "1,16: from one sequence alone to all 16 running"),
        ((16, 32), 33, (1, 16, 32, 48), "1,16,32,48: from one sequence alone to all 33 running, rounded up to 48"),
        ((512,), 8, (1, 16), "1,16: from one sequence alone to all 8 running, rounded up to 16"),
        ((512,), 1, (1,), "1: one sequence runs at a time"),
    ],
)
def test_decode_takes_one_then_the_paddings_up_to_all_that_run(paddings, running, expected, why):
    """Regression: one user paid for steps of sixteen rows, and a padding of 128 held only 64 sequences."""
    assert derive_decode_paddings(paddings, running) == (expected, f"decode paddings {why}")


def test_decode_paddings_are_built_to_the_letter():
    plan = make_plan(CONFIG, replace(SMALL, decode_paddings=(1, 3, 7)), "cpu")
    assert plan.decode_paddings == (1, 3, 7)
    assert PlannedCell("sample", 7) in plan.cells


@pytest.mark.parametrize(("fields", "tp"), [({}, 4), ({"num_attention_heads": 2, "num_key_value_heads": 2}, 2)])
def test_tp_defaults_to_the_most_that_the_model_splits_over_and_says_so(fields, tp):
    plan = make_plan(Config.from_dict(tiny_fields(**fields)), replace(SMALL, tp=None), "cpu")
    assert plan.target.name == f"cpu-tp{tp}"
    assert f"tp {tp}: the most of up to 16 devices that this model splits over" in plan.notes


def test_a_tp_that_was_asked_for_is_not_called_a_choice():
    """Regression: `cpu@2` was reported as the largest TP that the model allows."""
    plan = make_plan(CONFIG, replace(SMALL, tp=None), "cpu@2")
    assert plan.target.name == "cpu-tp2"
    assert not any(note.startswith("tp ") for note in plan.notes)


def test_tp_defaults_to_at_most_16():
    """Regression: a model of 24 shards got a plan for 24 devices."""
    fields = {"num_attention_heads": 24, "num_key_value_heads": 24, "num_experts": 24, "num_experts_per_tok": 4}
    widths = {"intermediate_size": 48, "moe_intermediate_size": 24, "moe_shared_expert_intermediate_size": 24}
    config = Config.from_dict(tiny_fields(**fields, **widths))
    assert config.tp_shards == 24
    assert make_plan(config, replace(SMALL, tp=None), "cpu").target.tp == 12


def test_a_tp_that_does_not_divide_is_refused_with_those_that_do():
    assert refusal(tp=8) == (
        "--tp: expected a divisor of 4 (the common divisor of heads 4, experts 16, vocabulary 96 and widths), found 8\n"
        "hint: this model splits over 1, 2, 4"
    )
    for tp in (0, -1, 3):
        assert f"found {tp}\n" in refusal(tp=tp)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"paddings": ()}, "--paddings: no padding is given"),
        ({"paddings": (-16,)}, f"{MULTIPLE}, found -16\nhint: the next one that can be built is 16"),
        ({"paddings": (16, 40)}, f"{MULTIPLE}, found 40\nhint: the next one that can be built is 48"),
        ({"paddings": (32, 16)}, "--paddings: expected ascending paddings, found 32 before 16\nhint: write 16,32"),
        ({"paddings": (16, 16)}, "--paddings: expected ascending paddings, found 16 before 16\nhint: write 16"),
        ({"paddings": (1 << 21,)}, "--paddings: expected paddings of at most 1,048,576, found 2,097,152"),
        (
            {"decode_paddings": (0,)},
            "--decode-paddings: expected a positive number, found 0\nhint: the next one that can be built is 1",
        ),
        (
            {"decode_paddings": (3, 2)},
            "--decode-paddings: expected ascending paddings, found 3 before 2\nhint: write 2,3",
        ),
        ({"max_running": 0}, "--max-running: expected a positive number, found 0"),
        ({"page_size": -1}, "--page-size: expected a positive number, found -1"),
        ({"pages": 0}, "--pages: expected a positive number, found 0"),
        ({"context": 513}, "--context: expected 2 to 512 (max_position_embeddings), found 513"),
        ({"memory_fraction": float("nan")}, "--memory-fraction: expected above 0 and at most 1, found nan"),
    ],
)
def test_numbers_outside_their_range_are_refused_not_dropped(changes, message):
    assert refusal(**changes) == message


def test_a_context_beyond_what_yarn_scales_to_is_refused_by_what_scales():
    """Regression: the error named max_position_embeddings, which was smaller."""
    yarn = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 512}
    scaled = Config.from_dict(tiny_fields(rope_scaling=yarn))
    assert make_plan(scaled, replace(SMALL, context=1024), "cpu").context == 1024
    source = "factor times original_max_position_embeddings of rope_scaling"
    with pytest.raises(PlanError, match=f"expected 2 to 1024 .{source}., found 1025"):
        make_plan(scaled, replace(SMALL, context=1025), "cpu")


def test_the_pool_takes_what_full_sequences_need_or_what_fits():
    fixed = 2 * SLOT + PAGE  # slot 0 and page 0 are dummies
    assert make_plan(CONFIG, SMALL, "cpu").geometry.pages == 4
    two = replace(SMALL, max_running=2)
    assert make_plan(CONFIG, two, "cpu").geometry.pages == 8
    room = fixed + SLOT + 5 * PAGE + PAGE - 1
    plan = make_plan(CONFIG, replace(two, state_memory=room), "cpu")
    assert plan.geometry.pages == 5
    assert "5 pages of 16 tokens (replicated), what fits" in plan.notes[-1]
    tight = make_plan(CONFIG, replace(SMALL, pages=1), "cpu")
    assert tight.geometry.pages == 1
    assert "as asked, too few for one sequence of the whole context (4 pages); " in tight.notes[-1]
    assert "as asked; " in make_plan(CONFIG, replace(SMALL, pages=4), "cpu").notes[-1]


def test_a_replicated_pool_counts_once_a_device():
    slot, page = SLOT - 4 + 2 * 4, 2 * PAGE  # heads are split; last_token and latents are not
    exact = 2 * slot + page + 4 * page
    assert make_plan(CONFIG, replace(SMALL, tp=2, state_memory=exact), "cpu").geometry.pages == 4
    assert "found" in refusal(tp=2, state_memory=exact - 1)


def test_a_pool_that_does_not_fit_is_refused_with_the_sum():
    fixed, need = 2 * SLOT + PAGE, 2 * SLOT + PAGE + 4 * PAGE
    kib = [f"{count / 1024:.2f} KiB" for count in (fixed, PAGE, need, need - 1)]
    assert refusal(state_memory=need - 1) == (
        f"--state-memory: expected room for 2 slots and one page ({kib[0]}) + 4 pages of 16 tokens ({kib[1]} each) "
        f"= {kib[2]} on 1 device, found {kib[3]}\n"
        "hint: lower --max-running, --context or --pages, or raise --state-memory"
    )
    assert "+ 1000000000 pages of 16 tokens (2.25 KiB each) = 2145.77 GiB" in refusal(pages=10**9)
    assert "expected room for 100000001 slots and one page" in refusal(max_running=10**8)


def test_sizes():
    found = [parse_bytes(text) for text in ("0", "1000000", "4GiB", "512 MiB", " 2KB", "1.5MB", "7B", "1TiB")]
    assert found == [0, 10**6, 4 << 30, 512 << 20, 2000, 1_500_000, 7, 1 << 40]


@pytest.mark.parametrize("text", ["", "x", "4Gi", "-4GiB", "4 4", "4gib", "nan", "1e9", "1_0", "٤GiB", "9" * 400])
def test_an_invalid_size_is_refused(text):
    """Regression: a number of 400 digits ended in an OverflowError."""
    with pytest.raises(PlanError) as caught:
        parse_bytes(text, "--state-memory")
    shown = text if len(text) < 61 else "9" * 60 + "…"
    assert caught.value.message == f"--state-memory: expected a size, found `{shown}`"


@pytest.mark.parametrize(
    "text", ["", ",", "16,", "16,,32", "a", "16.0", "1_6", "+16", "0x10", "１６", "16;32", "9" * 99]
)
def test_an_invalid_list_of_integers_is_refused(text):
    """int() also accepts underscores and the digits of every script."""
    with pytest.raises(PlanError) as caught:
        parse_paddings(text, "--decode-paddings")
    shown = text if len(text) < 61 else "9" * 60 + "…"
    assert caught.value.message == f"--decode-paddings: expected integers with commas between, found `{shown}`"
    assert caught.value.hint == "e.g. 16,128,512"


def test_flash_fits_a_v6e_slice_with_as_many_sequences_of_its_longest_context_as_docs_say():
    """28 sequences of 262,144 tokens fit, as in the table of the targets' page. For 29 the pool has too few pages."""
    flash = Config.from_dict(config_fields("flash", {}))
    plans = [make_plan(flash, Options(context=262144, max_running=count), "tpu:v6e:4x4") for count in (28, 29)]
    assert [plan.geometry.pages >= plan.geometry.slots * 1024 for plan in plans] == [True, False]
    assert round(weight_bytes(flash, plans[0].geometry) / 2**30, 2) == 14.69
    with pytest.raises(PlanError, match="--context: expected 2 to 262144"):
        make_plan(flash, Options(context=262145), "tpu:v6e:4x4")
