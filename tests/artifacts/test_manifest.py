"""The manifest: its bytes and digests, the error for each invalid one, and the files that it lists."""

import copy
import hashlib
import json
import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from ling3export.artifacts.manifest import (
    FORMAT_VERSION,
    MANIFEST,
    file_record,
    read_checked,
    read_manifest,
    write_manifest,
)
from ling3export.artifacts.records import canonical, sha256_of
from ling3export.artifacts.schema import FileRecord, Manifest
from ling3export.foundation.errors import ArtifactError
from tests.support.limits import file_size_limit
from tests.support.manifests import sealed

BUILT = Path(__file__).parents[1] / "data"
TARGET = "cpu-tp2"
HINT = "hint: copy the artifact again, or build it again"


@pytest.fixture(scope="module")
def small() -> Manifest:
    """The manifest of tests/data with one target, as a build for that target would write it."""
    manifest = read_manifest(BUILT)
    receipts = {TARGET: manifest.vectors.receipts[TARGET]}
    targets = {TARGET: manifest.targets[TARGET]}
    return replace(manifest, targets=targets, vectors=replace(manifest.vectors, receipts=receipts))


@pytest.fixture
def raw(small: Manifest, tmp_path: Path) -> dict[str, Any]:
    """Its JSON; ``tmp_path`` has the file."""
    write_manifest(tmp_path, small)
    return dict(json.loads((tmp_path / MANIFEST).read_text()))


def failure(folder: Path) -> str:
    with pytest.raises(ArtifactError) as caught:
        read_manifest(folder)
    return str(caught.value)


