"""The manifest as a file: read, checked and written here alone; and the other files, by their records.

The records are in `schema`, their agreement in `agreement`.
"""

import hashlib
import os
import re
import shlex
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from ling3export.artifacts.agreement import check_agreement
from ling3export.artifacts.files import REBUILD, leftovers, open_regular, remove, replace_file, writing
from ling3export.artifacts.records import CANONICAL, WrongRecordError, from_json, laid_out, reading, to_json
from ling3export.artifacts.schema import Cell, FileRecord, Manifest, Target
from ling3export.foundation.errors import ArtifactError, listed, shown
from ling3export.foundation.strict_json import LARGEST, parse_json

# Version history (artifacts/FORMAT.md tells what a reader must do):
# 1 (November 2026): the first.
FORMAT_VERSION = 1
MANIFEST = "manifest.json"
LAST_LINE = re.compile(rb'  "sha256": "([0-9a-f]{64})"\n}\n\Z')
PROGRAMS = ("config", "plan", "targets")  # what programs_digest covers, ENDS apart
ENDS = "eos_token_id"  # of the config: it comes with the weights, and a fine-tune may have another
DIGESTS = ("programs_digest", "weights_digest")


def write_manifest(folder: Path, manifest: Manifest) -> Manifest:
    """Makes ``folder`` an artifact, or replaces its manifest, in one step: written to a temporary sibling, then
    renamed.

    One writer at a time: whoever replaces a manifest holds the folder's lock.

    Args:
        folder: The artifact's folder, every other file already in place.
        manifest: The manifest to write. Its digests are set here, whatever they were.


    Raises:
        ArtifactError: A value that no reader would take, or the disk is full. Nothing is written.
    """
    body = to_json(replace(manifest, programs_digest=None, weights_digest=None, sha256=None))
    with _reading(folder):
        whole = _typed(body)
    digests = _digests(body)
    data = (laid_out({"format": FORMAT_VERSION, **body, **digests, "sha256": "0" * 64}) + "\n").encode()
    covered = data[: -len('  "sha256": "' + "0" * 64 + '"\n}\n')]
    digest = hashlib.sha256(covered).hexdigest()
    with writing(folder / MANIFEST):
        for left in leftovers(folder / MANIFEST):
            remove(left)
    replace_file(folder / MANIFEST, covered + f'  "sha256": "{digest}"\n}}\n'.encode())
    return replace(whole, **digests, sha256=digest)


def read_manifest(folder: Path, check: Callable[[bytes], object] = lambda data: None) -> Manifest:
    """The manifest of an artifact: its digest, every type and bound, and their agreement checked.

    Other files are not opened.

    Args:
        check: Called with the file's bytes, before anything is made of them.

    Raises:
        ArtifactError: No folder, no manifest, another format, a byte that was changed, or a field that is missing,
            unknown, of another type, out of bounds, or in contradiction to another.
    """
    folder = Path(folder)
    data = _read(folder)
    check(data)
    with _reading(folder):
        raw = parse_json(data)
    version = raw.get("format") if isinstance(raw, dict) else None
    if type(version) is not int or version < 1:
        raise ArtifactError(f"{MANIFEST}: expected a format version, found {shown(version)}, in {folder}", REBUILD)
    if version != FORMAT_VERSION:
        raise ArtifactError(
            f"{MANIFEST}: expected format {FORMAT_VERSION}, found format {version}, in {folder}",
            "install a newer ling3export, or build the artifact again with this one",
        )
    with _reading(folder):
        return _checked(raw, data)


def _read(folder: Path) -> bytes:
    if not folder.is_dir():
        problem = "a file" if folder.exists() else "nothing"
        raise ArtifactError(
            f"artifact `{folder.name}`: expected a folder, found {problem}, at {folder}",
            "make one with: ling3export build CHECKPOINT ARTIFACT",
        )
    if not os.path.lexists(folder / MANIFEST):
        hint = "this is no artifact, or its build was interrupted: build it again"
        if (folder / "config.json").is_file():
            hint = f"this is a checkpoint; make an artifact of it: ling3export build {shlex.quote(str(folder))}"
        raise ArtifactError(f"artifact `{folder.name}`: it has no {MANIFEST}, in {folder}", hint)
    with open_regular(folder, MANIFEST, MANIFEST) as file:
        return file.read(LARGEST + 1)


def _reading(folder: Path) -> AbstractContextManager[None]:
    return reading(MANIFEST, folder, ArtifactError, REBUILD)


