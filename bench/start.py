"""One start in a process of its own: ``python -m bench.start aot|jit ARTIFACT CHECKPOINT``; seconds as JSON.

``aot`` loads the artifact as the runner does. ``jit`` traces and compiles the same steps from the model's sources, with
the same weights.
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
THREADS = os.cpu_count() or 1  # for the loader and for jit


def finish(seconds: dict[str, float], runner: Any, target: "Target") -> dict[str, Any]:
    """Runs until the first token of PROMPT, and prints the report."""
    import numpy as np

    from ling3export.runners.engine.inputs import Span, prefill_fields, sample_fields

    started = time.perf_counter()
    state, spawned = target.state, float(os.environ["BENCH_SPAWNED"])
    pages = np.zeros((state.slots + 1, state.max_pages), np.int32)
    held = -(-len(PROMPT) // state.page_size)
    pages[1, :held] = 1 + np.arange(held)
    padding = next(size for size in target.paddings("prefill") if size >= len(PROMPT))
    logits = runner.step("prefill", padding, prefill_fields(padding, [Span(1, 0, PROMPT)], state.chunk, pages))
    rows, row = padding // state.chunk, (len(PROMPT) - 1) // state.chunk
    token = int(runner.read(runner.sample(logits, rows, sample_fields(rows, [row], [1], [len(PROMPT)])))[row])
    seconds["first step"] = time.perf_counter() - started
    seconds["whole"] = time.monotonic() - spawned
    seconds["interpreter"] = STARTED - spawned
    return {"seconds": seconds, "token": token}


def aot(artifact: Path) -> dict[str, Any]:
    """Loads the artifact with the runner's loader."""
    from ling3export.runners.load.loader import load

    loaded = load(artifact, report=lambda text: None, early=True)  # like an engine
    result = finish(dict(loaded.timings.seconds), loaded.runner, loaded.record)
    return result | {"compiles": loaded.compiles.count}


def jit(artifact: Path, checkpoint: Path) -> dict[str, Any]:
    """Traces and compiles the same steps from the model's sources."""
    from ling3export.runners.load.loader import Timings

    timings = Timings()
    with timings.stage("imports"):
        from ling3export.artifacts.manifest import read_checked, read_manifest
        from ling3export.machine.targets import prepare

        manifest = read_manifest(artifact)
        record = next(iter(manifest.targets.values()))
        prepare(record)
        import jax

        from ling3export.artifacts.store import Store
        from ling3export.compile.lower import prepared
        from ling3export.machine.pjrt import CompileCounter, recorded_mesh
        from ling3export.model.config import Config
        from ling3export.model.geometry import Geometry
        from ling3export.runners.load.fresh import state_source
        from ling3export.runners.load.model_runner import ModelRunner, parameter_arrays

        jax.devices()
    mesh = recorded_mesh(record.mesh)
    with timings.stage("weights"):
        params = parameter_arrays(Store(artifact, manifest.weights.index), record, mesh)
    with timings.stage("state"):
        file = record.state_program
        source = state_source({} if file is None else {file: read_checked(artifact, file)}, record, mesh)
        state = source()
    config = Config.from_path(checkpoint / "config.json")
    geometry = Geometry(**cast(dict[str, Any], record.geometry))
    events = CompileCounter()

    def compiled(cell: "Cell") -> Callable[..., list[jax.Array]]:
        step, function, arguments = prepared(config, geometry, cell.phase, cell.padding, mesh)
        program, tree = function.lower(*arguments).compile(), jax.tree.structure(step.arguments)
        return lambda *leaves: jax.tree.leaves(program(*jax.tree.unflatten(tree, leaves)))

    with timings.stage(PREPARATION), ThreadPoolExecutor(THREADS) as pool:
        cells = dict(zip(record.cells, pool.map(compiled, record.cells.values()), strict=True))
    result = finish(timings.seconds, ModelRunner(record, cells, params, state, source, mesh), record)
    return result | {"compiles": events.count}


def main() -> None:
    name, artifact, checkpoint = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    print(json.dumps(jit(artifact, checkpoint) if name == "jit" else aot(artifact)))


if __name__ == "__main__":
    main()