def test_canonical_golden() -> None:
    value = {"b": [1, 2.5, -0.0, 1e30, None, True], "a": {"é": "\n\u2028", "Z": ""}, "€": 1, "😀": 2}
    assert canonical(value) == ('{"a":{"Z":"","é":"\\n\u2028"},"b":[1,2.5,-0.0,1e+30,null,true],"€":1,"😀":2}'.encode())
    assert sha256_of({}) == hashlib.sha256(b"{}").hexdigest()
    assert canonical((1, 2)) == canonical([1, 2])


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({1: 2}, "JSON key 1: expected a string, found int"),
        ([{"a": {None: 2}}], "JSON key None: expected a string, found NoneType"),
        ({"a": float("nan")}, "not JSON compliant"),
        ({"a": float("inf")}, "not JSON compliant"),
        ({"a": np.float32(1)}, "not JSON serializable"),
        ({"a": "\ud800"}, "surrogates not allowed"),
    ],
)
def test_canonical_refuses_what_has_two_spellings_or_none(value: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        canonical(value)


def test_a_manifest_is_written_again_byte_by_byte(tmp_path: Path) -> None:
    whole, built = (BUILT / MANIFEST).read_bytes(), read_manifest(BUILT)
    manifest = write_manifest(tmp_path, built)
    assert manifest == built == read_manifest(tmp_path)
    assert (tmp_path / MANIFEST).read_bytes() == whole
    assert os.listdir(tmp_path) == [MANIFEST]
    assert FORMAT_VERSION == 1
    assert whole.startswith(b'{\n  "format": 1,\n  "producer": {')
    lines = whole.splitlines(keepends=True)
    covered = b"".join(lines[:-2])
    assert lines[-2:] == [f'  "sha256": "{hashlib.sha256(covered).hexdigest()}"\n'.encode(), b"}\n"]
    raw = json.loads(whole)
    assert raw["sha256"] == manifest.sha256
    assert raw["weights_digest"] == sha256_of({name: row["sha256"] for name, row in raw["weights"]["index"].items()})
    del raw["config"]["eos_token_id"]
    assert raw["programs_digest"] == sha256_of({name: raw[name] for name in ("config", "plan", "targets")})


def test_other_weights_leave_the_programs_digest_and_other_programs_that_of_the_weights(
    small: Manifest, tmp_path: Path
) -> None:
    before = write_manifest(tmp_path, small)
    name, tensor = next(iter(small.weights.index.items()))
    index = small.weights.index | {name: replace(tensor, sha256=("0" * 64,) * len(tensor.sha256))}
    weights = write_manifest(tmp_path, replace(small, weights=replace(small.weights, index=index)))
    assert weights.programs_digest == before.programs_digest
    assert weights.weights_digest != before.weights_digest
    assert weights.state_of(TARGET) != before.state_of(TARGET), "states must not be shared"
    ends = write_manifest(tmp_path, replace(small, config=small.config | {"eos_token_id": (1,)}))
    assert (ends.programs_digest, ends.sha256 == before.sha256) == (before.programs_digest, False)
    target = replace(small.targets[TARGET], fingerprint="0" * 64)
    programs = write_manifest(tmp_path, replace(small, targets={TARGET: target}))
    assert programs.weights_digest == before.weights_digest
    assert programs.programs_digest != before.programs_digest


def test_every_changed_byte_is_detected(raw: dict[str, Any], tmp_path: Path) -> None:
    whole = (tmp_path / MANIFEST).read_bytes()
    random = np.random.default_rng(0)
    flips = [(int(random.integers(len(whole))), int(random.integers(1, 256))) for _ in range(150)]
    blanks = [at for at, byte in enumerate(whole) if byte == 0x20]
    spaces = [(int(at), 0x20 ^ other) for at in random.choice(blanks, 25) for other in b"\n\t"]
    for at, mask in flips + spaces:
        flipped = bytearray(whole)
        flipped[at] ^= mask
        (tmp_path / MANIFEST).write_bytes(flipped)
        failure(tmp_path)
    for cut in (0, 1, len(whole) // 2, len(whole) - 1):
        (tmp_path / MANIFEST).write_bytes(whole[:cut])
        failure(tmp_path)
    (tmp_path / MANIFEST).write_bytes(whole + b"\n")
    assert failure(tmp_path).startswith("manifest.json: expected its sha256 on a line of its own before the last")
    exchanged = {name: raw[name] for name in ("format", "source", "producer", *list(raw)[3:])}
    text = json.dumps(exchanged, indent=2) + "\n"  # the order of keys matters, too
    (tmp_path / MANIFEST).write_text(text)
    assert failure(tmp_path).startswith("manifest.json: expected sha256 ")


def test_each_failure_has_its_own_text(tmp_path: Path, raw: dict[str, Any]) -> None:
    make = "hint: make one with: ling3export build CHECKPOINT ARTIFACT"
    whole = (tmp_path / MANIFEST).read_text()
    name, path = tmp_path.name, tmp_path / MANIFEST
    path.unlink()
    assert failure(tmp_path / "no") == f"artifact `no`: expected a folder, found nothing, at {tmp_path / 'no'}\n{make}"
    assert failure(tmp_path) == (
        f"artifact `{name}`: it has no manifest.json, in {tmp_path}\n"
        "hint: this is no artifact, or its build was interrupted: build it again"
    )
    path.mkdir()
    assert failure(tmp_path) == f"manifest.json: expected a readable file, found a folder, in {tmp_path}\n{HINT}"
    path.rmdir()
    path.symlink_to(BUILT / MANIFEST)
    assert failure(tmp_path) == f"manifest.json: expected a readable file, found a symbolic link, in {tmp_path}\n{HINT}"
    path.unlink()
    os.mkfifo(path)
    assert failure(tmp_path).startswith("manifest.json: expected a readable file, found a pipe, in ")
    path.unlink()
    path.write_text("{")
    assert failure(path) == f"artifact `manifest.json`: expected a folder, found a file, at {path}\n{make}"
    assert failure(tmp_path).startswith("manifest.json: expected JSON, found Expecting property name")
    path.write_bytes(b"\xff")
    assert failure(tmp_path).startswith("manifest.json: expected JSON, found 'utf-8' codec can't decode")
    twice = "manifest.json: expected JSON, found a key that stands twice in one object"
    path.write_text('{"format": 1, "a": 1, "a": 2}')
    assert failure(tmp_path) == f"{twice}, in {tmp_path}\n{HINT}"
    path.write_text('{"format": NaN}')
    assert failure(tmp_path) == f"manifest.json: expected JSON, found the number NaN, in {tmp_path}\n{HINT}"
    for text, found in (("[1]", "null"), ("{}", "null"), ('{"format": "1"}', '"1"'), ('{"format": true}', "true")):
        path.write_text(text)
        assert failure(tmp_path) == f"manifest.json: expected a format version, found {found}, in {tmp_path}\n{HINT}"
    path.write_text('{"format": 3, "anything": []}')
    assert failure(tmp_path) == (
        f"manifest.json: expected format 1, found format 3, in {tmp_path}\n"
        "hint: install a newer ling3export, or build the artifact again with this one"
    )
    path.write_text('{"format": 1, "a": "\\ud800"}')
    assert failure(tmp_path).startswith("manifest.json: expected JSON, found half a character (a lone surrogate), in ")
    text = whole.replace('"context": 64', '"context": 65')
    path.write_text(text)
    found = hashlib.sha256("".join(text.splitlines(keepends=True)[:-2]).encode()).hexdigest()
    assert failure(tmp_path) == (
        f"manifest.json: expected sha256 {raw['sha256']}, found {found}, in {tmp_path}\n{HINT}"
    )


def at(*path: Any, value: Any = ...) -> Callable[[dict[str, Any]], None]:
    """An edit that sets a value in a manifest's JSON, or removes it."""

    def edit(raw: dict[str, Any]) -> None:
        place: Any = raw
        for key in path[:-1]:
            place = place[key]
        if value is ...:
            del place[path[-1]]
        else:
            place[path[-1]] = value

    return edit


def both(*edits: Callable[[dict[str, Any]], None]) -> Callable[[dict[str, Any]], None]:
    """Combines several edits."""
    return lambda raw: [edit(raw) for edit in edits].clear()


CPU = ("targets", TARGET)
CELL = (*CPU, "cells", "decode@2")


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (at("plan"), "manifest.json: expected the field plan, found none"),
        (at("more", value=1), "manifest.json: expected only the fields producer, source, config, plan, "),
        (at(*CELL, "rows", value=2), "`targets.cpu-tp2.cells.decode@2`: expected only the fields "),
        (at(*CPU, "mesh", "axis", value=3), "`targets.cpu-tp2.mesh.axis`: expected a text, found 3"),
        (at("plan", "max_running", value="2"), '`plan.max_running`: expected a whole number, found "2"'),
        (at("plan", "max_running", value=True), "`plan.max_running`: expected a whole number, found true"),
        (at("plan", "max_running", value=2.0), "`plan.max_running`: expected a whole number, found 2.0"),
        (at("plan", "max_running", value=10**9), "`plan.max_running`: expected a number from 1 to 65,536, found 1000"),
        (at("plan", "paddings", value=[32, 16]), "`plan.paddings`: expected ascending paddings, found [32, 16]"),
        (at("plan", "dtype", value="int8"), '`plan.dtype`: expected "bfloat16" or "float32", found "int8"'),
        (at("notes", value=["\x1b[2J gone"]), r"`notes[0]`: expected a printable text of at most 10,000 characters, "
         r'found "\u001b[2J gone"'),
        (at("targets", "\x1b]0;x\x07", value={}), r"`targets.\u001b]0;x\u0007`: expected a printable text"),
        # Numbers that contradict the rest of the manifest.
        (at(*CPU, "state", "slots", value=100),
         "`targets.cpu-tp2.state.slots`: expected 2, as the plan says, found 100"),
        (at(*CPU, "state", "pages", value=100),
         "`targets.cpu-tp2.geometry.pages`: expected 100, as the state says, found 8"),
        (both(at(*CPU, "state", "pages", value=100), at(*CPU, "geometry", "pages", value=100)),
         "`targets.cpu-tp2.state.arrays[3].shape`: expected 101, the size of the axis `pages`, found 9"),
        (at(*CPU, "state", "max_pages", value=5),
         "state.max_pages`: expected 4, what the plan's context needs, found 5"),
        (at(*CPU, "state", "arrays", 0, "shape", 1, value=9),
         "state.arrays[0].shape`: expected 3, the size of the axis"),
        (at(*CPU, "geometry", "tp", value=4),
         "geometry.tp`: expected 2, as the mesh says, found 4"),
        (at(*CPU, "geometry", "placement", value="striped"), 'geometry.placement`: expected "replicated", as the '),
        (at(*CPU, "geometry", "form", value="tiles"),
         'cpu-tp2.state.placement`: expected "striped", as the geometry\'s form and TP say, found "replicated"'),
        (at(*CPU, "mesh", "devices", value=[0, 1, 2]), '`targets.cpu-tp2`: expected "cpu-tp3", its platform, kind, '),
        (at(*CPU, "mesh", "devices", value=[1, 1]), "mesh.devices`: expected every device once, found [1, 1]"),
        (at(*CPU, "mesh", "hosts", value=[0, 2]), "mesh.hosts`: expected for each of 2 devices its host"),
        (at(*CPU, "mesh", "devices", value=list(range(5000))),
         "mesh.devices`: expected 1 to 4,096 devices, found [0, 1, 2, 3, "),
        (at(*CELL, "padding", value=3),
         '`targets.cpu-tp2.cells.decode@2`: expected "decode@3", its phase and padding, '),
        (at(*CELL, "fields", 1, "offset", value=1),
         "fields[1].offset`: expected 2, where the field before it ends, found"),
        (at(*CELL, "fields", 2, "shape", value=[2, 9]),
         "fields[2].shape`: expected [2, 4], the shape of the field, found [2, 9]"),
        (at(*CELL, "inputs", 0, "shape", 0, value=5), "decode@2.inputs`: expected "),
        (at(*CELL, "call", "inputs", 3, "shape", value=[1]),
         'decode@2.call.inputs`: expected [[64], "float32"], input 3 of the cell, found [[1], '),
        (at(*CELL, "call", "inputs", 3, "donated", value=True),
         "decode@2.call.inputs`: expected false, whether input 3 is state, which is donated, found true"),
        (at(*CELL, "exec"), 'decode@2`: expected `exec` and `call` together, or neither, found "only call"'),
        (at(*CELL, "stablehlo"), "decode@2`: expected the field stablehlo, found none"),
        (at(*CELL), "`targets.cpu-tp2.cells`: expected [2], the paddings of decode, found []"),
        (at(*CPU, "cells", "sample@2"), "`targets.cpu-tp2.cells`: expected [1, 2], the paddings of sample, found [1]"),
        (at(*CPU, "parameters", 0, "shape", 0, value=5), "parameters[0].shape`: expected [[4, "),
        (at(*CPU, "parameters", 0, "split"), "parameters[0].split`: expected true, whether the tensor has shards, "),
        (at(*CPU, "parameters", 0, "tensor", value="x"),
         "parameters[0].tensor`: expected a tensor of the weight index"),
        (at("weights", "index", "mla.dense", "offset", value=10**8),
         "`weights.index.mla.dense.offset`: expected a tensor"
         " that ends within the "),
        (at("weights", "index", "mla.dense", "sha256", value=["0" * 64] * 3),
         "`weights.index.mla.dense.sha256`: expected 4, one digest a shard, found 3"),
        (at("weights", "index", "mla.dense", "shards", value=3),
         "`weights.index.mla.dense.shape`: expected a leading axis of 3 shards, found [4, "),
        (at("weights", "files", value={}), '`weights.files`: expected ["weights/dense.safetensors", '),
        (at("vectors", "sequences", 0, "ids", 0, value=10**6),
         "`vectors.sequences[0].ids`: expected token ids below 320"),
        (at("vectors", "sequences", 0, "prompt", value=99), "`vectors.sequences[0].prompt`: expected 1 to 24 tokens"),
        (at("vectors", "receipts", "x", value={"tolerance": {"measure": "median", "bound": 1}, "cells": {}, "agreement":
         {"a": "b"}}), '`vectors.receipts.x.agreement.a`: expected a number, found "b"'),
        (at("config", "vocab_size", value=[320]), "`config`: expected a positive `vocab_size`, found [320]"),
        (at("config", "eos_token_id", value=[320]),
         "`config`: expected `eos_token_id` to be a list of token ids below 320"),
    ],
)  # fmt: skip
def test_a_crafted_manifest_is_refused_by_name(
    raw: dict[str, Any], tmp_path: Path, edit: Callable[[dict[str, Any]], None], message: str
) -> None:
    """Every digest is right: an attacker who knows the format made this manifest."""
    edit(raw)
    (tmp_path / MANIFEST).write_bytes(sealed(raw))
    said = failure(tmp_path)
    assert message in said
    assert said.isprintable() or said.replace("\n", "").isprintable()
    assert said.endswith(f", in {tmp_path}\n{HINT}")


