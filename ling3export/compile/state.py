"""Compiles the program that gives a target's state on the processor: it lies beside those that take the state."""

from base64 import b64decode
from dataclasses import asdict
from pathlib import Path

from ling3export.artifacts.files import write_new
from ling3export.artifacts.records import sha256_of, to_json
from ling3export.artifacts.schema import STATE
from ling3export.cache.cells import Cells
from ling3export.cache.keys import changed, program_fields
from ling3export.compile.worker import MODULE, STATE_PROGRAM, Job
from ling3export.foundation.errors import PlanError, listed
from ling3export.foundation.processes import Child, Failure
from ling3export.model.config import Config
from ling3export.model.state import state_arrays
from ling3export.plan.plan import Plan

WHAT = "the program that gives the state"


def put_state_program(folder: Path, config: Config, plan: Plan, cells: Cells) -> None:
    """Writes the program of a target for the processor into ``folder`` unless it is there; for others there is none.

    Raises:
        PlanError: It does not compile.
        ArtifactError: The disk is full.
    """
    if plan.target.platform != "cpu" or (folder / STATE).exists():
        return
    arrays = [asdict(row) for row in state_arrays(config, plan.geometry)]
    fields = program_fields(plan.target, {"state": sha256_of(arrays)}, {}, None)
    job = Job(plan.target, plan.geometry, config, folder, cells.use)
    write_new(folder / STATE, cells.file("exec", fields, lambda: _compiled(job)))


def _compiled(job: Job) -> bytes:
    with Child(MODULE) as worker:
        worker.send({"job": to_json(job)})
        worker.send(STATE_PROGRAM)
        reply = worker.receive()
        if reply is None:
            raise PlanError(f"{WHAT}: the compiling process {worker.ended()[1]}")
    if "failure" in reply:
        failure = Failure(**reply["failure"])
        raise PlanError(f"{WHAT}: {failure.error}", failure.hint)
    if other := changed(reply["sources"]):
        raise PlanError(
            f"{WHAT}: expected the sources of the build's start, found another {listed(other)}", "build again"
        )
    return b64decode(reply["raw"])
