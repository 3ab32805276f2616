"""The account of operations: FLOPs by formula, bytes of weights, times; comparisons and rules on planted changes."""

import json
import math
from collections import defaultdict

import jax
import jax.numpy as jnp
import pytest
from click.testing import CliRunner
from jax import export

from ling3export.artifacts.manifest import read_manifest
from ling3export.artifacts.schema import GRAPH
from ling3export.checkpoint.synth import config_fields
from ling3export.cli.main import main
from ling3export.compile.lower import lower_cell
from ling3export.cost.estimates import context_of
from ling3export.cost.roofline import TOKENS, expected_collectives, expected_tiles
from ling3export.foundation.errors import PlanError
from ling3export.graph import audit, diff, hlo, memory, optimized, portable, summary
from ling3export.graph.context import Context
from ling3export.graph.record import Graph
from ling3export.model.config import Config
from ling3export.model.geometry import CHUNK
from ling3export.model.moe import tile_rows
from ling3export.model.parameters import weight_table
from ling3export.model.scopes import LAYER_KINDS, WEIGHTS
from ling3export.plan.options import Options
from ling3export.plan.plan import make_plan
from ling3export.report.cells import graph_of, memory_of
from tests.support.artifacts_fixture import RECIPES

NAME = "micro-tp2"


def lowered(padding: int, phase: str) -> tuple[Graph, Config, int]:
    """The portable program of a cell of the full config at TP 16, its config, and TP."""
    config = Config.from_dict(config_fields("full", {}))
    geometry = make_plan(config, Options(), "cpu@16").geometry
    cell = lower_cell(config, geometry, phase, padding, "cpu")
    leaves = tuple(f"{leaf.group}.{leaf.name}" for leaf in cell.inputs)
    context = context_of(config, geometry, phase, padding, leaves, None)
    return portable.read(cell.blob, f"{phase}@{padding}", "cpu-tp16", context), config, geometry.tp


def by_kind(graph: Graph, quantity: str) -> dict[str | None, float]:
    sums: dict[str | None, float] = defaultdict(float)
    for row in graph.rows():
        sums[row.layer_kind] += getattr(row, quantity)
    return sums


@pytest.mark.parametrize("padding", [16, 512])
def test_flops_by_layer_kind_are_those_of_the_shapes(padding):
    """Two FLOPs a weight and token in every kind; the recurrence, the attention and the experts' tiles have more."""
    phase = "decode" if padding == 16 else "prefill"
    graph, config, tp = lowered(padding, phase)
    flops, dim = by_kind(graph, "flops"), config.hidden_size
    moe, dense = len(config.layers("moe")), len(config.layers("dense"))
    assert flops["router"] == 2 * padding * dim * config.num_experts * moe
    shared = 3 * dim * config.moe_intermediate_size * config.num_shared_experts
    assert flops["shared_expert"] == pytest.approx(2 * padding * shared * moe / tp, rel=0.01)
    assert flops["dense_mlp"] == pytest.approx(2 * padding * 3 * dim * config.intermediate_size * dense / tp, rel=0.01)
    rows = padding if phase == "decode" else padding // 16
    assert flops["logits"] == pytest.approx(2 * rows * dim * config.vocab_size / tp, rel=0.01)
    geometry = make_plan(config, Options(), "cpu@16").geometry
    products = dict.fromkeys(("kda", "mla"), 0.0)
    for weight in weight_table(config, geometry.weights):
        kind, _, name = weight.name.partition(".")
        if kind in products and "norm" not in name and name not in ("A_log", "conv1d", "dt_bias"):
            products[kind] += math.prod(weight.shape) / (tp if weight.split else 1)
    heads, key = config.num_attention_heads / tp, config.head_dim
    # Of a head and token: two reads of the state; in chunks of C, three with it and four with the chunk.
    recurrence = 4 * key**2 if phase == "decode" else 6 * key**2 + 8 * CHUNK * key
    expected = 2 * padding * products["kda"] + padding * len(config.layers("kda")) * heads * recurrence
    assert flops["kda"] == pytest.approx(expected, rel=0.01)
    # Decode: scores and values of a whole row over the pages of 1,024 tokens. Prefill: every token with every token.
    wide = 2 * config.latent_dim if phase == "decode" else config.qk_head_dim + config.v_head_dim
    seen = TOKENS if phase == "decode" else padding
    expected = 2 * padding * products["mla"] + 2 * padding * len(config.layers("mla")) * heads * seen * wide
    assert flops["mla"] == pytest.approx(expected, rel=0.01)
    top, experts = config.num_experts_per_tok, config.num_experts
    tiles = expected_tiles(padding, config, experts / tp) * tile_rows(padding * top, experts)
    expected = 2 * tiles * 3 * config.moe_intermediate_size * dim * moe
    assert flops["experts"] == pytest.approx(expected, rel=0.01)
    assert set(flops) <= {*LAYER_KINDS, None}
    assert by_kind(graph, "bytes")[None] <= 0.02 * sum(by_kind(graph, "bytes").values())
    assert by_kind(graph, "flops")[None] == 0


