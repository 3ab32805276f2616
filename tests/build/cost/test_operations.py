"""Kinds of operations, and bytes through the large memory, for instructions small enough to sum by hand."""

import dataclasses

import pytest

from ling3export.cost.chips import CHIPS
from ling3export.cost.estimates import estimate
from ling3export.graph.context import Context
from ling3export.graph.hlo import KINDS, Instruction, Module, access, kind, large_bytes, opcodes, parse
from ling3export.graph.optimized import read

CHIP = dataclasses.replace(CHIPS["tpu", "v6e"], clock=1e9, bandwidth=1e9)
CONTEXT = Context(clock=CHIP.clock, bandwidth=CHIP.bandwidth, peak=CHIP.flops)

# S(1) is the fast memory; a layout without it is in the large memory. W: 18 layers of 8 x 16 bf16, 256 bytes each.
MODULE = """\
HloModule jit_body, is_scheduled=true

%add (x.1: f32[], x.2: f32[]) -> f32[] {
  %x.1 = f32[] parameter(0)
  %x.2 = f32[] parameter(1)
  ROOT %x.3 = f32[] add(%x.1, %x.2)
}

%sliced (p.1: bf16[18,8,16], p.2: f32[16]) -> f32[16] {
  %p.1 = bf16[18,8,16]{2,1,0} parameter(0)
  %p.2 = f32[16]{0} parameter(1)
  %b.1 = bf16[18,8,16]{2,1,0} bitcast(%p.1)
  %s.1 = bf16[1,8,16]{2,1,0} slice(%b.1), slice={[3:4], [0:8], [0:16]}
  ROOT %d.1 = f32[16]{0} dot(%s.1, %p.2), lhs_contracting_dims={2}, rhs_contracting_dims={0}
}

%kept (p.3: bf16[18,8,16]) -> bf16[144,16] {
  %p.3 = bf16[18,8,16]{2,1,0} parameter(0)
  ROOT %b.2 = bf16[144,16]{1,0} bitcast(%p.3)
}

%cut (p.4: bf16[18,8,16]) -> bf16[1,8,16] {
  %p.4 = bf16[18,8,16]{2,1,0} parameter(0)
  ROOT %s.2 = bf16[1,8,16]{2,1,0} slice(%p.4), slice={[0:1], [0:8], [0:16]}
}

%whole (p.5: bf16[18,8,16], p.6: f32[16]) -> f32[144] {
  %p.5 = bf16[18,8,16]{2,1,0} parameter(0)
  %p.6 = f32[16]{0} parameter(1)
  %f.1 = bf16[144,16]{1,0} fusion(%p.5), kind=kLoop, calls=%kept
  ROOT %d.2 = f32[144]{0} dot(%f.1, %p.6), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%nested (p.7: bf16[18,8,16]) -> f32[8] {
  %p.7 = bf16[18,8,16]{2,1,0} parameter(0)
  %f.2 = bf16[1,8,16]{2,1,0} fusion(%p.7), kind=kLoop, calls=%cut
  ROOT %r.1 = f32[8]{0} reduce(%f.2), dimensions={0,2}, to_apply=%add
}

%put (p.8: f32[65,4], p.9: s32[2], p.10: f32[2,4]) -> f32[65,4] {
  %p.8 = f32[65,4]{1,0} parameter(0)
  %p.9 = s32[2]{0} parameter(1)
  %p.10 = f32[2,4]{1,0} parameter(2)
  ROOT %sc.1 = f32[65,4]{1,0} scatter(%p.8, %p.9, %p.10), to_apply=%add
}

%turn (p.11: f32[2,4]) -> f32[4,2] {
  %p.11 = f32[2,4]{1,0} parameter(0)
  %t.1 = f32[4,2]{0,1} transpose(%p.11), dimensions={1,0}
  ROOT %c.1 = f32[4,2]{1,0} copy(%t.1)
}

ENTRY %main (w: bf16[18,8,16], x: f32[16], pool: f32[65,4], rows: s32[2], new: f32[2,4], big: f32[1024,1024]) -> f32[4,2] {
  %w = bf16[18,8,16]{2,1,0} parameter(0)
  %x = f32[16]{0:T(128)S(1)} parameter(1)
  %pool = f32[65,4]{1,0} parameter(2)
  %rows = s32[2]{0} parameter(3)
  %new = f32[2,4]{1,0} parameter(4)
  %big = f32[1024,1024]{1,0:T(8,128)} parameter(5)
  %one = f32[16]{0:T(128)S(1)} fusion(%w, %x), kind=kOutput, calls=%sliced
  %two = f32[144]{0:T(128)} fusion(%w, %x), kind=kOutput, calls=%whole
  %three = f32[8]{0:T(128)S(1)} fusion(%w), kind=kLoop, calls=%nested
  %four = f32[65,4]{1,0} fusion(%pool, %rows, %new), kind=kLoop, calls=%put
  %five = f32[4,2]{1,0:S(1)} fusion(%new), kind=kLoop, calls=%turn
  %six = f32[2,4]{1,0} gather(%pool, %rows), offset_dims={1}
  %seven = f32[65,4]{1,0} dynamic-update-slice(%pool, %new, %rows)
  %eight = f32[16]{0} add(%x, %x)
  %nine = f32[16]{0} sort(%eight), dimensions={0}, to_apply=%add
  %in = (f32[1024,1024]{1,0:T(8,128)S(1)}, f32[1024,1024]{1,0:T(8,128)}, u32[]{:S(2)}) copy-start(%big)
  %there = f32[1024,1024]{1,0:T(8,128)S(1)} copy-done(%in)
  %out = (f32[1024,1024]{1,0:T(8,128)}, f32[1024,1024]{1,0:T(8,128)S(1)}, u32[]{:S(2)}) copy-start(%there)
  %across = (f32[1024,1024]{1,0:T(8,128)}, f32[1024,1024]{1,0:T(8,128)}, u32[]{:S(2)}) copy-start(%big)
  %part = ((f32[1024,1024]{1,0:T(8,128)}), f32[8,1024]{1,0:T(8,128)S(1)}, s32[]{:S(2)}) slice-start(%big), slice={[0:8]}
  %down = f32[1024,1024]{1,0:T(8,128)} copy(%there)
  ROOT %twin = f32[1024,1024]{1,0:T(8,128)} copy(%big)
}
"""  # noqa: E501
MB = 4 * 1024 * 1024