def test_only_cpu_targets_have_a_program_that_makes_the_state(small: Manifest, tmp_path: Path) -> None:
    record = FileRecord("programs/tpu-v6e-2x1-tp2/state.exec", 1, "0" * 64)
    target = replace(small.targets["cpu-tp2"], platform="tpu", kind="v6e", topology="2x1", state_program=record)
    vectors = replace(small.vectors, receipts={}, portable=None)
    with pytest.raises(ArtifactError, match='expected a program that gives the state for cpu alone, found "tpu"'):
        write_manifest(tmp_path, replace(small, targets={"tpu-v6e-2x1-tp2": target}, vectors=vectors))


@pytest.mark.parametrize("path", ["/etc/passwd", "../x", "a/../../x", "./x", "a//b", "", ".", "a\0b", 7, None])
def test_paths_stay_inside(raw: dict[str, Any], small: Manifest, tmp_path: Path, path: Any) -> None:
    words = "expected a (path below the artifact's folder|(printable )?text)"
    for place in ((*CELL, "exec", "path"), ("vectors", "expected", "path"), ("tokenizer", 0, "path")):
        mutated = copy.deepcopy(raw)
        at(*place, value=path)(mutated)
        (tmp_path / MANIFEST).write_bytes(sealed(mutated))
        with pytest.raises(ArtifactError, match=words):
            read_manifest(tmp_path)
    record = FileRecord(path, 1, "0" * 64)
    with pytest.raises(ArtifactError, match=words):
        write_manifest(tmp_path, replace(small, tokenizer=(record,)))
    with pytest.raises(ArtifactError, match="expected a path below the artifact's folder, found one that leaves it"):
        read_checked(tmp_path, record)


