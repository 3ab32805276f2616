"""The tables of cells, errors of several cells of a build, and notes about them."""

import contextlib
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from msgspec import structs

from ling3export.artifacts.program_records import Memory, Origin, Program
from ling3export.artifacts.schema import Receipt, Receipts, Tolerance
from ling3export.cache.cells import Cells
from ling3export.cache.store import CacheUse
from ling3export.cli.progress import Console
from ling3export.compile import build, pool
from ling3export.compile.pool import BuildOutcome
from ling3export.cost.chips import CHIPS
from ling3export.foundation.errors import ArtifactError, PlanError
from ling3export.foundation.processes import Failure
from ling3export.model.config import Config
from ling3export.plan.options import Options
from ling3export.plan.plan import make_plan
from ling3export.plan.targets import TargetSpec
from tests.support.tiny import tiny_fields

CONFIG = Config.from_dict(tiny_fields())
OPTIONS = Options((16,), (1,), tp=1, max_running=1, page_size=16, context=64)
PLAN = make_plan(CONFIG, OPTIONS, "cpu")
PROGRAM = Program(
    phase="decode",
    padding=1,
    fields=(),
    inputs=(),
    outputs=(),
    collectives={},
    lower_seconds=0.5,
    compile_seconds=1.25,
    memory=Memory(arguments=10**6, outputs=10, temporaries=5 * 10**5, alias=10, code=0),
)
BUILT = SimpleNamespace(program=PROGRAM)
FAILED = Failure("too large", "lower it", "PlanError")


def outcome(failures=("prefill@16",), plan=PLAN, why=FAILED):
    built = [cell.name for cell in plan.cells if cell.name not in failures]
    return BuildOutcome(plan, dict.fromkeys(built, BUILT), dict.fromkeys(failures, why))


def printed(capsys) -> list[str]:
    """The text on stderr; stdout is for data."""
    out, err = capsys.readouterr()
    assert out == ""
    return err.splitlines()


def test_each_cell_is_reported_by_name_when_it_starts_and_ends(capsys, monkeypatch, tmp_path):
    """Regression: a TPU build printed nothing for 254 s without a terminal, and `0%` for minutes on a terminal."""
    monkeypatch.setattr(pool, "Child", lambda *_, **__: contextlib.nullcontext(Mock(alive=True)))
    monkeypatch.setattr(pool.Compilers, "made", lambda self, worker, cell: FAILED if cell.phase == "decode" else BUILT)
    options, cells = replace(OPTIONS, jobs=1), Cells(CacheUse("off"), print)
    with (
        pytest.raises(PlanError, match="did not: decode@1: too large"),
        build.compiling(CONFIG, options, [PLAN], tmp_path, cells, Console()) as finished,
    ):
        finished()
    told = [line for line in printed(capsys) if line.startswith("cpu-tp1, ")]
    ends = {cell.name: "failed" if cell.phase == "decode" else "done" for cell in PLAN.cells}
    assert [re.sub(r"\d+\.\d s$", "N s", line) for line in told] == [
        f"cpu-tp1, {name}: {said}" for name, end in ends.items() for said in ("compiling", f"{end} in N s")
    ]


def test_a_failed_build_says_what_became_of_every_cell(capsys):
    began = BuildOutcome(PLAN, {"decode@1": BUILT}, {"prefill@16": FAILED})
    Console().failed([began])
    assert printed(capsys) == [
        "cpu-tp1:",
        "  cell                     status  seconds  peak MB",
        "  prefill@16               failed        -        -",
        "  decode@1               compiled      1.8      1.5",
        "  sample@1            not started        -        -",
        "  logits_processor@1  not started        -        -",
    ]


ORIGINS = {"prefill@16": "cache", "decode@1": "program cache", "sample@1": "compiler"}
ERRORS = Receipt(status="passed", relative=0.25, median=0.0312, absolute=1.5, positions=17)
RECEIPTS = Receipts(
    tolerance=Tolerance("median", 0.15),
    cells={
        "prefill@16": ERRORS,
        "decode@1": structs.replace(ERRORS, status="failed", median=0.2),
        "sample@1": Receipt(status="passed", relative=0.0, median=0.0, absolute=0.0, positions=1),
    },
    agreement={},
)


