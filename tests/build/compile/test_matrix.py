"""The table of cells, what of a build is refused together, and what is noted of it."""

from dataclasses import replace
from pathlib import Path

import pytest

from ling3export.cli.progress import Console
from ling3export.compile import matrix, pool, replay
from ling3export.compile.pool import Outcome
from ling3export.errors import ArtifactError, PlanError
from ling3export.model.config import Config
from ling3export.plan.chips import CHIPS
from ling3export.plan.options import Options
from ling3export.plan.plan import make_plan
from ling3export.plan.targets import Target
from ling3export.processes import Failure
from tiny import tiny_fields

FIELDS = tiny_fields()
CONFIG = Config.from_dict(FIELDS)
OPTIONS = Options((16,), (1,), tp=1, max_running=1, page_size=16, context=64)
PLAN = make_plan(CONFIG, OPTIONS, "cpu")
RECORD = {
    "lower_seconds": 0.5, "compile_seconds": 1.25, "estimated_seconds": None, "collectives": {"all_reduce": 3},
    "memory": {"arguments": 10**6, "outputs": 10, "alias": 10, "temporaries": 5 * 10**5, "code": 0},
}  # fmt: skip
PRICED = RECORD | {"estimated_seconds": 0.0025, "collectives": {"all-reduce": {"count": 49, "bytes": 8}}}
FAILED = Failure("too large", "lower it", "PlanError")


def outcome(failures=("prefill@16",), plan=PLAN, why=FAILED):
    built = [cell.name for cell in plan.cells if cell.name not in failures]
    return Outcome(plan, dict.fromkeys(built, RECORD), dict.fromkeys(failures, why))


def staging(folder: Path) -> Path:
    programs = folder / "staging" / "programs" / "cpu-tp1"
    programs.mkdir(parents=True)
    for cell in ("decode@1", "sample@1"):
        for tier in ("stablehlo", "exec"):
            (programs / f"{cell}.{tier}").write_bytes(f"{cell}.{tier}".encode())
    return folder / "staging"


def test_rows():
    assert matrix.row("a", "compiled", RECORD, 1_234_567, 2e-6) == (
        "a", "compiled", "1.8", "1.23 MB", "1.5 MB", "3", "-", "2.0e-06",
    )  # fmt: skip
    assert matrix.row("b", "compiled, not executed", PRICED, 10**6)[5:] == ("49", "2.500 ms", "-")
    taken, traced = RECORD | {"origin": {"from": "cache"}}, RECORD | {"origin": {"from": "program cache"}}
    assert matrix.row("d", "compiled", taken)[1:3] == ("cached", "-")
    assert matrix.row("e", "compiled, not executed", taken)[1:3] == ("cached, not executed", "-")
    assert matrix.row("f", "compiled, not executed", traced)[1:3] == ("cached, not executed", "0.5")
    assert matrix.row("g", "compiled", RECORD | {"origin": {"from": "compiler"}})[1:3] == ("compiled", "1.8")
    assert matrix.row("c", "failed") == ("c", "failed", "-", "-", "-", "-", "-", "-")


def test_the_table_of_a_failed_build_is_plain_text_without_a_terminal(tmp_path, capsys):
    rows = matrix.outcome_rows(staging(tmp_path), [outcome()])
    Console().table(matrix.COLUMNS, rows)
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "  cell                  status  seconds  program  peak a device  collectives  estimate  worst error",
        "  cpu-tp1 prefill@16    failed        -        -              -            -         -            -",
        "  cpu-tp1 decode@1    compiled      1.8  0.00 MB         1.5 MB            3         -            -",
        "  cpu-tp1 sample@1    compiled      1.8  0.00 MB         1.5 MB            3         -            -",
    ]


def test_every_failed_cell_is_named_with_its_target():
    other = replace(PLAN, target=replace(PLAN.target, tp=2))
    outcomes = [outcome(), outcome(("decode@1", "sample@1"), other)]
    noted = []
    with pytest.raises(PlanError) as caught:
        pool.check(CONFIG, outcomes, True, lambda: noted.append(1))
    assert noted == [1]
    assert caught.value.message == (
        "programs: expected 6 cells to build, 3 did not: cpu-tp1 prefill@16: too large; cpu-tp2 decode@1: too large; "
        "cpu-tp2 sample@1: too large"
    )
    assert caught.value.hint == (
        "lower it; the 3 others are in the cache: the same build again takes them; to build one alone and see all that "
        "its compiler says: --replay cpu-tp1/prefill@16"
    )
    with pytest.raises(PlanError) as caught:
        pool.check(CONFIG, [outcome()], False, lambda: None)
    assert caught.value.hint == (
        "lower it; the 2 others are lost without --cache on; to build one alone and see all that its compiler says: "
        "--replay prefill@16"
    )


def test_nothing_is_noted_of_a_build_without_room_on_the_disk():
    full = Failure("write: no room", "free some", "ArtifactError")
    with pytest.raises(ArtifactError) as caught:
        pool.check(CONFIG, [outcome(why=full)], True, lambda: pytest.fail("noted"))
    assert caught.value.hint == "free some"


def test_whole_targets_are_checked_against_the_memory(monkeypatch):
    pool.check(CONFIG, [outcome(())], True, lambda: pytest.fail("noted"))
    monkeypatch.setattr(Target, "chip", replace(CHIPS["tpu", "v6e"], memory=10**6))
    plan = replace(PLAN, target=replace(PLAN.target))  # the old one remembers that it has no chip
    with pytest.raises(PlanError, match=r"memory of `cpu`: expected room for weights .*, found 976.56 KiB"):
        pool.check(CONFIG, [outcome((), plan)], True, lambda: pytest.fail("noted"))


def test_what_a_failed_build_was_asked_for_is_noted_until_one_succeeds(tmp_path):
    artifact, request = tmp_path / "x.ling3", replay.Request(FIELDS, ("extra",), OPTIONS)
    assert replay.read_failure(artifact) is None
    replay.note_failure(artifact, request, [outcome()])
    assert [path.name for path in tmp_path.iterdir()] == [".x.ling3.failed.json"]
    assert replay.read_failure(artifact) == (request, {"cpu-tp1": ["prefill@16"]})
    replay.forget_failure(artifact)
    replay.forget_failure(artifact)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("damaged", ["", "[]", "{}", "3", '{"config": 1}', "[" * 10**5, '{"options": {"no": 1}}'])
def test_a_damaged_note_of_a_failed_build_counts_as_none(tmp_path, damaged):
    """Other JSON types in it once ended in a traceback."""
    replay.failed_path(tmp_path / "x.ling3").write_text(damaged)
    assert replay.read_failure(tmp_path / "x.ling3") is None
