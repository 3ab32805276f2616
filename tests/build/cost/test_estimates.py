"""Cost estimates from a compiler's text, for a module small enough to sum by hand."""

import dataclasses
import re
from collections.abc import Mapping
from types import MappingProxyType

import numpy as np
import pytest

from ling3export.artifacts.program_records import Collective, Estimate
from ling3export.checkpoint.synth import config_fields
from ling3export.cost.chips import CHIPS
from ling3export.cost.estimates import collectives_of, estimate
from ling3export.cost.roofline import loop_trips, roofline_bound
from ling3export.graph import optimized
from ling3export.graph.context import Context
from ling3export.graph.record import Graph, Loop
from ling3export.model.config import Config
from ling3export.model.moe import form_of
from ling3export.plan.options import Options
from ling3export.plan.plan import make_plan

CHIP = dataclasses.replace(CHIPS["tpu", "v6e"], clock=1e9, bandwidth=1e9)

MODULE = """\
HloModule jit_body, is_scheduled=true

%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %add = f32[] add(%a, %b)
}

%until (p: (s32[], s32[], f32[8])) -> pred[] {
  %p = (s32[], s32[], f32[8]{0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %n = s32[] get-tuple-element(%p), index=1
  ROOT %lt = pred[] compare(%i, %n), direction=LT
}

%inside (p.1: (s32[], s32[], f32[8])) -> (s32[], s32[], f32[8]) {
  %p.1 = (s32[], s32[], f32[8]{0}) parameter(0)
  ROOT %f = (s32[], s32[], f32[8]{0}) fusion(%p.1), kind=kLoop, calls=%sum, CYCLES(100)
}

%outer_condition (q: (s32[], f32[8])) -> pred[] {
  %q = (s32[], f32[8]{0}) parameter(0)
  %j = s32[] get-tuple-element(%q), index=0
  %six = s32[] constant(6)
  ROOT %lt.1 = pred[] compare(%j, %six), direction=LT
}

%outer_body (q.1: (s32[], s32[], f32[8])) -> (s32[], s32[], f32[8]) {
  %q.1 = (s32[], s32[], f32[8]{0}) parameter(0)
  %x = f32[8]{0} get-tuple-element(%q.1), index=2
  %bound = s32[] get-tuple-element(%q.1), index=1
  %zero = s32[] constant(0)
  %r = f32[8]{0:T(128)S(1)} all-reduce(%x), replica_groups=[1,4]<=[4], to_apply=%sum
  %start = (s32[], s32[], f32[8]{0}) tuple(%zero, %bound, %r)
  ROOT %w = (s32[], s32[], f32[8]{0}) while(%start), condition=%until, body=%inside, AT(b/SCOPE/while)
}

%yes (y: f32[8]) -> f32[8] {
  %y = f32[8]{0} parameter(0)
  ROOT %g = f32[8]{0} fusion(%y), kind=kLoop, calls=%sum, CYCLES(5000)
}

%no (z: f32[8]) -> f32[8] {
  ROOT %z = f32[8]{0} parameter(0)
}

ENTRY %main (a.1: f32[8], big: bf16[1024,1024], which: pred[]) -> f32[8] {
  %a.1 = f32[8]{0} parameter(0)
  %big = bf16[1024,1024]{1,0:T(8,128)(2,1)} parameter(1)
  %which = pred[] parameter(2)
  %nil = s32[] constant(0)
  %four = s32[] constant(4)
  %t = (s32[], s32[], f32[8]{0}) tuple(%nil, BOUND, %a.1)
  %loop = (s32[], s32[], f32[8]{0}) while(%t), condition=%outer_condition, body=%outer_body
  %out = f32[8]{0} get-tuple-element(%loop), index=2
  %twin = bf16[1024,1024]{1,0:T(8,128)(2,1)} copy(%big), CYCLES(7)
  %unknown = f32[8]{0} sort(%out), dimensions={0}, to_apply=%sum
  %scratch = f32[8]{0} custom-call(), custom_call_target="AllocateBuffer"
  %kernel = f32[8]{0} custom-call(%unknown), custom_call_target="tpu_custom_call"
  ROOT %c = f32[8]{0} conditional(%which, %kernel, %kernel), branch_computations={%yes, %no}, AT(b/cached/cond)
}
"""


def module(bound: str = "%four", scope: str = "pages") -> str:
    """The module, with its long attributes written out."""
    text = MODULE.replace("BOUND", bound).replace("SCOPE", scope)
    text = re.sub(r"CYCLES\((\d+)\)", r'backend_config={"window_config":{"estimated_cycles":"\1"}}', text)
    return re.sub(r"AT\((\S+)\)", r'metadata={op_name="\1"}', text)


def graph(text: str, trips: Mapping[str, float] = MappingProxyType({})) -> Graph:
    context = Context(trips=trips, clock=CHIP.clock, bandwidth=CHIP.bandwidth, peak=CHIP.flops)
    return optimized.read(text, "", "", context)


def seconds(of: Graph, opcode: str, source: str = "compiler") -> float:
    """Seconds that a call spends in operations of one opcode, counted from one source only."""
    return sum(one.times * one.seconds for one in of.operations if (one.opcode, one.source) == (opcode, source))


