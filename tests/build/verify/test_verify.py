"""``ling3export verify``: its measurements, its verdicts, and that it finds damage and wrong claims of an artifact."""

import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from msgspec.structs import replace
from safetensors.numpy import load_file, save_file

from ling3export.artifacts.manifest import file_record, read_manifest, write_manifest
from ling3export.artifacts.records import to_json
from ling3export.artifacts.schema import Receipts, SequenceRecord, Tolerance
from ling3export.cli import main as cli
from ling3export.foundation import processes
from ling3export.foundation.errors import ArtifactError, MisfitError
from ling3export.foundation.phases import ON_LOGITS
from ling3export.runners.calibrate.receipts import logits_receipt, relative_error
from ling3export.runners.calibrate.vectors import VectorRunner
from ling3export.verify import verify
from ling3export.verify.measure import measure_apart
from tests.support.manifests import changed_targets

VECTORS = "vectors/expected.safetensors"
SEQUENCES = tuple(
    SequenceRecord(ids, prompt, (), "") for ids, prompt in ((tuple(range(20)), 17), ((7, 8, 9), 2), ((5,) * 40, 39))
)


@pytest.fixture(scope="module")
def whole(artifact) -> Path:
    return artifact("micro-tp2")


@pytest.fixture
def copy(whole, tmp_path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "x.ling3"))


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli.main, ["verify", *map(str, arguments)])


def with_vectors(folder: Path, **changes: Any) -> None:
    """Changes the artifact's vectors and their records in the manifest, and makes the digests right again."""
    manifest = read_manifest(folder)
    vectors = replace(manifest.vectors, expected=file_record(folder, VECTORS), **changes)
    write_manifest(folder, replace(manifest, vectors=vectors))


def test_a_whole_artifact_passes_and_every_cell_is_listed_the_worst_first(whole):
    done = run(whole)
    assert done.exit_code == 0, done.stderr
    lines = done.stdout.splitlines()
    cells = read_manifest(whole).targets["cpu-tp2"].cells
    # one more is the manifest
    files = sum(path.is_file() and "weights" not in path.parts for path in whole.rglob("*")) - 1
    shards = sum(max(entry.shards, 1) for entry in read_manifest(whole).weights.index.values())
    assert lines[0] == f"digests: {files} files and {shards} weight shards agree"
    assert lines[1] == "cpu-tp2:"
    assert lines[2].split() == "cell status median worst absolute positions".split()
    rows = [line.split() for line in lines[3 : 3 + len(cells)]]
    assert {row[0] for row in rows} == set(cells)
    assert {row[1] for row in rows} == {"passed"}
    on_logits = [name for name, cell in cells.items() if cell.phase in ON_LOGITS]
    assert [row[2:4] for row in rows if row[0] in on_logits] == [["exact", "-"]] * len(on_logits)
    errors = [float(row[3]) for row in rows if row[0] not in on_logits]
    assert errors == sorted(errors, reverse=True)
    assert errors[0] <= 1e-5
    assert all(row[4:6] == ["≤", "1.0e-05"] for row in rows if row[0] not in on_logits)
    note = " ".join(line.strip() for line in lines[3 + len(cells) :])
    assert note.startswith(
        "errors are relative L2 distances of a position's logits from the plain model's; the worst may be up to "
        "1.0e-05 (float32)"
    )
    assert max(map(len, lines)) <= 80


def test_verify_as_json_agrees_with_the_receipts_of_the_build(whole):
    done = run(whole, "--json", "--no-engine", "--target", "cpu-tp2")
    assert done.exit_code == 0, done.stderr
    record = json.loads(done.stdout)
    assert record["passed"] is True
    found, receipts = record["targets"]["cpu-tp2"], to_json(read_manifest(whole).vectors.receipts["cpu-tp2"])
    assert found["tolerance"] == receipts["tolerance"] == {"measure": "largest", "bound": 1e-5}
    assert found["cells"].keys() == receipts["cells"].keys()
    for name, row in receipts["cells"].items():
        assert found["cells"][name] == pytest.approx(row, abs=1e-5)