def moved(module: Module, instruction: Instruction) -> int:
    """Bytes that one run reads and writes."""
    counted = access(module, module.entry, instruction)
    return sum(counted.read) + counted.written


@pytest.mark.parametrize(
    ("name", "expected", "what"),
    [
        ("one", 8 * 16 * 2, "the slice of one layer; what is in the fast memory is free"),
        ("two", 18 * 8 * 16 * 2 + 144 * 4, "all layers, through a fusion that only renames, and the result"),
        ("three", 8 * 16 * 2, "the slice that a fusion in the fusion takes"),
        ("four", 2 * 4 + 2 * 4 * 4 + 2 * 4 * 4, "indices, what is written, and writing it"),
        ("five", 2 * 4 * 4, "read; the result is in the fast memory"),
        ("six", 2 * 2 * 4 * 4, "the rows taken, and written"),
        ("seven", 2 * 4 * 4 + 2 * 4 + 2 * 4 * 4, "the update, the place, and writing it"),
        ("eight", 16 * 4, "written"),
        ("nine", 2 * 16 * 4, "read and written"),
        ("in", MB, "one end is in the large memory"),
        ("out", MB, "one end is in the large memory"),
        ("across", 2 * MB, "both ends are"),
        ("part", 8 * 1024 * 4 + 4, "the slice, and the 4 bytes of its context"),
        ("down", MB, "written"),
        ("twin", 2 * MB, "read and written"),
    ],
)
def test_bytes_through_the_large_memory(name, expected, what):
    module = parse(MODULE)
    assert moved(module, module.entry.instructions[name]) == expected, what


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("one", "two"), "matrix products"),
        (("four", "six", "seven"), "gathers and scatters"),
        (("nine",), "sorts"),
        (("three",), "reductions"),
        (("five", "twin"), "copies and layout"),
        (("eight",), "elementwise"),
    ],
)
def test_kinds_of_operations(names, expected):
    module = parse(MODULE)
    assert {kind(opcodes(module, module.entry.instructions[name])) for name in names} == {expected}
    assert expected in KINDS


def test_an_estimate_sums_both():
    graph = read(MODULE, "", "", CONTEXT)
    module = parse(MODULE)
    each = [i for i in module.entry.instructions.values() if i.opcode not in ("parameter", "copy-done")]
    assert graph.totals().bytes == sum(moved(module, i) for i in each)
    bounded = [one for one in graph.operations if one.source == "roofline" and not one.overlapped]  # without cycles
    assert graph.totals().seconds == pytest.approx(sum(one.times * one.seconds for one in bounded))
    prefetches = sum(one.times * one.seconds for one in graph.operations if one.overlapped)
    assert estimate(graph, CHIP, 512).seconds == pytest.approx(max(graph.totals().seconds, prefetches))
    assert {one.kind for one in bounded if one.kind != "collectives"} == set(KINDS)


def test_a_move_from_or_to_the_fast_memory_is_no_copy():
    """Regression: writes from the fast memory back to the large one counted as copies within the large one."""
    copies = {one.name: one.copied for one in read(MODULE, "", "", CONTEXT).operations}
    assert {name: count for name, count in copies.items() if count >= MB} == {"across": MB, "twin": MB}


def test_bytes_of_a_tuple_by_memory():
    assert large_bytes("(f32[8]{0:T(128)S(1)}, /*index=1*/bf16[2,3]{1,0:T(8,128)(2,1)}, pred[7])") == 12 + 7
