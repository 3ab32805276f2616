"""Receipts: how far a cell's outputs are from the plain model's, and whether that is within the tolerance.

The error of a position is the relative L2 distance of its logits. A greedy token is right or wrong.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ling3export.artifacts import schema
from ling3export.artifacts.schema import Receipt, Receipts, Tolerance

Logits = dict[tuple[int, int], np.ndarray]  # (sequence, position) → logits [V]

# By dtype: which error of all positions is judged, and the largest that it may be. bf16 is judged by its median, since
# rounding may send one token to another expert, which alone moves the error of its position to up to 0.3.
TOLERANCES = {"float32": ("largest", 1e-5), "bfloat16": ("median", 0.15)}


@dataclass(frozen=True)
class Scored:
    """What a score program returns for one sequence of T tokens.

    Attributes:
        logits: By position, at the ends of chunks: [V] each.
        logprob: [T-1], the log-probability of the token behind each position but the last.
        best: [T-1], the most likely token behind each of them.
    """

    logits: dict[int, np.ndarray]
    logprob: np.ndarray
    best: np.ndarray


def relative_error(found: np.ndarray, expected: np.ndarray) -> float:
    """Relative L2 distance of one position's logits, in float64; infinite where a value is not finite."""
    if not np.isfinite(found).all():
        return float("inf")
    expected = expected.astype(np.float64)
    return float(np.linalg.norm(found.astype(np.float64) - expected) / np.linalg.norm(expected))


def logits_receipt(found: Logits, expected: Logits, dtype: str) -> Receipt:
    """The receipt of a cell's logits at every position that has an expectation."""
    errors = [relative_error(value, expected[key]) for key, value in found.items() if key in expected]
    absolute = max(float(np.max(np.abs(value - expected[key]))) for key, value in found.items() if key in expected)
    measure, bound = TOLERANCES[dtype]
    judged = max(errors) if measure == "largest" else float(np.median(errors))
    status = "passed" if judged <= bound else "failed"
    return Receipt(status, max(errors), float(np.median(errors)), absolute, len(errors))


def tokens_receipt(count: int, wrong: int) -> Receipt:
    """The receipt of greedy sampling, which is exact: a token that is not the first of the largest logits is wrong."""
    share = wrong / count
    status = "passed" if wrong == 0 else "failed"
    return Receipt(status, share, share, float(wrong), count)


def score_receipt(
    receipt: Receipt, scored: Sequence[Scored], sequences: Sequence[schema.Sequence], expected: Logits,
    measure: str, bound: float,
) -> Receipt:  # fmt: skip
    """The receipt of a score program: its logits, log-probabilities and most likely tokens.

    Args:
        receipt: The receipt of the logits at the ends of chunks.
        scored: What the program returned for every sequence.
        sequences: The manifest's vectors.
        expected: The plain model's logits.
        measure: ``largest`` judges the largest of the sequences' errors. ``median`` judges their median; rounding may
            swap the two most likely tokens, so these are then compared with the program's own logits alone.
        bound: The largest relative error that a sequence's log-probabilities may have.

    Returns:
        ``receipt``, failed if log-probabilities or most likely tokens are wrong. ``relative`` becomes the larger of
        both errors; ``log_probabilities`` (the largest error) and ``wrong_best`` (a count) are new.
    """
    errors, wrong = [], 0
    for number, (said, sequence) in enumerate(zip(scored, sequences, strict=True)):
        ids = sequence.ids
        places = [at for at in range(len(ids) - 1) if (number, at) in expected]
        wanted = np.array([log_softmax(expected[number, at])[ids[at + 1]] for at in places])
        distance = np.linalg.norm(said.logprob[places] - wanted) / np.linalg.norm(wanted)
        errors.append(float(distance) if np.isfinite(distance) else float("inf"))
        best = {at: int(np.argmax(logits)) for at, logits in said.logits.items()}
        if measure == "largest":
            best |= {at: int(np.argmax(expected[number, at])) for at in places if decided(expected[number, at], bound)}
        wrong += sum(int(said.best[at]) != token for at, token in best.items())
    judged = max(errors) if measure == "largest" else float(np.median(errors))
    passed = receipt.status == "passed" and judged <= bound and not wrong
    return replace(
        receipt, status="passed" if passed else "failed", relative=max(receipt.relative, *errors),
        log_probabilities=max(errors), wrong_best=wrong,
    )  # fmt: skip


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Log-probabilities of logits [V], in float64."""
    shifted = logits.astype(np.float64) - np.max(logits)
    return np.asarray(shifted - np.log(np.sum(np.exp(shifted))))


def decided(logits: np.ndarray, bound: float) -> bool:
    """Whether no error of ``bound``, relative to the norm of the logits, can swap the two most likely tokens."""
    second, first = np.sort(logits)[-2:]
    return bool(first - second > 2 * bound * np.linalg.norm(logits))


def agreement(found: Mapping[str, Logits]) -> dict[str, float]:
    """Largest relative distance between the logits of two paddings, for prefill and for decode.

    Args:
        found: By cell, the logits that it gave.
    """
    distances = {}
    for phase in ("prefill", "decode"):
        cells = [values for cell, values in found.items() if cell.startswith(phase)]
        errors = [relative_error(other[key], cells[0][key]) for other in cells[1:] for key in other if key in cells[0]]
        if errors:
            distances[f"{phase}_padding_against_padding"] = max(errors)
    return distances


ERROR_COLUMNS = ("median error", "worst error")


def error_columns(cell: str, receipts: Receipts | None) -> tuple[str, str]:
    """A cell's receipt for the ERROR_COLUMNS of a table; the error that is judged stands beside its tolerance.

    Args:
        cell: The cell's name, ``decode@16``.
        receipts: Those of its target; None where no cell was run.
    """
    if receipts is None or cell not in receipts.cells:
        return "not run", "-"
    receipt, tolerance = receipts.cells[cell], receipts.tolerance
    if cell.startswith("sample@"):
        wrong = f"{receipt.absolute:.0f} of {receipt.positions} wrong"
        return ("exact" if receipt.status == "passed" else wrong), "-"
    median, worst = f"{receipt.median:.1e}", f"{receipt.relative:.1e}"
    if tolerance.measure == "median":
        return _beside(median, receipt.median, tolerance.bound), worst
    return median, _beside(worst, receipt.relative, tolerance.bound)


def _beside(text: str, error: float, bound: float) -> str:
    return f"{text} {'≤' if error <= bound else '>'} {bound:.1e}"


def explained(tolerance: Tolerance) -> str:
    """A line that says what the errors of receipts are, and which of them is judged."""
    errors = "errors are relative L2 distances of a position's logits from the plain model's"
    if tolerance.measure == "median":
        return (
            f"{errors}; the median of all positions may be up to {tolerance.bound:.1e} (bfloat16). The worst is not "
            "judged: rounding that sends one token to another expert alone makes it up to 0.3"
        )
    return f"{errors}; the worst may be up to {tolerance.bound:.1e} (float32)"
