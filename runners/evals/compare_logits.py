"""The distance of two artifacts' distributions over a text: the cost of quantized weights, for example."""

import itertools
import math
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ling3export.artifacts.schema import Manifest
from ling3export.artifacts.signing import read_trusted
from ling3export.foundation.reading import opened
from ling3export.runners.calibrate.receipts import log_softmax
from ling3export.runners.evals.logits import judged
from ling3export.runners.evals.trials import EvalError
from ling3export.runners.text.tokenizer import TokenizerFiles

LETTERS = 32  # bytes of a text that are read for each token at most
ROOM = "judge fewer tokens with --tokens, or name a folder with more room in TMPDIR"


@dataclass(frozen=True)
class LogitsComparison:
    """B's distributions, with A's as the reference. KL(A || B) is in nats, over the whole vocabulary."""

    tokens: int  # number of judged tokens
    window: int  # tokens that the model saw at once; each token was judged after half of them or more
    kl_mean: float
    kl_error: float | None  # standard error of the mean, as if tokens were independent; None for one token
    kl_median: float
    kl_p99: float
    kl_max: float
    same_best: float  # share of tokens for which both have the same most likely token
    perplexity_a: float
    perplexity_b: float
    perplexity_ratio: float  # B's divided by A's


class Row(NamedTuple):
    """Both artifacts on one token."""

    kl: float
    same_best: bool
    logprob_a: float
    logprob_b: float


def judge(a: np.ndarray, b: np.ndarray, token: int) -> Row:
    """Two rows of logits [V], and the token that follows in the text.

    Raises:
        EvalError: A number is not finite.
    """
    for name, row in (("A", a), ("B", b)):
        if not np.isfinite(row).all():
            raise EvalError(f"logits of {name}: expected finite numbers, found others")
    p, q = log_softmax(a), log_softmax(b)
    return Row(float(np.exp(p) @ (p - q)), bool(np.argmax(a) == np.argmax(b)), float(p[token]), float(q[token]))


def summed(rows: Sequence[Row], window: int) -> LogitsComparison:
    """The figures of all tokens."""
    kl, same, a, b = (np.array(column, np.float64) for column in zip(*rows, strict=True))
    median, p99 = np.quantile(kl, (0.5, 0.99))
    nats_a, nats_b = -float(np.mean(a)), -float(np.mean(b))
    return LogitsComparison(
        tokens=len(kl),
        window=window,
        kl_mean=float(np.mean(kl)),
        kl_error=float(np.std(kl, ddof=1)) / math.sqrt(len(kl)) if len(kl) > 1 else None,
        kl_median=float(median),
        kl_p99=float(p99),
        kl_max=float(np.max(kl)),
        same_best=float(np.mean(same)),
        perplexity_a=math.exp(nats_a),
        perplexity_b=math.exp(nats_b),
        perplexity_ratio=math.exp(nats_b - nats_a),
    )


def compare_logits(
    a: Path,
    b: Path,
    text: Path,
    tokens: int,
    window: int,
    *,
    progress: Callable[[int, int], None] = lambda done, total: None,
    **options: Any,
) -> LogitsComparison:
    """Runs a text through A, whose logits are kept in a file, and then through B.

    Memory beyond one loaded artifact is that of a step's rows; the file takes ``tokens * vocab_size * 4`` bytes.

    Args:
        b: Of A's vocabulary, with any form of weights and any target.
        text: A file in UTF-8; no more of it is read than is judged.
        tokens: Most tokens that are judged.
        window: Most tokens that the model sees at once; a shorter context or text bounds it.
        progress: Called with the numbers of finished and of all rows, those of both artifacts.
        options: Arguments of ``load``.

    Raises:
        EvalError: The artifacts have other vocabularies or tokenizers, the text is too short or no text, there is no
            room for the file, or a number is not finite.
        Ling3Error: An artifact cannot be loaded or run here.
    """
    ids, half, vocab = _text(a, b, text, tokens, window)
    count, done, rows = len(ids) - half, 0, list[Row]()
    with tempfile.TemporaryDirectory(prefix="ling3-logits-") as folder:
        if shutil.disk_usage(folder).free < count * vocab * 4:
            needed = f"{count:,} tokens * {vocab:,} logits * 4 bytes = {count * vocab * 4 / 1e9:.1f} GB"
            raise EvalError(f"logits of A: expected room for {needed}, found less, in {folder}", ROOM)
        kept, step = Path(folder, "a"), Path(folder, "b")
        for places in judged(a, ids, half, kept, whole=True, **options):
            done += len(places)
            progress(done, 2 * count)
        for places in judged(b, ids, half, step, whole=False, **options):
            for place, q in zip(places, _rows(step, range(len(places)), vocab), strict=True):
                (p,) = _rows(kept, [place], vocab)
                rows.append(judge(p, q, ids[half + place]))
            done += len(places)
            progress(done, 2 * count)
    return summed(rows, 2 * half)


def _rows(file: Path, places: Sequence[int], vocab: int) -> Iterator[np.ndarray]:
    for place in places:
        yield np.fromfile(file, np.float32, vocab, offset=place * vocab * 4)


def _text(a: Path, b: Path, text: Path, tokens: int, window: int) -> tuple[list[int], int, int]:
    """The ids of the judged tokens and of those before them; half a window; the size of the vocabulary."""
    manifests = [read_trusted(folder, lambda line: None) for folder in (a, b)]
    sizes = [manifest.vocab_size for manifest in manifests]
    if sizes[0] != sizes[1]:
        raise EvalError(f"vocabularies: expected the same, found {sizes[0]:,} tokens in {a} and {sizes[1]:,} in {b}")
    half = min(window, *(manifest.plan.context for manifest in manifests)) // 2
    try:
        with opened(text.parent, text.name, links=True) as file:
            read = file.read((tokens + half) * LETTERS)
        words = read.decode(errors="strict" if len(read) < (tokens + half) * LETTERS else "ignore")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise EvalError(f"text: expected a file in UTF-8, found {reason}, at {text}") from error
    encoded = (_ids(folder, manifest, words) for folder, manifest in zip((a, b), manifests, strict=True))
    first, second = (ids[: tokens + half] for ids in encoded)
    if first != second:
        same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))
        at = sum(1 for _ in same)
        raise EvalError(f"tokenizers: expected the same tokens of the text, found others from token {at} on, in {b}")
    if len(first) < 2:
        raise EvalError(f"text: expected two tokens or more, found {len(first)}, at {text}")
    half = min(half, len(first) // 2)
    return first[: tokens + half], half, sizes[0]


def _ids(folder: Path, manifest: Manifest, text: str) -> list[int]:
    return TokenizerFiles(folder, manifest.tokenizer, manifest.eos_token_ids).tokenizer("text").encode(text)
