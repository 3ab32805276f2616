"""A layout in an S3 store (moto's server, on loopback): found and pulled, by two publishers at once, broken off."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from click.testing import CliRunner

from ling3export.artifacts.catalog import pull as pulling
from ling3export.artifacts.catalog import remote
from ling3export.artifacts.catalog.layout import INDEX
from ling3export.artifacts.catalog.publish import Words, publish
from ling3export.artifacts.catalog.remote import RemoteLayout
from ling3export.artifacts.manifest import MANIFEST, read_manifest, recorded_files, write_manifest
from ling3export.artifacts.share import check_share
from ling3export.cli import main as cli
from ling3export.foundation.errors import CatalogError, VersionExists
from ling3export.runners.cli import main as runner_cli
from tests.support import toy_artifact
from tests.support.catalog_kills import contents
from tests.support.manifests import parted
from tests.support.s3_server import s3_bucket


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    with s3_bucket() as url:
        yield url


@pytest.fixture
def where(bucket, request) -> str:
    """A layout of the test's own."""
    return f"{bucket}/{request.node.name}"


@pytest.fixture
def toy(tmp_path) -> Path:
    """The toy with few programs: each file costs the server and its client a twentieth of a second."""
    toy = Path(shutil.copytree(toy_artifact.shared(), tmp_path / "x.ling3"))
    manifest = read_manifest(toy)
    ((name, target),) = manifest.targets.items()
    cells = {each: target.cells[each] for each in ("prefill@16", "decode@2", "sample@1", "sample@2")}
    manifest = replace(manifest, plan=replace(manifest.plan, decode_paddings=(2,)), tokenizer=())
    write_manifest(toy, replace(manifest, targets={name: replace(target, cells=cells)}))
    manifest = read_manifest(toy)
    for path in contents(toy).keys() - {MANIFEST, *recorded_files(manifest)}:
        (toy / path).unlink()
    return toy


def said(main, *words: object) -> str:
    done = CliRunner().invoke(main, [str(word) for word in words])
    assert done.exit_code == 0, done.output
    return done.stdout


def noted(toy: Path, note: str) -> None:
    write_manifest(toy, replace(read_manifest(toy), notes=(note,)))


def other_first(monkeypatch, other) -> None:
    """Has ``other`` run between the moment at which the next writer has read the index and that of its writing."""
    left, real = [other], RemoteLayout._put_if

    def put_if(self, path, data, tag):
        if path == INDEX and left:
            left.pop()()
        return real(self, path, data, tag)

    monkeypatch.setattr(RemoteLayout, "_put_if", put_if)


def test_published_found_pulled_and_shared(toy, where, tmp_path):
    parted(toy)
    words = ("catalog", "publish", toy, where, "--id", "toy", "--no-run", "--version")
    digest = said(cli.main, *words, "1.0.0")
    assert said(cli.main, *words, "1.0.0") == digest
    assert json.loads(said(cli.main, "catalog", "search", where, "toy", "--json"))[0]["version"] == "1.0.0"
    assert "bytes agree" in said(cli.main, "catalog", "verify", f"{where}/toy")
    said(runner_cli.main, "pull", f"{where}/toy", "--to", tmp_path / "out")
    assert contents(tmp_path / "out") == contents(toy)
    said(runner_cli.main, "pull", f"{where}/toy", "--to", tmp_path / "share", "--target", "cpu-tp2", "--host-id", 1)
    check_share(tmp_path / "share", "cpu-tp2", 1)
    noted(toy, "other programs")
    assert publish(toy, RemoteLayout(where), "toy", "1.1.0", Words()).moved == (toy / MANIFEST).stat().st_size
    with pytest.raises(VersionExists):
        publish(toy, RemoteLayout(where), "toy", "1.0.0", Words())


