"""Publishing, finding and pulling, over an OCI layout in a folder; the artifact is the toy."""

import hashlib
import json
import os
import random
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from ling3export.artifacts.catalog import oci, stores
from ling3export.artifacts.catalog import pull as pulling
from ling3export.artifacts.catalog.layout import OciLayout
from ling3export.artifacts.catalog.publish import Words, publish, sealed
from ling3export.artifacts.catalog.stores import find, parse_reference, resolve, search
from ling3export.artifacts.files import TRUST
from ling3export.artifacts.manifest import MANIFEST, read_manifest, write_manifest
from ling3export.artifacts.records import canonical, to_json
from ling3export.artifacts.schema import Vectors
from ling3export.artifacts.schema import WeightsRecord as Stored
from ling3export.artifacts.share import check_share
from ling3export.artifacts.signing import make_key, public_path, sign
from ling3export.artifacts.store import Store
from ling3export.cli import main as cli
from ling3export.foundation.errors import ArtifactError, CatalogError, TrustError, UnsafePath, VersionExists
from ling3export.foundation.shards import WHOLE
from ling3export.runners.cli import main as runner_cli
from ling3export.runners.engine.engine import Engine
from ling3export.runners.evals.folder import RunRecord, SuiteRecord, json_line
from ling3export.runners.evals.trials import RunConfig
from tests.support import toy_artifact
from tests.support.catalog_kills import contents, kill_publishers, kill_pulls, started
from tests.support.manifests import noted, parted
from tests.support.refusals import refusal, said


@pytest.fixture
def store(tmp_path) -> OciLayout:
    return OciLayout(tmp_path / "store")


def pulled(store: OciLayout, to: Path, version: str | None = None, **options) -> pulling.Moved:
    found = resolve(store, "toy", version)
    return pulling.pull(store, found, to, to.with_name("blobs"), **options)


def versions(store: OciLayout) -> list[str]:
    return [entry.version for entry in store.entries("toy")]


def test_published_found_pulled_and_run_elsewhere_byte_for_byte(toy, tmp_path, monkeypatch):
    where = f"oci:{tmp_path / 'store'}"
    digest = said(cli.main, "catalog", "publish", toy, where, "--id", "toy", "--version", "1.0.0", "--no-run",
                  "--title", "Ein Spielzeug 玩具", "--tag", "demo")  # fmt: skip
    assert said(cli.main, "catalog", "publish", toy, where, "--id", "toy", "--version", "1.0.0", "--no-run",
                "--title", "Ein Spielzeug 玩具", "--tag", "demo") == digest  # fmt: skip
    lines = said(cli.main, "catalog", "search", where, "具 SPIEL").splitlines()
    assert len(lines) == 2 and "toy@1.0.0" in lines[1] and "cpu@2" in lines[1]
    (found,) = json.loads(said(cli.main, "catalog", "search", where, "--json", "--target", "cpu", "--tp", 2))
    assert found["id"] == "toy" and json.loads(said(cli.main, "catalog", "search", where, "cat", "--json")) == []
    record = json.loads(said(cli.main, "catalog", "info", f"{where}/toy"))
    assert record["digest"] == digest.strip() and {"tp2", "demo", "cpu", "float32"} == set(record["tags"])
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
    assert "expected a folder in LING3_STORE to pull it into, found none" in refusal(runner_cli.main, *words)


def test_other_tools_read_the_layout(toy, store):
    """What the image layout specification demands of the files, read without our code."""
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
    with pytest.raises(VersionExists, match=r"version `toy@1\.10\.0`: expected a new one"):
        publish(toy, store, "toy", "1.10.0", Words())
    assert contents(store.folder) == before
    assert parse_reference(f"{store}/toy@latest").version is None
    found = resolve(store, "toy", None)
    assert found.entry.version == "1.10.0"
    found = [record.version for record in search(store, "toy")]
    assert found == ["2.0.0-rc.1", "1.10.0", "1.9.0", "1.9.0-rc.1"]
    with pytest.raises(
        CatalogError, match=r"version `toy@3.0.0`: .* found version 2.0.0-rc.1, 1.10.0, 1.9.0, 1.9.0-rc.1"
    ):
        resolve(store, "toy", "3.0.0")


