"""A process that lowers and compiles cells: jobs in on stdin, results out on stdout, one JSON object a line.

The first line describes the target, every further one names a cell. A process of its own because the number of virtual
devices is fixed when jax starts, and because a compiler that dies must not take the build with it.
"""

import json
import os
import sys
import threading
import traceback
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from ling3export.artifacts.disk import writing
from ling3export.errors import Ling3Error
from ling3export.runners.environment import prepare_cpu
from ling3export.targets import Target, compiler_environment


def _prepare(job: dict[str, Any]) -> None:
    target = Target(**job["target"])
    if target.chip is not None:
        os.environ.update(compiler_environment(target))
        return
    os.environ["JAX_PLATFORMS"] = target.platform
    prepare_cpu(target.tp)


def _write(path: Path, data: bytes) -> None:
    with writing(path, len(data)):
        path.write_bytes(data)


def run_cell(job: dict[str, Any], phase: str, padding: int) -> dict[str, Any]:
    """Lowers and compiles one cell into the artifact's folder; returns its manifest record, files undigested."""
    from ling3export.lower import compile_cell, device_mesh, lower_cell
    from ling3export.model.config import Config
    from ling3export.model.geometry import Geometry

    config = Config.from_dict(job["config"], ignore=job["ignore"])
    geometry, target = Geometry(**job["geometry"]), Target(**job["target"])
    lowered = lower_cell(config, geometry, phase, padding, target.platform)
    folder = Path(job["folder"])
    name = f"{phase}@{padding}"
    _write(folder / f"{name}.stablehlo", lowered.blob)
    if target.chip is None:
        raw, compiled = compile_cell(lowered, device_mesh(geometry.tp))
    else:
        from ling3export.accelerators import compile_for

        raw, compiled = compile_for(config, geometry, phase, padding, target)
    _write(folder / f"{name}.exec", raw)
    return lowered.record | compiled


def _reply(job: dict[str, Any], cell: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"record": run_cell(job, cell["phase"], cell["padding"])}
    except Ling3Error as error:
        return {"error": error.message, "hint": error.hint}
    except Exception as error:
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}"}


def _lines() -> "SimpleQueue[str]":
    """The lines of stdin, read ahead; this process ends at once when stdin does, in the middle of a cell too.

    Whoever started it ends stdin when all cells are done; otherwise it was killed.
    """
    lines: SimpleQueue[str] = SimpleQueue()

    def read() -> None:
        for line in sys.stdin:
            lines.put(line)
        os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    return lines


def main() -> None:
    """Serves cells until stdin ends."""
    replies = sys.stdout
    sys.stdout = sys.stderr  # nothing but replies may reach the pipe
    lines = _lines()
    job = json.loads(lines.get())
    _prepare(job)
    while True:
        replies.write(json.dumps(_reply(job, json.loads(lines.get()))) + "\n")
        replies.flush()


if __name__ == "__main__":
    main()
