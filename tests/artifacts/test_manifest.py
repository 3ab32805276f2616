"""The manifest: its bytes, its digest, and the files that it records."""

import hashlib
import json
import os
import secrets
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ling3export.artifacts.manifest import (
    FORMAT_VERSION,
    MANIFEST,
    _file_bytes,
    canonical,
    file_record,
    read_checked,
    read_manifest,
    sha256_of,
    write_manifest,
)
from ling3export.errors import ArtifactError

BODY: dict[str, Any] = {
    "producer": {"ling3export": "0.1.0", "flags": ("--b", "ä")},
    "source": {"path": "/somewhere/else", "files": {"config.json": "00"}},
    "config": {"rope_theta": 10000.0, "rms_norm_eps": 1e-06, "q_lora_rank": None, "use_mla_nope": False},
    "plan": {"paddings": [16, 128, 512]},
    "targets": [
        {"name": "cpu-tp4", "cells": [{"path": "programs/cpu-tp4/decode@16.exec", "bytes": 3, "sha256": "ab"}]}
    ],
    "weights": {"x": {"file": "weights/x.safetensors", "sha256": ["0" * 64, "1" * 64]}},
    "vectors": [],
    "tokenizer": [],
    "notes": "",
}

GOLDEN = """\
{
  "format": 1,
  "producer": {"ling3export": "0.1.0", "flags": ["--b", "ä"]},
  "source": {"path": "/somewhere/else", "files": {"config.json": "00"}},
  "config": {"rope_theta": 10000.0, "rms_norm_eps": 1e-06, "q_lora_rank": null, "use_mla_nope": false},
  "plan": {"paddings": [16, 128, 512]},
  "targets": [
    {
      "name": "cpu-tp4",
      "cells": [{"path": "programs/cpu-tp4/decode@16.exec", "bytes": 3, "sha256": "ab"}]
    }
  ],
  "weights": {
    "x": {
      "file": "weights/x.safetensors",
      "sha256": [
        "0000000000000000000000000000000000000000000000000000000000000000",
        "1111111111111111111111111111111111111111111111111111111111111111"
      ]
    }
  },
  "vectors": [],
  "tokenizer": [],
  "notes": "",
  "sha256": "DIGEST"
}
"""

HINT = "hint: copy the artifact again, or build it again"


def golden() -> str:
    body = {"format": 1, **json.loads(json.dumps(BODY))}
    text = json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return GOLDEN.replace("DIGEST", hashlib.sha256(text.encode()).hexdigest())


def resealed(folder: Path, **changes: Any) -> None:
    """Writes a manifest with ``changes`` and a right digest, as a crafted artifact would."""
    body = {"format": 1, **BODY, **changes}
    body = {key: value for key, value in body.items() if value is not ...}
    (folder / MANIFEST).write_bytes(_file_bytes({**json.loads(json.dumps(body)), "sha256": sha256_of(body)}))


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


def test_golden_file_and_round_trip(tmp_path: Path) -> None:
    written = write_manifest(tmp_path, BODY)
    assert (tmp_path / MANIFEST).read_text() == golden()
    assert os.listdir(tmp_path) == [MANIFEST]
    assert written == read_manifest(tmp_path)
    assert list(written) == ["format", *BODY, "sha256"]
    again = write_manifest(tmp_path, written | {"notes": "more"})
    assert again == read_manifest(tmp_path)
    assert again["sha256"] != written["sha256"]
    assert FORMAT_VERSION == 1


