"""A process that lowers and compiles cells: jobs in on stdin, results out on stdout, one JSON object a line.

The first line describes the target, every further one names a cell. A process of its own because the number of virtual
devices is fixed when jax starts, and because a compiler that dies must not take the build with it.
"""

import hashlib
import json
import os
import sys
import threading
import traceback
from dataclasses import asdict
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from ling3export.artifacts.files import writing
from ling3export.cache.programs import Programs
from ling3export.compile.peers import become_first
from ling3export.errors import Ling3Error
from ling3export.plan.targets import Target
from ling3export.plan.toolchain import compiler_environment
from ling3export.runners.load.environment import prepare_cpu

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from ling3export.compile.lower import Lowered
    from ling3export.model.config import Config
    from ling3export.model.geometry import Geometry


def _prepare(job: dict[str, Any]) -> None:
    target = Target(**job["target"])
    if target.chip is not None:
        os.environ.update(compiler_environment(target))
        return
    os.environ["JAX_PLATFORMS"] = target.platform
    if target.processes > 1:
        become_first(target)
    else:
        prepare_cpu(target.tp)


def _write(path: Path, data: bytes) -> None:
    with writing(path, len(data)):
        path.write_bytes(data)


def run_cell(job: dict[str, Any], phase: str, padding: int) -> dict[str, Any]:
    """Lowers and compiles one cell into the artifact's folder.

    Returns:
        ``record`` for the manifest, files undigested, with its ``origin``: whether the program was compiled or came
        from the cache, and what jax traced and compiled. ``messages`` for the user.
    """
    from ling3export.compile.lower import lower_cell
    from ling3export.model.config import Config
    from ling3export.model.geometry import Geometry
    from ling3export.runners.load.pjrt import CompileCounter

    events, programs = CompileCounter(), Programs(job["cache"])
    config = Config.from_dict(job["config"], ignore=job["ignore"])
    geometry, target = Geometry(**job["geometry"]), Target(**job["target"])
    lowered = lower_cell(config, geometry, phase, padding, target.platform)
    folder = Path(job["folder"])
    name = f"{phase}@{padding}"
    _write(folder / f"{name}.stablehlo", lowered.blob)
    raw, compiled = _compiled(lowered, config, geometry, target, programs)
    _write(folder / f"{name}.exec", raw)
    origin = {**programs.origin, "traces": events.traces, "compiles": events.count}
    return {"record": lowered.record | compiled | {"origin": origin}, "messages": programs.messages}


def _compiled(
    lowered: "Lowered", config: "Config", geometry: "Geometry", target: Target, programs: Programs
) -> tuple[bytes, dict[str, Any]]:
    """The executable of a lowered cell and its record, from the cache or compiled now."""
    from ling3export.cache.keys import program_fields
    from ling3export.compile.lower import compile_cell, device_mesh

    modules = {"portable": hashlib.sha256(lowered.blob).hexdigest()}
    if target.chip is None:
        mesh = device_mesh(geometry.tp)
        fields = program_fields(target, modules, described(mesh), None)
        return programs.compiled(fields, lambda: compile_cell(lowered, mesh))
    from ling3export.compile.accelerators import compile_for, lower_for

    cell = (config, geometry, lowered.record["phase"], lowered.record["padding"], target)
    direct = lower_for(*cell)
    priced = {"config": config.semantic(), "plan": asdict(geometry), "cell": cell[2:4]}
    fields = program_fields(target, modules | {"direct": direct.digest}, described(direct.mesh), priced)
    return programs.compiled(fields, lambda: compile_for(direct, *cell))


def described(mesh: "Mesh") -> dict[str, Any]:
    """The devices that a program is compiled for."""
    devices = list(mesh.devices.flat)
    return {
        "kind": devices[0].device_kind,
        "ids": [device.id for device in devices],
        "processes": len({device.process_index for device in devices}),
    }


def _reply(job: dict[str, Any], cell: dict[str, Any]) -> dict[str, Any]:
    try:
        return run_cell(job, cell["phase"], cell["padding"])
    except Ling3Error as error:
        return {"error": error.message, "hint": error.hint, "kind": type(error).__name__}
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
