"""``ling3export keygen`` and ``sign``: who made an artifact."""

from pathlib import Path

import click

from ling3export.runners.cli.command import Command, require
from ling3export.runners.cli.options import FOLDER, PATH


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