def test_collectives_are_those_of_the_formula():
    graph, config, _ = lowered(16, "decode")
    geometry = make_plan(config, Options(), "cpu@16").geometry
    runs = sum(one.times for one in graph.operations if one.kind == hlo.COLLECTIVES)
    assert runs == expected_collectives(config, geometry, "decode")


def test_weights_are_read_once_in_decode():
    """Every weight of the store outside of the experts; of the embeddings a row a token."""
    graph, config, tp = lowered(16, "decode")
    read = by_kind(graph, "bytes_weights")
    geometry, stored = make_plan(config, Options(), "cpu@16").geometry, defaultdict[str, float](float)
    for weight in weight_table(config, geometry.weights):
        kind = next(kind for start, kind in WEIGHTS.items() if weight.name.startswith(start))
        kind = "router" if weight.name == "moe.expert_bias" else kind
        stored[kind] += weight.nbytes(geometry.dtype) / (tp if weight.split else 1)
    for kind in stored.keys() - {"embed", "experts"}:
        assert read[kind] == pytest.approx(stored[kind], rel=0.001), kind
    assert read["dense_mlp"] == 2 * 3 * config.hidden_size * config.intermediate_size / tp
    assert read["logits"] == pytest.approx(2 * config.hidden_size * config.vocab_size / tp, rel=0.001)
    assert read["embed"] == 2 * 16 * config.hidden_size


def test_programs_without_loops_have_the_flops_of_the_compilers_own_analysis():
    """XLA counts additions, too; a chain of products of matrices has none to speak of."""
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((3, 64, 128), (3, 128, 256), (256, 512))]
    function = jax.jit(lambda a, b, c: jnp.einsum("bij,bjk,kl->bil", a, b, c))
    compiled = function.lower(*shapes).compile()
    read = optimized.read(compiled.as_text() or "", "decode@1", "toy", Context())
    assert read.totals().flops == pytest.approx(compiled.cost_analysis()["flops"], rel=0.001)
    blob = bytes(export.export(function)(*shapes).mlir_module_serialized)
    assert portable.read(blob, "decode@1", "toy", Context()).totals().flops == read.totals().flops


def test_an_artifact_keeps_the_optimized_program_and_names_its_weights(artifact):
    folder = artifact(NAME)
    manifest = read_manifest(folder)
    (target,) = manifest.targets
    cell = next(name for name in manifest.targets[target].cells if name.startswith("decode@"))
    graph = graph_of(folder, manifest, target, cell)
    sizes = manifest.targets[target].cells[cell].memory
    assert graph.form == "optimized" and graph.peak_bytes == sizes.compiler_peak
    alive = memory_of(folder, manifest, target, cell)
    assert sum(one.bytes for one in alive.inputs) == sizes.arguments
    assert {"weights", "state"} <= {one.what for one in alive.inputs}
    said = CliRunner().invoke(main, ["graph", "memory", str(folder), cell, "--json"])
    assert json.loads(said.stdout)["peak_bytes"] == alive.peak
    read = {weight for one in graph.operations for weight in one.weights}
    assert {"embeddings.lm_head", "kda.qkvfg_proj", "moe.experts_down_proj"} <= read
    kinds = {one.layer_kind for one in graph.operations}
    assert {"kda", "mla", "experts", "router", "shared_expert", "logits", "embed"} <= kinds
    total = graph.totals()
    unscoped = sum(row.bytes for row in graph.rows() if row.layer_kind is None)
    assert unscoped <= 0.04 * total.bytes
    said = CliRunner().invoke(main, ["graph", "summary", str(folder), cell, "--json"])
    document = json.loads(said.stdout)
    assert document["schema"] == summary.SCHEMA
    assert document["cells"][cell]["totals"]["flops"] == total.flops
    record = manifest.targets[target].cells[cell]  # what `inspect` prints
    assert (record.flops, record.bytes_accessed) == (pytest.approx(total.flops), pytest.approx(total.bytes))
    same = CliRunner().invoke(main, ["graph", "diff", str(folder), str(folder), cell])
    assert (same.exit_code, "equal" in same.stdout) == (0, True)