def test_a_search_orders_by_id_then_name_then_version(toy, store):
    for id, title in (("tea", "a cat"), ("cat-two", ""), ("cat", ""), ("dog", "for a CAT lover"), ("cow", "")):
        publish(toy, store, id, "1.0.0", Words(title, description="no cat" if id == "cow" else ""))
    publish(toy, store, "cat", "1.1.0", Words())
    found = [f"{record.id}@{record.version}" for record in search(store, "Cat")]
    assert found == ["cat@1.1.0", "cat@1.0.0", "cat-two@1.0.0", "dog@1.0.0", "tea@1.0.0", "cow@1.0.0"]
    assert [record.id for record in search(store, "cat lover")] == ["dog"]
    assert search(store, "", kind="programs") == search(store, "", tag="tp4") == search(store, "", tp=4) == []


def test_a_flipped_byte_is_named_by_verify_and_refused_by_pull(toy, store, tmp_path):
    publish(toy, store, "toy", "1.0.0", Words())
    found = resolve(store, "toy", None)
    (layer,) = found.layers["weights/toy.safetensors"]
    blob = store.folder / "blobs" / layer.digest.replace(":", "/")
    data = bytearray(blob.read_bytes())
    data[len(data) // 2] ^= 4
    blob.write_bytes(data)
    for reads in (lambda: pulling.verify(store, found), lambda: pulled(store, tmp_path / "out")):
        with pytest.raises(CatalogError, match=r"file `weights/toy\.safetensors`: expected sha256 "):
            reads()
    assert not (tmp_path / "out").exists()
    blob.unlink()
    with pytest.raises(CatalogError, match=f"blob `{layer.digest}`: expected a readable file, found No such file"):
        pulled(store, tmp_path / "out")
    blob.symlink_to("/etc/passwd")
    with pytest.raises(CatalogError, match="found a symbolic link"):
        pulled(store, tmp_path / "out")


def test_weights_move_once_for_many_programs_and_a_host_pulls_its_target_alone(toy, store, tmp_path):
    publish(toy, store, "toy", "1.0.0", Words())
    weights = read_manifest(toy).weights.nbytes
    first = pulled(store, tmp_path / "one")
    noted(toy, "other programs")
    second = publish(toy, store, "toy", "1.1.0", Words())
    assert second.moved == (toy / MANIFEST).stat().st_size
    again = pulled(store, tmp_path / "two")
    assert first.pulled > weights and (again.pulled, again.here) == (
        second.moved,
        first.pulled - _size(tmp_path / "one"),
    )
    assert (
        os.stat(tmp_path / "one/weights/toy.safetensors").st_ino
        == os.stat(tmp_path / "two/weights/toy.safetensors").st_ino
    )
    with pytest.raises(ArtifactError, match="target `tpu`: expected one of cpu-tp2, found none of that name"):
        pulled(store, tmp_path / "three", target="tpu")


@pytest.fixture
def hosts(toy) -> Path:
    """The toy as two hosts of one device each would have it."""

    parted(toy)
    return toy


def test_a_host_pulls_the_slabs_of_its_own_devices_alone(hosts, store, tmp_path, monkeypatch):
    monkeypatch.setattr(oci, "PART", 50_000)  # so that a slab lies in several layers
    publish(hosts, store, "toy", "1.0.0", Words())
    manifest = read_manifest(hosts)
    stored, whole = manifest.weights.index["toy.table"], (hosts / "weights/toy.safetensors").read_bytes()
    rest = sum(path.stat().st_size for path in hosts.rglob("*") if path.is_file()) - len(whole)
    for host in (0, 1):
        out = tmp_path / f"out-{host}"
        moved = pulled(store, out, target="cpu-tp2", host=host)
        here = moved.here if host else 0
        assert (moved.pulled, here) == ((stored.slab_bytes, rest) if host else (stored.slab_bytes + rest, 0))
        data = (out / "weights/toy.safetensors").read_bytes()
        start, size = stored.offset, stored.slab_bytes
        parts = [data[start : start + size], data[start + size :]]
        assert parts[host] == whole[start + host * size :][:size] and not any(parts[1 - host])
        assert data[:start] == whole[:start] and len(data) == len(whole)
        Store(out, manifest.weights.index).check_many(manifest.targets["cpu-tp2"].slabs(host))
        assert (contents(out).keys() - contents(hosts).keys()) == {"share.json"}
        check_share(out, "cpu-tp2", host)
        with pytest.raises(ArtifactError, match=f"expected the share of host {1 - host} of `cpu-tp2`, found a share"):
            check_share(out, "cpu-tp2", 1 - host)
        assert "expected all of `every target`, found a share" in refusal(cli.main, "verify", out, "--no-run")
    again = pulled(store, tmp_path / "again", target="cpu-tp2", host=1)
    assert again.pulled == 0 and contents(tmp_path / "again") == contents(tmp_path / "out-1")
    with pytest.raises(CatalogError, match="--host-id: expected 0 to 1, found 2"):
        pulled(store, tmp_path / "three", target="cpu-tp2", host=2)
    assert (
        "expected --target NAME with --host-id"
        in CliRunner()
        .invoke(runner_cli.main, ["pull", f"{store}/toy", "--to", str(tmp_path / "x"), "--host-id", "1"])
        .stderr
    )
    words = ("pull", f"{store}/toy", "--to", tmp_path / "there", "--target", "cpu-tp2", "--host-id", 1)
    said(runner_cli.main, *words)
    assert contents(tmp_path / "there") == contents(tmp_path / "out-1")


def test_a_share_that_breaks_off_goes_on_slab_by_slab_and_a_damaged_slab_is_refused(hosts, store, tmp_path):
    publish(hosts, store, "toy", "1.0.0", Words())
    manifest = read_manifest(hosts)
    stored = manifest.weights.index["toy.table"]
    found = resolve(store, "toy", None)
    (layer,) = found.layers["weights/toy.safetensors"]
    blob = store.folder / "blobs" / layer.digest.replace(":", "/")
    data = blob.read_bytes()
    damaged = bytearray(data)
    damaged[stored.offset + stored.slab_bytes + 7] ^= 1
    blob.write_bytes(damaged)
    pulled(store, tmp_path / "zero", target="cpu-tp2", host=0)  # which does not hold that slab
    with pytest.raises(CatalogError, match=r"tensor `toy\.table` slab 1: expected sha256 "):
        pulled(store, tmp_path / "one", target="cpu-tp2", host=1)
    blob.write_bytes(data[: stored.offset + stored.slab_bytes + 100])
    with pytest.raises(CatalogError, match="expected all of a range, found an end"):
        pulled(store, tmp_path / "one", target="cpu-tp2", host=1)
    assert not (tmp_path / "one").exists()
    blob.write_bytes(data)
    pulled(store, tmp_path / "one", target="cpu-tp2", host=1)
    Store(tmp_path / "one", manifest.weights.index).check_many(manifest.targets["cpu-tp2"].slabs(1))


def test_the_score_of_an_evaluation_stands_in_the_record(toy, store, tmp_path):
    def run(name: str, rate: float, **changes: Any) -> Path:
        environment = {"artifact": read_manifest(toy).sha256}
        record = RunRecord.of(SuiteRecord(name, 1, {}, [], None, "0" * 64), RunConfig(), environment, WHOLE)
        record = replace(record, status="complete", totals={"success_rate": rate, "invalid": False})
        (folder := tmp_path / name).mkdir()
        (folder / "run.json").write_bytes(json_line(replace(record, **changes)))
        return folder

    words = ("catalog", "publish", toy, store, "--id", "toy", "--version", "1.0.0", "--no-run", "--eval")
    digest = said(cli.main, *words, run("sums", 0.75))
    assert said(cli.main, *words, tmp_path / "sums") == digest
    assert "expected a new one, found one with other content" in refusal(cli.main, *words, run("differences", 0.5))
    run_digest = hashlib.sha256((tmp_path / "sums/run.json").read_bytes()).hexdigest()
    record = json.loads(said(cli.main, "catalog", "info", f"{store}/toy"))
    assert record["eval"] == {"suite": "sums", "score": 0.75, "run_digest": f"sha256:{run_digest}"}
    running = run("running", 0.5, status="running")
    assert "expected one that is finished, whole and valid, found another" in refusal(cli.main, *words, running)
    noted(toy, "changed")
    assert "expected one of artifact " in refusal(cli.main, *words, tmp_path / "sums")


def _size(folder: Path) -> int:
    return (folder / MANIFEST).stat().st_size


def test_programs_alone_are_published_as_such(toy, store):
    manifest = read_manifest(toy)
    none = Vectors("none", 0, manifest.vectors.margins, ())
    write_manifest(toy, replace(manifest, weights=Stored({}, {}), vectors=none))
    record = publish(toy, store, "toy-programs", "1.0.0", Words()).record
    assert record.kind == "programs" and not any(file.path.startswith("weights/") for file in record.files)


def test_a_pull_that_breaks_off_goes_on_from_there(toy, store, tmp_path, monkeypatch):
    monkeypatch.setattr(oci, "PART", 50_000)  # so that the weights are several layers
    publish(toy, store, "toy", "1.0.0", Words())
    assert len(resolve(store, "toy", None).layers["weights/toy.safetensors"]) > 5
    rng, stream, left = random.Random(0), OciLayout.stream, [0]

    def breaking(self, blob, start=0, stop=None):
        for data in stream(self, blob, start, stop):
            for at in range(0, len(data), 1000):
                left[0] -= 1000
                if left[0] < 0:
                    raise KeyboardInterrupt
                yield data[at : at + 1000]

    total, moved, breaks = sum(file.stat().st_size for file in toy.rglob("*") if file.is_file()), 0, 0
    monkeypatch.setattr(OciLayout, "stream", breaking)
    while not (tmp_path / "out").exists():
        left[0] = rng.randrange(10_000, 90_000)
        before = _kept(tmp_path / "blobs")
        try:
            pulled(store, tmp_path / "out")
        except KeyboardInterrupt:
            breaks += 1
        moved += _kept(tmp_path / "blobs") - before
    assert contents(tmp_path / "out") == contents(toy)
    assert breaks >= 5 and moved <= total


def _kept(blobs: Path) -> int:
    return sum(path.stat().st_size for path in blobs.glob("*"))


def test_a_partial_file_that_was_damaged_is_not_taken(toy, store, tmp_path):
    publish(toy, store, "toy", "1.0.0", Words())
    found = resolve(store, "toy", None)
    file = next(each for each in found.record.files if each.path == "weights/toy.safetensors")
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / f"{file.sha256}.partial").write_bytes(b"x" * 1000)
    with pytest.raises(CatalogError, match="expected sha256"):
        pulled(store, tmp_path / "out")
    (tmp_path / "blobs" / file.sha256).write_bytes(b"x" * file.size)
    pulled(store, tmp_path / "out")
    assert contents(tmp_path / "out") == contents(toy)