def _checked(raw: dict[str, Any], data: bytes) -> Manifest:
    last = LAST_LINE.search(data, max(0, len(data) - 100))
    if last is None:
        raise WrongRecordError("its sha256 on a line of its own before the last", "none")
    digest = hashlib.sha256(data[: last.start()]).hexdigest()
    if last[1].decode() != digest:
        raise WrongRecordError(f"sha256 {last[1].decode()}", digest)
    del raw["format"]
    manifest, digests = _typed(raw), _digests(raw)
    for name in DIGESTS:
        if raw.get(name) != digests.get(name):
            raise WrongRecordError(f"{name} {digests.get(name)}", shown(raw.get(name)))
    return manifest


def _typed(body: dict[str, Any]) -> Manifest:
    manifest = from_json(Manifest, body)
    check_agreement(manifest)
    return manifest


def _digests(body: dict[str, Any]) -> dict[str, Any]:
    """Digests of the programs, with all that decides how they are called, and of the weights: two artifacts with equal
    ones hold the same."""
    shards = {name: tensor["sha256"] for name, tensor in body["weights"]["index"].items()}
    config = {name: value for name, value in body["config"].items() if name != ENDS}
    parts = {"programs_digest": {name: body[name] for name in PROGRAMS} | {"config": config}}
    if shards:
        parts["weights_digest"] = shards
    return {name: hashlib.sha256(CANONICAL.encode(part).encode()).hexdigest() for name, part in parts.items()}


def file_record(folder: Path, relative: str) -> FileRecord:
    """The record of a file below ``folder``.

    Raises:
        ArtifactError: The path leaves the folder, or the file cannot be read.
    """
    with open_regular(folder, relative, f"file `{relative}`") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return FileRecord(relative, file.tell(), digest)


def read_checked(folder: Path, record: FileRecord) -> bytes:
    """The bytes of a recorded file: those that were digested, so nothing can change them in between.

    Raises:
        ArtifactError: The path leaves the folder, the file is missing, or its size or digest is another.
    """
    what = f"file `{record.path}`"
    with open_regular(folder, record.path, what) as file:
        size = os.fstat(file.fileno()).st_size
        data = file.read(record.bytes + 1) if size == record.bytes else b""
    if size != record.bytes:
        raise ArtifactError(f"{what}: expected {record.bytes:,} bytes, found {size:,}, in {folder}", REBUILD)
    digest = hashlib.sha256(data).hexdigest()
    if digest != record.sha256:
        raise ArtifactError(f"{what}: expected sha256 {record.sha256}, found {digest}, in {folder}", REBUILD)
    return data


def recorded_files(manifest: Manifest) -> list[str]:
    """Every file that a manifest names, as a path below the artifact's folder."""
    return [*(record.path for record in file_records(manifest)), *manifest.weights.files]


def file_records(manifest: Manifest) -> tuple[FileRecord, ...]:
    """Every file that a manifest names with its digest: all but those of the weights, whose shards have one each."""
    programs = [file for target in manifest.targets.values() for file in target.files]
    vectors = () if manifest.vectors.expected is None else (manifest.vectors.expected,)
    return (*programs, *vectors, *manifest.tokenizer)


def named_target(names: Iterable[str], wanted: str) -> str:
    """The one of ``names`` that a user means by ``cpu-tp16``, ``cpu@16`` or ``cpu``.

    Raises:
        ArtifactError: ``wanted`` means none of them, or several.
    """
    text, known = wanted.replace("@tp", "@").replace("@", "-tp").replace(":", "-"), sorted(names)
    matching = [text] if text in known else [name for name in known if name.rpartition("-tp")[0] == text]
    if not matching:
        raise ArtifactError(f"target `{wanted}`: the artifact has only {listed(known)}")
    if len(matching) > 1:
        what = f"{len(matching)}: {listed(matching)}"
        raise ArtifactError(f"target `{wanted}`: expected one of {listed(known)}, found {what}, in the manifest")
    return matching[0]


def target_of(manifest: Manifest, name: str | None) -> tuple[str, Target]:
    """The target of that name, or the only one.

    Raises:
        ArtifactError: There is no such target, or there are several and none is named.
    """
    names = list(manifest.targets)
    if name is None and len(names) > 1:
        raise ArtifactError(f"the artifact has the targets {listed(names)}", f"choose one: --target {names[0]}")
    chosen = names[0] if name is None else named_target(names, name)
    return chosen, manifest.targets[chosen]


def cell_of(target: Target, name: str) -> Cell:
    """The cell of that name.

    Raises:
        ArtifactError: The target has no such cell.
    """
    if name not in target.cells:
        raise ArtifactError(f"the target has no cell {name}; it has {listed(sorted(target.cells), 20)}")
    return target.cells[name]
