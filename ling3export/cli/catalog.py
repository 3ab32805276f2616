"""``ling3export catalog``, ``keygen`` and ``sign``: artifacts for others to find, to pull and to trust."""

import json
from pathlib import Path

import click

from ling3export.cli.options import JSON
from ling3export.foundation.errors import CatalogError
from ling3export.foundation.extras import require
from ling3export.foundation.tables import aligned
from ling3export.runners.cli.command import Command, Group
from ling3export.runners.cli.options import FOLDER, PATH, trust_option
from ling3export.runners.cli.references import Artifact, pull


@click.group(cls=Group)
def catalog() -> None:
    """Publish artifacts, find them, pull them.

    STORE is oci:FOLDER (an OCI image layout), HOST[/PREFIX] (an OCI registry), or the URL of a layout.
    REFERENCE is STORE/ID or STORE/ID@VERSION, of a registry also HOST/ID:VERSION.
    """


catalog.add_command(pull)


@catalog.command()
@click.argument("artifact", type=Artifact(elsewhere=True))
@click.argument("store")
@click.option("--id", "name", required=True, help="What it is called there: a-z, 0-9 and -.")
@click.option("--version", required=True, help="A semantic version.")
@click.option("--title", default="", help="Its name for people.  [default: ID]")
@click.option("--description", default="", help="What it is, in a sentence.")
@click.option("--author", default="", help="Who made it.")
@click.option("--tag", "tags", multiple=True, help="A word to find it by, beside targets and dtype; again for more.")
@click.option(
    "--eval", "evaluation", type=PATH, metavar="RUN", help="Record the score of a finished evaluation of ARTIFACT."
)
@click.option("--no-run", is_flag=True, help="Check digests alone before: nothing of ARTIFACT is executed.")
@trust_option
def publish(
    artifact: Path,
    store: str,
    name: str,
    version: str,
    title: str,
    description: str,
    author: str,
    tags: tuple[str, ...],
    evaluation: Path | None,
    no_run: bool,
) -> None:
    """Publish ARTIFACT as a version that never changes.

    ARTIFACT is verified first. The same content again does nothing; other content is refused. Prints the version's
    digest.
    """
    from ling3export.artifacts.catalog.publish import Words
    from ling3export.artifacts.catalog.publish import publish as published
    from ling3export.artifacts.catalog.record import EvalScore
    from ling3export.artifacts.catalog.stores import open_store
    from ling3export.artifacts.manifest import file_record, read_manifest
    from ling3export.runners.cli.eval import finished_run
    from ling3export.verify.verify import verify_artifact

    place, score = open_store(store), None
    if evaluation is not None:
        suite, rate, results = finished_run(evaluation, read_manifest(artifact).sha256)
        score = EvalScore(suite, rate, f"sha256:{file_record(evaluation, results[0]).sha256}")
    signed: list[str] = []
    result = verify_artifact(artifact, None, run=not no_run, report=signed.append)
    if not result.passed:
        raise CatalogError(
            f"artifact `{artifact.name}`: expected every cell within its tolerance, found another, in {artifact}",
            f"see: ling3export verify {artifact}",
        )
    done = published(artifact, place, name, version, Words(title, description, author, tags), score)
    said = f"{done.moved:,} bytes written" if done.new else "was there"
    click.echo("\n".join(signed), err=True)
    click.echo(f"{name}@{version}: {said}, of {done.record.size:,}", err=True)
    click.echo(done.record.digest)


@catalog.command()
@click.argument("store")
@click.argument("words", required=False, default="")
@click.option("--tag", help="Only with this tag.")
@click.option("--kind", help="Only of this kind: artifact or programs.")
@click.option("--target", help="Only for this target, such as tpu:v6e:4x4 or cpu.")
@click.option("--tp", type=int, help="Only for so many devices.")
@JSON
def search(
    store: str, words: str, tag: str | None, kind: str | None, target: str | None, tp: int | None, as_json: bool
) -> None:
    """Show what STORE has that holds all WORDS; all it has without WORDS."""
    from ling3export.artifacts.catalog.stores import open_store, summary
    from ling3export.artifacts.catalog.stores import search as searched

    found = [summary(each) for each in searched(open_store(store), words, tag=tag, kind=kind, target=target, tp=tp)]
    if as_json:
        click.echo(json.dumps(found, ensure_ascii=False))
    elif found:
        rows = [("version", "kind", "targets", "MB", "name")]
        for each in found:
            size = f"{each['bytes'] / 1e6:,.1f}"
            rows.append(
                (f"{each['id']}@{each['version']}", each["kind"], ",".join(each["targets"]), size, each["name"])
            )
        click.echo("\n".join(aligned(rows)))
    else:
        click.echo(f"{store}: no such version", err=True)


@catalog.command()
@click.argument("reference")
@click.option("--strict", is_flag=True, help="Refuse fields that this version does not know.")
def info(reference: str, strict: bool) -> None:
    """Print the record of REFERENCE."""
    from ling3export.artifacts.catalog.stores import located
    from ling3export.artifacts.records import laid_out, to_json

    record = located(reference, strict=strict, warn=lambda text: click.echo(text, err=True))[1].record
    click.echo(laid_out(to_json(record)))


@catalog.command()
@click.argument("reference")
def verify(reference: str) -> None:
    """Read every byte of REFERENCE in its store, and compare it with the record."""
    from ling3export.artifacts.catalog.pull import verify as verified
    from ling3export.artifacts.catalog.stores import located

    store, found = located(reference)
    click.echo(f"{found.entry}: {len(found.record.files)} files, {verified(store, found):,} bytes agree")


@catalog.command()
@click.argument("store")
def gc(store: str) -> None:
    """Remove from STORE what no version needs, such as the files of a publication that was killed."""
    from ling3export.artifacts.catalog.stores import open_layout

    removed, freed = open_layout(store).gc()
    click.echo(f"{removed} files, {freed:,} bytes removed", err=True)


@click.command(cls=Command)
@click.argument("key", type=PATH)
def keygen(key: Path) -> None:
    """Write a private key into KEY and its public half into KEY.pub.

    Whoever has KEY can sign; put KEY.pub into the folder that --trust of ling3-runner names. Prints the key's id.
    """
    require("keygen", "sign", "cryptography")
    from ling3export.artifacts.signing import make_key, public_path

    click.echo(make_key(key))
    click.echo(f"wrote {key} and {public_path(key)}", err=True)


@click.command(cls=Command)
@click.argument("artifact", type=FOLDER)
@click.option("--key", type=PATH, required=True, help="A private key, as keygen or openssl writes it.")
def sign(artifact: Path, key: Path) -> None:
    """Sign ARTIFACT: its manifest, which names every other byte by digest.

    The signature is a file beside the manifest. Prints the key's id.
    """
    require("sign", "sign", "cryptography")
    from ling3export.artifacts.signing import sign as signed

    click.echo(signed(artifact, key))
