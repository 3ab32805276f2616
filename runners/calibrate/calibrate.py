"""One command's work: a target is loaded, proven, timed and written down, with a page for people."""

import math
import sys
from contextlib import nullcontext
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from ling3export.artifacts.calibration import SCHEMA, Calibration, programs_digest
from ling3export.artifacts.schema import Receipt
from ling3export.runners.calibrate.times import cached, timed
from ling3export.runners.calibrate.vectors import measured

if TYPE_CHECKING:
    from ling3export.runners.load.loader import Loaded


def calibrated(loaded: "Loaded", calls: int) -> Calibration | None:
    """Runs and times every cell of a loaded target.

    Args:
        loaded: The target; every one of several hosts calls this.
        calls: Calls of each cell that are counted.

    Returns:
        What was measured; None on the hosts behind the first.
    """
    from ling3export.runners.load.calibrated import measuring

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
        replace(
            receipts,
            cells={name: finite(each) for name, each in receipts.cells.items()},
            agreement={name: _finite(error) for name, error in receipts.agreement.items()},
        ),
        times,
    )


def finite(receipt: Receipt) -> Receipt:
    """A receipt for JSON, which has no infinity: the largest number stands for what is not finite."""
    errors = {name: _finite(value) for name, value in vars(receipt).items() if isinstance(value, float)}
    return Receipt(**vars(receipt) | errors)


def _finite(value: float) -> float:
    return value if math.isfinite(value) else sys.float_info.max
