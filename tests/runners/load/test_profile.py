"""``ling3-runner profile``: which programs were called, and whose operations took the time."""

from functools import partial
from types import SimpleNamespace

from ling3export.artifacts.manifest import read_manifest
from ling3export.runners.cli.main import main
from ling3export.runners.engine.engine import Engine
from ling3export.runners.load import profile as profiles
from ling3export.runners.load.profile import own_times, traced
from tests.support.refusals import refusal


def test_an_operation_has_the_time_that_none_inside_it_has():
    nested = [(0, 100, "while"), (10, 30, "dot"), (12, 20, "add"), (40, 90, "dot"), (100, 110, "copy")]
    assert sorted(own_times(nested)) == [("add", 8), ("copy", 10), ("dot", 12), ("dot", 50), ("while", 30)]
    assert list(own_times([])) == []


def plane(name, **lines):
    """A part of a trace: by line, events of (begin, duration, name, what else is known of it)."""
    made = [
        SimpleNamespace(
            events=[
                SimpleNamespace(start_ns=begin, duration_ns=took, name=event, stats=list(stats.items()))
                for begin, took, event, stats in events
            ]
        )
        for events in lines.values()
    ]
    return SimpleNamespace(name=name, lines=made)


def test_kernels_of_a_card_are_parted_by_program_and_may_overlap(monkeypatch):
    """As an H100's trace has them: a program's number and no run; kernels of a graph beside each other."""
    graph, loop = {"hlo_op": "command_buffer_1", "program_id": "27"}, {"hlo_op": "while.3", "program_id": "27"}
    other = {"hlo_op": "dot.5", "program_id": "8"}
    card = plane(
        "/device:GPU:0",
        compute=[(10, 4, "fusion_2", graph), (13, 4, "fusion_2", graph), (20, 5, "gemm_x", other), (30, 1, "f", graph)],
        copies=[(12, 6, "MemcpyD2H", loop), (2, 1, "MemcpyH2D", {"correlation_id": "1"}), (40, 2, "gemm_x", other)],
    )
    host = plane("/host:CPU", python=[(0, 99, "wait", {}), (5, 6, "hidden", {"hlo_op": "dot.5", "program_id": "8"})])
    runs = profiles.runs_in([host, card])
    assert runs == [
        [[(10, 14, "fusion_2")], [(12, 18, "while.3")], [(13, 17, "fusion_2")]],
        [[(20, 25, "dot.5")]],
        [[(30, 31, "f")]],
        [[(40, 42, "dot.5")]],
    ]
    text = 'ENTRY main {\n  %fusion.2 = f32[] fusion(), metadata={op_name="jit/a/mul"}\n  %while.3 = s32[] while()\n}'
    monkeypatch.setattr(profiles, "loaded_programs", lambda: iter([({"fusion_2": "jit/a/mul", "while_3": ""}, text)]))
    monkeypatch.setattr(profiles, "kinds_of", lambda _: {"fusion.2": "elementwise", "while.3": "other"})
    monkeypatch.setattr(profiles, "parse", lambda given: given)
    names = profiles.programs_of(["decode@1", "decode@1", "sample@1", "decode@1", "sample@1"], len(runs))
    assert names == [("decode@1", 2), ("sample@1", 1), ("decode@1", 1), ("sample@1", 1)]
    found = {(each.program, each.name): each for each in profiles.operations_of(runs, [name for name, _ in names])}
    fusion = found["decode@1", "fusion_2"]
    assert (fusion.calls, round(fusion.seconds * 1e9), fusion.source, fusion.kind) == (2, 8, "jit/a/mul", "elementwise")
    assert found["decode@1", "f"].kind == "" and all(each.seconds > 0 for each in found.values())


def test_calls_that_a_trace_does_not_part_share_its_time_and_unknown_ones_have_no_program():
    assert profiles.programs_of(["a", "a", "b"], 3) == [("a", 1), ("a", 1), ("b", 1)]
    assert profiles.programs_of(["a", "a", "b"], 2) == [("a", 2), ("b", 1)]
    assert profiles.programs_of(["a", "a", "b"], 4) == [(profiles.UNKNOWN, 1)] * 4


def test_the_operations_of_a_trace_are_those_of_the_programs_that_were_called(artifact, tmp_path):
    with Engine(artifact("micro-tp1"), report=lambda text: None) as engine:
        work = partial(engine.generate, [[1, 2, 3, 4, 5]] * 2, max_tokens=4, ignore_eos=True)
        found = traced(work, tmp_path / "trace", perfetto=True)
    (record,) = read_manifest(artifact("micro-tp1")).targets.values()
    counts = {name.partition("@")[0]: count for name, count in found.calls.items()}
    assert counts == {"prefill": 1, "decode": 3, "sample": 4}
    assert found.calls.keys() <= record.cells.keys()
    assert {each.program for each in found.operations} == set(found.calls)
    seconds = [each.seconds for each in found.operations]
    assert seconds == sorted(seconds, reverse=True) and seconds[-1] >= 0
    assert all(each.calls > 0 for each in found.operations)
    assert any("dot_general" in each.source for each in found.operations)
    assert found.file.is_file() and (found.file.parent / "perfetto_trace.json.gz").is_file()


def test_a_profile_never_goes_into_a_folder_that_is_there(artifact, tmp_path):
    assert f"error: profile `{tmp_path}`: expected no such folder, found one" in refusal(
        main, "profile", artifact("micro-tp1"), "--to", tmp_path
    )