def manifest(receipts):
    """The fields of a manifest that a summary reads."""
    cells = {}
    for name, source in ORIGINS.items():
        phase, padding = name.split("@")
        origin = Origin(source, "0" * 64, 0, 0)
        cells[name] = structs.replace(PROGRAM, phase=phase, padding=int(padding), origin=origin)
    return SimpleNamespace(
        targets={"cpu-tp1": SimpleNamespace(cells=cells)},
        vectors=SimpleNamespace(receipts={"cpu-tp1": receipts} if receipts else {}, portable=None),
        measured=lambda target: receipts,
        weights=SimpleNamespace(nbytes=10**6),
        has_weights=True,
    )


def test_the_summary_has_bf16_s_errors_tolerance_and_kind_in_80_columns(capsys):
    """Regression: a worst error of 2.5e-01 looked like a failure, and headers were cut to `progr…` and `colle…`."""
    Console().summary(Path("x.ling3"), manifest(RECEIPTS))
    *lines, built = printed(capsys)
    table = lines[:5]
    assert table == [
        "cpu-tp1:",
        "  cell          status  seconds  peak MB       median error  worst error",
        "  prefill@16    cached        -      1.5  3.1e-02 ≤ 1.5e-01      2.5e-01",
        "  decode@1      cached      0.5      1.5  2.0e-01 > 1.5e-01      2.5e-01",
        "  sample@1    compiled      1.8      1.5              exact            -",
    ]
    assert max(map(len, lines)) <= 80
    assert " ".join(line.strip() for line in lines[5:]) == (
        "errors are relative L2 distances of a position's logits from the plain model's; the median of all positions "
        "may be up to 1.5e-01 (bfloat16). The worst is not judged: rounding may send one token to another "
        "expert, which moves its position far"
    )
    assert built.startswith("built x.ling3 in ") and built.endswith(" s (1.0 MB of weights)")


def test_every_failed_cell_is_named_with_its_target():
    other = replace(PLAN, target=replace(PLAN.target, tp=2))
    outcomes = [outcome(), outcome(("decode@1", "sample@1"), other)]
    with pytest.raises(PlanError) as caught:
        pool.check(CONFIG, outcomes, True)
    assert caught.value.message == (
        "programs: expected 8 cells to build, 3 did not: cpu-tp1 prefill@16: too large; cpu-tp2 decode@1: too large; "
        "cpu-tp2 sample@1: too large"
    )
    assert caught.value.hint == ("lower it; the 5 others are in the cache: the same build again takes them")
    with pytest.raises(PlanError) as caught:
        pool.check(CONFIG, [outcome()], False)
    assert caught.value.hint == "lower it; the 3 others are lost without --cache on"


def test_a_build_on_a_full_disk_reports_only_that():
    full = Failure("write: no room", "free some", "ArtifactError")
    with pytest.raises(ArtifactError) as caught:
        pool.check(CONFIG, [outcome(why=full)], True)
    assert caught.value.hint == "free some"


def test_whole_targets_are_checked_against_the_memory(monkeypatch):
    pool.check(CONFIG, [outcome(())], True)
    monkeypatch.setattr(TargetSpec, "chip", replace(CHIPS["tpu", "v6e"], memory=10**6))
    plan = replace(PLAN, target=replace(PLAN.target))  # the old object has cached that it has no chip
    with pytest.raises(PlanError, match=r"memory of `cpu`: expected room for weights .*, found 976.56 KiB"):
        pool.check(CONFIG, [outcome((), plan)], True)


def test_a_refused_build_names_the_cell_that_failed(monkeypatch, tmp_path):
    """Regression: the error named the cell with the largest error, which may have passed in bfloat16."""
    passed = Receipt("passed", 0.42, 0.01, 9.0, 14)  # one routing flip; the median decides
    failed = Receipt("failed", 0.19, 0.19, 17_400.0, 89_600)
    measured = Receipts(Tolerance("median", 0.15), {"decode@1": passed, "copy@8": failed}, {})
    monkeypatch.setattr(build, "measure_apart", lambda *_, **__: measured)
    manifest = SimpleNamespace(targets={"cpu-tp1": SimpleNamespace(geometry={})})
    with pytest.raises(ArtifactError, match=r"'absolute': 17400\.0, 'positions': 89600}, in copy@8"):
        build.receipts(tmp_path, manifest, "cpu-tp1")
