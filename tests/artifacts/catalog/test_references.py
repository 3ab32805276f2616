"""References in the place of folders, in the commands of both command lines."""

import json
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import click
import pytest

from ling3export.artifacts.catalog.layout import OciLayout
from ling3export.artifacts.catalog.publish import Words, publish
from ling3export.artifacts.manifest import MANIFEST, read_manifest
from ling3export.artifacts.share import check_share
from ling3export.cli import main as cli
from ling3export.compile import attach, replay
from ling3export.plan import pricing
from ling3export.runners.cli import main as runner_cli
from ling3export.runners.cli.options import FOLDER
from ling3export.runners.cli.references import Artifact
from ling3export.runners.load.references import pulled
from tests.support.catalog_kills import contents
from tests.support.manifests import parted
from tests.support.refusals import refusal, said


@pytest.fixture
def reference(toy, tmp_path) -> str:
    """The toy in a store, as two hosts of one device each would have it."""
    parted(toy)
    publish(toy, OciLayout(tmp_path / "store"), "toy", "1.0.0", Words())
    return f"oci:{tmp_path}/store/toy@1.0.0"


@pytest.fixture
def kept(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("LING3_STORE", str(tmp_path / "kept"))
    return tmp_path / "kept/artifacts"


def commands(group: click.Group, *above: str) -> Iterator[tuple[str, click.Command]]:
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from commands(command, *above, name)
        else:
            yield " ".join((*above, name)), command


def test_every_command_takes_a_reference_for_an_artifact_that_it_reads():
    found: dict[str, set[str]] = {"read": set(), "written": set()}
    for main in (cli.main, runner_cli.main):
        for name, command in commands(main):
            for param in command.params:
                if param.name in ("artifact", "artifacts", "into"):
                    assert param.type is FOLDER or isinstance(param.type, Artifact), name
                    found["written" if param.type is FOLDER else "read"].add(name)
    assert found["written"] == {"build", "sign"}
    assert found["read"] == {
        "attach", "bench compare", "bench serve", "batch run", "calibrate", "catalog publish", "chat",
        "doctor", "eval determinism", "eval run", "ffn-worker", "generate", "inspect", "plan", "profile",
        "serve", "verify",
    }  # fmt: skip


def test_what_needs_the_manifest_alone_pulls_no_more(toy, reference, tmp_path, monkeypatch):
    monkeypatch.delenv("LING3_STORE", raising=False)
    for blob in (tmp_path / "store/blobs/sha256").iterdir():
        if blob.stat().st_size == (toy / "weights/toy.safetensors").stat().st_size:
            blob.unlink()
    assert said(cli.main, "inspect", reference, "--json") == said(cli.main, "inspect", toy, "--json")
    given: list[Path] = []

    def priced(config, options, requests, artifact, ignore):
        assert read_manifest(artifact) == read_manifest(toy)
        given.append(artifact)
        raise click.UsageError("enough")

    monkeypatch.setattr(pricing, "priced", priced)
    assert "enough" in refusal(cli.main, "plan", "--from", reference, code=2)
    assert given and not given[0].exists()


def test_verify_publish_and_attach_pull_what_they_read(toy, reference, kept, tmp_path, monkeypatch):
    assert "weight slabs agree" in said(cli.main, "verify", reference, "--no-run")
    (folder,) = kept.glob("*.ling3")
    assert contents(folder) == contents(toy)
    words = ("catalog", "publish", reference, f"oci:{tmp_path}/other", "--id", "toy", "--version", "1.0.0", "--no-run")
    said(cli.main, *words)
    here, there = (OciLayout(tmp_path / name).entries() for name in ("store", "other"))
    assert [entry.version for entry in here] == [entry.version for entry in there] == ["1.0.0"]

    def attached(artifact, checkpoint, out, *others, **options):
        assert (artifact, out) == (folder, tmp_path / "out.ling3")
        return read_manifest(artifact)

    monkeypatch.setattr(attach, "attach", attached)
    said(cli.main, "attach", reference, tmp_path, tmp_path / "out.ling3", "--no-run")


def test_a_cell_of_a_reference_is_built_again(toy, reference, kept, monkeypatch):
    def replayed(artifact, cell, *build):
        assert (contents(artifact), cell) == (contents(toy), "decode@2")
        return ["built"], True

    monkeypatch.setattr(replay, "replay", replayed)
    assert said(cli.main, "build", reference, "--replay", "decode@2") == "built\n"
    found = refusal(cli.main, "build", reference, code=2)
    assert f"expected a folder, or --replay beside the reference {reference}." in found


@pytest.mark.parametrize(
    "words",
    [
        ("sign", "REF", "--key", "k"),
        ("build", "config.json", "REF"),
        ("build", "--into", "REF"),
        ("attach", "x.ling3", "checkpoint", "REF"),
        ("catalog", "pull", "oci:a/b@1.0.0", "--to", "REF"),
    ],
)
def test_a_reference_where_a_folder_is_written_is_refused(words, reference):
    found = refusal(cli.main, *(reference if word == "REF" else word for word in words), code=2)
    assert f"expected a folder to write, found the reference {reference}; pull it, and publish another." in found


def test_a_reference_whose_folder_would_be_written_needs_another(reference, kept):
    found = refusal(cli.main, "attach", reference, "checkpoint", code=2)
    assert f"expected OUT beside the reference {reference}, found none." in found
    assert not kept.exists()


def test_one_of_several_hosts_pulls_its_share_for_the_target_that_is_named(reference, kept, monkeypatch):
    given: list[Path] = []

    def leading(artifact, place, config):
        given.append(artifact)
        raise click.UsageError("enough")

    monkeypatch.setattr("ling3export.runners.cli.generate.leading", leading)
    words = f"generate {reference} --prompt-ids 1 --max-tokens 1 --coordinator 127.0.0.1:9 --num-hosts 2".split()
    for host in ("0", "1"):
        refusal(runner_cli.main, *words, "--host-id", host, "--target", "cpu@2", code=2)
        check_share(given[-1], "cpu-tp2", int(host))
        assert json.loads((given[-1] / "share.json").read_text()) == {"target": "cpu-tp2", "host": int(host)}
    refusal(runner_cli.main, *words, "--host-id", "1", code=2)
    assert len(set(given)) == 3 and not (given[-1] / "share.json").exists()


def test_processes_that_start_with_one_reference_pull_it_once(reference, kept, capsys):
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: pulled(reference, None, str(kept.parent), None), range(4)))
    assert len(set(found)) == 1 and (found[0] / MANIFEST).is_file()
    assert capsys.readouterr().err.count("there already") == 3


def test_a_share_that_the_disk_has_no_room_for_is_refused_before_it_is_pulled(toy, reference, kept, monkeypatch):
    manifest, real = read_manifest(toy), shutil.disk_usage
    slab = manifest.weights.index["toy.table"].slab_bytes
    rest = sum(path.stat().st_size for path in toy.rglob("*") if path.is_file() and path.parent.name != "weights")
    needs = slab + rest - (toy / MANIFEST).stat().st_size
    words = ("pull", reference, "--target", "cpu-tp2", "--host-id", 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: real(folder)._replace(free=needs - 1))
    assert f"error: disk: expected {needs:,} bytes free for toy@1.0.0, found {needs - 1:,}, in " in refusal(
        runner_cli.main, *words
    )
    assert [path.stat().st_size for path in (kept.parent / "blobs").iterdir()] == [(toy / MANIFEST).stat().st_size]
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: real(folder)._replace(free=needs))
    folder = Path(said(runner_cli.main, *words).strip())
    shutil.rmtree(folder)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: real(folder)._replace(free=0))  # what is there is no need
    assert os.listdir(said(runner_cli.main, *words).strip())