def test_a_wrong_expectation_fails_and_comes_first(copy):
    """One logit of one decoded position is moved by a thousandth of the row."""
    stored = load_file(copy / VECTORS)
    entry = read_manifest(copy).vectors.sequences[0]
    row = entry.positions.index(entry.prompt)
    values = stored[entry.logits].copy()
    values[row, 3] += 1e-3 * np.linalg.norm(values[row])
    save_file(stored | {entry.logits: values}, copy / VECTORS)
    with_vectors(copy)
    done = run(copy, "--no-engine")
    assert done.exit_code == 1
    cell, status, _, error, sign, bound = done.stdout.splitlines()[3].split()[:6]
    assert (cell, status, sign, bound) == ("decode@8", "failed", ">", "1.0e-05")
    assert float(error) == pytest.approx(1e-3, rel=0.01)
    assert done.stdout.count("failed") == 1


def test_an_unknown_target_is_refused(whole):
    done = run(whole, "--target", "tpu-v6e-4x4-tp16")
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr == (f"error: target `tpu-v6e-4x4-tp16`: the artifact has only cpu-tp2, in {whole}\n")


@pytest.mark.parametrize("damaged", ["programs/*/sample@*.stablehlo", "weights/moe.safetensors", VECTORS])
@pytest.mark.parametrize("options", [[], ["--no-run"]])
def test_damage_is_found_before_anything_runs(copy, damaged, options, monkeypatch):
    monkeypatch.setattr(verify, "measure_apart", lambda *arguments: pytest.fail("a damaged artifact was run"))
    path = next(copy.glob(damaged))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    done = run(copy, *options)
    assert (done.exit_code, done.stdout) == (1, "")
    assert "expected sha256 " in done.stderr


def test_the_output_of_the_measuring_process_is_passed_on(whole, monkeypatch):
    with pytest.raises(ArtifactError) as caught:
        measure_apart(whole, "cpu-tp9", read_manifest(whole))
    assert caught.value.message.startswith(
        "vectors of `cpu-tp9`: expected to run, found: target `cpu-tp9`: the artifact has only cpu-tp2"
    )

    monkeypatch.setattr(processes, "command", lambda *_: ["sh", "-c", "echo last words >&2; kill -ABRT $$"])
    with pytest.raises(ArtifactError) as caught:
        measure_apart(whole, "cpu-tp2", read_manifest(whole))
    assert caught.value.message == (
        "vectors of `cpu-tp2`: expected to run, found: a process that was killed by SIGABRT: last words"
    )


def test_verify_names_the_target_that_runs_on_this_machine(copy, monkeypatch):
    """Regression: an artifact for two machines, one of them this machine, was not verified at all."""
    manifest = read_manifest(copy)
    changed_targets(copy, lambda here: replace(here, requires=replace(here.requires, cpu_features=("avx1024",))))
    wrong = "processor: built for avx1024, which this one lacks"
    alone = run(copy)
    assert alone.exit_code == 1 and wrong in alone.stderr
    with pytest.raises(MisfitError, match=wrong) as caught:
        measure_apart(copy, "cpu-tp2", read_manifest(copy))

    def measured(folder: Path, name: str, *_: Any, **__: Any) -> Receipts:
        if name == "other":
            raise caught.value
        return manifest.vectors.receipts["cpu-tp2"]

    two = replace(manifest, targets={**manifest.targets, "other": manifest.targets["cpu-tp2"]})
    monkeypatch.setattr(verify, "read_trusted", lambda *_: two)
    monkeypatch.setattr(verify, "measure_apart", measured)
    done = run(copy, "--json", "--no-engine")
    assert done.exit_code == 0, done.stderr
    told = json.loads(done.stdout)["targets"]
    assert told["cpu-tp2"]["passed"] and set(told["other"]) == {"reason"}
    assert wrong in told["other"]["reason"] and "hint" not in told["other"]["reason"]
    named = run(copy, "--target", "other")
    assert named.exit_code == 1 and wrong in named.stderr


def test_the_measuring_process_takes_nothing_from_its_surroundings(whole, tmp_path, monkeypatch):
    """Regression: a json.py in the working directory was imported, and JAX_DISABLE_JIT ended in a traceback."""
    (tmp_path / "json.py").write_text("raise SystemExit('shadowed')")
    monkeypatch.chdir(tmp_path)
    for name in ("JAX_DISABLE_JIT", "JAX_ENABLE_X64"):
        monkeypatch.setenv(name, "1")
    assert "JAX_NUMPY_DTYPE_PROMOTION" in processes.environment()
    assert measure_apart(whole, "cpu-tp2", read_manifest(whole)).passed


