"""FLOPs and bytes of custom calls: each native kernel by hand, and a program with kernels against its portable form."""

import math
from collections import defaultdict

import pytest

from ling3export.artifacts.manifest import read_manifest
from ling3export.graph.context import Context
from ling3export.graph.native import KERNELS, VIEWS, cost
from ling3export.model.parameters import weight_table
from ling3export.model.scopes import WEIGHTS
from ling3export.plan.recorded import config_of, plan_of
from ling3export.report.cells import graph_of

# Target, types of operands, type of the result; FLOPs, bytes read, bytes written. Stacks have 7 layers.
CALLS = {
    "columns": (
        "bf16[4,64] bf16[2,7,2,8,64] s32[]", "f32[4,2,16]",
        2 * 4 * 32 * 64, 2 * 4 * 64 + 2 * 32 * 64 + 4, 4 * 4 * 32,
    ),
    "columns_int4.avx2-0": (
        "bf16[4,64] u8[2,7,16,32] bf16[2,7,16,2] s32[]", "f32[4,2,16]",
        2 * 4 * 32 * 64, 2 * 4 * 64 + 32 * 32 + 2 * 32 * 2 + 4, 4 * 4 * 32,
    ),
    "rows": ("bf16[4,16] bf16[2,7,8,64] s32[]", "f32[4,64]", 2 * 4 * 16 * 64, 2 * 64 + 2 * 16 * 64 + 4, 4 * 4 * 64),
    "rows.heads": (
        "bf16[4,2,16] bf16[2,7,1,16,48] s32[]", "f32[4,2,48]",
        2 * 4 * 2 * 16 * 48, 2 * 4 * 32 + 2 * 2 * 16 * 48 + 4, 4 * 4 * 2 * 48,
    ),
    # 8 of 16 experts are here, of which 4 tokens with 2 each choose the share 1 - (7 / 8)^4.
    "experts": (
        "bf16[4,64] bf16[2,7,4,2,32,64] bf16[2,7,4,64,32] s32[] s32[4,2] f32[4,2] f32[1]", "f32[4,64]",
        2 * 3 * 32 * 64 * 4, 512 + 2 * 8 * 3 * 32 * 64 * (1 - (7 / 8) ** 4) + 4 + 32 + 32 + 4, 4 * 4 * 64,
    ),
    "route": (
        "f32[4,64] f32[7,16,64] f32[7,16] s32[]", "(s32[4,2], f32[4,2])",
        2 * 4 * 16 * 64, 4 * 4 * 64 + 4 * 16 * 64 + 4 * 16 + 4, 2 * 4 * 4 * 2,
    ),
    "best": ("f32[4,128] s32[]", "f32[3,4]", 0, 4 * 4 * 128 + 4, 48),
    # 3 of the 32 pages of 256 tokens are cached by each of 4 sequences.
    "attention": (
        "bf16[4,2,56] bf16[2,2049,256,56] s32[] s32[4,32] s32[4]", "f32[4,2,48]",
        2 * 4 * 2 * 768 * (56 + 48), 2 * 4 * 2 * 56 + 2 * 4 * 768 * 56 + 4 + 512 + 16, 4 * 4 * 2 * 48,
    ),
    "token": (
        "f32[6,65,2,16,16] bf16[6,65,2,144] f32[4,2,80] bf16[4,64] bf16[1,6,2,64] bf16[1,6,2,3,16,4] f32[1,6,2] "
        "f32[1,6,2,16] bf16[6,16] s32[] s32[4] s32[]",
        "(f32[6,65,2,16,16], bf16[6,65,2,144], bf16[4,2,16])",
        2 * 4 * 2 * (64 + 2 * 16 * 16),
        4 * (4 * 512 + 2 * 288) + 4 * 640 + 2 * 256 + 2 * 128 + 2 * 384 + 4 * 2 + 4 * 32 + 2 * 16 + 4 + 16 + 4,
        4 * (4 * 512 + 2 * 288) + 2 * 4 * 2 * 16,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_a_kernel_costs_what_its_loops_do(name):
    operands, result, flops, read, written = CALLS[name]
    one = cost(f"ling3_{name}", operands.split(), result, "", Context(experts=16, pages=3))
    assert (one.flops, sum(one.read), sum(one.written)) == (flops, pytest.approx(read), written)


def test_every_kernel_has_a_case():
    assert {name.partition(".")[0].partition("_")[0] for name in CALLS} == set(KERNELS)


def test_other_calls_read_and_write_whole_arrays_and_views_move_nothing():
    one = cost("TopK", ["f32[16,64]{1,0}", "f32[8]{0:S(1)}"], "(f32[16,2]{1,0}, s32[16,2]{1,0})", "", Context())
    assert (one.flops, one.read, one.written) == (0, (4096, 0), (128, 128))
    product = 'backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}}'
    assert cost("__cublas$gemm", ["bf16[4,64]", "bf16[64,8]"], "(bf16[4,8], s8[64])", product, Context()).flops == 4096
    assert VIEWS.fullmatch("ConcatBitcast")
    assert cost("ConcatBitcast", ["f32[8]", "f32[8]"], "f32[16]", "", Context()).read == (0, 0)


def test_a_kernel_with_other_axes_is_refused():
    with pytest.raises(ValueError, match="ling3_experts"):
        cost("ling3_experts", ["bf16[4]"] * 7, "f32[4,64]", "", Context())


PRODUCTS = ("b_proj", "o_proj", "qkvfg_proj", "gate", "shared_down_proj", "shared_gate_up_proj", "down_proj", "lm_head")


def test_a_program_with_kernels_costs_the_formulas_of_the_model(artifact):
    """Decode of one sequence: two FLOPs a weight, two reads of each KDA state, and each weight read once."""
    folder = artifact("micro-tp1-kernels")
    manifest = read_manifest(folder)
    (target,) = manifest.targets
    config, geometry = config_of(manifest), plan_of(manifest, target).geometry
    flops, stored = defaultdict[str | None, float](float), defaultdict[str | None, float](float)
    for weight in weight_table(config, geometry.weights):
        kind = next(kind for start, kind in WEIGHTS.items() if weight.name.startswith(start))
        kind = "router" if weight.name == "moe.expert_bias" else kind
        stored[kind] += weight.nbytes(geometry.dtype)
        if weight.name.partition(".")[2] in (*PRODUCTS, "gate_up_proj"):
            flops[kind] += 2 * math.prod(weight.shape)
    state = len(config.layers("kda")) * config.num_attention_heads * config.head_dim**2
    flops["kda"] += 4 * state
    counted, read = defaultdict[str | None, float](float), defaultdict[str | None, float](float)
    for row in graph_of(folder, manifest, target, "decode@1").rows():
        counted[row.layer_kind] += row.flops
        read[row.layer_kind] += row.bytes_weights
    for kind in ("kda", "router", "shared_expert", "dense_mlp", "logits"):
        assert counted[kind] == pytest.approx(flops[kind], rel=0.01) != 0
        assert read[kind] == pytest.approx(stored[kind], rel=0.03) != 0
    assert read["mla"] == pytest.approx(stored["mla"], rel=0.03)