def test_a_build_can_leave_the_programs_texts_out(artifact):
    recipe = RECIPES[NAME]
    words = (*recipe.options(), "--graphs", "drop")
    folder = artifact.built("dropped.ling3", artifact.checkpoint(NAME), *words, variables=recipe.variables)
    ((_, target),) = read_manifest(folder).targets.items()
    assert not list(folder.rglob(f"*.{GRAPH}"))
    assert {cell.graph for cell in target.cells.values()} == {None}
    cell = next(iter(target.cells))
    assert "portable" in CliRunner().invoke(main, ["graph", "summary", str(folder), cell]).stdout
    refused = CliRunner().invoke(main, ["graph", "memory", str(folder), cell])
    assert refused.exit_code == 1 and "--graphs keep" in refused.stderr


TEXT = """HloModule jit_body, is_scheduled=true, input_output_alias={ {0}: (1, {}, may-alias) }, num_partitions=1

%fused (p.1: f32[16,64], p.2: bf16[64,64]) -> f32[16,64] {
  %p.1 = f32[16,64]{1,0} parameter(0)
  %p.2 = bf16[64,64]{1,0} parameter(1)
  %mask = pred[16,64]{1,0} compare(%p.1, %p.1), direction=LE
  ROOT %d.1 = f32[16,64]{1,0} dot(%p.1, %p.2), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

ENTRY %main (w: bf16[64,64], s: f32[9,64], x: f32[16,64]) -> (f32[9,64], f32[16,64]) {
  %w = bf16[64,64]{1,0} parameter(0)
  %s = f32[9,64]{1,0} parameter(1)
  %x = f32[16,64]{1,0} parameter(2)
  %y = f32[16,64]{1,0} fusion(%x, %w), kind=kLoop, calls=%fused, metadata={op_name="jit(f)/layer_0/kda/q_proj/dot"}
  %z = f32[16,64]{1,0} add(%y, %x), metadata={op_name="jit(f)/layer_0/norm/add"}
  ROOT %out = (f32[9,64]{1,0}, f32[16,64]{1,0}) tuple(%s, %z)
}
"""
CONTEXT = Context(
    inputs=("params.kda.q", "state.kda_conv", "batch.packed"), kinds=frozenset(LAYER_KINDS), bandwidth=1e9
)


def graph(text: str, cell: str = "decode@16") -> Graph:
    return optimized.read(text, cell, "toy", CONTEXT)


def test_operations_of_a_text_have_the_costs_that_add_up_by_hand():
    fusion, add = graph(TEXT).operations
    assert (fusion.layer_kind, fusion.part, fusion.layers, fusion.kind) == ("kda", "q_proj", (0,), hlo.PRODUCTS)
    assert (fusion.flops, fusion.weights) == (2 * 16 * 64 * 64, ("kda.q",))
    assert fusion.read == {"other": 4 * 16 * 64, "weights": 2 * 64 * 64}
    assert (add.layer_kind, add.operands, add.seconds) == ("norm", ("y", "batch.packed"), 3 * 4096 / 1e9)
    assert graph(TEXT).aliased == {"state.kda_conv"}


def test_operations_of_two_paddings_are_partners():
    difference = diff.compare(graph(TEXT), graph(TEXT.replace("16,64", "64,64"), "decode@64"))
    assert difference.unmatched_share == 0 and difference.matched == 2


@pytest.mark.parametrize(("maker", "copied"), [("add(%x, %x)", 4096), ("broadcast(%x), dimensions={}", 0)])
def test_a_copy_of_one_repeated_value_is_a_fill(maker: str, copied: int):
    text = TEXT.replace("add(%y, %x)", "copy(%v)").replace("  %z =", f"  %v = f32[16,64]{{1,0}} {maker}\n  %z =")
    assert graph(text).operations[-1].copied == copied


