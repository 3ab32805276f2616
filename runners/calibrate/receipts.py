"""Receipts: how far a cell's outputs are from the plain model's, and whether that is within the tolerance.

The error of a position is the relative L2 distance of its logits. A token that was chosen greedily is right or wrong.
"""

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from msgspec.structs import replace

from ling3export.artifacts import schema
from ling3export.artifacts.schema import Receipt, Tolerance
from ling3export.foundation.errors import ArtifactError

Logits = dict[tuple[int, int], np.ndarray]  # (sequence, position) → logits [V]

# By dtype: which of all positions' errors is judged, and how large it may be. bf16 is judged by its median, since
# rounding may send one token to another expert, which moves the error of its position far (0.6 was seen).
TOLERANCES = {"float32": Tolerance("largest", 1e-5), "bfloat16": Tolerance("median", 0.15)}


@dataclass(frozen=True)
class ScoredSequence:
    """The results of a score program for one sequence of T tokens."""

    logits: dict[int, np.ndarray]  # by position, at the ends of chunks: [V] each
    logprob: np.ndarray  # [T-1], the log-probability of the next token, at each position but the last
    best: np.ndarray  # [T-1], the most likely next token, at each position but the last


def finite(error: float) -> float:
    """An error for JSON, which has no infinity: the largest number stands for what is not finite."""
    return error if math.isfinite(error) else sys.float_info.max


def relative_error(actual: np.ndarray, expected: np.ndarray) -> float:
    """Relative L2 distance of logits or log-probabilities, in float64; ``finite``."""
    expected = expected.astype(np.float64)
    return finite(float(np.linalg.norm(actual.astype(np.float64) - expected) / np.linalg.norm(expected)))


def _status(errors: Sequence[float], tolerance: Tolerance) -> str:
    judged = max(errors) if tolerance.measure == "largest" else np.median(errors)
    return "passed" if judged <= tolerance.bound else "failed"


def logits_receipt(actual: Logits, expected: Logits, tolerance: Tolerance) -> Receipt:
    """The receipt of a cell's logits at every position that has an expectation.

    Raises:
        ArtifactError: The vectors hold no expectation for any of them.
    """
    pairs = [(logits, expected[key]) for key, logits in actual.items() if key in expected]
    if not pairs:
        raise ArtifactError(
            "vectors: no logits at a position that the cell gives: nothing can be compared; build the artifact again"
        )
    errors = [relative_error(logits, wanted) for logits, wanted in pairs]
    absolute = max(finite(float(np.max(np.abs(logits - wanted)))) for logits, wanted in pairs)
    return Receipt(_status(errors, tolerance), max(errors), float(np.median(errors)), absolute, len(errors))


def exact_receipt(count: int, wrong: int) -> Receipt:
    """The receipt of exact programs. Greedy sampling must take the largest logit, an adjusted row must have the same
    numbers in the same order, and a moved state the same bits.
    """
    return Receipt("failed" if wrong else "passed", wrong / count, wrong / count, float(wrong), count)


def score_receipt(
    scored: Sequence[ScoredSequence], sequences: Sequence[schema.SequenceRecord], expected: Logits, tolerance: Tolerance
) -> Receipt:
    """The receipt of a score program: its logits, log-probabilities and most likely tokens.

    Args:
        tolerance: The error of logits at a position, and of the log-probabilities of a sequence. Where the median is
            judged, rounding may swap the two most likely tokens: these are then compared with the program's own logits
            alone.

    Returns:
        The receipt of the logits at the ends of chunks, failed if log-probabilities or most likely tokens are wrong.
        ``relative`` is the larger of both errors, ``log_probabilities`` the largest error of a sequence, ``wrong_best``
        a count of tokens.
    """
    at_ends = {(number, at): row for number, scores in enumerate(scored) for at, row in scores.logits.items()}
    receipt = logits_receipt(at_ends, expected, tolerance)
    errors, wrong = [], 0
    for number, (scores, sequence) in enumerate(zip(scored, sequences, strict=True)):
        ids = sequence.ids
        places = [at for at in range(len(ids) - 1) if (number, at) in expected]
        wanted = np.array([log_softmax(expected[number, at])[ids[at + 1]] for at in places])
        errors.append(relative_error(scores.logprob[places], wanted))
        best = {at: int(np.argmax(logits)) for at, logits in scores.logits.items()}
        if tolerance.measure == "largest":
            rows = {at: expected[number, at] for at in places}
            best |= {at: int(np.argmax(row)) for at, row in rows.items() if decided(row, tolerance.bound)}
        wrong += sum(int(scores.best[at]) != token for at, token in best.items())
    passed = receipt.status == _status(errors, tolerance) == "passed" and not wrong
    return replace(
        receipt,
        status="passed" if passed else "failed",
        relative=max(receipt.relative, *errors),
        log_probabilities=max(errors),
        wrong_best=wrong,
    )


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Log-probabilities of logits [V], in float64."""
    shifted = logits.astype(np.float64) - np.max(logits)
    return np.asarray(shifted - np.log(np.sum(np.exp(shifted))))


def decided(logits: np.ndarray, bound: float) -> bool:
    """Whether the two most likely tokens cannot swap by an error of ``bound``, relative to the norm of the logits."""
    second, first = np.sort(logits)[-2:]
    return bool(first - second > 2 * bound * np.linalg.norm(logits))


def agreement(logits: Mapping[str, Logits], cut: Mapping[tuple[int, int], Logits]) -> dict[str, float]:
    """Largest relative distance between the logits of two paddings, for prefill and for decode; and between those of a
    decode step that was cut at the experts and those of the one program.

    Args:
        logits: By cell, the logits that it gave.
        cut: Those of steps that were cut, by the paddings of ``attend`` and ``dispatch``.
    """
    distances = {}
    for phase in ("prefill", "decode"):
        cells = [values for cell, values in logits.items() if cell.startswith(phase)]
        errors = [relative_error(other[key], cells[0][key]) for other in cells[1:] for key in other if key in cells[0]]
        if errors:
            distances[f"{phase}_padding_against_padding"] = max(errors)
    steps = [(logits.get(f"decode@{padding}", {}), values) for (padding, _), values in cut.items()]
    errors = [relative_error(values[key], fused[key]) for fused, values in steps for key in values if key in fused]
    if errors:
        distances["split_against_decode"] = max(errors)
    return distances
