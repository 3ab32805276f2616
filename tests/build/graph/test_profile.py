"""Measured times: a trace of jax's profiler, joined to the operations of the program that it traced."""

import gzip
import json
import time
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from ling3export.artifacts.manifest import read_manifest
from ling3export.cli.main import main
from ling3export.foundation.errors import ArtifactError
from ling3export.graph import optimized
from ling3export.graph.context import Context
from ling3export.graph.hlo import unpacked
from ling3export.graph.kernels import Event, named
from ling3export.graph.profile import calls, events, joined, trace_of
from ling3export.graph.record import Graph, Operation
from ling3export.report.cells import graph_of

# Two cells of 4 layers at full width, built and traced on an H200 with jax 0.11.2.
CARD = Path(__file__).parent / "h200"


def row(name, begin, length, run="1", device="0", thread=7, **more):
    return {"ph": "X", "pid": 1, "tid": thread, "ts": begin, "dur": length, "name": name} | {
        "args": {"hlo_op": name, "run_id": run, "device_ordinal": device} | more
    }


def traced(*rows):
    return gzip.compress(json.dumps({"traceEvents": [{"ph": "M", "name": "process_name"}, *rows]}).encode(), mtime=0)


def graph(*operations):
    return Graph(cell="decode@1", target="cpu-tp1", form="optimized", operations=operations)


def operation(name, times=1.0):
    return Operation(name=name, opcode="fusion", kind="loops", times=times)


LOOPED = traced(
    row("copy.1", 0, 10),
    row("while.2", 10, 100),
    row("dot.3", 12, 40),
    row("dot.3", 60, 30),
    row("copy.1", 500, 30, run="2"),
    row("while.2", 530, 100, run="2"),
    row("dot.3", 531, 50, run="2"),
    row("dot.3", 585, 40, run="2"),
    row("copy.1", 0, 10, device="1", thread=8),
    row("while.2", 10, 90, device="1", thread=8),
    row("dot.3", 10, 40, device="1", thread=8),
    row("dot.3", 50, 40, device="1", thread=8),
)


def test_an_operation_counts_without_those_inside_it():
    ordered = named(events(LOOPED, "trace"), ())
    one, two, three = sorted(calls(ordered).values(), key=lambda call: call["copy.1"])[:3]
    assert {round(one["while.2"] * 1e6), round(two["while.2"] * 1e6)} == {30, 10}
    assert set(three) == {"copy.1", "while.2", "dot.3"} and three["while.2"] == pytest.approx(10e-6)


def test_times_are_those_of_one_run_and_the_mean_over_calls_and_devices():
    result = joined(graph(operation("copy.1"), operation("while.2/dot.3", 2)), events(LOOPED, "trace"), "trace")
    copied, product = result.graph.operations
    assert result.calls == 3 and copied.source == product.source == result.graph.seconds_source == "measured"
    assert copied.seconds == pytest.approx((10 + 30 + 10) / 3 * 1e-6)
    assert product.seconds == pytest.approx((70 + 90 + 80) / 3 / 2 * 1e-6)
    assert result.graph.totals().seconds == pytest.approx(copied.seconds + 2 * product.seconds)
    assert result.unmatched == pytest.approx(50 / 340)


def test_an_instruction_of_two_places_has_its_time_in_equal_parts():
    trace = traced(row("call.1", 0, 50), row("dot.3", 0, 30), row("call.2", 50, 20), row("dot.3", 50, 10))
    one, other = joined(
        graph(operation("call.1/dot.3"), operation("call.2/dot.3")), events(trace, "t"), "t"
    ).graph.operations
    assert one.seconds == other.seconds == pytest.approx(20e-6)


def test_calls_of_other_programs_do_not_count():
    trace = traced(row("copy.1", 0, 10), row("sort.9", 100, 500, run="2"), row("copy.1", 600, 1, run="2"))
    result = joined(graph(operation("copy.1")), events(trace, "t"), "t")
    assert result.calls == 1 and result.graph.operations[0].seconds == pytest.approx(10e-6)
    with pytest.raises(ArtifactError, match="no call in the trace is one of cpu-tp1 decode@1"):
        joined(graph(operation("dot.7")), events(trace, "t"), "t")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "not a trace"),
        (b"[]", "not a trace"),
        (b'{"traceEvents": [1]}', "not a trace"),
        (b'{"traceEvents": []}', "no operations"),
        (gzip.compress(b"{}", mtime=0), "not a trace"),
        (LOOPED[:-20], "damaged gzip"),
        (traced(row("copy.1", 0, -1)), "not a trace"),
        (traced(row("copy.1", 0, float("nan"))), "not a trace"),
        (traced(row("copy.1", "x", 1)), "not a trace"),
        (traced(row("copy.1", 10**400, 1)), "not a trace"),
        (b"[" * 100_000, "not a trace"),
    ],
)
def test_what_is_no_trace_is_refused(data, message):
    with pytest.raises(ArtifactError, match=message):
        events(data, "trace")