@pytest.mark.parametrize(
    "text",
    [
        "x",
        "a = " + "[" * 9999,
        "[rules]\nnothing = 1",
        '[cells."a"]\nflops = "x"',
        "[other]\na = 1",
        "rules = 1",
        "cells = {a = 1}",
    ],
)
def test_a_wrong_budgets_file_is_refused(text):
    with pytest.raises(PlanError, match=r"^b\.toml: "):
        audit.budgets(text, "b.toml")


@pytest.mark.parametrize("data", [b"", b"x", hlo.packed("HloModule a")[:-3], hlo.packed("y" * 10)[:10] + b"\0" * 20])
def test_a_damaged_text_is_a_value_error(data):
    with pytest.raises(ValueError, match=r"text|incomplete"):
        hlo.unpacked(data)
    assert hlo.unpacked(hlo.packed(TEXT)) == TEXT


def test_a_batched_product_as_a_convolution_counts_only_its_own_products():
    """XLA:TPU writes a product with a batch of 8 as a convolution over a dilated dimension of 8."""
    line = (
        "  %c = f32[8,16,32]{2,1,0} convolution(%a, %b), window={size=8 stride=7 pad=0_0 lhs_dilate=8}, "
        "dim_labels=0bf_0io->0bf"
    )
    text = (
        "HloModule m\n\nENTRY %main (a: f32[8,16,64], b: f32[8,64,32]) -> f32[8,16,32] {\n"
        "  %a = f32[8,16,64]{2,1,0} parameter(0)\n  %b = f32[8,64,32]{2,1,0} parameter(1)\n" + line + "\n}\n"
    )
    (one,) = graph(text.replace("  %c", "  ROOT %c")).operations
    assert one.flops == 2 * math.prod((8, 16, 32, 64))


def test_a_buffer_lives_until_its_last_reader_and_views_make_none():
    """x, w and the result z live throughout; y (4 KiB) until z is made; tiles of 8 by 128 are padded."""
    alive = memory.timeline(TEXT, CONTEXT.inputs, frozenset(LAYER_KINDS), None)
    assert [one.bytes for one in alive.inputs] == [8192, 4096, 9 * 64 * 4]
    assert [(one.name, one.bytes, one.what, one.layer_kind) for one in alive.at_peak] == [
        ("z", 4096, "result", "norm"), ("y", 4096, "temporary", "kda"),
    ]  # fmt: skip
    assert dict(alive.points) == {"w": 4096, "s": 4096, "x": 4096, "y": 8192, "z": 8192, "out": 4096}
    assert memory.padded_bytes("bf16[3,5,100]{2,1,0:T(8,128)(2,1)}") == 2 * 3 * 8 * 128
    assert memory.padded_bytes("s32[]{:T(128)}") == 512  # a scalar fills a tile


UPDATED = """HloModule jit_body, is_scheduled=true

%store (p.1: f32[9,64], p.2: f32[2,64], p.3: s32[2]) -> f32[9,64] {
  %p.1 = f32[9,64]{1,0} parameter(0)
  %p.2 = f32[2,64]{1,0} parameter(1)
  %p.3 = s32[2]{0} parameter(2)
  ROOT %scatter.1 = f32[9,64]{1,0} scatter(%p.1, %p.3, %p.2)
}

ENTRY %main (s: f32[9,64], at: s32[2], x: f32[2,64]) -> (f32[9,64], f32[2,64]) {
  %s = f32[9,64]{1,0} parameter(0)
  %at = s32[2]{0} parameter(1)
  %x = f32[2,64]{1,0} parameter(2)
  %new = f32[2,64]{1,0} add(%x, %x)
  %pool = f32[9,64]{1,0} fusion(%s, %new, %at), kind=kLoop, calls=%store
  %later = f32[2,64]{1,0} negate(%x)
  ROOT %out = (f32[9,64]{1,0}, f32[2,64]{1,0}) tuple(%pool, %later)
}
"""


