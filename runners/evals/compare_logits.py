"""The distance of two artifacts' distributions over a text: the cost of quantized weights, for example.

A text is cut into windows that overlap by half: the first half of each is prefilled, and the tokens of the second are
decoded as they are in the text, many windows a step. So each token after the first half is judged once, after half a
window or more. Every artifact has programs for this; score programs give whole rows only at the ends of chunks.

Each artifact runs in a process of its own, because the number of devices is fixed when jax starts, and the memory of
one must be free before the next is loaded. The first writes its logits into a file, the second judges its own by them.
"""

import itertools
import math
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ling3export.artifacts.files import create
from ling3export.artifacts.schema import Manifest
from ling3export.artifacts.signing import read_trusted
from ling3export.foundation.errors import Ling3Error
from ling3export.foundation.processes import Child, Failure, Parent, ending
from ling3export.foundation.reading import opened
from ling3export.runners.calibrate.receipts import log_softmax
from ling3export.runners.engine.inputs import Span, decode_fields, fitting, prefill_fields
from ling3export.runners.evals.trials import EvalError
from ling3export.runners.text.tokenizer import TokenizerFiles

if TYPE_CHECKING:
    from ling3export.runners.load.loader import Loaded

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
    """Two rows of logits [V], and the token that follows in the text; EvalError if a number is not finite."""
    for name, row in (("A", a), ("B", b)):
        if not np.isfinite(row).all():
            raise EvalError(f"logits of {name}: a number is not finite")
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
    """Runs a text through A, and then through B.

    A's logits lie in a file meanwhile, of ``tokens * vocab_size * 4`` bytes.

    Args:
        b: An artifact with A's vocabulary, with any form of weights and any target.
        text: A file in UTF-8; no more of it is read than is judged.
        window: Most tokens that the model sees at once; a shorter context or text bounds it.

    Raises:
        EvalError: The artifacts have other vocabularies or tokenizers, the text is too short or no text, there is no
            room for the file.
        Ling3Error: An artifact cannot be loaded or run here, or a number is not finite.
    """
    ids, half, vocab = _text(a, b, text, tokens, window)
    count, done, rows = len(ids) - half, 0, list[Row]()
    with tempfile.TemporaryDirectory(prefix="ling3-logits-") as folder:
        if shutil.disk_usage(folder).free < count * vocab * 4:
            needed = f"{count:,} tokens * {vocab:,} logits * 4 bytes = {count * vocab * 4 / 1e9:.1f} GB"
            raise EvalError(f"logits of A: expected room for {needed}, found less, in {folder}", ROOM)
        for judges, artifact in ((False, a), (True, b)):
            job = {"ids": ids, "half": half, "logits": str(Path(folder, "a")), "judges": judges}
            for step in _steps_of(artifact, {**job, "options": options}):
                rows += [Row(*row) for row in step["rows"]]
                done += step["count"]
                progress(done, 2 * count)
    return summed(rows, 2 * half)


def _steps_of(artifact: Path, job: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The results of each step of an artifact's process: how many rows, and those that it judged."""
    with Child(__name__, shown=True) as child:
        child.send({**job, "artifact": str(artifact)})
        while True:
            message = child.receive()
            if message is None:
                raise EvalError(f"artifact `{artifact.name}`: its process {ending(child.ended()[0])}")
            if "failure" in message:
                failure = Failure(**message["failure"])
                raise Ling3Error(failure.error, failure.hint)
            if not message:
                return
            yield message


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


def steps(loaded: "Loaded", ids: Sequence[int], half: int) -> Iterator[tuple[list[int], np.ndarray]]:
    """The logits fp32 ``[rows, vocab]`` of each step; row i of all judges ``ids[half + i]``.

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
            judged = [start + place + 1 - half for _, start in live]
            yield judged, loaded.read(runner.step("decode", padding, fields))[: len(live)]


def _run(parent: Parent, job: Mapping[str, Any]) -> None:
    from ling3export.runners.load.loader import load

    loaded, file = load(job["artifact"], **job["options"]), Path(job["logits"])
    shape = len(job["ids"]) - job["half"], loaded.manifest.vocab_size
    if not job["judges"]:
        with open(create(file), "wb") as new:
            new.truncate(4 * shape[0] * shape[1])
    kept = np.memmap(file, np.float32, "r" if job["judges"] else "r+", shape=shape)
    for places, logits in steps(loaded, job["ids"], job["half"]):
        rows = []
        if job["judges"]:
            pairs = zip(places, logits, strict=True)
            rows = [judge(kept[place], row, job["ids"][job["half"] + place]) for place, row in pairs]
        else:
            kept[places] = logits
        parent.send({"count": len(places), "rows": rows})
    parent.send({})


def main() -> None:
    """The process of an artifact."""
    parent = Parent()
    try:
        _run(parent, parent.receive())
    except Exception as error:
        parent.send({"failure": asdict(Failure.of(error))})


if __name__ == "__main__":
    main()