def test_a_checkpoint_in_place_of_an_artifact_gets_the_command_that_builds_one(tmp_path: Path) -> None:
    """Regression: `serve CHECKPOINT` only reported that this is no artifact."""
    folder = tmp_path / "my checkpoint"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    with pytest.raises(ArtifactError) as caught:
        read_manifest(folder)
    assert caught.value.hint == f"this is a checkpoint; make an artifact of it: ling3export build '{folder}'"


def test_a_builders_mistake_writes_nothing(small: Manifest, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"manifest.json `notes`: expected a list, found 3, in"):
        write_manifest(tmp_path, replace(small, notes=3))  # type: ignore[arg-type]
    with pytest.raises(ArtifactError, match=r"`plan.memory_fraction`: expected a finite number, found NaN"):
        write_manifest(tmp_path, replace(small, plan=replace(small.plan, memory_fraction=float("nan"))))
    with pytest.raises(ArtifactError, match=r"`targets.cpu-tp2.state.slots`: expected 3, as the plan says, found 2"):
        write_manifest(tmp_path, replace(small, plan=replace(small.plan, max_running=3)))
    assert list(tmp_path.iterdir()) == []


def test_a_file_size_limit_keeps_the_old_manifest(small: Manifest, tmp_path: Path) -> None:
    written = write_manifest(tmp_path, small)
    with file_size_limit(4096), pytest.raises(ArtifactError) as caught:
        write_manifest(tmp_path, written)
    assert caught.value.message.startswith("write `manifest.json`: expected room for ")
    assert caught.value.message.endswith(f"found a file-size limit of 4,096 bytes, in {tmp_path}")
    assert os.listdir(tmp_path) == [MANIFEST]
    assert read_manifest(tmp_path) == written