def test_rows_that_a_fusion_writes_into_a_pool_end_there():
    """The updates of a scatter once counted as parts of the pool, and lived as long as it did."""
    alive = memory.timeline(UPDATED, ("state.kda_conv",), frozenset(LAYER_KINDS), None)
    assert dict(alive.points) == {"s": 512, "at": 512, "x": 512, "new": 1024, "pool": 1024, "later": 512, "out": 512}


BRANCHES = """HloModule jit_body, is_scheduled=true, input_output_alias={ {1}: (1, {}, may-alias) }

%same (p.1: f32[16]) -> (f32[16]) {
  %p.1 = f32[16]{0} parameter(0)
  ROOT %t.1 = (f32[16]{0}) tuple(%p.1)
}

%sorted (p.2: (f32[16], f32[64])) -> (f32[16]) {
  %p.2 = (f32[16]{0}, f32[64]{0}) parameter(0)
  %large = f32[64]{0} get-tuple-element(%p.2), index=1
  %short = f32[16]{0} slice(%large), slice={[0:16]}
  %half = f32[32]{0} concatenate(%short, %short), dimensions={0}
  %zero = f32[] constant(0)
  %made = f32[16]{0} slice(%half), slice={[0:16]}
  ROOT %t.2 = (f32[16]{0}) tuple(%made)
}

ENTRY %main (n: s32[], x: f32[16]) -> (f32[16], f32[16]) {
  %n = s32[] parameter(0)
  %x = f32[16]{0} parameter(1)
  %y = f32[16]{0} add(%x, %x)
  %wide = f32[64]{0} concatenate(%x, %x, %x, %x), dimensions={0}
  %both = (f32[16]{0}, f32[64]{0}) tuple(%y, %wide)
  %c = (f32[16]{0}) conditional(%n, %y, %both), branch_computations={%same, %sorted}
  %z = f32[16]{0} get-tuple-element(%c), index=0
  %w = f32[16]{0} negate(%z)
  %v = f32[16]{0} add(%z, %w)
  ROOT %out = (f32[16]{0}, f32[16]{0}) tuple(%w, %v)
}
"""


def test_results_of_branches_lie_in_one_place_and_operands_end_inside_of_them():
    """`sample` and `logits_processor` had 0.86 to 1.45 of the compiler's peak.

    w lives throughout, and a constant of 4 bytes; v is written into the donated x. Both branches of c write where y
    lies. The wide array ends in the branch after `short` is made.
    """
    alive = memory.timeline(BRANCHES, ("batch.n", "batch.x"), frozenset(LAYER_KINDS), None)
    assert {name: size - 68 for name, size in alive.points if name in "y wide c w v"} == {
        "y": 64, "wide": 64 + 256, "c": 64 + 256 + 64, "w": 64, "v": 64,
    }  # fmt: skip
    assert [one.name for one in alive.at_peak] == ["wide", "w", "y", "short", "constants"]


def test_results_may_be_tuples_of_tuples():
    """XLA:GPU joins reductions with several results so."""
    line = '  %v = (f32[16]{0}, (f32[8]{0}, s32[8]{0:T(128)})) custom-call(%x), custom_call_target="both"\n'
    more = "  %inner = (f32[8]{0}, s32[8]{0}) get-tuple-element(%v), index=1\n"
    last = "  %last = s32[8]{0} get-tuple-element(%inner), index=1\n  %use = s32[8]{0} negate(%last)\n  ROOT %out ="
    text = TEXT.replace("  ROOT %out =", line + more + last)
    before, after = (memory.timeline(one, (), frozenset(LAYER_KINDS), None) for one in (TEXT, text))
    assert dict(after.points)["v"] - dict(before.points)["out"] == 64 + 32 + 512
    assert dict(after.points)["use"] - dict(before.points)["out"] == 32 + 512 + 32


def test_the_peak_is_that_of_the_compiler(artifact):
    folder = artifact(NAME)
    manifest = read_manifest(folder)
    (target,) = manifest.targets
    for cell in manifest.targets[target].cells:
        alive = memory_of(folder, manifest, target, cell)
        assert alive.peak == pytest.approx(alive.compiler_peak, rel=0.01, abs=4_000), cell  # gaps of the heap


def test_a_call_of_a_computation_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match=r"HLO text: a call of gone, which is no computation"):
        hlo.parse(BRANCHES.replace("%same, %sorted", "%same, %gone"))
