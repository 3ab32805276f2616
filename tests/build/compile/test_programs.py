"""Properties of lowered and compiled programs: collectives, constants, donation, and no paths of this checkout."""

import math
import re
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax import export

from ling3export.artifacts.program_records import Collective
from ling3export.checkpoint.synth import config_fields
from ling3export.compile.lower import Lowered, compile_cell, device_mesh, lower_cell
from ling3export.machine import portable
from ling3export.model.config import Config
from ling3export.model.geometry import Geometry
from ling3export.model.state import StateArray, state_arrays

pytestmark = pytest.mark.jit

ROOT = Path(__file__).resolve().parents[3]
TP = 4
# tables of frequencies and masks of a chunk are far smaller; the smallest weight matrix is larger
CONSTANT_BYTES = 4096
CELLS = [("prefill", 32), ("decode", 3)]
COLLECTIVES = ("all_reduce", "all_gather", "all_to_all", "collective_permute", "collective_broadcast", "reduce_scatter")


def config(**overrides: Any) -> Config:
    return Config.from_dict(config_fields("micro", {"layer_group_size": 3, "num_hidden_layers": 10} | overrides))


def geometry(form: str, **changes: Any) -> Geometry:
    fields: dict[str, Any] = {"slots": 4, "pages": 8, "page_size": 16, "max_pages": 4, "latent_row": 56}
    fields |= {"tp": TP, "dtype": "bfloat16", "form": form} | changes
    return Geometry(**fields)


@cache
def plain(phase: str, padding: int) -> Lowered:
    """A program for cpu, lowered once for all tests."""
    return lower_cell(config(), geometry("loops"), phase, padding, "cpu")


def text(lowered: Lowered) -> str:
    """The StableHLO in the file."""
    return portable.text(lowered.blob)


def collectives(module: str) -> dict[str, int]:
    counts = {name: len(re.findall(rf"stablehlo\.{name}\b", module)) for name in COLLECTIVES}
    return {name: count for name, count in counts.items() if count}


def largest_constant(module: str) -> int:
    """Characters of the longest literal, at least as many as its bytes."""
    return max((len(value) for value in re.findall(r"stablehlo\.constant dense<(.*?)> : tensor<", module)), default=0)


@pytest.mark.parametrize(("phase", "padding"), CELLS)
def test_two_collectives_a_layer_and_one_for_the_embedding(phase: str, padding: int):
    """Unrolled layers.

    In a striped pool, each of four MLA layers also reads cached pages (prefill), or exchanges queries and partial
    attention (decode).
    """
    lowered = lower_cell(config(), geometry("tiles"), phase, padding, "cpu")
    two_a_layer = 2 * 10 + 1
    wanted = {
        "prefill": {"all_reduce": two_a_layer + 4},
        "decode": {"all_reduce": two_a_layer, "all_gather": 4, "all_to_all": 4},
    }[phase]
    assert collectives(text(lowered)) == wanted
    assert lowered.collectives == {kind: Collective(count) for kind, count in wanted.items()}


@pytest.mark.parametrize(("phase", "padding"), CELLS)
def test_a_loop_over_layers_holds_each_kind_once(phase: str, padding: int):
    """Two all-reduces each for a KDA layer, an MLA layer and the layer after the last group, one for the embedding."""
    assert collectives(text(plain(phase, padding))) == {"all_reduce": 2 + 2 + 2 + 1}


