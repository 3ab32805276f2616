"""Times the cells of a loaded target: how long a call takes on this machine.

A timed call repeats the last call that the vectors made, filled up to the whole of its padding: prefill gets token rows
of one prompt, and decode gets sequences with the number of cached tokens of the compiler's estimate. Token values
change no time except through the experts that they choose, so they are random. Calls follow one after the other.
"""

import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ling3export.artifacts.calibration import SCHEMA, Calibration, CellTimes, programs_digest
from ling3export.artifacts.files import replace_file
from ling3export.artifacts.schema import Cell, Receipts, Target
from ling3export.foundation.errors import ArtifactError
from ling3export.machine.verdict import measuring
from ling3export.runners.calibrate.vectors import page_table
from ling3export.runners.engine.inputs import Span, decode_fields, prefill_fields

if TYPE_CHECKING:
    from ling3export.runners.load.loader import Loaded
    from ling3export.runners.load.model_runner import Inputs, ModelRunner

TOKENS = 1024  # cached by each decoding sequence of a cell without an estimate
TRACED = 5  # calls in a trace
WARM, CALLS = 2, 20  # calls of a cell that are not counted, and that are
SAMPLED = {"temperature": 1.0, "top_k": 40, "top_p": 0.9, "min_p": 0.01}  # so that no part of sampling is left out


def timed(
    loaded: "Loaded", inputs: "Mapping[str, Inputs]", receipts: Receipts, traces: Path | None = None
) -> Calibration:
    """Times every cell. On several hosts every process calls it; the result of the first one counts.

    Args:
        loaded: The target; its state is overwritten.
        inputs: By cell, what its last call took.
        traces: A folder for a trace of each cell, ``CELL.trace.json.gz``, of calls after the timed ones.
    """
    manifest, target = loaded.manifest, loaded.record
    assert manifest.weights_digest is not None  # the loader refuses an artifact without weights
    cells = {}
    for name, (fields, batch) in sorted(inputs.items()):
        call = full(target.cells[name], target, fields, manifest.vocab_size), batch
        seconds = [_call(loaded.runner, name, call) for _ in range(WARM + CALLS)][WARM:]
        cells[name] = CellTimes(CALLS, statistics.median(seconds), min(seconds), max(seconds))
        if traces is not None:
            trace(partial(_call, loaded.runner, name, call), traces, name)
    decode = [cell for cell in target.cells.values() if cell.phase == "decode"]
    return Calibration(
        SCHEMA,
        loaded.target,
        programs_digest(manifest.targets[loaded.target]),
        manifest.weights_digest,
        datetime.now(UTC).date().isoformat(),
        measuring(),
        min(cached(cell, target, min(cell.padding, target.state.slots)) for cell in decode),
        receipts,
        cells,
    )


def trace(call: Callable[[], object], folder: Path, name: str) -> None:
    """Writes ``NAME.trace.json.gz``, jax's profiler on a few calls.

    Raises:
        ArtifactError: The profiler wrote no trace, or the file cannot be written.
    """
    import jax

    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # a trace holds a million events
    with tempfile.TemporaryDirectory(prefix="ling3-trace-") as temporary:
        with jax.profiler.trace(temporary, profiler_options=options):
            for _ in range(TRACED):
                call()
        files = sorted(Path(temporary).glob("plugins/profile/*/*.trace.json.gz"))
        if not files:
            raise ArtifactError(f"{name}: jax's profiler wrote no trace")
        folder.mkdir(parents=True, exist_ok=True)
        replace_file(folder / f"{name}.trace.json.gz", files[-1].read_bytes())


def full(cell: Cell, target: Target, fields: Mapping[str, np.ndarray], vocab_size: int) -> Mapping[str, np.ndarray]:
    """The fields of a call with all rows in use. Phases without sequences keep the fields that they have."""
    state, rng = target.state, np.random.default_rng(0)
    if "chunk_slot" in fields:
        count = min(cell.padding, state.max_pages * state.page_size, state.pages * state.page_size)
        ids = rng.integers(0, vocab_size, (2, count)).tolist()
        scores = "next_token" in fields
        span, table = Span(1, 0, ids[0], ids[1] if scores else ()), page_table(state, 1, -(-count // state.page_size))
        filled = prefill_fields(cell.padding, [span], state.chunk, table, score=scores)
    elif "page_table" in fields and "position" in fields:
        rows = min(cell.padding, state.slots, state.pages)
        tokens = cached(cell, target, rows)
        ids = rng.integers(0, vocab_size, rows).tolist()
        table = page_table(state, rows, -(-tokens // state.page_size))
        filled = decode_fields(cell.padding, range(1, rows + 1), [tokens - 1] * rows, table, ids)
    else:
        filled = {name: np.full_like(fields[name], value) for name, value in SAMPLED.items() if name in fields}
    return {name: filled.get(name, value) for name, value in fields.items()}


def cached(cell: Cell, target: Target, rows: int) -> int:
    """Tokens that each of ``rows`` sequences has cached: as many as the estimate is for, or as many as fit."""
    state = target.state
    wanted = TOKENS if cell.estimate is None else cell.estimate.tokens_a_sequence
    return min(wanted, state.max_pages * state.page_size, state.pages // rows * state.page_size)


def _call(runner: "ModelRunner", name: str, inputs: "Inputs") -> float:
    """Seconds until all outputs of a call are computed."""
    import jax

    fields, batch = inputs
    begun = time.perf_counter()
    out = runner.call(name, fields, batch)
    jax.block_until_ready((out, runner.state))
    return time.perf_counter() - begun
