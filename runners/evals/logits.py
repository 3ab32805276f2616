"""Logits over the whole vocabulary after each token of a text, by an artifact in a process of its own.

A text is cut into windows that overlap by half: the first half of each is prefilled, and the tokens of the second are
decoded as they are in the text, many windows a step. So each token after the first half is judged once, after half a
window or more. Every artifact has programs for this; score programs give whole rows only at the ends of chunks.

The process is separate because the number of devices is fixed when jax starts, and the memory of one artifact must be
free before the next is loaded. Rows go through a file; the parent requests each step.
"""

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ling3export.artifacts.files import create
from ling3export.foundation.errors import Ling3Error
from ling3export.foundation.processes import Child, Failure, Parent, ending
from ling3export.runners.engine.inputs import Span, decode_fields, fitting, prefill_fields
from ling3export.runners.evals.trials import EvalError

if TYPE_CHECKING:
    from ling3export.runners.load.loader import Loaded


def judged(
    artifact: Path, ids: Sequence[int], half: int, file: Path, *, whole: bool, **options: Any
) -> Iterator[list[int]]:
    """Starts a process that writes the logits after tokens of a text, step by step.

    Args:
        half: Tokens of half a window; the first judged token is ``ids[half]``.
        file: A new file for rows fp32 ``[vocab]``.
        whole: Whether each row has its place among all rows; otherwise the rows of a step start at the begin.
        options: Arguments of ``load``.

    Yields:
        The rows that a step wrote: row i has the logits by which ``ids[half + i]`` is judged. The next step begins
        when the next item is requested.

    Raises:
        Ling3Error: The process ended.
    """
    job = {
        "artifact": str(artifact),
        "ids": list(ids),
        "half": half,
        "file": str(file),
        "whole": whole,
        "options": options,
    }
    with Child(__name__, shown=True) as child:
        child.send(job)
        while True:
            message = child.receive()
            if message is None:
                raise EvalError(f"artifact `{artifact.name}`: its process {ending(child.ended()[0])}")
            if "failure" in message:
                failure = Failure(**message["failure"])
                raise Ling3Error(failure.error, failure.hint)
            if "rows" not in message:
                return
            yield message["rows"]
            child.send({})


def steps(loaded: "Loaded", ids: Sequence[int], half: int) -> Iterator[tuple[list[int], np.ndarray]]:
    """The rows of each step (see :func:`judged`), and fp32 ``[rows, vocab]``.

    Raises:
        ArtifactError: The target has too few pages for a window.
    """
    from ling3export.runners.calibrate.vectors import page_table

    runner, target, state = loaded.runner, loaded.record, loaded.record.state
    starts = range(0, len(ids) - half, half)
    pages = math.ceil(min(2 * half, len(ids)) / state.page_size)
    most = min(state.slots, max(1, state.pages // pages))
    padding = fitting(min(most, len(starts)), target.paddings("decode"))
    together = min(most, padding)
    table = page_table(state, together, pages)
    for first in range(0, len(starts), together):
        group = starts[first : first + together]
        for slot, start in enumerate(group, 1):
            at = 0
            while at < half:
                size = fitting(half - at, target.paddings("prefill"))
                tokens = ids[start + at : start + min(at + size, half)]
                fields = prefill_fields(size, [Span(slot, at, tokens)], state.chunk, table)
                logits = runner.step("prefill", size, fields)
                at += len(tokens)
            last = math.ceil(len(tokens) / state.chunk) - 1
            yield [start], loaded.read(logits)[last : last + 1]
        for place in range(half, 2 * half - 1):
            live = [(slot, start) for slot, start in enumerate(group, 1) if start + place + 1 < len(ids)]
            if not live:
                break
            tokens = [ids[start + place] for _, start in live]
            fields = decode_fields(padding, [slot for slot, _ in live], [place] * len(live), table, tokens)
            yield (
                [start + place + 1 - half for _, start in live],
                loaded.read(runner.step("decode", padding, fields))[: len(live)],
            )


def _run(parent: Parent, job: Mapping[str, Any]) -> None:
    from ling3export.runners.load.loader import load

    loaded = load(job["artifact"], **job["options"])
    with os.fdopen(create(Path(job["file"])), "wb", buffering=0) as file:
        for rows, logits in steps(loaded, job["ids"], job["half"]):
            for at, (row, values) in enumerate(zip(rows, logits, strict=True)):
                file.seek((row if job["whole"] else at) * values.nbytes)
                file.write(values.data)
            parent.send({"rows": rows})
            parent.receive()
    parent.send({})


def main() -> None:
    """The process of :func:`judged`."""
    parent = Parent()
    try:
        _run(parent, parent.receive())
    except Exception as error:
        parent.send({"failure": asdict(Failure.of(error))})


if __name__ == "__main__":
    main()