def test_sampling_gathers_candidates_and_only_for_draws_exchanges_the_vocabulary():
    module = text(plain("sample", 3))
    assert collectives(module) == {"all_gather": 2, "all_to_all": 1}
    gathered = re.findall(r"stablehlo\.all_gather.*?-> tensor<([0-9x]+)x", module)
    rows = -(-3 // TP) * TP
    assert sorted(gathered) == sorted([f"{TP}x3x3", f"2x{rows}"])


def test_scoring_adds_one_gather_and_never_holds_the_logits_of_all_slots():
    """For 2,048 slots and a vocabulary of 32,768, all logits would be 67 MB on each of four devices.

    For 128 slots they are 4 MB, and the reductions over them hold four such arrays on CPU.
    """
    slots, vocabulary = 2048, 32768
    wide = config(vocab_size=vocabulary, eos_token_id=1, pad_token_id=1)
    lowered = lower_cell(wide, geometry("loops", dtype="float32"), "score", slots, "cpu")
    module = text(lowered)
    assert collectives(module) == {"all_reduce": 2 + 2 + 2 + 1, "all_gather": 1}
    assert re.findall(r"stablehlo\.all_gather.*?-> tensor<([0-9x]+)x", module) == [f"{TP}x16x4x128"]
    assert largest_constant(module) < CONSTANT_BYTES
    assert [row.name for row in lowered.outputs if row.group == "out"] == ["best", "best_logprob", "logits", "logprob"]
    _, record, _ = compile_cell(lowered, device_mesh(TP))
    assert record.memory.temporaries < slots * vocabulary // TP * 4 / 2


@pytest.mark.parametrize(("phase", "padding"), [*CELLS, ("sample", 3)])
def test_no_program_holds_weights_or_a_path_of_this_checkout(phase: str, padding: int):
    lowered = plain(phase, padding)
    assert largest_constant(text(lowered)) < CONSTANT_BYTES
    assert str(ROOT).encode() not in lowered.blob
    assert b".py" not in lowered.blob


def test_a_closed_over_weight_would_be_found():
    weight = np.random.default_rng(0).normal(size=(64, 32)).astype(np.float32)
    exported = export.export(jax.jit(lambda x: x @ weight))(jax.ShapeDtypeStruct((2, 64), np.float32))
    assert largest_constant(exported.mlir_module()) > weight.nbytes


@pytest.mark.parametrize(("phase", "padding"), CELLS)
def test_size_does_not_follow_experts_or_depth(phase: str, padding: int):
    small, wide, deep = (
        len(lower_cell(config(**changes), geometry("loops"), phase, padding, "cpu").blob)
        for changes in (
            {"num_experts": 64},  # from here on tiles are of one form
            {"num_experts": 128, "vocab_size": 4096, "intermediate_size": 640},
            {"num_experts": 64, "num_hidden_layers": 40},
        )
    )
    assert abs(wide / small - 1) < 0.02
    assert abs(deep / small - 1) < 0.02


def local_bytes(array: StateArray) -> int:
    """Bytes on one device."""
    width = 2 if array.dtype == "bfloat16" else 4
    return math.prod(array.shape) * width // (TP if "heads" in array.axes else 1)


@pytest.mark.parametrize(("phase", "padding"), CELLS)
def test_state_is_donated_and_never_copied(phase: str, padding: int):
    """Every state input aliases its output, and a program's allocations do not grow with the pools.

    The pools are large and never allocated here, so that a copy of even the smallest would exceed the bound.
    """
    # jax 0.10.2 widens a bf16 pool to fp32 and back for each write: it has no bf16 scatter on CPU.
    dtype = "bfloat16" if jax.__version_info__ >= (0, 11) else "float32"
    model, large = config(), geometry("loops", slots=2000, pages=20000, dtype=dtype)
    lowered = lower_cell(model, large, phase, padding, "cpu")
    _, record, _ = compile_cell(lowered, device_mesh(TP))
    donated = [
        leaf.name for leaf, row in zip(lowered.inputs, record.executable.call.inputs, strict=True) if row.donated
    ]
    assert donated == sorted(array.name for array in state_arrays(model, large))
    sizes = {array.name: local_bytes(array) for array in state_arrays(model, large)}
    assert record.memory.alias == sum(sizes.values())
    assert record.memory.temporaries < min(size for name, size in sizes.items() if name != "last_token") / 2
