"""Publishing, finding and pulling versions of the toy artifact, with an OCI layout in a folder."""

import hashlib
import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from ling3export.artifacts.catalog.layout import OciLayout, Published, parse_reference
from ling3export.artifacts.catalog.publish import Words, publish, search
from ling3export.artifacts.catalog.pull import pull, verify
from ling3export.artifacts.files import TRUST
from ling3export.artifacts.manifest import MANIFEST, read_manifest, write_manifest
from ling3export.artifacts.schema import Vectors
from ling3export.artifacts.schema import WeightsRecord as Stored
from ling3export.artifacts.signing import make_key, public_path, sign
from ling3export.cli import main as cli
from ling3export.foundation.errors import ArtifactError, CatalogError, TrustError, UnsafePath, VersionExists
from ling3export.runners.cli import main as runner_cli
from ling3export.runners.engine.engine import Engine
from ling3export.runners.evals.run import run_suite
from ling3export.runners.evals.suites import Suite
from ling3export.runners.evals.trials import RunConfig
from tests.support import toy_artifact
from tests.support.catalog_kills import contents, kill_publishers, kill_pulls, started
from tests.support.eval_fakes import FakeBackend, numbered
from tests.support.manifests import noted
from tests.support.refusals import refusal, said


@pytest.fixture
def store(tmp_path) -> OciLayout:
    return OciLayout(tmp_path / "store")


def pulled(store: OciLayout, to: Path, version: str | None = None) -> None:
    pull(store, store.find("toy", version), to)


def blob_of(store: OciLayout, path: str) -> Path:
    (file,) = (file for file in store.find("toy").record.files if file.path == path)
    return store.folder / "blobs/sha256" / file.sha256


def versions(store: OciLayout) -> list[str]:
    return [version.record.version for version in store.versions("toy")]


def test_published_found_pulled_and_run_elsewhere_byte_for_byte(toy, tmp_path, monkeypatch):
    where = f"oci:{tmp_path / 'store'}"
    digest = said(cli.main, "catalog", "publish", toy, where, "--id", "toy", "--version", "1.0.0", "--no-run",
                  "--title", "Ein Spielzeug 玩具", "--tag", "demo")  # fmt: skip
    assert said(cli.main, "catalog", "publish", toy, where, "--id", "toy", "--version", "1.0.0", "--no-run",
                "--title", "Ein Spielzeug 玩具", "--tag", "demo") == digest  # fmt: skip
    lines = said(cli.main, "catalog", "search", where, "具 SPIEL").splitlines()
    assert len(lines) == 2 and "toy@1.0.0" in lines[1] and "cpu@2" in lines[1]
    (found,) = json.loads(said(cli.main, "catalog", "search", where, "cpu tp2 demo", "--json"))
    assert found["id"] == "toy" and json.loads(said(cli.main, "catalog", "search", where, "cat", "--json")) == []
    record = json.loads(said(cli.main, "catalog", "info", f"{where}/toy"))
    assert {"tp2", "demo", "cpu", "float32"} == set(record["tags"])
    assert digest.strip() in (tmp_path / "store/index.json").read_text()
    assert "bytes agree" in said(cli.main, "catalog", "verify", f"{where}/toy@1.0.0")
    out = tmp_path / "out.ling3"
    assert said(runner_cli.main, "pull", f"{where}/toy", "--to", out) == f"{out}\n"
    assert contents(out) == contents(toy)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.ling3", "store", "x.ling3"]
    with Engine(out, report=lambda text: None) as engine:
        toy_artifact.check_tokens(engine)
    monkeypatch.setenv("LING3_STORE", str(tmp_path / "kept"))
    first = said(runner_cli.main, "pull", f"{where}/toy@1.0.0")
    assert said(cli.main, "catalog", "pull", f"{where}/toy") == first
    assert contents(Path(first.strip())) == contents(toy)
    words = ("generate", f"{where}/toy@1.0.0", "--prompt-ids", "1,2,3", "--max-tokens", 4, "--ignore-eos", "--json")
    assert json.loads(said(runner_cli.main, *words))["token_ids"] == toy_artifact.answer([1, 2, 3], 4)[0]
    monkeypatch.delenv("LING3_STORE")
    assert "LING3_STORE names no folder to pull it into" in refusal(runner_cli.main, *words)