def test_every_changed_byte_is_detected(tmp_path: Path) -> None:
    write_manifest(tmp_path, BODY)
    whole = (tmp_path / MANIFEST).read_bytes()
    random = np.random.default_rng(0)
    flips = [(int(random.integers(len(whole))), int(random.integers(1, 256))) for _ in range(200)]
    spaces = [(at, 0x20 ^ other) for at, byte in enumerate(whole) if byte == 0x20 for other in b"\n\t"]
    for at, mask in flips + spaces:
        flipped = bytearray(whole)
        flipped[at] ^= mask
        (tmp_path / MANIFEST).write_bytes(flipped)
        with pytest.raises(ArtifactError):
            read_manifest(tmp_path)
    for cut in (0, 1, len(whole) // 2, len(whole) - 1):
        (tmp_path / MANIFEST).write_bytes(whole[:cut])
        with pytest.raises(ArtifactError):
            read_manifest(tmp_path)
    (tmp_path / MANIFEST).write_bytes(whole + b"\n")
    with pytest.raises(ArtifactError, match="expected the spacing and spelling of a build"):
        read_manifest(tmp_path)


def test_each_failure_has_its_own_text(tmp_path: Path) -> None:
    def failure(folder: Path = tmp_path) -> str:
        with pytest.raises(ArtifactError) as caught:
            read_manifest(folder)
        return str(caught.value)

    make = "hint: make one with: ling3export build CHECKPOINT ARTIFACT"
    name, path = tmp_path.name, tmp_path / MANIFEST
    assert failure(tmp_path / "no") == f"artifact `no`: expected a folder, found nothing, at {tmp_path / 'no'}\n{make}"
    assert failure() == (
        f"artifact `{name}`: expected manifest.json, found none, in {tmp_path}\n"
        "hint: this is no artifact, or its build was interrupted: build it again"
    )
    path.mkdir()
    assert failure() == f"manifest.json: expected a readable file, found Is a directory, in {tmp_path}"
    path.rmdir()
    path.write_text("{")
    assert failure(path) == f"artifact `manifest.json`: expected a folder, found a file, at {path}\n{make}"
    assert failure().startswith("manifest.json: expected JSON, found Expecting property name")
    path.write_bytes(b"\xff")
    assert failure().startswith("manifest.json: expected JSON, found 'utf-8' codec can't decode")
    path.write_text('{"format": 1, "a": 1, "a": 2}')
    assert (
        failure() == f"manifest.json: expected JSON, found a key that stands twice in one object, in {tmp_path}\n{HINT}"
    )
    path.write_text('{"format": NaN}')
    assert failure() == f"manifest.json: expected JSON, found the number NaN, in {tmp_path}\n{HINT}"
    path.write_text("[" * 100_000)
    assert failure().startswith("manifest.json: expected JSON, found")
    path.write_text('{"format": 1, "a": "\\ud800"}')
    assert failure().startswith("manifest.json: expected the spacing and spelling of a build")
    path.write_text('{"format": 1, "a": 1e999}')
    assert failure().startswith("manifest.json: expected the spacing and spelling of a build")
    for text, found in (("[1]", "None"), ("{}", "None"), ('{"format": "1"}', "'1'"), ('{"format": true}', "True")):
        path.write_text(text)
        assert failure() == f"manifest.json: expected a format version, found {found}, in {tmp_path}\n{HINT}"
    path.write_text('{"format": 2, "anything": []}')
    assert failure() == (
        f"manifest.json: expected format 1, found format 2, in {tmp_path}\n"
        "hint: install a newer ling3export, or build the artifact again with this one"
    )
    text = golden().replace("[16, 128, 512]", "[16, 128, 513]")
    path.write_text(text)
    expected = json.loads(text).pop("sha256")
    found = sha256_of({key: value for key, value in json.loads(text).items() if key != "sha256"})
    assert failure() == f"manifest.json: expected sha256 {expected}, found {found}, in {tmp_path}\n{HINT}"
    resealed(tmp_path, plan=..., vectors=...)
    assert failure() == f"manifest.json: expected the field plan, vectors, found none, in {tmp_path}\n{HINT}"


@pytest.mark.parametrize("path", ["/etc/passwd", "../x", "a/../../x", "./x", "a//b", "", ".", "a\0b", 7, None])
def test_paths_stay_inside(tmp_path: Path, path: Any) -> None:
    message = "expected a path below the artifact's folder, found one that leaves it, in manifest.json"
    for changes in ({"targets": [{"cells": [{"path": path}]}]}, {"vectors": {"file": {"path": path}}}):
        resealed(tmp_path, **changes)
        with pytest.raises(ArtifactError, match=message):
            read_manifest(tmp_path)
        with pytest.raises(ArtifactError, match=message):
            write_manifest(tmp_path, BODY | changes)
    with pytest.raises(ArtifactError, match=message):
        read_checked(tmp_path, {"path": path, "bytes": 1, "sha256": ""})


def test_a_builders_mistake_writes_nothing(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="manifest: expected the fields of format 1, found extra, more"):
        write_manifest(tmp_path, BODY | {"more": 1, "extra": 1})
    with pytest.raises(ArtifactError, match=r"manifest.json: expected the field notes, found none"):
        write_manifest(tmp_path, {key: value for key, value in BODY.items() if key != "notes"})
    with pytest.raises(TypeError):
        write_manifest(tmp_path, BODY | {"notes": tmp_path})
    assert list(tmp_path.iterdir()) == []


def test_a_file_size_limit_keeps_the_old_manifest(tmp_path: Path) -> None:
    write_manifest(tmp_path, BODY)
    script = (
        "import resource, sys; from pathlib import Path\n"
        "from ling3export.artifacts.manifest import read_manifest, write_manifest\n"
        "from ling3export.errors import ArtifactError\n"
        "manifest = read_manifest(Path(sys.argv[1])) | {'notes': 'x' * 9000}\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
        "try: write_manifest(Path(sys.argv[1]), manifest)\n"
        "except ArtifactError as error: print(error.message)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("write `manifest.json`: expected room for ")
    assert done.stdout.endswith(f"found a file-size limit of 4,096 bytes, in {tmp_path}\n")
    assert os.listdir(tmp_path) == [MANIFEST]
    assert (tmp_path / MANIFEST).read_text() == golden()


def test_a_manifest_is_not_written_through_a_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its temporary name was once fixed and followed: a link of that name had what it names overwritten."""
    folder, outside = tmp_path / "a", tmp_path / "outside"
    folder.mkdir()
    outside.write_text("years")
    leftovers = [f".{MANIFEST}.partial", f".{MANIFEST}.partial-7-0123abcd"]
    for name in leftovers:
        (folder / name).symlink_to(outside)
    (folder / MANIFEST).symlink_to(outside)
    write_manifest(folder, BODY)
    assert outside.read_text() == "years"
    assert os.listdir(folder) == [MANIFEST]
    assert not (folder / MANIFEST).is_symlink()
    assert (folder / MANIFEST).read_text() == golden()
    guessed = f".{MANIFEST}.partial-{os.getpid()}-guessed"
    (folder / guessed).symlink_to(outside)
    monkeypatch.setattr(secrets, "token_hex", lambda size: "guessed")
    with pytest.raises(ArtifactError) as caught:
        write_manifest(folder, BODY | {"notes": "more"})
    assert str(caught.value) == f"write `{MANIFEST}`: expected a writable file, found File exists, in {folder}"
    assert (folder / MANIFEST).read_text() == golden()
    assert outside.read_text() == "years"


def test_records_are_checked_before_use(tmp_path: Path) -> None:
    data = bytes(range(256)) * 5
    (tmp_path / "programs").mkdir()
    path = tmp_path / "programs" / "decode@16.exec"
    path.write_bytes(data)
    record = file_record(tmp_path, "programs/decode@16.exec")
    digest = hashlib.sha256(data).hexdigest()
    assert record == {"path": "programs/decode@16.exec", "bytes": 1280, "sha256": digest}
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
    for read in (lambda: read_checked(tmp_path, record), lambda: file_record(tmp_path, record["path"])):
        with pytest.raises(ArtifactError) as caught:
            read()
        assert str(caught.value) == (
            "file `programs/decode@16.exec`: expected a readable file, found No such file or directory, "
            f"in {tmp_path}\n{HINT}"
        )
    with pytest.raises(ArtifactError, match="file record: expected path, bytes and sha256, found"):
        read_checked(tmp_path, {"path": "x"})
