"""Planted changes and changes that mean nothing, for `diff`, and planted faults, for `audit`."""

import dataclasses
import json
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import pytest
from click.testing import CliRunner
from jax import export

from ling3export.artifacts.manifest import read_manifest
from ling3export.cli.main import main
from ling3export.foundation.errors import ArtifactError
from ling3export.graph import audit, diff, optimized, portable, saved, summary
from ling3export.graph.context import Context
from ling3export.graph.record import Graph
from ling3export.model.scopes import LAYER_KINDS

TEXT = """HloModule jit_body, is_scheduled=true, input_output_alias={ {0}: (1, {}, may-alias) }, num_partitions=1

%fused (p.1: f32[16,64], p.2: bf16[64,64]) -> f32[16,64] {
  %p.1 = f32[16,64]{1,0} parameter(0)
  %p.2 = bf16[64,64]{1,0} parameter(1)
  %bound = f32[] constant(8)
  %limit = f32[16,64]{1,0} broadcast(%bound), dimensions={}
  %mask = pred[16,64]{1,0} compare(%p.1, %limit), direction=LE
  %kept = f32[16,64]{1,0} select(%mask, %p.1, %limit)
  ROOT %d.1 = f32[16,64]{1,0} dot(%kept, %p.2), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%plus (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %ab = f32[] add(%a, %b)
}

%more (q: (s32[], f32[16,64])) -> pred[] {
  %q = (s32[], f32[16,64]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%q), index=0
  %end = s32[] constant(3)
  ROOT %lt = pred[] compare(%i, %end), direction=LT, metadata={op_name="jit(f)/layer_0/shared_expert/while/lt"}
}

%step (r: (s32[], f32[16,64])) -> (s32[], f32[16,64]) {
  %r = (s32[], f32[16,64]{1,0}) parameter(0)
  %j = s32[] get-tuple-element(%r), index=0
  %h = f32[16,64]{1,0} get-tuple-element(%r), index=1
  %g = f32[16,64]{1,0} multiply(%h, %h), metadata={op_name="jit(f)/layer_0/shared_expert/mul"}
  ROOT %next = (s32[], f32[16,64]{1,0}) tuple(%j, %g)
}

ENTRY %main (w: bf16[64,64], s: f32[9,64], x: f32[16,64]) -> (f32[9,64], f32[16,64]) {
  %w = bf16[64,64]{1,0} parameter(0)
  %s = f32[9,64]{1,0} parameter(1)
  %x = f32[16,64]{1,0} parameter(2)
  %y = f32[16,64]{1,0} fusion(%x, %w), kind=kLoop, calls=%fused, metadata={op_name="jit(f)/layer_0/kda/q_proj/dot"}
  %row = f32[1,64]{1,0} dynamic-slice(%s, %x), dynamic_slice_sizes={1,64}, metadata={op_name="jit(f)/layer_0/mla/pages/slice"}
  %e = f32[16,64]{1,0} dot(%y, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}, metadata={op_name="jit(f)/layer_0/experts/all/dot"}
  %r.1 = f32[16,64]{1,0} all-reduce(%e), channel_id=1, replica_groups={{0,1}}, to_apply=%plus, metadata={op_name="jit(f)/layer_0/experts/reduce/psum"}
  %k = f32[16,64]{1,0} custom-call(%r.1), custom_call_target="ling3_gate.avx2", metadata={op_name="jit(f)/layer_0/router/ffi_call"}
  %nil = s32[] constant(0)
  %t = (s32[], f32[16,64]{1,0}) tuple(%nil, %k)
  %loop = (s32[], f32[16,64]{1,0}) while(%t), condition=%more, body=%step
  %out.1 = f32[16,64]{1,0} get-tuple-element(%loop), index=1
  %best = f32[16,8]{1,0} sort(%out.1), dimensions={1}, to_apply=%plus, metadata={op_name="jit(f)/sample/top_k"}
  %z = f32[16,64]{1,0} add(%out.1, %x), metadata={op_name="jit(f)/layer_0/norm/add"}
  ROOT %out = (f32[9,64]{1,0}, f32[16,64]{1,0}) tuple(%s, %z)
}
"""  # noqa: E501
CONTEXT = Context(
    inputs=("params.kda.q", "state.kda_conv", "batch.packed"), kinds=frozenset(LAYER_KINDS), bandwidth=1e9
)