def test_a_manifest_is_not_written_through_a_link(
    small: Manifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: the temporary name was fixed, and a write through a link of that name overwrote the link's target."""
    folder, outside = tmp_path / "a", tmp_path / "outside"
    folder.mkdir()
    outside.write_text("years")
    (folder / f".{MANIFEST}.partial-7-0123abcd").symlink_to(outside)
    (folder / MANIFEST).symlink_to(outside)
    written = write_manifest(folder, small)
    assert outside.read_text() == "years"
    assert os.listdir(folder) == [MANIFEST]
    assert not (folder / MANIFEST).is_symlink()
    assert read_manifest(folder) == written
    guessed = f".{MANIFEST}.partial-{os.getpid()}-guessed"
    (folder / guessed).symlink_to(outside)
    monkeypatch.setattr(secrets, "token_hex", lambda size: "guessed")
    with pytest.raises(ArtifactError) as caught:
        write_manifest(folder, replace(small, notes=("more",)))
    assert str(caught.value) == f"write `{MANIFEST}`: expected a writable file, found File exists, in {folder}"
    assert read_manifest(folder) == written
    assert outside.read_text() == "years"


def test_records_are_checked_before_use(tmp_path: Path) -> None:
    data = bytes(range(256)) * 5
    (tmp_path / "programs").mkdir()
    path = tmp_path / "programs" / "decode@16.exec"
    path.write_bytes(data)
    record = file_record(tmp_path, "programs/decode@16.exec")
    digest = hashlib.sha256(data).hexdigest()
    assert record == FileRecord("programs/decode@16.exec", 1280, digest)
    assert read_checked(tmp_path, record) == data
    random = np.random.default_rng(1)
    for _ in range(200):
        flipped = bytearray(data)
        flipped[int(random.integers(len(data)))] ^= int(random.integers(1, 256))
        path.write_bytes(flipped)
        with pytest.raises(ArtifactError, match=r"file `programs/decode@16.exec`: expected sha256"):
            read_checked(tmp_path, record)
    path.write_bytes(data[:-1])
    with pytest.raises(ArtifactError) as caught:
        read_checked(tmp_path, record)
    assert str(caught.value) == (
        f"file `programs/decode@16.exec`: expected 1,280 bytes, found 1,279, in {tmp_path}\n{HINT}"
    )
    path.unlink()
    for read in (lambda: read_checked(tmp_path, record), lambda: file_record(tmp_path, record.path)):
        with pytest.raises(ArtifactError) as caught:
            read()
        assert str(caught.value) == (
            "file `programs/decode@16.exec`: expected a readable file, found No such file or directory, "
            f"in {tmp_path}\n{HINT}"
        )


def test_only_regular_files_within_the_folder_are_read(tmp_path: Path) -> None:
    """Regression: a pipe hung ``verify``, and links led out of the artifact. test_reading.py has other file types."""
    folder = tmp_path / "x.ling3"
    (folder / "programs").mkdir(parents=True)
    (tmp_path / "a").write_bytes(b"x")
    record = FileRecord("programs/a", 1, hashlib.sha256(b"x").hexdigest())
    os.mkfifo(folder / "programs/a")
    (folder / "linked").symlink_to(tmp_path)
    for each, found in ((record, "a pipe"), (replace(record, path="linked/a"), "no folder on the way to it")):
        for read in (lambda each=each: read_checked(folder, each), lambda each=each: file_record(folder, each.path)):
            with pytest.raises(ArtifactError, match=f"found {found}"):
                read()
