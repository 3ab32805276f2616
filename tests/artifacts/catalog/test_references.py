"""References instead of folders as arguments of both command lines."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import click
import pytest

from ling3export.artifacts.catalog.layout import OciLayout
from ling3export.artifacts.catalog.publish import Words, publish
from ling3export.artifacts.manifest import MANIFEST
from ling3export.cli import main as cli
from ling3export.runners.cli import main as runner_cli
from ling3export.runners.cli.options import FOLDER
from ling3export.runners.cli.references import ARTIFACT
from ling3export.runners.load.references import pulled
from tests.support.catalog_kills import contents
from tests.support.refusals import refusal, said


@pytest.fixture
def reference(toy, tmp_path) -> str:
    publish(toy, OciLayout(tmp_path / "store"), "toy", "1.0.0", Words())
    return f"oci:{tmp_path}/store/toy@1.0.0"


@pytest.fixture
def kept(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("LING3_STORE", str(tmp_path / "kept"))
    return tmp_path / "kept"


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
                    assert param.type in (FOLDER, ARTIFACT), name
                    found["written" if param.type is FOLDER else "read"].add(name)
    assert found["written"] == {"attach", "build", "sign"}
    assert found["read"] == {
        "bench compare", "bench serve", "batch", "catalog publish", "chat", "doctor",
        "eval run", "ffn-worker", "generate", "graph audit", "graph bisect", "graph extract", "graph memory",
        "graph show", "graph summary", "graph view", "inspect", "serve", "verify",
    }  # fmt: skip


def test_inspect_verify_and_publish_read_what_a_reference_names(toy, reference, kept, tmp_path):
    assert said(cli.main, "inspect", reference, "--json") == said(cli.main, "inspect", toy, "--json")
    assert "weight shards agree" in said(cli.main, "verify", reference, "--no-run")
    (folder,) = kept.glob("*.ling3")
    assert contents(folder) == contents(toy)
    words = ("catalog", "publish", reference, f"oci:{tmp_path}/other", "--id", "toy", "--version", "1.0.0", "--no-run")
    said(cli.main, *words)
    here, there = (OciLayout(tmp_path / name).versions() for name in ("store", "other"))
    assert [version.record.version for version in here] == [version.record.version for version in there] == ["1.0.0"]


@pytest.mark.parametrize(
    "words",
    [
        ("sign", "REF", "--key", "k"),
        ("build", "config.json", "REF"),
        ("build", "--into", "REF"),
        ("attach", "REF", "checkpoint"),
        ("catalog", "pull", "oci:a/b@1.0.0", "--to", "REF"),
    ],
)
def test_a_reference_where_a_folder_is_written_is_refused(words, reference):
    found = refusal(cli.main, *(reference if word == "REF" else word for word in words), code=2)
    assert f"expected a folder to write, found the reference {reference}; pull it, and publish another." in found


def test_processes_that_start_with_one_reference_pull_it_once(reference, kept, capsys):
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: pulled(reference), range(4)))
    assert len(set(found)) == 1 and (found[0] / MANIFEST).is_file()
    assert capsys.readouterr().err.count("there already") == 3