def test_of_two_publishers_one_wins_and_nothing_is_torn(toy, store, tmp_path):
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
    """Three kills here; thirty of each are in docs/log/catalog.md."""
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
    assert pulling.verify(store, resolve(store, "toy", "1.0.0")) > 0


@pytest.mark.parametrize("link", ["blobs", "blobs/sha256"])
def test_neither_gc_nor_publish_goes_through_a_link_into_another_folder(link, toy, store, tmp_path):
    """Both once did: ``gc`` of a store without versions removed all that the other folder held."""
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


def test_a_pull_puts_nothing_into_a_folder_that_a_link_of_its_own_name_leads_to(toy, store, tmp_path):
    publish(toy, store, "toy", "1.0.0", Words())
    (others := tmp_path / "others").mkdir()
    (tmp_path / ".out.pull").symlink_to(others)
    assert "found one at `.out.pull`" in refusal(runner_cli.main, "pull", f"{store}/toy", "--to", tmp_path / "out")
    assert not [*others.iterdir()] and not (tmp_path / "out").exists()


def test_a_machine_without_the_devices_is_refused_before_a_byte_is_pulled(toy, store, tmp_path, monkeypatch):
    found = find(store, _published(toy, store))
    real = found.record
    needs = replace(real.requirements, targets=("tpu:v6e:4x4",), devices=16)
    monkeypatch.setattr(stores, "find", lambda *_, **options: replace(found, record=replace(real, requirements=needs)))
    out = tmp_path / "out"
    assert refusal(runner_cli.main, "pull", f"{store}/toy", "--to", out) == (
        "error: machine: expected 16 devices of tpu:v6e:4x4 for toy@1.0.0, found cpu\n"
        "hint: pull it for another machine with --elsewhere\n"
    )
    assert not list(tmp_path.glob("*out*"))
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=1))
    monkeypatch.setattr(stores, "find", lambda *_, **options: found)
    assert "error: disk: expected " in refusal(runner_cli.main, "pull", f"{store}/toy", "--to", out)


