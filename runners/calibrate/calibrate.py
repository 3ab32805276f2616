"""One command's work: a target is loaded, proven, timed and written down.

A timed call gets what the vectors gave it last, filled up to the whole of its padding: token rows of one prompt, and
decoding sequences that have cached as many tokens as the compiler's estimate is for. What the tokens are decides no
time, apart from the experts that they choose; they are random. Calls follow one after the other.
"""

import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping
from contextlib import nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ling3export.artifacts.calibration import SCHEMA, Calibration, CellTimes, programs_digest
from ling3export.artifacts.schema import Cell, Target
from ling3export.foundation.errors import Ling3Error
from ling3export.machine.verdict import measuring
from ling3export.runners.calibrate.vectors import measured, page_table
from ling3export.runners.engine.inputs import Span, decode_fields, prefill_fields

if TYPE_CHECKING:
    from ling3export.runners.load.loader import Loaded
    from ling3export.runners.load.model_runner import Inputs, ModelRunner
    from ling3export.runners.load.profile import Profile

TOKENS = 1024  # cached by each decoding sequence, where no estimate says for how many it is
WARM = 2  # calls that are not counted
TRACED = 3  # calls of each cell under the profiler
SAMPLED = {"temperature": 1.0, "top_k": 40, "top_p": 0.9, "min_p": 0.01}  # so that no part of sampling is left out


def calibrated(loaded: "Loaded", calls: int) -> Calibration | None:
    """Runs and times every cell of a loaded target.

    Args:
        loaded: The target; every one of several hosts calls this.
        calls: Calls of each cell that are counted.

    Returns:
        What was measured; None on the hosts behind the first.
    """
    manifest, target, channel = loaded.manifest, loaded.record, loaded.channel
    with channel.together() if channel else nullcontext():
        loaded.runner.inputs = {}
        receipts = measured(loaded)
        inputs, loaded.runner.inputs = loaded.runner.inputs, None
        times = timed(loaded.runner, target, inputs, manifest.vocab_size, calls)
        machine = measuring()
    if channel is not None:
        channel.finish()
        if not channel.leads:
            return None
    assert manifest.weights_digest is not None  # where there are weights, as the loader found
    decode = [cell for cell in target.cells.values() if cell.phase == "decode"]
    return Calibration(
        SCHEMA,
        manifest.source.name,
        loaded.target,
        programs_digest(manifest.targets[loaded.target]),
        manifest.weights_digest,
        datetime.now(UTC).date().isoformat(),
        machine,
        min(cached(cell, target, min(cell.padding, target.state.slots)) for cell in decode),
        {name: round(seconds, 6) for name, seconds in loaded.timings.seconds.items()},
        receipts,
        times,
    )


def timed(
    runner: "ModelRunner", target: Target, inputs: "Mapping[str, Inputs]", vocab_size: int, calls: int
) -> dict[str, CellTimes]:
    """Times every cell. On several hosts every process calls it.

    Args:
        runner: The loaded programs; the state is written over.
        target: The manifest's.
        inputs: By cell, what its last call took.
        vocab_size: Token ids are below it.
        calls: Calls of each cell that are counted.
    """
    whole = {
        name: (full(target.cells[name], target, fields, vocab_size), batch) for name, (fields, batch) in inputs.items()
    }
    found = {name: [_call(runner, name, whole[name]) for _ in range(WARM + calls)][WARM:] for name in sorted(whole)}
    profile = _profiled(runner, whole)
    return {name: _times(target.cells[name], rows, profile, target.tp) for name, rows in found.items()}


def full(cell: Cell, target: Target, fields: Mapping[str, np.ndarray], vocab_size: int) -> Mapping[str, np.ndarray]:
    """The fields of a call with all rows in use; those of phases that know no sequences stay as they are."""
    state, rng = target.state, np.random.default_rng(0)
    if "chunk_slot" in fields:
        count = min(cell.padding, state.max_pages * state.page_size, state.pages * state.page_size)
        ids = rng.integers(0, vocab_size, (2, count)).tolist()
        scores = "next_token" in fields
        span, table = Span(1, 0, ids[0], ids[1] if scores else ()), page_table(state, 1, -(-count // state.page_size))
        return _taken(prefill_fields(cell.padding, [span], state.chunk, table, score=scores), fields)
    if "page_table" in fields and "position" in fields:
        rows = min(cell.padding, state.slots, state.pages)
        tokens = cached(cell, target, rows)
        ids = rng.integers(0, vocab_size, rows).tolist()
        table = page_table(state, rows, -(-tokens // state.page_size))
        return _taken(decode_fields(cell.padding, range(1, rows + 1), [tokens - 1] * rows, table, ids), fields)
    return {**fields} | {name: np.full_like(fields[name], value) for name, value in SAMPLED.items() if name in fields}


def _taken(filled: Mapping[str, np.ndarray], fields: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
    """``fields`` with what a phase, or a part of one, takes of ``filled``."""
    return {**fields, **{name: value for name, value in filled.items() if name in fields}}


def cached(cell: Cell, target: Target, rows: int) -> int:
    """Tokens that each of ``rows`` sequences has cached: as many as the estimate is for, or as fit."""
    state = target.state
    wanted = TOKENS if cell.estimate is None else cell.estimate.tokens_a_sequence
    return min(wanted, state.max_pages * state.page_size, state.pages // rows * state.page_size)


def _call(runner: "ModelRunner", name: str, inputs: "Inputs") -> tuple[float, float]:
    """The seconds until a call returned, and until all was there."""
    import jax

    fields, batch = inputs
    begin = time.perf_counter()
    out = runner.call(name, fields, batch)
    returned = time.perf_counter()
    jax.block_until_ready((out, runner.state))
    return returned - begin, time.perf_counter() - begin


def _profiled(runner: "ModelRunner", inputs: "Mapping[str, Inputs]") -> "Profile | None":
    """What jax's profiler says of a few calls of each cell; None where it knows none of these devices."""
    from ling3export.runners.load.profile import traced

    def work() -> None:
        for _ in range(TRACED):  # in turn: traces of some devices do not part calls of one program
            for name, given in inputs.items():
                _call(runner, name, given)

    with tempfile.TemporaryDirectory() as folder:
        try:
            return traced(work, Path(folder))
        except Ling3Error:
            return None


def _times(cell: Cell, calls: list[tuple[float, float]], profile: "Profile | None", tp: int) -> CellTimes:
    dispatch, whole = zip(*calls, strict=True)
    spans = profile.spans.get(cell.name) if profile is not None else None
    by_kind = defaultdict[str, float](float)
    if profile is not None and spans:
        for each in profile.operations:
            if each.program == cell.name:
                by_kind[each.kind or "unknown"] += each.seconds / len(spans) / tp
    return CellTimes(
        calls=len(calls),
        median=statistics.median(whole),
        fastest=min(whole),
        slowest=max(whole),
        dispatch=statistics.median(dispatch),
        device=statistics.median(spans) if spans else None,
        by_kind=by_kind or None,
        estimate=cell.estimated_seconds,
        bound=None if cell.floor is None else cell.floor.seconds,
    )
