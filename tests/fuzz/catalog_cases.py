"""Damaged catalogues: layouts with one changed document, with or without right digests, and damaged signatures."""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from random import Random

from ling3export.artifacts.catalog.layout import OciLayout
from ling3export.artifacts.catalog.publish import Words, publish, search
from ling3export.artifacts.catalog.pull import pull, verify
from ling3export.artifacts.files import TRUST
from ling3export.artifacts.signing import SIGNATURES, make_key, public_path, read_trusted, sign
from tests.fuzz.artifact_cases import toy_copy
from tests.fuzz.harness import Case, WrongResultError
from tests.fuzz.mutations import json_text, mutated, mutated_bytes


@contextmanager
def catalogs(folder: Path) -> Iterator[Case]:
    """An accepted version is the published one, and nothing is written outside of the pulled folder."""
    toy, store = toy_copy(folder), OciLayout(folder / "store")
    image_digest = publish(toy, store, "toy", "1.0.0", Words()).version.image.digest
    index = json.loads((store.folder / "index.json").read_text())
    original = {path.relative_to(toy): path.read_bytes() for path in toy.rglob("*") if path.is_file()}
    image = json.loads((store.folder / "blobs" / image_digest.replace(":", "/")).read_bytes())
    record = json.loads((store.folder / "blobs" / image["config"]["digest"].replace(":", "/")).read_bytes())
    room = folder / "room"
    room.mkdir()

    def case(rng: Random) -> None:
        shutil.rmtree(room)
        room.mkdir()
        what = rng.choice(("record", "image", "index"))
        documents = {"record": record, "image": image, "index": index}
        changed = mutated(rng, documents[what])
        data = json_text(changed)
        data = mutated_bytes(rng, data) if rng.random() < 0.1 else data
        _write(store, index, image, what, data)
        before = sorted(folder.iterdir())
        try:
            search(store, "toy")
            version = store.find("toy")
            verify(store, version)
            pull(store, version, room / "out")
        finally:
            left = sorted(path.name for path in room.iterdir())
            if sorted(folder.iterdir()) != before or left not in ([], ["out"]):
                raise WrongResultError(f"a pull left {left}")
        taken = {path.relative_to(room / "out"): path for path in (room / "out").rglob("*") if path.is_file()}
        if {name: path.read_bytes() for name, path in taken.items()} != original:
            raise WrongResultError(f"a pull made other files: {sorted(map(str, taken))}")

    yield case


def _write(store: OciLayout, index: dict, image: dict, what: str, data: bytes) -> None:
    """Writes a document into the layout, and its digest into the documents that refer to it."""
    if what == "record":
        image = image | {"config": image["config"] | _blob(store, data)}
        what, data = "image", json.dumps(image).encode()
    if what == "image":
        named = _blob(store, data)
        data = json.dumps(index | {"manifests": [each | named for each in index["manifests"]]}).encode()
    (store.folder / "index.json").write_bytes(data)


def _blob(store: OciLayout, data: bytes) -> dict[str, object]:
    digest = sha256(data).hexdigest()
    (store.folder / "blobs/sha256" / digest).write_bytes(data)
    return {"digest": f"sha256:{digest}", "size": len(data)}


@contextmanager
def signatures(folder: Path) -> Iterator[Case]:
    """An artifact needs an intact signature of a trusted key; a second, bad signature changes nothing."""
    toy = toy_copy(folder)
    make_key(folder / "key")
    make_key(folder / "other")
    (folder / "keys").mkdir()
    shutil.copy(public_path(folder / "key"), folder / "keys")
    os.environ[TRUST] = str(folder / "keys")  # of this process only
    sign(toy, folder / "other")
    sign(toy, folder / "key")
    original = json.loads((toy / SIGNATURES).read_text())

    def case(rng: Random) -> None:
        tree = mutated(rng, original)
        data = json_text(tree)
        data = mutated_bytes(rng, data) if rng.random() < 0.3 else data
        (toy / SIGNATURES).write_bytes(data)
        read_trusted(toy, lambda text: None)
        if original["signatures"][1] not in json.loads(data)["signatures"]:
            raise WrongResultError(f"taken without the good signature: {data!r}")

    yield case