def _published(toy: Path, store: OciLayout) -> oci.CatalogEntry:
    publish(toy, store, "toy", "1.0.0", Words())
    return store.entries()[0]


def test_a_pull_takes_nothing_but_the_manifest_of_what_no_trusted_key_signed(toy, store, tmp_path, monkeypatch):
    make_key(tmp_path / "key")
    (tmp_path / "keys").mkdir()
    shutil.copy(public_path(tmp_path / "key"), tmp_path / "keys")
    publish(toy, store, "toy", "1.0.0", Words())
    sign(toy, tmp_path / "key")
    publish(toy, store, "toy", "1.1.0", Words())
    monkeypatch.setenv(TRUST, str(tmp_path / "keys"))
    with pytest.raises(TrustError, match=r"artifact `toy@1\.0\.0`: expected a signature by "):
        pulled(store, tmp_path / "out", "1.0.0")
    assert [path.stat().st_size for path in (tmp_path / "blobs").iterdir()] == [_size(toy)]
    pulled(store, tmp_path / "out", "1.1.0")
    assert contents(tmp_path / "out") == contents(toy)


def test_a_record_with_paths_that_leave_the_folder_is_refused(toy, store, tmp_path):
    """As somebody writes it who knows the format: every digest is right."""
    publish(toy, store, "toy", "1.0.0", Words())
    found = resolve(store, "toy", None)
    for number, path in enumerate(("../x", "/tmp/x", "MANIFEST.json")):
        store.enter("toy", f"2.0.{number}", _forged(store, found, path, f"2.0.{number}"))
        with pytest.raises(UnsafePath):
            resolve(store, "toy", f"2.0.{number}")