def test_a_range_is_what_is_asked_for_and_no_more(where, monkeypatch):
    """File objects of s3fs read 50 MB ahead, which of a host's share would be nearly all."""
    monkeypatch.setattr(remote, "RANGE", 100)
    store, asked = RemoteLayout(where), []
    store._put("blob", bytes(range(250)))
    real = store._files.cat_file

    def cat_file(path, start=0, end=0):
        asked.append(end - start)
        return real(path, start=start or None, end=end or None)

    monkeypatch.setattr(store._files, "cat_file", cat_file)
    for start, stop in ((0, 250), (0, 251), (40, 60), (249, 251)):
        assert b"".join(store._blocks("blob", start, stop)) == bytes(range(250))[start:stop]
    assert asked == [100, 150, 100, 151, 20, 2]
    store._put("none", b"")
    assert b"".join(store._blocks("none", 0, 1)) == b""


def test_of_two_publishers_at_once_both_stand_or_one_is_refused(toy, where, tmp_path, monkeypatch):
    other = Path(shutil.copytree(toy, tmp_path / "y.ling3"))
    noted(other, "another")
    for version in ("1.0.0", "1.1.0"):
        other_first(monkeypatch, partial(publish, other, RemoteLayout(where), "other", version, Words()))
        publish(toy, RemoteLayout(where), "toy", version, Words())
    found = [(entry.id, entry.version) for entry in RemoteLayout(where).entries()]
    assert found == [(id, version) for id in ("other", "toy") for version in ("1.0.0", "1.1.0")]
    other_first(monkeypatch, lambda: publish(other, RemoteLayout(where), "toy", "2.0.0", Words()))
    with pytest.raises(VersionExists):
        publish(toy, RemoteLayout(where), "toy", "2.0.0", Words())
    (winner,) = pulling.resolve(RemoteLayout(where), "toy", "2.0.0")
    pulling.pull(RemoteLayout(where), winner, tmp_path / "out", tmp_path / "blobs")
    assert contents(tmp_path / "out") == contents(other)


def test_an_index_that_others_change_all_the_time_is_given_up(toy, where, monkeypatch):
    monkeypatch.setattr(remote, "PATIENCE", 0.0)
    publish(toy, RemoteLayout(where), "toy", "1.0.0", Words())
    other_first(monkeypatch, lambda: publish(toy, RemoteLayout(where), "other", "1.0.0", Words()))
    with pytest.raises(CatalogError, match="expected its index to stay as it was read, found others changing it for 0"):
        publish(toy, RemoteLayout(where), "toy", "1.1.0", Words())


@pytest.mark.parametrize("after", [False, True])
def test_a_publication_that_ends_at_the_index_needs_no_hand(after, toy, where, monkeypatch):
    """Nobody holds anything, so whoever comes next goes on: also where the answer to the writing was lost."""
    real = RemoteLayout._put_if

    def put_if(self, path, data, tag):
        if path != INDEX:
            return real(self, path, data, tag)
        if after:
            real(self, path, data, tag)
        raise KeyboardInterrupt

    publish(toy, RemoteLayout(where), "first", "1.0.0", Words())
    with monkeypatch.context() as patch:
        patch.setattr(RemoteLayout, "_put_if", put_if)
        with pytest.raises(KeyboardInterrupt):
            publish(toy, RemoteLayout(where), "toy", "1.0.0", Words())
    assert len(RemoteLayout(where).entries("toy")) == after
    assert publish(toy, RemoteLayout(where), "toy", "1.0.0", Words()).new is not after
    (entry,) = RemoteLayout(where).entries("toy")
    RemoteLayout(where).enter("toy", "1.0.0", entry.descriptor)  # as s3fs asks again where it got no answer
    assert RemoteLayout(where).entries("toy") == [entry]
    assert pulling.verify(RemoteLayout(where), pulling.resolve(RemoteLayout(where), "toy", None)[0]) > 0


def test_a_store_that_knows_no_conditions_is_refused(toy, where, monkeypatch):
    store = RemoteLayout(where)
    real = store._files.pipe_file
    monkeypatch.setattr(store._files, "pipe_file", lambda path, data, **condition: real(path, data))
    with pytest.raises(
        CatalogError, match="expected one that writes on a condition, found one that writes in any case"
    ):
        publish(toy, store, "toy", "1.0.0", Words())
    assert not store._there(INDEX)
