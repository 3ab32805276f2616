"""Records of cells compiled for a TPU slice, each module compiled once for all runs that lower the cell to it.

What libtpu makes of a module follows from the module's text, the flags and libtpu's version: its answer, the compiled
program's text and memory, is kept under these. What our sources make of that answer they make anew once one of them
has changed, so a change that leaves the modules as they are is seen and costs no compiling.
"""

import gzip
import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ling3export.artifacts.records import from_json, sha256_of, to_json
from ling3export.cache.keys import below_model, cell_fields, source_digests, toolchain
from ling3export.cache.use import CacheUse
from ling3export.compile.lower import Compiled
from ling3export.compile.worker import Job, devices_of, prepare
from ling3export.foundation.processes import Child, Parent
from ling3export.machine.environment import compiler_flags
from ling3export.model.config import Config
from ling3export.plan.plan import Cell, Plan
from tests.support.artifacts_fixture import Artifacts, digest_of

# The sources that put libtpu's answer into a record.
ASKING = ("compile/accelerators.py", "compile/lower.py", "machine/pjrt.py")


def records(config: Config, plan: Plan, cells: Sequence[Cell], kept: Artifacts | None) -> dict[str, Compiled]:
    """What describes each cell, by name.

    Args:
        config: The model.
        plan: Says the target, all of whose devices are compiled for, and the geometry.
        cells: Which.
        kept: Where a run finds what an earlier one found: all of it, if no source changed. None compiles.
    """

    def write(path: Path) -> None:
        path.mkdir()
        (path / "records.json").write_text(json.dumps(_found(config, plan, cells, path.parents[1])))

    if kept is None:
        found = _found(config, plan, cells, None)
    else:
        made_of = [digest_of({"": Path(__file__)}), *(cell_fields(config, plan, cell) for cell in cells)]
        found = json.loads((kept.kept("records", made_of, write) / "records.json").read_text())
    return {name: from_json(Compiled, record) for name, record in found.items()}


def _found(config: Config, plan: Plan, cells: Sequence[Cell], answers: Path | None) -> dict[str, Any]:
    """The records as JSON, from a process of their own: its environment is that of the target."""
    job = Job(plan.target, plan.geometry, config, answers or Path(os.devnull), CacheUse("off"))
    found = {}
    with Child("tpu_texts") as child:
        child.send({"job": to_json(job), "kept": answers is not None})
        for cell in cells:
            child.send(asdict(cell))
            found[cell.name] = child.receive()
            assert found[cell.name] is not None, child.ended()[1]
    return found


def record_of(job: Job, cell: Cell, kept: bool) -> Compiled:
    """What describes one cell, in the process that compiles; ``kept`` says whether the job's folder has answers."""
    from ling3export.compile.accelerators import compiled_for, lower_for, priced

    arguments = (job.config, job.geometry, cell.phase, cell.padding, job.target)
    direct = lower_for(*arguments)
    sources = [below_model(source_digests())[name] for name in ASKING]
    given = [direct.digest, toolchain(job.target), compiler_flags(), devices_of(direct.mesh), sources]
    home = job.folder / f"tpu-{sha256_of(given)[:16]}"
    if kept and (home / "record.json").exists():
        os.utime(home)
        record = from_json(Compiled, json.loads((home / "record.json").read_text()))
        text = gzip.decompress((home / "text.gz").read_bytes()).decode()
    else:
        _, record, text = compiled_for(direct, cell.name, job.target)
        if kept:
            home.mkdir(exist_ok=True)
            (home / "text.gz").write_bytes(gzip.compress(text.encode()))
            (home / "record").write_text(json.dumps(to_json(record)))
            (home / "record").replace(home / "record.json")  # the last to appear
    return priced(record, text, *arguments)


def main() -> None:
    """Answers cells until stdin ends."""
    parent = Parent()
    first = parent.receive()
    job = from_json(Job, first["job"])
    _kept = prepare(job.target)
    while True:
        parent.send(to_json(record_of(job, Cell(**parent.receive()), first["kept"])))


if __name__ == "__main__":
    main()
