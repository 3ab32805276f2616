"""One start in a process of its own: ``python -m bench.start ARM ARTIFACT CHECKPOINT``; seconds as JSON.

``aot`` loads the artifact as the runner does. ``programs`` only makes the artifact's programs ready, nothing beside it,
one stage after the other. ``jit`` traces and compiles the same steps from the model's sources, with the same weights;
it is the cold arm, or the warm one where JAX_COMPILATION_CACHE_DIR names a filled cache.
"""

import time

STARTED = time.monotonic()

import json  # noqa: E402
import os  # noqa: E402
import sys  # noqa: E402
from collections.abc import Callable  # noqa: E402
from concurrent.futures import ThreadPoolExecutor  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import TYPE_CHECKING, Any, cast  # noqa: E402

if TYPE_CHECKING:
    from ling3export.artifacts.schema import Cell, Target

PROMPT = [2, *range(40, 56)]  # 17 tokens
PREPARATION = "program preparation"
THREADS = os.cpu_count() or 1  # for the loader and for jit alike


def processor() -> float:
    """Processor seconds of this process so far, all threads: what other users of the machine disturb less."""
    return time.process_time()


def finish(seconds: dict[str, float], device: Any, record: "Target") -> dict[str, Any]:
    """The first token, and the report."""
    from bench.drive import Driver

    started = time.perf_counter()
    handle = Driver(device, record).prefill(1, PROMPT)
    row = -(-len(PROMPT) // record.state.chunk) - 1
    token = int(device.read(handle)[row])
    seconds["first step"] = time.perf_counter() - started
    seconds["whole"] = time.monotonic() - float(os.environ["BENCH_SPAWNED"])
    seconds["interpreter"] = STARTED - float(os.environ["BENCH_SPAWNED"])
    return {"seconds": seconds, "cpu": {"whole": processor()}, "token": token}


def aot(artifact: Path) -> dict[str, Any]:
    """The artifact through the runner's loader."""
    from ling3export.runners.load.loader import load

    loaded = load(artifact, report=lambda text: None, early=True)  # as an engine does
    result = finish(dict(loaded.timings.seconds), loaded.runner, loaded.record)
    return result | {"compiles": loaded.compiles.count, "traces": loaded.compiles.traces}


def programs(artifact: Path) -> dict[str, Any]:
    """Manifest, digests, verdicts and loading of every program; nothing runs beside it."""
    from ling3export.artifacts.manifest import read_manifest
    from ling3export.machine.targets import prepare

    prepare(next(iter(read_manifest(artifact).targets.values())))
    import jax

    from ling3export.machine import pjrt
    from ling3export.machine.verdict import enforce, executable_fits, judge, machine_here
    from ling3export.runners.load import programs as work

    jax.devices()
    clock, before = Clock(), processor()
    manifest = read_manifest(artifact)
    name, record = next(iter(manifest.targets.items()))
    clock.lap("manifest")
    with ThreadPoolExecutor(THREADS) as pool:
        files = work.read_executables(artifact, record, pool)
        read = {file: found.result() for file, found in files.items()}
        clock.lap("read and digest")
        verdicts = judge(record, machine_here(), executable_fits)
        enforce(verdicts, "prebuilt-only", name, str(artifact))
        clock.lap("verdicts")
        mesh = pjrt.recorded_mesh(record.mesh)
        work.load_programs(read, record, mesh, verdicts, {}, pool).settle()
        clock.lap("load")
    total = sum(clock.seconds.values())
    return {"seconds": clock.seconds | {PREPARATION: total}, "cpu": {PREPARATION: processor() - before}}


def jit(artifact: Path, checkpoint: Path) -> dict[str, Any]:
    """The same steps from the model's sources."""
    clock = Clock()
    from ling3export.artifacts.manifest import read_checked, read_manifest
    from ling3export.machine.targets import prepare

    manifest = read_manifest(artifact)
    record = next(iter(manifest.targets.values()))
    prepare(record)
    clock.lap("manifest")
    import jax

    from ling3export.compile.lower import with_shardings
    from ling3export.machine.pjrt import CompileCounter, recorded_mesh
    from ling3export.model.config import Config
    from ling3export.model.geometry import Geometry
    from ling3export.model.program import build_step
    from ling3export.runners.load.fresh import state_source
    from ling3export.runners.load.model_runner import ModelRunner
    from ling3export.runners.load.weights import Weights

    clock.lap("imports")
    jax.devices()
    clock.lap("backend")
    mesh = recorded_mesh(record.mesh)
    params = Weights(artifact, manifest, record).arrays(mesh)
    clock.lap("weights")
    file = record.state_program
    source = state_source({} if file is None else {file: read_checked(artifact, file)}, record, mesh)
    state = source()
    clock.lap("state")
    config = Config.from_file(checkpoint / "config.json")
    geometry = Geometry(**cast(dict[str, Any], record.geometry))
    events, before = CompileCounter(), processor()

    def prepared(cell: "Cell") -> Callable[..., list[jax.Array]]:
        step = build_step(config, geometry, cell.phase, cell.padding, mesh)
        arguments = with_shardings(step.arguments, step.specs, mesh)
        compiled = jax.jit(step.call, donate_argnums=(1,)).lower(*arguments).compile()
        tree = jax.tree.structure(step.arguments)
        return lambda *leaves: jax.tree.leaves(compiled(*jax.tree.unflatten(tree, leaves)))

    with ThreadPoolExecutor(THREADS) as pool:
        found = dict(zip(record.cells, pool.map(prepared, record.cells.values()), strict=True))
    clock.lap(PREPARATION)
    spent = {PREPARATION: processor() - before}
    result = finish(clock.seconds, ModelRunner(record, found, params, state, source, mesh), record)
    result["cpu"] |= spent
    return result | {"compiles": events.count, "cache_hits": events.cache_hits}


class Clock:
    """Seconds between laps."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        """What went by since the last lap was ``name``."""
        now = time.perf_counter()
        self.seconds[name] = now - self._last
        self._last = now


def main() -> None:
    name, artifact, checkpoint = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    result = jit(artifact, checkpoint) if name == "jit" else {"aot": aot, "programs": programs}[name](artifact)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