def graph(text: str, cell: str = "decode@16", peak: int | None = 1000) -> Graph:
    return optimized.read(text, cell, "toy", CONTEXT, peak)


def changed(old: str, new: str) -> str:
    assert TEXT.count(old) >= 1, old
    return TEXT.replace(old, new)


def added(line: str, scope: str) -> str:
    """The text with one more operation in its entry."""
    return changed("  %z =", f'  {line}, metadata={{op_name="jit(f)/layer_0/{scope}"}}\n  %z =')


FIRST, SECOND = "  %w = bf16[64,64]{1,0} parameter(0)\n", "  %s = f32[9,64]{1,0} parameter(1)\n"
ROW, E = (
    next(line for line in TEXT.splitlines(keepends=True) if line.startswith(f"  %{name} =")) for name in ("row", "e")
)
SAME = {
    "rebuilt, of another checkpoint": TEXT,
    "renamed variables": TEXT.replace("%y", "%q.7").replace("%fused", "%other").replace("%kept", "%chosen"),
    "moved source lines": changed('/dot"}', '/dot" source_file="a.py" source_line=7}'),
    "noted by the compiler": changed('/add"}', '/add"}, backend_config={"a":"b"}'),
    "other order of inputs' lines": changed(FIRST + SECOND, SECOND + FIRST),
    "reordered independent operations": changed(ROW + E, E + ROW),
    "other channel": changed("channel_id=1", "channel_id=7"),
    "another frontend's attributes": changed('/psum"}', '/psum"}, frontend_attributes={a="b"}'),
}  # fmt: skip
PLANTED = {
    "changed mask": (changed("direction=LE", "direction=LT"), "kda"),
    "changed scale": (changed("constant(8)", "constant(9)"), "kda"),
    "fp32 copy of a weight": (added("%u = f32[64,64]{1,0} convert(%w)", "kda/convert"), "kda"),
    "another weight": (changed("fusion(%x, %w)", "fusion(%x, %s)"), "kda"),
    "no fusion": (
        changed("  %y = f32[16,64]{1,0} fusion(%x, %w), kind=kLoop, calls=%fused",
                '  %y.1 = f32[16,64]{1,0} negate(%x), metadata={op_name="jit(f)/layer_0/kda/q_proj/neg"}\n'
                "  %y = f32[16,64]{1,0} dot(%y.1, %w), lhs_contracting_dims={1}"),
        "kda",
    ),
    "one more collective": (added("%r = f32[16,64]{1,0} all-reduce(%y), to_apply=%plus", "mla/psum"), "mla"),
    "collective of other devices": (changed("replica_groups={{0,1}}", "replica_groups={{0},{1}}"), "experts"),
    "gather in place of reduce": (changed("all-reduce(%e)", "all-gather(%e)"), "experts"),
    "added copy": (added("%c = f32[9,64]{1,0} copy(%s)", "experts/copy"), "experts"),
    "another expert path": (changed("%e = f32[16,64]{1,0} dot(", "%e = f32[16,64]{1,0} gather("), "experts"),
    "precision": (changed("={0}, meta", "={0}, operand_precision={highest,highest}, meta"), "experts"),
    "another page size": (changed("f32[9,64]", "f32[17,64]"), "mla"),
    "wider result": (changed("%z = f32[16,64]{1,0} add(", "%z = f64[16,64]{1,0} add("), "norm"),
    "other layout": (changed("%z = f32[16,64]{1,0} add(", "%z = f32[16,64]{0,1} add("), "norm"),
    "norm left out": (changed('%z = f32[16,64]{1,0} add(%out.1, %x), metadata={op_name="jit(f)/layer_0/norm/add"}',
                              "%z = f32[16,64]{1,0} bitcast(%out.1)"), "norm"),
    "one more trip": (changed("constant(3)", "constant(4)"), "shared_expert"),
    "another kernel": (changed("ling3_gate.avx2", "ling3_gate.avx512"), "router"),
    "more candidates": (changed("%best = f32[16,8]", "%best = f32[16,32]"), "sample"),
}  # fmt: skip