def test_other_tools_read_the_layout(toy, store):
    """Checks the files against the image layout specification, without our code."""
    publish(toy, store, "toy", "1.0.0", Words())
    assert json.loads((store.folder / "oci-layout").read_text()) == {"imageLayoutVersion": "1.0.0"}
    index = json.loads((store.folder / "index.json").read_text())
    assert index["schemaVersion"] == 2 and index["mediaType"] == "application/vnd.oci.image.index.v1+json"
    names = [each["annotations"]["org.opencontainers.image.ref.name"] for each in index["manifests"]]
    assert names == ["toy:1.0.0", "toy:latest"]

    def blob(descriptor: dict) -> bytes:
        data = (store.folder / "blobs" / descriptor["digest"].replace(":", "/")).read_bytes()
        assert len(data) == descriptor["size"]
        return data

    image = json.loads(blob(index["manifests"][0]))
    assert image["artifactType"] == "application/vnd.ling3.artifact.v1"
    assert json.loads(blob(image["config"]))["id"] == "toy"
    files = {each["annotations"]["org.opencontainers.image.title"]: blob(each) for each in image["layers"]}
    assert files == contents(toy)
    assert said(cli.main, "catalog", "verify", f"{store}/toy").startswith("toy@1.0.0: ")


def test_a_version_never_changes_and_latest_moves_to_the_newest_release(toy, store):
    for version in ("1.9.0-rc.1", "1.10.0", "1.9.0", "2.0.0-rc.1"):
        noted(toy, version)
        assert publish(toy, store, "toy", version, Words()).new
    assert versions(store) == ["1.9.0-rc.1", "1.9.0", "1.10.0", "2.0.0-rc.1"]
    before = contents(store.folder)
    assert not publish(toy, store, "toy", "2.0.0-rc.1", Words()).new
    noted(toy, "changed")
    with pytest.raises(VersionExists, match=r"version `toy@1\.10\.0`: it exists with other content"):
        publish(toy, store, "toy", "1.10.0", Words())
    assert contents(store.folder) == before
    assert parse_reference(f"{store}/toy@latest")[1:] == ("toy", None)
    assert store.find("toy").record.version == "1.10.0"
    found = [record.version for record in search(store, "toy")]
    assert found == ["2.0.0-rc.1", "1.10.0", "1.9.0", "1.9.0-rc.1"]
    with pytest.raises(
        CatalogError, match=r"version `toy@3.0.0`: .* found version 2.0.0-rc.1, 1.10.0, 1.9.0, 1.9.0-rc.1"
    ):
        store.find("toy", "3.0.0")


def test_a_search_orders_by_id_then_name_then_version(toy, store):
    for id, title in (("tea", "a cat"), ("cat-two", ""), ("cat", ""), ("dog", "for a CAT lover"), ("cow", "")):
        publish(toy, store, id, "1.0.0", Words(title, description="no cat" if id == "cow" else ""))
    publish(toy, store, "cat", "1.1.0", Words())
    found = [f"{record.id}@{record.version}" for record in search(store, "Cat")]
    assert found == ["cat@1.1.0", "cat@1.0.0", "cat-two@1.0.0", "dog@1.0.0", "tea@1.0.0", "cow@1.0.0"]
    assert [record.id for record in search(store, "cat lover")] == ["dog"]
    assert search(store, "programs") == search(store, "tp4") == []


