"""Expected results of sampling with penalties, biases and masks: the rules in numpy, one token at a time."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import numpy as np


def changed(
    logits: np.ndarray,
    prompt: Sequence[int],
    generated: Sequence[int],
    *,
    presence: float = 0,
    frequency: float = 0,
    repetition: float = 1,
    bias: Mapping[int, float] | None = None,
) -> np.ndarray:
    """The logits after penalties, biases and masks."""
    out = logits.astype(np.float64)
    for token in {*prompt, *generated}:
        out[token] = out[token] / repetition if out[token] > 0 else out[token] * repetition
    for token, count in Counter(generated).items():
        out[token] -= presence + frequency * count
    for token, add in (bias or {}).items():
        out[token] += add
    return out


def greedy(
    logits: Callable[[list[int]], np.ndarray], prompt: Sequence[int], count: int, **how: float | Mapping[int, float]
) -> list[int]:
    generated: list[int] = []
    for _ in range(count):
        row = changed(logits([*prompt, *generated]), prompt, generated, **how)  # type: ignore[arg-type]
        generated.append(int(np.argmax(row)))
    return generated


def log_softmax(row: np.ndarray) -> np.ndarray:
    """Log-probabilities in float64."""
    shifted = row.astype(np.float64) - row.max()
    return shifted - np.log(np.exp(shifted).sum())


def most_likely(row: np.ndarray, count: int) -> list[int]:
    """The tokens with the highest logits; equal logits are ordered by id."""
    return np.argsort(-row, kind="stable")[:count].tolist()