@pytest.mark.parametrize("change", SAME)
def test_changes_that_mean_nothing_are_no_difference(change):
    assert (SAME[change] == TEXT) is change.startswith("rebuilt")
    assert diff.compare(graph(TEXT), graph(SAME[change])).equal


@pytest.mark.parametrize("change", PLANTED)
def test_a_planted_change_is_found_in_its_layer_kind_and_nowhere_else(change):
    text, layer_kind = PLANTED[change]
    difference = diff.compare(graph(TEXT), graph(text))
    assert not difference.equal
    assert {one.operation.layer_kind for one in difference.changes} == {layer_kind}
    assert any(layer_kind in line for line in diff.table(difference, markdown=True))


@pytest.mark.parametrize("change", ["scale", "mask", "weight"])
def test_changes_of_portable_programs_are_found(change):
    def program(changed: str) -> Graph:
        @jax.named_scope("kda")
        def function(x: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
            kept = x <= 0 if changed == "mask" else x < 0
            return jnp.where(kept, x, 3.0 if changed == "scale" else 2.0) @ (b if changed == "weight" else a)

        shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((16, 64), (64, 64), (64, 64))]
        blob = bytes(export.export(jax.jit(function, keep_unused=True))(*shapes).mlir_module_serialized)
        return portable.read(blob, "decode@16", "toy", CONTEXT)

    assert diff.compare(program(""), program("")).equal
    difference = diff.compare(program(""), program(change))
    assert not difference.equal and {one.operation.layer_kind for one in difference.changes} == {"kda"}


def test_a_dropped_donation_and_another_peak_are_found():
    kept = graph(changed("{ {0}: (1, {}, may-alias) }", "{}"))
    difference = diff.compare(graph(TEXT), kept)
    assert not difference.equal and difference.donations == ["state.kda_conv is no longer donated"]
    assert any("no longer donated" in line for line in diff.table(difference))
    assert diff.compare(kept, graph(TEXT)).donations == ["state.kda_conv is now donated"]
    assert not diff.compare(graph(TEXT), graph(TEXT, peak=1001)).equal
    assert len(PLANTED) + 2 == 20 and len(SAME) == 8


def test_a_program_compares_with_an_earlier_summary():
    document = json.dumps(summary.document([graph(TEXT)])).encode()
    (before,) = saved.read(document, "main.json").values()
    assert diff.compare(before, saved.rolled(graph(TEXT))).equal
    text, layer_kind = PLANTED["one more collective"]
    difference = diff.compare(before, saved.rolled(graph(text)))
    assert {one.operation.layer_kind for one in difference.changes} == {layer_kind}
    assert difference.rows()[0][1]["collective_bytes"] == 4 * 16 * 64


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b'{"schema": "ling3.graph/1"}', b"[" * 9999])
def test_what_is_no_summary_is_refused(data):
    with pytest.raises(ArtifactError, match=r"main\.json: "):
        saved.read(data, "main.json")


def test_a_summary_by_layer_is_refused():
    with pytest.raises(ArtifactError, match="by layer"):
        saved.read(json.dumps(summary.document([graph(TEXT)], "layer")).encode(), "main.json")


def test_the_commands_compare_every_cell_with_an_earlier_summary_and_audit_them(artifact, tmp_path):
    folder = artifact("micro-tp2")
    manifest = read_manifest(folder)
    ((_, target),) = manifest.targets.items()
    earlier = tmp_path / "main.json"
    earlier.write_text(CliRunner().invoke(main, ["graph", "summary", str(folder), "--json"]).stdout)
    same = CliRunner().invoke(main, ["graph", "diff", str(earlier), str(folder), "--json"])
    assert same.exit_code == 0, same.output
    document = json.loads(same.stdout)
    assert (document["schema"], document["equal"], set(document["cells"])) == (diff.SCHEMA, True, set(target.cells))
    cell = next(iter(target.cells))
    changes = json.loads(earlier.read_text())
    changes["cells"][cell]["rows"][0]["flops"] += 1e9
    earlier.write_text(json.dumps(changes))
    other = CliRunner().invoke(main, ["graph", "diff", str(earlier), str(folder), cell, "--markdown"])
    assert (other.exit_code, f"### cpu-tp2 {cell}" in other.stdout) == (3, True)
    checked = CliRunner().invoke(main, ["graph", "audit", str(folder), cell, "--json"])
    assert json.loads(checked.stdout)["schema"] == audit.SCHEMA


