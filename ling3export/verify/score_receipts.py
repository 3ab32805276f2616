"""The receipt of a score program: what it says of given tokens, against the stored logits of the plain model."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Stored = Mapping[tuple[int, int], np.ndarray]  # (sequence, position) → logits [V]


@dataclass(frozen=True)
class Scored:
    """What a score program said of one sequence.

    Attributes:
        logits: By position, at the ends of chunks.
        logprob: Of the token behind each position but the last.
        best: The best token behind each of them.
    """

    logits: dict[int, np.ndarray]
    logprob: np.ndarray
    best: np.ndarray


def score_receipt(
    receipt: dict[str, Any], scored: Sequence[Scored], sequences: Sequence[Mapping[str, Any]], expected: Stored,
    measure: str, bound: float,
) -> dict[str, Any]:  # fmt: skip
    """A receipt of the logits, and of the log-probabilities and best tokens too.

    Args:
        receipt: That of the logits at the ends of chunks.
        scored: Of every sequence.
        sequences: The manifest's vectors.
        expected: The plain model's logits.
        measure: ``largest``: of the sequences' errors, the largest counts. ``median``: rounding may turn the best two
            tokens round, so these are compared with the program's own logits alone.
        bound: What the relative error of a sequence's log-probabilities may be.

    Returns:
        ``receipt``, failed if log-probabilities or best tokens are wrong; ``relative`` is the worst of both errors, and
        ``log_probabilities`` and ``wrong_best`` are new.
    """
    errors, wrong = [], 0
    for number, (said, sequence) in enumerate(zip(scored, sequences, strict=True)):
        ids = sequence["ids"]
        places = [at for at in range(len(ids) - 1) if (number, at) in expected]
        wanted = np.array([log_softmax(expected[number, at])[ids[at + 1]] for at in places])
        distance = np.linalg.norm(said.logprob[places] - wanted) / np.linalg.norm(wanted)
        errors.append(float(distance) if np.isfinite(distance) else float("inf"))
        best = {at: int(np.argmax(logits)) for at, logits in said.logits.items()}
        if measure == "largest":
            best |= {at: int(np.argmax(expected[number, at])) for at in places if decided(expected[number, at], bound)}
        wrong += sum(int(said.best[at]) != token for at, token in best.items())
    judged = max(errors) if measure == "largest" else float(np.median(errors))
    passed = receipt["status"] == "passed" and judged <= bound and not wrong
    return receipt | {
        "status": "passed" if passed else "failed",
        "relative": max(receipt["relative"], *errors),
        "log_probabilities": max(errors),
        "wrong_best": wrong,
    }


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Of ``[V]``, in float64."""
    shifted = logits.astype(np.float64) - np.max(logits)
    return np.asarray(shifted - np.log(np.sum(np.exp(shifted))))


def decided(logits: np.ndarray, bound: float) -> bool:
    """Whether no error of ``bound``, relative to the norm, can turn the best two tokens round."""
    second, first = np.sort(logits)[-2:]
    return bool(first - second > 2 * bound * np.linalg.norm(logits))
