"""A folder that holds what one host of a target needs: its weight files have holes where other hosts' slabs are."""

import os
from pathlib import Path

from ling3export.artifacts.files import write_new
from ling3export.artifacts.records import canonical
from ling3export.foundation.errors import ArtifactError
from ling3export.foundation.strict_json import read_json

SHARE = "share.json"


def write_share(folder: Path, target: str, host: int) -> None:
    """Says whose share a folder holds."""
    write_new(folder / SHARE, canonical({"target": target, "host": host}))


def check_share(folder: Path, target: str, host: int | None) -> None:
    """Passes where a folder is whole, or the share of a host.

    Args:
        folder: The artifact.
        target: The target that is to run.
        host: Its host; None for all of them.

    Raises:
        ArtifactError: It is the share of another one.
    """
    if not os.path.lexists(folder / SHARE):
        return
    try:
        share = read_json(folder / SHARE)
    except (OSError, ValueError) as error:
        raise ArtifactError(f"{SHARE}: expected whose share this is, found {error}, in {folder}") from error
    if share != {"target": target, "host": host}:
        wanted = f"all of `{target}`" if host is None else f"the share of host {host} of `{target}`"
        raise ArtifactError(
            f"artifact `{folder.name}`: expected {wanted}, found a share, {share}, in {folder}",
            "pull it for this host (--target NAME --host-id N), or whole",
        )