def test_a_trace_that_is_not_there_names_the_command_that_records_it(tmp_path):
    with pytest.raises(ArtifactError, match=r"decode@1.trace.json.gz: no trace.*\n.*verify ARTIFACT --time --trace"):
        trace_of(tmp_path, "decode@1")


def test_a_recorded_trace_gives_the_time_of_the_programs_operations(artifact, tmp_path):
    folder = artifact("micro-tp2")
    said = CliRunner().invoke(main, ["verify", str(folder), "--time", "--trace", str(tmp_path / "traces"), "--json"])
    assert said.exit_code == 0, said.output
    manifest = read_manifest(folder)
    (target,) = manifest.targets
    assert {path.name for path in (tmp_path / "traces").iterdir()} == {
        f"{cell}.trace.json.gz" for cell in manifest.targets[target].cells
    }
    for cell in ("decode@8", "prefill@128"):
        data, where = trace_of(tmp_path / "traces", cell)
        result = joined(graph_of(folder, manifest, target, cell), events(data, where), where)
        assert result.calls == 10  # five on each device
        assert result.unmatched < 0.25
        timed = [one for one in result.graph.operations if one.seconds is not None]
        assert len(timed) > 0.6 * len(result.graph.operations)
        kinds = {row.layer_kind: row.seconds for row in result.graph.rows() if row.seconds}
        assert {"kda", "mla", "experts", "logits"} <= kinds.keys()
    said = CliRunner().invoke(
        main, ["graph", "summary", str(folder), "decode@8", "--profile", str(tmp_path / "traces")]
    )
    assert said.exit_code == 0 and "µs: measured" in said.stdout, said.output
    assert "ms in the trace" in said.stderr and "% of the time is that of loops" in said.stderr


def card_graph(cell):
    text = unpacked((CARD / f"{cell}.hlo.xz").read_bytes())
    return optimized.read(text, cell, "cuda-h200-here-tp1", Context(kinds=frozenset(("kda", "experts", "logits"))))


@pytest.mark.parametrize(("cell", "microseconds"), [("decode@1", 439), ("sample@1", 184.8)])
def test_every_kernel_of_a_cards_trace_is_an_operation(cell, microseconds):
    """sample@1 has a conditional, and copies that the graph makes without a kernel of the program."""
    data, where = trace_of(CARD, cell)
    result = joined(card_graph(cell), events(data, where), where)
    assert result.calls == 5 and abs(result.unmatched) < 1e-3
    assert result.graph.totals().seconds == pytest.approx(microseconds * 1e-6, rel=5e-3)
    timed = [one for one in result.graph.operations if one.seconds]
    assert len(timed) == len(result.graph.operations) or cell == "sample@1"


def test_equal_layers_that_share_a_kernel_have_their_own_times():
    """The projections of KDA run the kernel `gemm_fusion_dot_22` in each layer; the logits' product reads 483 MB."""
    data, where = trace_of(CARD, "decode@1")
    result = joined(card_graph("decode@1"), events(data, where), where)
    by_name = {one.name: one for one in result.graph.operations}
    projections = [by_name[f"gemm_fusion_dot.{number}"] for number in (22, 24, 25)]
    assert [one.layers for one in projections] == [(0,), (1,), (2,)]
    assert all(13e-6 < one.seconds < 15e-6 for one in projections)
    (logits,) = [one for one in result.graph.operations if one.layer_kind == "logits" and one.kind == "matrix products"]
    assert logits.seconds == pytest.approx(113.7e-6, rel=0.01)
    kernels = {event.name for event in events(data, where)}
    assert {"gemm_fusion_dot_22", "loop_add_fusion_3"} <= kernels and "gemm_fusion_dot_24" not in kernels


def test_a_cards_trace_of_another_program_is_refused():
    data, where = trace_of(CARD, "sample@1")
    with pytest.raises(ArtifactError, match="no call in the trace is one of cuda-h200-here-tp1 decode@1"):
        joined(card_graph("decode@1"), events(data, where), where)


def test_cards_that_run_at_the_same_time_have_orders_and_calls_of_their_own():
    operations = [replace(operation(f"f.{number}"), shared="alike") for number in range(3)]
    rows = [
        row(
            "f_0", 100 * call + 10 * number + 5 * device, 1 + number + device, run="", device=str(device), thread=device
        )
        for call in range(4)
        for number in range(3)
        for device in range(2)
    ]
    for place, one in enumerate(rows):
        one["args"] |= {"hlo_op": "command_buffer", "cuda_graph_node_id": place // 2 % 3}
    result = joined(graph(*operations), events(traced(*rows), "t"), "t")
    assert result.calls == 8
    assert [one.seconds for one in result.graph.operations] == pytest.approx([1.5e-6, 2.5e-6, 3.5e-6])


def test_kernels_that_wait_for_their_names_are_named_in_linear_time():
    many = 100_000
    rows = [Event("memset", "", "0", ("1", "7"), number, 0.5, str(number)) for number in range(many)]
    begin = time.perf_counter()
    assert len(named(rows, [operation("f.1")])) == many
    assert time.perf_counter() - begin < 10