def _forged(store: OciLayout, found: stores.ResolvedVersion, path: str, version: str) -> oci.Descriptor:
    file = replace(found.record.files[0], path=path)
    record = sealed(replace(found.record, version=version, files=(*found.record.files, file)))
    config = store.add_document(canonical(to_json(record)), oci.RECORD)
    layers = [layer for each in found.layers.values() for layer in each]
    layers.append(replace(layers[0], annotations={oci.TITLE: path}))
    image = oci.ImageManifest(schemaVersion=2, mediaType=oci.MANIFEST, config=config, layers=tuple(layers))
    return store.add_document(canonical(to_json(image)), oci.MANIFEST)


@pytest.mark.parametrize("text", ["toy", "oci:x", "oci:x/Toy", "oci:x/toy@1", "oci:x/toy@", ""])
def test_a_reference_of_another_form_is_refused(text):
    with pytest.raises(CatalogError, match="reference"):
        parse_reference(text)


def test_a_store_that_is_none_is_refused(tmp_path):
    assert refusal(cli.main, "catalog", "search", f"oci:{tmp_path}").startswith(
        f"error: store `oci:{tmp_path}`: expected an OCI image layout, found No such file or directory, at "
    )
    assert "expected oci:FOLDER" in refusal(cli.main, "catalog", "search", "nowhere")
    (tmp_path / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
    (tmp_path / "index.json").write_text('{"schemaVersion": 2, "manifests": [{"digest": "../../x"}]}')
    assert "index.json `manifests[0]" in refusal(cli.main, "catalog", "search", f"oci:{tmp_path}")
