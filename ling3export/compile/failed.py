"""What a build that failed was asked for, so that one of its cells can be built again alone.

``.NAME.ling3.failed.json`` beside the artifact that did not come to be. The cells that were done are in the cache.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ling3export.artifacts.files import replace_file
from ling3export.compile.matrix import Outcome
from ling3export.plan.options import Options


def failed_path(artifact: Path) -> Path:
    """Where a failed build of ``artifact`` is described."""
    artifact = artifact.resolve()
    return artifact.parent / f".{artifact.name}.failed.json"


def note_failure(
    artifact: Path, raw: dict[str, Any], ignore: Sequence[str], options: Options, outcomes: Sequence[Outcome]
) -> None:
    """Describes a failed build, by rename.

    Args:
        artifact: What it was to become; its lock is held.
        raw: The content of config.json.
        ignore: Its fields that were ignored on request.
        options: What was asked for.
        outcomes: What became of every cell.
    """
    failed = {outcome.plan.target.name: outcome.failures for outcome in outcomes}
    record = {"config": raw, "ignore": list(ignore), "options": asdict(options), "failed": failed}
    replace_file(failed_path(artifact), json.dumps(record).encode())


def read_failure(artifact: Path) -> dict[str, Any] | None:
    """What a failed build of ``artifact`` was asked for: ``config``, ``ignore``, ``options``, ``failed`` by target.

    None where the last build did not fail, or its description is damaged.
    """
    try:
        return dict(json.loads(failed_path(artifact).read_bytes()))
    except (OSError, ValueError):
        return None


def forget_failure(artifact: Path) -> None:
    """Removes the description once a build succeeded."""
    failed_path(artifact).unlink(missing_ok=True)