def test_relative_error():
    assert relative_error(np.array([3.0, 4.0]), np.array([3.0, 4.0])) == 0
    assert relative_error(np.array([3.0, 4.5]), np.array([3.0, 4.0])) == pytest.approx(0.1)
    assert relative_error(np.array([3.0, np.nan]), np.array([3.0, 4.0])) == sys.float_info.max
    large = np.array([3e30, 4e30], np.float32)
    assert relative_error(large, large * np.float32(2)) == pytest.approx(0.5)


class FakeDevice:
    """Records the steps; the logits of every row are its position."""

    def __init__(self) -> None:
        self.steps: list[tuple[str, int, dict[str, np.ndarray]]] = []

    def step(self, phase: str, padding: int, fields: dict[str, np.ndarray]) -> np.ndarray:
        self.steps.append((phase, padding, {name: value.copy() for name, value in fields.items()}))
        if phase == "decode":
            return fields["position"][:, None].astype(np.float32)
        return (fields["chunk_start"] + fields["chunk_len"] - 1)[:, None].astype(np.float32)

    def read(self, handle: np.ndarray) -> np.ndarray:
        return handle


def prober(device: FakeDevice, **state: int) -> VectorRunner:
    record = {"chunk": 16, "page_size": 16, "max_pages": 4, "slots": 4, "pages": 12} | state
    target = SimpleNamespace(state=SimpleNamespace(**record), paddings=lambda phase: (16,))
    loaded: Any = SimpleNamespace(runner=SimpleNamespace(step=device.step), read=device.read)
    return VectorRunner(loaded, target, SEQUENCES)  # type: ignore[arg-type]


def test_a_cell_without_an_expectation_is_not_called_compared():
    row = np.ones(4, np.float32)
    with pytest.raises(ArtifactError, match="no logits at a position that the cell gives"):
        logits_receipt({(0, 3): row}, {(0, 2): row}, Tolerance("largest", 1e-5))


def test_prompts_are_prefilled_in_calls_of_whole_chunks():
    device = FakeDevice()
    found = dict(prober(device).prefill(32, 2, 3))
    assert {key: float(value[0]) for key, value in found.items()} == {(2, end): end for end in (15, 31, 38)}
    (_, _, first), (_, padding, second) = device.steps
    assert padding == 32
    names = ("chunk_start", "chunk_len", "chunk_slot", "fresh")
    assert [first[name].tolist() for name in names] == [[0, 16], [16, 16], [3, 3], [1, 0]]
    assert [second[name].tolist() for name in names] == [[32, 0], [7, 0], [3, 0], [0, 0]]
    assert second["page_table"].tolist() == [[7, 8, 9, 0], [0, 0, 0, 0]]


@pytest.mark.parametrize(
    ("padding", "state", "together"),
    [(4, {}, 3), (2, {}, 2), (4, {"slots": 1}, 1), (4, {"pages": 6}, 2), (4, {"pages": 3}, 1)],
)
def test_decode_takes_as_many_sequences_as_padding_slots_and_pages_hold(padding, state, together):
    """Regression: a pool with fewer pages than three sequences need made every build fail."""
    device = FakeDevice()
    found = prober(device, **state).decode(padding)
    wanted = {(0, 17): 17, (0, 18): 18, (0, 19): 19, (1, 2): 2, (2, 39): 39}
    assert {key: float(value[0]) for key, value in found.items()} == wanted
    live = [np.count_nonzero(fields["slot"]) for phase, _, fields in device.steps if phase == "decode"]
    assert max(live) == live[0] == together


def test_no_run_checks_digests_and_executes_nothing(whole, monkeypatch):
    """Regression: no command could check an artifact's digests without running its native code."""
    monkeypatch.setattr(verify, "measure_apart", lambda *_: pytest.fail("executed"))
    done = run(whole, "--no-run")
    assert done.exit_code == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("digests: ")
    assert lines[1:] == ["cpu-tp2: not run here: --no-run"]
