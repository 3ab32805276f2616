"""A process that lowers and compiles cells: jobs in on stdin, results out on stdout, one JSON object a line.

The first line describes the target, every further one names a cell. A process of its own because the number of virtual
devices is fixed when jax starts, and because a compiler that dies must not take the build with it.
"""

import json
import sys
import traceback
from pathlib import Path
from typing import Any

from ling3export.runners.environment import prepare_cpu


def _prepare(job: dict[str, Any]) -> None:
    prepare_cpu(job["geometry"]["tp"])


def run_cell(job: dict[str, Any], phase: str, padding: int) -> dict[str, Any]:
    """Lowers and compiles one cell into the artifact's folder; returns its manifest record, files undigested."""
    from ling3export.lower import compile_cell, device_mesh, lower_cell
    from ling3export.model.config import Config
    from ling3export.model.geometry import Geometry

    config = Config.from_dict(job["config"], ignore=job["ignore"])
    geometry = Geometry(**job["geometry"])
    lowered = lower_cell(config, geometry, phase, padding, job["platform"])
    folder = Path(job["folder"])
    name = f"{phase}@{padding}"
    (folder / f"{name}.stablehlo").write_bytes(lowered.blob)
    raw, compiled = compile_cell(lowered, device_mesh(geometry.tp))
    (folder / f"{name}.exec").write_bytes(raw)
    return lowered.record | compiled


def main() -> None:
    """Serves cells until stdin ends."""
    replies = sys.stdout
    sys.stdout = sys.stderr  # nothing but replies may reach the pipe
    job = json.loads(sys.stdin.readline())
    _prepare(job)
    for line in sys.stdin:
        cell = json.loads(line)
        try:
            reply: dict[str, Any] = {"record": run_cell(job, cell["phase"], cell["padding"])}
        except Exception as error:
            reply = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


if __name__ == "__main__":
    main()