def test_loops_count_as_often_as_they_run():
    counted = graph(module())
    # 6 × 4 × 100 cycles of the fusion, 5000 of the slower branch, 7 of the copy, at 1 GHz; the sort moves 64 bytes.
    assert (seconds(counted, "fusion"), seconds(counted, "copy")) == (pytest.approx(7400e-9), 7e-9)
    assert {one.opcode for one in counted.operations if one.source == "compiler"} == {"fusion", "copy"}
    assert seconds(counted, "sort", "roofline") == 64e-9
    assert [loop.trips for loop in counted.loops] == [6, 4]
    assert {loop.source for loop in counted.loops} == {"the program"}
    assert collectives_of(counted) == {"all-reduce": Collective(6, 6 * 32)}
    estimated = estimate(counted, CHIP, 512)
    assert estimated == Estimate(pytest.approx(counted.totals().seconds), 1, 512, 1e9)
    assert estimated.at_least == "at least "
    assert {one.name: one.copied for one in counted.operations if one.copied} == {"twin": 2 * 1024 * 1024}


def test_pieces_of_a_prefetch_seen_as_one_array_take_no_time():
    estimated = estimate(graph(module().replace("tpu_custom_call", "ConcatBitcast")), CHIP, 512)
    assert (estimated.unseen, estimated.at_least) == (0, "")


def test_a_chip_reads_some_experts_of_flash_where_few_sequences_run():
    """The chip with the most chosen experts decides: 11.5 of 32 for 16 rows, while the mean is 7.1."""
    config = Config.from_dict(config_fields("flash", {}))
    geometry = make_plan(config, Options(), "tpu:v6e:4x4").geometry
    assert [form_of(rows, config, geometry) for rows in (1, 16, 64, 512)] == ["some", "some", "all", "all"]
    tiny = Config.from_dict(config_fields("full", {}))
    assert form_of(1, tiny, geometry) == "all"  # with 8 experts, reading some saves too few
    drawn = np.random.default_rng(0).binomial(32, 1 - (1 - 1 / 64) ** 16, (20_000, 16))
    trips = loop_trips(config, geometry, "decode", 16, 1024)["some"]
    assert trips == pytest.approx(drawn.max(axis=1).mean(), rel=0.01) and round(drawn.mean(), 1) == 7.1


def test_a_bound_that_the_batch_decides_takes_the_stated_workload():
    dynamic = module("%a.1")
    counted = graph(dynamic, {"pages": 10, "cached": 0})
    assert seconds(counted, "fusion") == pytest.approx(6 * 10 * 100e-9)  # the branch is not taken
    assert counted.loops[1] == Loop("b/pages/while", 10, "the workload's `pages`", 6.0)


def test_a_bound_that_nobody_states_is_counted_once_and_said_so():
    loop = graph(module("%a.1")).loops[1]
    assert (loop.source, loop.trips) == ("unknown: counted once", 1)


def test_sparse_core_operations_count_where_they_start():
    """Regression: the scatter of ``dispatch`` runs on a sparse core.

    Its start has no operands, and the estimate failed.
    """
    text = module().replace(
        "  %unknown =",
        """\
  %begin = ((), (), s32[]) call-start(), async_execution_thread="sparsecore", to_apply=%there
  %more = ((f32[8]), f32[8], s32[]) call-update(%begin, %out)
  %end = f32[8]{0} call-done(%more)
  %unknown =""",
    )
    there = """%there (v: f32[8]) -> f32[8] {
  %v = f32[8]{0} parameter(0)
  ROOT %s = f32[8]{0} scatter(%v, %v, %v), backend_config={"estimated_cycles":"300"}
}

ENTRY"""
    assert seconds(graph(text.replace("ENTRY", there)), "scatter") == 300e-9


def test_the_roofline_bounds_of_a_split_layer_add_up_to_the_decode_step_s_weights():
    config = Config.from_dict(config_fields("full", {}))
    geometry, chip = make_plan(config, Options(), "tpu:v6e:4x4").geometry, CHIPS["tpu", "v6e"]
    bound = {
        phase: roofline_bound(config, geometry, phase, padding, chip, 1024)
        for phase, padding in (("decode", 16), ("attend", 16), ("experts", 128), ("combine", 16), ("head", 16))
    }
    weights = {phase: each.bytes.get("weights", 0) for phase, each in bound.items()}
    # experts@128 draws experts one by one, decode@16 eight for each row: 63.4 and 64.4 % of them are read.
    whole = 24 * weights["attend"] + 23 * weights["experts"] + weights["head"]
    assert whole == pytest.approx(weights["decode"], rel=0.02)
    assert weights["combine"] == 0
    assert bound["decode"].bytes["state"] == pytest.approx(24 * bound["attend"].bytes["state"], rel=1e-4)
    assert [bound[phase].collectives for phase in ("attend", "experts", "combine", "head")] == [2, 1, 0, 0]


def test_the_roofline_bound_of_decode_is_its_weights_state_and_latents():
    """About 0.67 ms for 16 rows at TP=16, nearly all of it weights."""
    config = Config.from_dict(config_fields("full", {}))
    geometry = make_plan(config, Options(), "tpu:v6e:4x4").geometry
    found = roofline_bound(config, geometry, "decode", 16, CHIPS["tpu", "v6e"], 1024)
    assert found.bytes["latents"] == 16 * 1024 * 6 * 576 * 2 // 16
    assert found.bytes["state"] == 2 * 16 * 18 * (128 * 128 * 4 + 3 * 3 * 128 * 2)
    assert 0.4e-3 < found.seconds < 0.7e-3
    assert (found.collectives, found.collective_seconds) == (48, pytest.approx(48e-5))
