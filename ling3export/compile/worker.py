"""The compiling process: its first message is a job, each later one a cell, answered with the built cell or a failure.
The message STATE_PROGRAM requests the program that gives the state, NATIVE_KERNELS the library of native kernels.

It is a process of its own because the number of virtual devices is fixed when jax starts, and because a compiler that
dies must not take the build with it. For a cpu target of several hosts it starts peers: an executable holds the ids of
the devices and the process of each, so as many processes must exist. The peers compute nothing.
"""

import hashlib
import os
import traceback
from base64 import b64encode
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ling3export.artifacts.files import write_new
from ling3export.artifacts.program_records import Origin
from ling3export.artifacts.records import from_json, sha256_of, to_json
from ling3export.artifacts.schema import GRAPH, KERNELS
from ling3export.cache.cells import COMPILED, PROGRAM, Built
from ling3export.cache.keys import Sources, program_fields
from ling3export.cache.store import Cache, CacheUse
from ling3export.compile.kernels import library_of
from ling3export.foundation.errors import Ling3Error
from ling3export.foundation.phases import PHASES
from ling3export.foundation.processes import LOOPBACK, START_TIMEOUT, Child, Failure, Parent, free_port
from ling3export.machine.environment import prepare_cpu
from ling3export.machine.kernels import register
from ling3export.machine.service import Service, join
from ling3export.model.config import Config
from ling3export.model.geometry import Geometry
from ling3export.model.state import state_arrays
from ling3export.plan.plan import PlannedCell
from ling3export.plan.targets import TargetSpec, compiler_environment

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from ling3export.compile.lower import Compiled, Lowered

    Compile = Callable[[], tuple[bytes, Compiled, bytes]]

MODULE = "ling3export.compile.worker"
STATE_PROGRAM = {"state_program": True}
NATIVE_KERNELS = {"native_kernels": True}


@dataclass(frozen=True)
class CompileJob:
    """The first message to a compiling process. ``folder`` gets the programs."""

    target: TargetSpec
    geometry: Geometry
    config: Config
    folder: Path
    cache: CacheUse
    sources: Sources  # at the start of the build


def join_peers(target: TargetSpec) -> list[object]:
    """Makes this process the first of the target's and starts its peers, which live as long as the returned objects.

    Call it before jax starts.
    """
    port, devices = free_port(), target.tp // target.processes
    service = Service(LOOPBACK, port, target.processes, grace=1)
    peers = [Child(MODULE, shown=True) for _ in range(1, target.processes)]
    for number, child in enumerate(peers, 1):
        child.send({"peer": (port, target.processes, devices, number)})
    become(port, target.processes, devices, 0)
    return [service, *peers]


def become(port: int, processes: int, devices: int, number: int) -> None:
    """Makes this process the given one of a cpu target's; returns when all see each other's devices."""
    prepare_cpu(devices)
    join(LOOPBACK, port, processes, number, START_TIMEOUT)
    import jax

    jax.devices()


def prepare(target: TargetSpec) -> list[object]:
    """Sets this process up to compile for ``target``, before jax starts; what it returns has to be kept."""
    if target.chip is not None:
        os.environ.update(compiler_environment(target))
        return []
    os.environ["JAX_PLATFORMS"] = target.platform
    if target.processes > 1:
        return join_peers(target)
    prepare_cpu(target.tp)
    return []


def compiled_program(
    cache: Cache, fields: dict[str, Any], sources: Sources, compile_it: "Compile"
) -> tuple[bytes, "Compiled", bytes, str]:
    """The serialized executable, its record, its packed text, and whether it was COMPILED now or is from the cache.

    The digest of ``fields`` is its key in the cache. Nothing is kept if a source has changed.
    """
    from ling3export.compile.lower import Compiled

    graph = {"graph": sha256_of(fields)}
    entry = cache.read("programs", sha256_of(fields), lambda entry: from_json(Compiled, entry.record))
    if entry and (text := cache.read("programs", sha256_of(graph))):
        return entry.data, from_json(Compiled, entry.record), text.data, PROGRAM
    data, compiled, packed = compile_it()
    if not sources.changed():
        cache.write("programs", graph, {}, packed)
        cache.write("programs", fields, to_json(compiled), data)
    return data, compiled, packed, COMPILED


