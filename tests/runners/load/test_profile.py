"""``ling3-runner profile``: which programs were called, and whose operations took the time."""

from functools import partial

from click.testing import CliRunner

from ling3export.artifacts.manifest import read_manifest
from ling3export.runners.cli.main import main
from ling3export.runners.engine.engine import Engine
from ling3export.runners.load.profile import own_times, profile


def test_an_operation_has_the_time_that_none_inside_it_has():
    nested = [(0, 100, "while"), (10, 30, "dot"), (12, 20, "add"), (40, 90, "dot"), (100, 110, "copy")]
    assert sorted(own_times(nested)) == [("add", 8), ("copy", 10), ("dot", 12), ("dot", 50), ("while", 30)]
    assert list(own_times([])) == []


def test_the_operations_of_a_trace_are_those_of_the_programs_that_were_called(artifact, tmp_path):
    with Engine(artifact("micro-tp1"), report=lambda text: None) as engine:
        work = partial(engine.generate, [[1, 2, 3, 4, 5]] * 2, max_tokens=4, ignore_eos=True)
        found = profile(work, tmp_path / "trace")
    (record,) = read_manifest(artifact("micro-tp1")).targets.values()
    assert {name.partition("@")[0]: count for name, count in found.calls.items()} == {
        "prefill": 1, "decode": 3, "sample": 4,
    }  # fmt: skip
    assert found.calls.keys() <= record.cells.keys()
    assert {each.program for each in found.operations} == set(found.calls)
    seconds = [each.seconds for each in found.operations]
    assert seconds == sorted(seconds, reverse=True) and seconds[-1] >= 0
    assert all(each.calls > 0 for each in found.operations)
    assert any("dot_general" in each.source for each in found.operations)
    assert found.file.is_file() and (found.file.parent / "perfetto_trace.json.gz").is_file()


def test_a_profile_never_goes_into_a_folder_that_is_there(artifact, tmp_path):
    done = CliRunner().invoke(main, ["profile", str(artifact("micro-tp1")), "--to", str(tmp_path)])
    assert done.exit_code == 1
    assert f"error: profile `{tmp_path}`: expected no such folder, found one" in done.stderr