def test_a_flipped_byte_is_named_by_verify_and_refused_by_pull(toy, store, tmp_path):
    publish(toy, store, "toy", "1.0.0", Words())
    blob = blob_of(store, "weights/toy.safetensors")
    data = bytearray(blob.read_bytes())
    data[len(data) // 2] ^= 4
    blob.chmod(0o600)
    blob.write_bytes(data)
    reads = (lambda: verify(store, store.find("toy")), lambda: pulled(store, tmp_path / "out"))
    for read in reads:
        with pytest.raises(CatalogError, match=r"file `weights/toy\.safetensors`: expected sha256 "):
            read()
    blob.unlink()
    for read in reads:
        with pytest.raises(CatalogError, match=f"blob `sha256:{blob.name}`: the file is missing"):
            read()
    blob.symlink_to("/etc/passwd")
    for read in reads:
        with pytest.raises(ArtifactError, match="expected no symbolic link on the way to it"):
            read()
    assert not (tmp_path / "out").exists()


def test_weights_are_stored_once_for_many_programs_and_pulled_files_are_second_names(toy, store, tmp_path):
    first = publish(toy, store, "toy", "1.0.0", Words())
    assert first.moved == sum(path.stat().st_size for path in toy.rglob("*") if path.is_file())
    noted(toy, "other programs")
    assert publish(toy, store, "toy", "1.1.0", Words()).moved == (toy / MANIFEST).stat().st_size
    pulled(store, tmp_path / "one", "1.0.0")
    pulled(store, tmp_path / "two")
    assert contents(tmp_path / "two") == contents(toy)
    one, two = ((tmp_path / name / "weights/toy.safetensors").stat() for name in ("one", "two"))
    assert one.st_ino == two.st_ino and not one.st_mode & 0o222


def test_the_score_of_an_evaluation_is_in_the_record(toy, store, tmp_path):
    def run(name: str, passed: int) -> Path:
        class Backend(FakeBackend):
            def environment(self) -> dict[str, Any]:
                return {"artifact": read_manifest(toy).sha256}

        path, backend = tmp_path / f"{name}.jsonl", Backend(lambda prompt: "42" if int(prompt) < passed else "41")
        run_suite(Suite(name, numbered(4)), backend, path, RunConfig())
        return path

    words = ("catalog", "publish", toy, store, "--id", "toy", "--version", "1.0.0", "--no-run", "--eval")
    digest = said(cli.main, *words, run("sums", 3))
    assert said(cli.main, *words, tmp_path / "sums.jsonl") == digest
    assert "it exists with other content" in refusal(cli.main, *words, run("differences", 2))
    run_digest = hashlib.sha256((tmp_path / "sums.jsonl").read_bytes()).hexdigest()
    record = json.loads(said(cli.main, "catalog", "info", f"{store}/toy"))
    assert record["eval"] == {"suite": "sums", "score": 0.75, "run_digest": f"sha256:{run_digest}"}
    (running := tmp_path / "running").write_bytes(
        b"".join((tmp_path / "sums.jsonl").read_bytes().splitlines(True)[:-1])
    )
    assert "3 of 4 trials are there" in refusal(cli.main, *words, running)
    noted(toy, "changed")
    assert "it evaluated artifact " in refusal(cli.main, *words, tmp_path / "sums.jsonl")


def test_programs_without_weights_are_published_as_such(toy, store):
    manifest = read_manifest(toy)
    none = Vectors("none", 0, manifest.vectors.margins, ())
    write_manifest(toy, structs.replace(manifest, weights=Stored({}, {}), vectors=none))
    record = publish(toy, store, "toy-programs", "1.0.0", Words()).version.record
    assert record.kind == "programs" and not any(file.path.startswith("weights/") for file in record.files)


def test_one_of_two_publishers_wins_and_no_version_is_incomplete(toy, store, tmp_path):
    other = Path(shutil.copytree(toy, tmp_path / "y.ling3"))
    noted(other, "another")
    both = [started("publish", folder, store, "1.0.0") for folder in (toy, other)]
    ends = [process.communicate(timeout=300) for process in both]
    assert sorted(process.returncode for process in both) == [0, 1], ends
    assert sum("VersionExists" in err for _, err in ends) == 1
    assert versions(store) == ["1.0.0"]
    winner = (toy, other)[[process.returncode for process in both].index(0)]
    pulled(store, tmp_path / "out")
    assert contents(tmp_path / "out") == contents(winner)


@pytest.mark.parametrize("kill", [kill_publishers, kill_pulls])
def test_a_kill_leaves_a_whole_version_or_none(kill, toy, tmp_path):
    """Three kills; docs/log/catalog.md has the results of thirty of each."""
    found = kill(toy, f"oci:{tmp_path}", 3, random.Random(1), 0.2)
    assert sum(count for what, count in found.items() if not what.startswith("a reader")) == 3


def test_gc_removes_what_no_version_names_and_waits_for_publishers(toy, store):
    publish(toy, store, "toy", "1.0.0", Words())
    assert store.gc() == (0, 0)
    (store.folder / "blobs/sha256" / ("0" * 64)).write_bytes(b"left")
    (store.folder / "blobs/sha256" / f".{'0' * 64}.partial-123-0123abcd").write_bytes(b"killed")
    for other in ("notes.txt", f"{'0' * 64}.bak", "0" * 63):
        (store.folder / "blobs/sha256" / other).write_bytes(b"somebody's")
    (store.folder / "blobs/sha256" / ("1" * 64)).mkdir()
    assert store.gc() == (2, 10)
    assert {"notes.txt", f"{'0' * 64}.bak", "0" * 63, "1" * 64} <= {*os.listdir(store.folder / "blobs/sha256")}
    assert verify(store, store.find("toy", "1.0.0")) > 0


@pytest.mark.parametrize("link", ["blobs", "blobs/sha256"])
def test_neither_gc_nor_publish_goes_through_a_link_into_another_folder(link, toy, store, tmp_path):
    """Regression: ``gc`` of a store without versions removed all files of the folder to which the link led."""
    publish(toy, store, "toy", "1.0.0", Words())
    (store.folder / "index.json").write_text('{"schemaVersion": 2, "manifests": []}')
    others = Path(shutil.move(store.folder / link, tmp_path / "others"))
    (store.folder / link).symlink_to(others)
    deep = others if link == "blobs/sha256" else others / "sha256"
    for name in ("thesis.txt", "0" * 64):
        (deep / name).write_bytes(b"somebody's")
    before = contents(others)
    noted(toy, "changed")
    for act in (store.gc, lambda: publish(toy, store, "toy", "1.1.0", Words())):
        with pytest.raises(ArtifactError, match=f"expected no symbolic link on the way to it, found one at `{link}`"):
            act()
        assert contents(others) == before
    assert versions(store) == []


def test_a_pull_takes_nothing_but_the_manifest_of_what_no_trusted_key_signed(toy, store, tmp_path, monkeypatch):
    make_key(tmp_path / "key")
    (tmp_path / "keys").mkdir()
    shutil.copy(public_path(tmp_path / "key"), tmp_path / "keys")
    publish(toy, store, "toy", "1.0.0", Words())
    sign(toy, tmp_path / "key")
    publish(toy, store, "toy", "1.1.0", Words())
    monkeypatch.setenv(TRUST, str(tmp_path / "keys"))
    # a pull would fail if it requested this blob
    blob_of(store, "weights/toy.safetensors").rename(tmp_path / "weights")
    with pytest.raises(TrustError, match=r"artifact `toy@1\.0\.0`: expected a signature by "):
        pulled(store, tmp_path / "out", "1.0.0")
    (tmp_path / "weights").rename(blob_of(store, "weights/toy.safetensors"))
    pulled(store, tmp_path / "out", "1.1.0")
    assert contents(tmp_path / "out") == contents(toy)


def test_a_record_with_paths_that_leave_the_folder_is_refused(toy, store):
    """The digests are right, as an attacker who knows the format would make them."""
    publish(toy, store, "toy", "1.0.0", Words())
    index, found = (store.folder / "index.json").read_bytes(), store.find("toy")
    for number, path in enumerate(("../x", "/tmp/x", "MANIFEST.json")):
        file = structs.replace(found.record.files[0], path=path)
        forged = structs.replace(found.record, version=f"2.0.{number}", files=(*found.record.files, file))
        with store.publishing():
            store.enter(forged)
        with pytest.raises(UnsafePath):
            store.find("toy", "1.0.0")
        (store.folder / "index.json").write_bytes(index)


def test_a_version_that_another_tool_named_is_found_and_what_is_no_artifact_is_passed_over(toy, store):
    """skopeo and oras write their own names into index.json; other tools may add fields and images."""
    published = publish(toy, store, "toy", "1.0.0", Words()).version
    index = json.loads((store.folder / "index.json").read_text())
    config = {"mediaType": "text/plain", "digest": "sha256:" + "0" * 64, "size": 0}
    image = json.dumps({"schemaVersion": 2, "config": config, "layers": []}).encode()
    name = hashlib.sha256(image).hexdigest()
    (store.folder / "blobs/sha256" / name).write_bytes(image)
    plain = {"mediaType": published.image.mediaType, "digest": f"sha256:{name}", "size": len(image)}
    ours = index["manifests"][0] | {"annotations": {"org.opencontainers.image.ref.name": "latest"}, "platform": {}}
    (store.folder / "index.json").write_text(json.dumps(index | {"manifests": [plain, ours], "annotations": {}}))
    assert store.versions() == [Published(published.image, published.record)]
    noted(toy, "changed")
    publish(toy, store, "toy", "1.1.0", Words())
    assert versions(store) == ["1.0.0", "1.1.0"]
    index = json.loads((store.folder / "index.json").read_text())
    names = [raw.get("annotations", {}).get("org.opencontainers.image.ref.name") for raw in index["manifests"]]
    assert names == [None, "toy:1.0.0", "toy:1.1.0", "toy:latest"] and "annotations" in index
    assert store.gc() == (0, 0)


@pytest.mark.parametrize("text", ["toy", "x/toy", "oci:x", "oci:x/Toy", "oci:x/toy@1", "oci:x/toy@", "h/toy:1.0", ""])
def test_a_reference_of_another_form_is_refused(text):
    with pytest.raises(CatalogError, match="reference"):
        parse_reference(text)


def test_an_invalid_store_is_refused(tmp_path):
    assert refusal(cli.main, "catalog", "search", f"oci:{tmp_path}").startswith(
        f"error: store `oci:{tmp_path}`: expected an OCI image layout, found No such file or directory, at "
    )
    assert "it must be oci:FOLDER" in refusal(cli.main, "catalog", "search", "nowhere")
    (tmp_path / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
    (tmp_path / "index.json").write_text('{"schemaVersion": 2, "manifests": [{"digest": "../../x"}]}')
    assert "descriptor: expected the field mediaType, size" in refusal(cli.main, "catalog", "search", f"oci:{tmp_path}")
