"""``verify --time``: its measurements and file, who uses them, and when they are not used."""

import re
import shutil
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from msgspec.structs import replace

from ling3export.artifacts import calibration
from ling3export.artifacts.manifest import read_manifest
from ling3export.artifacts.paddings import Shapes
from ling3export.artifacts.program_records import Estimate
from ling3export.artifacts.receipts import times_table
from ling3export.artifacts.schema import Tolerance
from ling3export.cli.main import main
from ling3export.foundation.errors import ArtifactError
from ling3export.machine.verdict import measuring
from ling3export.runners.calibrate.receipts import logits_receipt
from ling3export.runners.calibrate.times import CALLS, full
from ling3export.runners.engine.inputs import decode_fields, prefill_fields
from ling3export.runners.load.loader import calls_measured
from tests.support import toy_artifact
from tests.support.hosting import hosting
from tests.support.refusals import refusal, said


class Run(NamedTuple):
    """A copy of an artifact with its calibration next to it, and the command's output."""

    folder: Path
    file: Path
    said: str


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Run:
    folder = Path(shutil.copytree(toy_artifact.shared(), tmp_path_factory.mktemp("calibrate") / "toy.ling3"))
    return Run(folder, folder.with_name("toy.calibration.json"), said(main, "verify", folder, "--time"))


@pytest.fixture
def copied(run, tmp_path) -> Run:
    """A copy whose calibration a test may change."""
    folder = Path(shutil.copytree(run.folder, tmp_path / "toy.ling3"))
    shutil.copy(run.file, calibration.beside(folder))
    return Run(folder, calibration.beside(folder), run.said)


def changed(at: Run, **changes: object) -> None:
    calibration.write_calibration(at.file, replace(calibration.read_calibration(at.file), **changes))


def test_every_cell_is_proven_and_timed_and_the_file_names_machine_and_digests(run):
    manifest, found = read_manifest(run.folder), calibration.read_calibration(run.file)
    (target,) = manifest.targets.values()
    assert found.cells.keys() == found.receipts.cells.keys() == target.cells.keys()
    assert found.receipts.passed and found.weights == manifest.weights_digest
    assert found.machine == measuring()
    assert calibration.found_beside(run.folder, manifest, measuring) == (found, None)
    for times in found.cells.values():
        assert times.calls == CALLS
        assert 0 < times.fastest <= times.median <= times.slowest
    rows = [line.split()[0] for line in run.said.splitlines() if re.match(r"  \w+@\d+ ", line)]
    assert sorted(rows) == sorted([*target.cells, *target.cells])  # times, then receipts


@pytest.mark.hosts
def test_two_hosts_measure_together_and_host_0_writes(artifact, tmp_path):
    """All hosts take part in timed collectives; the other host prints and writes nothing."""
    path = artifact("micro-2x1-snapshots")
    folders = [Path(shutil.copytree(path, tmp_path / f"host{host}.ling3")) for host in range(2)]
    verify = [(sys.executable, "-m", "ling3export.cli")] * 2
    with hosting([["verify", folder, "--time"] for folder in folders], programs=verify) as processes:
        said = [process.communicate(timeout=120) for process in processes]
        assert [process.returncode for process in processes] == [0, 0], said
    assert [file.name for file in tmp_path.glob("host*.json")] == ["host0.calibration.json"] and not said[1][0]
    found, manifest = calibration.read_calibration(calibration.beside(folders[0])), read_manifest(path)
    (target,) = manifest.targets.values()
    assert found.receipts.passed and found.weights == manifest.weights_digest
    assert found.cells.keys() == found.receipts.cells.keys() == target.cells.keys()
    for times in found.cells.values():
        assert times.calls == CALLS and 0 < times.fastest <= times.median <= times.slowest
    assert f"\n{found.target}:\n" in said[0][0]


# A time that no cell of the toy can take.
@pytest.mark.parametrize(("unseen", "said"), [(0, "9876.543"), (2, "at least 9876.543")])
def test_an_estimate_without_the_time_of_custom_calls_says_at_least(run, unseen, said):
    found = calibration.read_calibration(run.file)
    (target,) = read_manifest(run.folder).targets.values()
    estimate = Estimate(9.876543, unseen, 512, 1e9)
    cells = target.cells | {"decode@2": replace(target.cells["decode@2"], estimate=estimate)}
    target = replace(target, cells=cells)
    (line,) = (line for line in times_table(found, target) if line.startswith("  decode@2 "))
    assert re.split(r" {2,}", line.strip())[-2] == said


def test_inspect_shows_what_was_measured(copied):
    found = calibration.read_calibration(copied.file)
    shown = said(main, "inspect", copied.folder)
    assert f"on {found.machine}, {found.made}; decoding sequences have" in " ".join(shown.split())
    assert f"{1e3 * found.cells['decode@2'].median:.3f}" in shown


def test_the_engine_chooses_prefill_paddings_by_measured_times():
    golden = Path(__file__).parents[2] / "data"
    target = next(iter(read_manifest(golden).targets.values()))
    some, names = next(iter(target.cells.values())), [f"prefill@{padding}" for padding in (16, 128, 512)]
    cells = {name: replace(some, phase="prefill", padding=int(name[8:]), estimate=None) for name in names}
    shapes = Shapes.of(replace(target, cells=cells), dict(zip(names, (1.0, 1.1, 9.0), strict=True)))
    assert shapes.costs == (1.0, 1.1, 9.0)
    assert [shapes.cheapest_padding(work) for work in (16, 32, 512)] == [16, 128, 128]
    assert Shapes.of(replace(target, cells=cells), {names[0]: 1.0}).costs == ()  # some were not measured


