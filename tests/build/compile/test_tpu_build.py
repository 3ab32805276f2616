"""A TPU target, compiled by libtpu on a machine without a TPU: fields of its artifact, and that nothing ran."""

import json
import re
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner
from msgspec.structs import replace

from ling3export.artifacts.manifest import read_manifest, write_manifest
from ling3export.artifacts.program_records import Lowering
from ling3export.artifacts.schema import Mesh, PortableReceipts, Receipt, Tolerance
from ling3export.checkpoint.synth import synthesize
from ling3export.cli import main as cli
from ling3export.report.cells import graph_of

pytestmark = pytest.mark.tpu

TARGET = "tpu-v6e-2x2-tp4"


def test_the_manifest_names_chips_hosts_and_device_order(tpu_artifact):
    target = read_manifest(tpu_artifact).targets[TARGET]
    assert (target.platform, target.kind, target.topology) == ("tpu", "v6e", "2x2")
    assert (target.tp, target.processes) == (4, 1)
    assert target.mesh == Mesh("tp", (0, 1, 3, 2), (0, 0, 0, 0))  # a ring, not a row
    assert target.requires.platform == "tpu"
    assert target.requires.device_kind == "TPU v6 lite"
    assert set(target.requires.plugins) == {"libtpu"}
    assert read_manifest(tpu_artifact).producer["libtpu"] == target.requires.plugins["libtpu"]


def test_every_cell_is_compiled_priced_and_labelled_as_never_executed(tpu_artifact):
    manifest = read_manifest(tpu_artifact)
    target = manifest.targets[TARGET]
    on_logits = [f"{phase}@{rows}" for phase in ("logits_processor", "sample") for rows in (1, 16)]
    assert sorted(target.cells) == sorted(["decode@16", "prefill@16", "score@16", *on_logits])
    for cell in target.cells.values():
        assert cell.status == "compiled, not executed"
        assert cell.estimated_seconds >= cell.floor.seconds > 0
        assert cell.lowering == Lowering(direct=True, forward_compatible=False)
        assert not graph_of(tpu_artifact, manifest, TARGET, cell.name).unknown_loops
        assert not cell.estimate.unseen
        assert cell.estimate.tokens_a_sequence == 512  # no more than the context
    assert TARGET not in manifest.vectors.receipts


def test_receipts_of_portable_programs_are_shown_next_to_compiled_not_executed(tpu_artifact, tmp_path):
    folder = Path(shutil.copytree(tpu_artifact, tmp_path / "x.ling3"))
    manifest = read_manifest(folder)
    cells = dict.fromkeys(manifest.targets[TARGET].cells, Receipt("passed", 0.021, 0.0123, 0.1, 5))
    special = cells.pop("score@16") and {"score@16": ("only_there",)}
    proof = PortableReceipts(Tolerance("median", 0.15), cells, {}, "jaxlib 0.11.2", special)
    write_manifest(folder, replace(manifest, vectors=replace(manifest.vectors, portable={TARGET: proof})))
    shown = " ".join(CliRunner().invoke(cli.main, ["inspect", str(folder)]).output.split())
    assert "stablehlo, on cpu (jaxlib 0.11.2), virtual devices: no executable of the target ran" in shown
    assert "1.2e-02 ≤ 1.5e-01" in shown
    assert "score@16: not run: only an accelerator has only_there" in shown
    done = CliRunner().invoke(cli.main, ["verify", str(folder)])
    assert f"{TARGET}: not run here: compiled, not executed (stablehlo, on cpu); it needs 4 devices" in done.output


HEADERS = ("executable MB", "temporaries MB", "stablehlo MB")


def test_inspect_shows_estimates_and_that_nothing_was_executed(tpu_artifact):
    shown = CliRunner().invoke(cli.main, ["inspect", str(tpu_artifact)]).output
    assert "compiled, not executed" in shown
    assert "tokens a sequence, without collectives: nothing was executed" in " ".join(shown.split())
    assert "bound ms" in shown
    tables = [line for line in shown.splitlines() if re.match(r"  (cell|estimates|state|[a-z_]+@\d+)  ", line)]
    assert len(tables) == 3 + 2 * 7
    assert max(map(len, tables)) <= 80
    wide = CliRunner().invoke(cli.main, ["inspect", str(tpu_artifact), "--wide"]).output
    assert all(name in wide for name in HEADERS)
    assert not any(name in shown for name in HEADERS)


def test_verify_checks_digests_and_says_why_it_ran_nothing(tpu_artifact):
    done = CliRunner().invoke(cli.main, ["verify", str(tpu_artifact)])
    assert done.exit_code == 0, done.output
    why = "compiled, not executed (stablehlo, on cpu); it needs 4 devices of tpu:v6e:2x2 on 1 host"
    assert f"{TARGET}: not run here: {why}" in done.output
    record = json.loads(CliRunner().invoke(cli.main, ["verify", str(tpu_artifact), "--json"]).stdout)
    assert "reason" in record["targets"][TARGET]


def test_a_target_whose_compiler_is_missing_is_refused_before_anything_is_written(monkeypatch, tmp_path):
    synthesize(tmp_path / "micro", "micro", 0)
    monkeypatch.setattr("ling3export.plan.targets.wanted_libtpu", lambda: "9.9.9")
    arguments = ["build", str(tmp_path / "micro"), str(tmp_path / "a.ling3"), "--target", "tpu:v6e:2x2"]
    done = CliRunner().invoke(cli.main, arguments)
    assert done.exit_code == 1
    assert "expected libtpu 9.9.9 (the compiler that belongs to jax" in done.output
    assert [path.name for path in tmp_path.iterdir()] == ["micro"]