def run_cell(job: CompileJob, cell: PlannedCell) -> dict[str, Any]:
    """Lowers and compiles one cell into the job's folder.

    Returns:
        ``built``, a Built with its origin; ``messages`` for the user.
    """
    from ling3export.compile.lower import lower_cell
    from ling3export.machine.pjrt import CompileCounter

    events, messages = CompileCounter(), list[str]()
    lowered = lower_cell(job.config, job.geometry, cell.phase, cell.padding, job.target.platform)
    write_new(job.folder / f"{cell.name}.stablehlo", lowered.blob)
    fields, compile_it = _compiler(lowered, job, cell)
    cache = Cache(job.cache, messages.append)
    data, compiled, text, source = compiled_program(cache, fields, job.sources, compile_it)
    write_new(job.folder / f"{cell.name}.exec", data)
    write_new(job.folder / f"{cell.name}.{GRAPH}", text)
    origin = Origin(source, sha256_of(fields), events.traces, events.count)
    built = Built(lowered.program(compiled, origin), compiled.executable.requires, compiled.executable.mesh)
    return {"built": to_json(built), "messages": messages}


def _counted(
    result: "tuple[bytes, Compiled, bytes]", job: CompileJob, cell: PlannedCell
) -> "tuple[bytes, Compiled, bytes]":
    """A program compiled for processors, with the FLOPs and bytes of its graph."""
    from msgspec.structs import replace

    from ling3export.cost.chips import device
    from ling3export.cost.estimates import context_of
    from ling3export.graph.hlo import unpacked
    from ling3export.graph.optimized import read

    raw, record, text = result
    chip = device(job.target.platform, None, job.geometry.tp)
    context = context_of(job.config, job.geometry, cell.phase, cell.padding, (), chip)
    total = read(unpacked(text), cell.name, "", context).totals()
    return raw, replace(record, flops=total.flops, bytes_accessed=total.bytes), text


def _compiler(lowered: "Lowered", job: CompileJob, cell: PlannedCell) -> tuple[dict[str, Any], "Compile"]:
    """Everything that decides the executable of a lowered cell, and the function that compiles it."""
    from ling3export.compile.lower import compile_cell, compile_with_kernels, device_mesh

    modules, target, geometry = {"portable": hashlib.sha256(lowered.blob).hexdigest()}, job.target, job.geometry
    lowering = job.sources.lowering
    if target.chip is None:
        mesh = device_mesh(geometry.tp)
        if not geometry.kernels or not PHASES[cell.phase].kernels:
            fields = program_fields(target, lowering, modules, devices_of(mesh))
            return fields, lambda: _counted(compile_cell(lowered, mesh), job, cell)
        register((job.folder / KERNELS).read_bytes(), geometry.kernels)
        modules |= {"kernels": geometry.kernels, "model": job.sources.model}  # the text does not say where kernels are
        fields = program_fields(target, lowering, modules, devices_of(mesh))
        return fields, lambda: _counted(
            compile_with_kernels(job.config, geometry, cell.phase, cell.padding, mesh), job, cell
        )
    from ling3export.compile.accelerators import compile_for, lower_for

    arguments = (job.config, geometry, cell.phase, cell.padding, target)
    direct = lower_for(*arguments)
    priced = {"config": job.config.semantic(), "plan": asdict(geometry), "cell": (cell.phase, cell.padding)}
    fields = program_fields(target, lowering, modules | {"direct": direct.digest}, devices_of(direct.mesh), priced)
    return fields, lambda: compile_for(direct, *arguments)


def devices_of(mesh: "Mesh") -> dict[str, Any]:
    """The devices that a program is compiled for, as its key names them."""
    devices = list(mesh.devices.flat)
    return {
        "kind": devices[0].device_kind,
        "ids": [device.id for device in devices],
        "processes": len({device.process_index for device in devices}),
    }


def _state_program(job: CompileJob) -> dict[str, Any]:
    from ling3export.compile.lower import compile_state, device_mesh

    raw = compile_state(state_arrays(job.config, job.geometry), device_mesh(job.geometry.tp))
    return {"raw": b64encode(raw).decode()}


def _reply(job: CompileJob, message: dict[str, Any]) -> dict[str, Any]:
    try:
        if message == NATIVE_KERNELS:
            return {"raw": b64encode(library_of(job.geometry.kernels)).decode()}
        return _state_program(job) if message == STATE_PROGRAM else run_cell(job, PlannedCell(**message))
    except Exception as error:
        if not isinstance(error, Ling3Error):
            traceback.print_exc()
        return {"failure": vars(Failure.of(error))}


def main() -> None:
    """Serves cells until stdin ends."""
    parent = Parent()
    first = parent.receive()
    if "peer" in first:
        become(*first["peer"])
        parent.receive()  # never comes: the process ends with the one that compiles
    job = from_json(CompileJob, first["job"])
    _peers = prepare(job.target)  # which end when nothing names them any more
    while True:
        parent.send(_reply(job, parent.receive()))


if __name__ == "__main__":
    main()