def used(at: Run, channel=None) -> tuple[dict[str, float], list[str]]:
    said: list[str] = []
    (name,) = (manifest := read_manifest(at.folder)).targets
    return calls_measured(at.folder, manifest, name, said.append, channel), said


def test_a_start_says_that_it_uses_a_calibration_that_fits(copied):
    found = calibration.read_calibration(copied.file)
    seconds, said = used(copied)
    assert seconds == {name: times.median for name, times in found.cells.items()}
    assert said == [f"prefill paddings are chosen by the calibration of {found.made}"]
    copied.file.unlink()
    assert used(copied) == ({}, [])


def test_a_calibration_of_another_artifact_machine_or_target_is_not_used_and_the_note_says_why(copied):
    found, name = calibration.read_calibration(copied.file), "calibration `toy.calibration.json`: not used: "
    changed(copied, weights="0" * 64)
    assert used(copied) == (
        {},
        [f"{name}another artifact's: measured with weights 000000000000, found {found.weights[:12]}"],
    )
    changed(copied, weights=found.weights, programs="1" * 64)
    assert used(copied)[1] == [
        f"{name}another artifact's: measured with programs 111111111111, found {found.programs[:12]}"
    ]
    shown = said(main, "inspect", copied.folder)
    assert f"{name}another artifact's" in " ".join(shown.split())
    changed(copied, programs=found.programs, machine=replace(found.machine, processor="Other 9000"))
    assert used(copied)[1] == [
        f"{name}another machine's: measured with processor Other 9000, found {found.machine.processor}"
    ]
    changed(copied, machine=found.machine, target="tpu-v6e-2x2-tp4")
    assert used(copied)[1][0].startswith(f"{name}another artifact's: measured with programs")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda text: text[: len(text) // 2], ": expected JSON, found "),
        (lambda text: "[]", ": expected an object, found [], in "),
        (
            lambda text: text.replace('"calls": 20', '"calls": "20"', 1),
            '.calls`: expected a whole number, found "20", in ',
        ),
        (lambda text: text.replace('"calls": 20', '"calls": 20, "call": 3', 1), ": expected only the fields calls, "),
        (
            lambda text: text.replace("ling3.calibration/1", "ling3.calibration/2"),
            'expected "ling3.calibration/1", found',
        ),
        (lambda text: re.sub(r'"fastest": [\d.e-]+', '"fastest": -1', text, count=1), "expected a number from 0 to"),
        (lambda text: text.replace('"cells": {', '"cells": {"x@1": 1, ', 1), "expected an object, found 1, in"),
    ],
)
def test_a_cut_file_and_wrong_types_are_refused_by_name(copied, change, told):
    text = copied.file.read_text()
    assert change(text) != text
    copied.file.write_text(change(text))
    with pytest.raises(ArtifactError) as caught:
        calibration.read_calibration(copied.file)
    assert caught.value.message.startswith("calibration `toy.calibration.json`")
    assert told in caught.value.message
    assert caught.value.hint == "measure again: ling3export verify ARTIFACT --time"
    seconds, (note,) = used(copied)
    assert seconds == {} and note == f"{caught.value.message}: not used"


class Channel:
    """The connection to another host, which sends its own digest."""

    def __init__(self, other: bytes | None) -> None:
        self.other = other

    def gather(self, payload: bytes) -> tuple[bytes, ...]:
        return payload, payload if self.other is None else self.other


def test_several_hosts_use_a_calibration_only_where_all_have_the_same(copied):
    assert used(copied, Channel(None))[0]
    assert used(copied, Channel(b"\0" * 32)) == (
        {},
        ["calibration: not used: expected the same beside the artifact of each host, found others"],
    )


def test_time_excludes_no_run(run):
    assert "exclude each other" in refusal(main, "verify", run.folder, "--no-run", "--time", code=2)


def test_a_timed_call_has_all_its_rows_in_use(run):
    (target,) = read_manifest(run.folder).targets.values()
    table = np.zeros((toy_artifact.SLOTS + 1, target.state.max_pages), np.int32)
    given = decode_fields(4, [1], [3], table, [5])
    fields = full(target.cells["decode@4"], target, given, toy_artifact.VOCAB)
    assert {name: value.shape for name, value in fields.items()} == {name: value.shape for name, value in given.items()}
    assert fields["slot"].tolist() == [1, 2, 3, 0]  # a slot each
    assert fields["position"].tolist() == [47, 47, 47, 0]  # a third of ten pages of 16 tokens
    pages = fields["page_table"][fields["page_table"] > 0]
    assert sorted(pages.tolist()) == list(range(1, 10))
    span = full(target.cells["prefill@16"], target, prefill_fields(16, [], 16, table), toy_artifact.VOCAB)
    assert (span["chunk_len"].tolist(), span["chunk_slot"].tolist(), span["fresh"].tolist()) == ([16], [1], [1])


def test_errors_that_are_not_finite_can_be_written(copied):
    nothing = np.full(3, np.nan)
    wrong = logits_receipt({(0, 0): nothing}, {(0, 0): np.ones(3)}, Tolerance("largest", 1.0))
    found = calibration.read_calibration(copied.file)
    changed(copied, receipts=replace(found.receipts, cells=found.receipts.cells | {"decode@2": wrong}))
    assert calibration.read_calibration(copied.file).receipts.cells["decode@2"].relative > 1e308


def test_times_and_receipts_are_of_the_same_cells(copied):
    found: calibration.Calibration = calibration.read_calibration(copied.file)
    more = calibration.CellTimes(calls=1, median=1.0, fastest=1.0, slowest=1.0)
    changed(copied, cells=found.cells | {"decode@9": more})
    with pytest.raises(
        ArtifactError, match="expected times and a receipt of each cell, found only one of them for dec"
    ):
        calibration.read_calibration(copied.file)
