"""``ling3export catalog``, ``keygen`` and ``sign``: publish artifacts, find them, pull them, sign them."""

import json
from pathlib import Path

import click

from ling3export.cli.options import JSON
from ling3export.foundation.errors import CatalogError
from ling3export.foundation.extras import require
from ling3export.foundation.tables import aligned
from ling3export.runners.cli.command import Command, Group
from ling3export.runners.cli.options import FOLDER, PATH
from ling3export.runners.cli.references import ARTIFACT, pull


@click.group(cls=Group)
def catalog() -> None:
    """Publish artifacts, find them, pull them.

    STORE is oci:FOLDER, an OCI image layout; REFERENCE is oci:FOLDER/ID or oci:FOLDER/ID@VERSION. skopeo and oras
    copy versions from a layout to a registry, and back.
    """


catalog.add_command(pull)


@catalog.command()
@click.argument("artifact", type=ARTIFACT)
@click.argument("store")
@click.option("--id", "name", required=True, help="Its name in the store: a-z, 0-9 and -.")
@click.option("--version", required=True, help="A semantic version.")
@click.option("--title", default="", help="Its name for people.  [default: ID]")
@click.option("--description", default="", help="A description in one sentence.")
@click.option("--author", default="", help="Name of its author.")
@click.option("--tag", "tags", multiple=True, help="A word to find it by; may be given many times.")
@click.option(
    "--eval", "evaluation", type=PATH, metavar="RUN", help="Record the score of a finished evaluation of ARTIFACT."
)
@click.option("--no-run", is_flag=True, help="Only check digests before: nothing of ARTIFACT is executed.")
def publish(
    artifact: Path, store: str, name: str, version: str, title: str, description: str, author: str,
    tags: tuple[str, ...], evaluation: Path | None, no_run: bool,
) -> None:  # fmt: skip
    """Publish ARTIFACT as a version that never changes.

    ARTIFACT is verified first. The same content again does nothing; other content is refused. Prints the version's
    digest.
    """
    from ling3export.artifacts.catalog.layout import parse_store
    from ling3export.artifacts.catalog.publish import Words
    from ling3export.artifacts.catalog.publish import publish as published
    from ling3export.artifacts.catalog.record import EvalScore
    from ling3export.artifacts.manifest import file_record, read_manifest
    from ling3export.runners.cli.eval import finished_run
    from ling3export.verify.verify import verify_artifact

    layout, score = parse_store(store), None
    if evaluation is not None:
        suite, rate = finished_run(evaluation, read_manifest(artifact).sha256)
        score = EvalScore(suite, rate, f"sha256:{file_record(evaluation.parent, evaluation.name).sha256}")
    signed: list[str] = []
    result = verify_artifact(artifact, None, run=not no_run, report=signed.append)
    if not result.passed:
        raise CatalogError(
            f"artifact `{artifact.name}`: a cell is outside its tolerance, in {artifact}",
            f"see: ling3export verify {artifact}",
        )
    done = published(artifact, layout, name, version, Words(title, description, author, tags), score)
    written = f"{done.moved:,} bytes written" if done.new else "was there"
    click.echo("\n".join(signed), err=True)
    click.echo(f"{done.version}: {written}, of {done.version.record.size:,}", err=True)
    click.echo(done.version.image.digest)


@catalog.command()
@click.argument("store")
@click.argument("words", required=False, default="")
@JSON
def search(store: str, words: str, as_json: bool) -> None:
    """Show the versions in STORE that hold all WORDS, such as "demo cpu tp2"; without WORDS all versions."""
    from ling3export.artifacts.catalog.layout import parse_store
    from ling3export.artifacts.catalog.publish import search as matching
    from ling3export.artifacts.records import to_json

    records = matching(parse_store(store), words)
    if as_json:
        click.echo(json.dumps([to_json(record) for record in records], ensure_ascii=False))
    elif records:
        rows = [("version", "kind", "targets", "MB", "name")]
        for record in records:
            targets, size = ",".join(record.requirements.targets), f"{record.size / 1e6:,.1f}"
            rows.append((f"{record.id}@{record.version}", record.kind, targets, size, record.name))
        click.echo("\n".join(aligned(rows)))
    else:
        click.echo(f"{store}: no such version", err=True)


@catalog.command()
@click.argument("reference")
def info(reference: str) -> None:
    """Print the record of REFERENCE."""
    from ling3export.artifacts.catalog.layout import parse_reference
    from ling3export.artifacts.records import laid_out, to_json

    store, name, version = parse_reference(reference)
    click.echo(laid_out(to_json(store.find(name, version).record)))


@catalog.command()
@click.argument("reference")
def verify(reference: str) -> None:
    """Read every byte of REFERENCE in its store, and compare it with the record."""
    from ling3export.artifacts.catalog.layout import parse_reference
    from ling3export.artifacts.catalog.pull import verify as verified

    store, name, number = parse_reference(reference)
    version = store.find(name, number)
    click.echo(f"{version}: {len(version.record.files)} files, {verified(store, version):,} bytes agree")


@catalog.command()
@click.argument("store")
def gc(store: str) -> None:
    """Remove the files that no version in STORE needs, such as those of a publication that was killed."""
    from ling3export.artifacts.catalog.layout import parse_store

    removed, freed = parse_store(store).gc()
    click.echo(f"{removed} files, {freed:,} bytes removed", err=True)


@click.command(cls=Command)
@click.argument("key", type=PATH)
def keygen(key: Path) -> None:
    """Write a private key into KEY and its public half into KEY.pub.

    Everybody who has KEY can sign. Put KEY.pub into the folder that LING3_TRUST names. Prints the key's id.
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

    The signature is a file next to the manifest. Prints the key's id. Without a signature, commands that load ARTIFACT
    print "NAME: unsigned"; if LING3_TRUST names a folder of public keys, they refuse it.
    """
    require("sign", "sign", "cryptography")
    from ling3export.artifacts.signing import sign as signed

    click.echo(signed(artifact, key))
