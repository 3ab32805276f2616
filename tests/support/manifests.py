"""Changes to manifests: as records that a build could write, or as edited JSON with right digests."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from ling3export.artifacts.manifest import ENDS, MANIFEST, PROGRAMS, read_manifest, write_manifest
from ling3export.artifacts.records import laid_out, sha256_of
from ling3export.artifacts.schema import Manifest, Target


def changed_targets(folder: Path, change: Callable[[Target], Target]) -> Manifest:
    """Writes the manifest again with every target changed."""
    manifest = read_manifest(folder)
    targets = {name: change(target) for name, target in manifest.targets.items()}
    return write_manifest(folder, replace(manifest, targets=targets))


def noted(folder: Path, note: str) -> Manifest:
    """Writes the manifest again with another note: other programs for the same weights."""
    return write_manifest(folder, replace(read_manifest(folder), notes=(note,)))


def sealed(raw: dict[str, Any]) -> bytes:
    """The text of a manifest with right digests, whatever else is in it."""
    body = {key: value for key, value in raw.items() if key not in ("programs_digest", "weights_digest", "sha256")}
    programs = {name: body.get(name) for name in PROGRAMS}
    if isinstance(programs["config"], dict):
        programs["config"] = {name: value for name, value in programs["config"].items() if name != ENDS}
    body["programs_digest"] = sha256_of(programs)
    index = body["weights"]["index"]
    digests = {name: each.get("sha256") if isinstance(each, dict) else None for name, each in index.items()}
    body["weights_digest"] = sha256_of(digests)
    text = (laid_out({**body, "sha256": "0" * 64}) + "\n").encode()
    covered = text[: text.rindex(b'  "sha256": "')]
    return covered + f'  "sha256": "{hashlib.sha256(covered).hexdigest()}"\n}}\n'.encode()


def crafted(folder: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """Replaces the manifest with an edited one whose digests are right, as an attacker who knows the format could."""
    raw = json.loads((folder / MANIFEST).read_text())
    edit(raw)
    (folder / MANIFEST).write_bytes(sealed(raw))