EXPECTED = audit.Expected(state=("state.kda_conv",), collectives=1, flops=300_000.0)
RULES = dict.fromkeys(("fp32-weights", "large-copy", "weight-layout", "large-constant"), 1000)
TABLE = "f32[512]{0} constant({...})"
FAULTS = {
    "fp32 copy of a weight": (PLANTED["fp32 copy of a weight"][0], "fp32-weights", "kda"),
    "fp32 copy in a fusion": (
        changed("  %row =", '  %u = f32[64,64]{1,0} fusion(%w), kind=kLoop, calls=%wide, '
                            'metadata={op_name="jit(f)/layer_0/mla/convert"}\n  %row =')
        .replace("%more (q", "%wide (p.3: bf16[64,64]) -> f32[64,64] {\n  %p.3 = bf16[64,64]{1,0} parameter(0)\n"
                             "  ROOT %v = f32[64,64]{1,0} convert(%p.3)\n}\n\n%more (q"),
        "fp32-weights", "mla",
    ),
    "copy of the state": (PLANTED["added copy"][0], "large-copy", "experts"),
    "copy next to other work": (
        added("%c = (f32[9,64]{1,0}, f32[9,64]{1,0}, u32[]) copy-start(%s)", "kda/copy"), "large-copy", "kda",
    ),
    "transposed weight": (
        added("%v = bf16[64,64]{0,1} transpose(%w), dimensions={1,0}", "mla/t"), "weight-layout", "mla",
    ),
    "callback": (
        added('%v = f32[1]{0} custom-call(%x), custom_call_target="xla_ffi_python_cpu_callback"', "norm/print"),
        "host-callback", "norm",
    ),
    "outfeed": (added("%v = token[] outfeed(%x)", "router/out"), "host-callback", "router"),
    "foreign call": (
        added('%v = f32[1]{0} custom-call(%x), custom_call_target="theirs"', "kda/x"), "custom-call", "kda",
    ),
    "table in the program": (added(f"%v = {TABLE}", "mla/rope"), "large-constant", None),
    "dropped donation": (changed("{ {0}: (1, {}, may-alias) }", "{}"), "state-donation", "state"),
    "collective": (PLANTED["one more collective"][0], "collectives", None),
    "collective in a loop": (
        changed("  %g = f32[16,64]{1,0} multiply(%h, %h)", "  %g = f32[16,64]{1,0} all-reduce(%h), to_apply=%plus"),
        "collectives", None,
    ),
    "dynamic shape": (changed("%z = f32[16,64]", "%z = f32[<=16,64]"), "dynamic-shape", "norm"),
}  # fmt: skip


def rules(text: str, **limits: object) -> Iterator[tuple[str, str | None]]:
    budgets = audit.Budgets(**{"rules": RULES} | limits)
    return ((one.rule, one.layer_kind) for one in audit.audit(graph(text), EXPECTED, budgets))


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found_and_its_rule_can_be_switched_off(fault):
    text, rule, layer_kind = FAULTS[fault]
    assert not list(rules(TEXT))
    assert list(rules(text)) == [(rule, layer_kind)]
    assert not list(rules(text, rules={**RULES, rule: False}))


def test_padding_and_budgets_are_faults_too():
    padded = audit.audit(graph(TEXT), dataclasses.replace(EXPECTED, flops=3000.0), audit.Budgets(RULES))
    assert [one.rule for one in padded] == ["extra-flops"]
    for name, limit in (("flops", 1), ("peak_bytes", 999), ("collectives", 0), ("seconds", 1e-9)):
        assert list(rules(TEXT, cells={"decode@16": {name: limit}})) == [("budget", None)]
    assert len(FAULTS) + 2 == 15
