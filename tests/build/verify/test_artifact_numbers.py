"""Built artifacts, loaded as the runner loads them, against the float64 reference, each other and transformers.

tests/model/test_numerics.py has calls that are cut and packed at random.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from tests.support.artifacts_fixture import RECIPES, Artifacts, digest_of, files_below
from tests.support.direct import agreed, relative
from tests.support.kept_reference import KeptReference
from tests.support.probe import Probe
from tests.support.tolerances import BFLOAT16_MEDIAN, FLOAT32, MARGIN
from tests.support.transformers_peer import transformers_logits

# Sixteen devices with a TP shard each, and one device with all four; tests/model has every TP, form and structure.
FLOAT32_ARTIFACTS = ["small-tp16", "micro-tp1"]
LENGTHS = (1, 3, 15, 16, 17, 63, 64, 65, 127, 128, 129, 700)
SIZES = (740, 240, 240, 240, 240)  # tokens of each prompt; the last tokens of prompt 0 are decoded
# The seed of each prompt by preset: the first ones whose smallest routing margin stays above MARGIN.
SEEDS = {"small": (2, 1, 2, 3, 4), "micro": (0, 0, 1, 2, 3)}
STEPS = 32
DECISIVE = 0.5  # difference of a position's two largest logits that rounding to bf16 cannot reverse


class Truth:
    """A checkpoint's prompts and the float64 logits at all their positions."""

    def __init__(self, checkpoint: Path, seeds: Sequence[int]) -> None:
        self._reference = KeptReference(checkpoint)
        self.vocabulary = self._reference.config.vocab_size
        self.prompts = [
            np.random.default_rng(seed).integers(0, self.vocabulary, size).tolist()
            for seed, size in zip(seeds, SIZES, strict=True)
        ]
        self.expected = self.logits(self.prompts)
        self.continued = cache(lambda ids: self.logits([ids])[0])  # every TP needs the same logits

    def logits(self, sequences: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """Logits of every position; checks that no routing decision is so close that fp32 rounding may flip it."""
        found = self._reference.logits_many(sequences)
        assert min(self._reference.margins) >= MARGIN, self._reference.margins
        return found


class Subject:
    """A loaded artifact and the expected logits of its checkpoint."""

    def __init__(self, probe: Probe, truth: Truth) -> None:
        self.probe, self.truth = probe, truth
        self.paddings = probe.target.paddings("prefill")
        (self.rows,) = probe.target.paddings("decode")

    def error(self, prompt: int, found: dict[int, np.ndarray]) -> float:
        """The largest error of logits by position."""
        return relative(np.array(list(found.values())), self.truth.expected[prompt][list(found)])

    def fill(self, lengths: Sequence[int]) -> list[np.ndarray]:
        """Prefills the first tokens of prompt n into slot n + 1; returns the logits after each."""
        cut = [prompt[:length] for prompt, length in zip(self.truth.prompts, lengths, strict=True)]
        return [list(self.probe.prompt(self.paddings[-1], ids, slot=n))[-1][1] for n, ids in enumerate(cut, 1)]


@pytest.fixture(scope="module")
def open_subject(artifact: Artifacts) -> Callable[[str], Subject]:
    @cache
    def truth(checkpoint: Path, preset: str) -> Truth:
        return Truth(checkpoint, SEEDS[preset])

    def opened(name: str) -> Subject:
        return Subject(artifact.probe(name), truth(artifact.checkpoint(name), RECIPES[name].preset))

    return opened


@pytest.fixture(scope="module", params=FLOAT32_ARTIFACTS)
def subject(request: pytest.FixtureRequest, open_subject: Callable[[str], Subject]) -> Iterator[Subject]:
    subject = open_subject(request.param)
    with subject.probe:
        yield subject
        assert subject.probe.compiled == 0


def test_prompts_of_every_length_through_every_padding(subject: Subject):
    ids = subject.truth.prompts[0]
    for padding in subject.paddings:
        for n, length in enumerate(LENGTHS):
            found = dict(subject.probe.prompt(padding, ids[:length], slot=n % 8 + 1))
            assert max(found) == length - 1
            assert subject.error(0, found) <= FLOAT32, (padding, length)


def test_greedy_steps(subject: Subject):
    """Decodes sequences of different lengths together, each with its own best tokens; compares with the reference."""
    lengths = (1, 17, 64, 129, 200)
    rows = [[logits] for logits in subject.fill(lengths)]
    for step in range(STEPS):
        tokens = [int(np.argmax(found[-1])) for found in rows]
        batch = [(n, length + step, token) for n, (length, token) in enumerate(zip(lengths, tokens, strict=True), 1)]
        for found, logits in zip(rows, subject.probe.decode(subject.rows, batch), strict=True):
            found.append(logits)
    compared = 0
    for prompt, length, found in zip(subject.truth.prompts, lengths, rows, strict=True):
        tokens = np.argmax(found, axis=-1)[:STEPS].tolist()
        expected = subject.truth.continued((*prompt[:length], *tokens))[length - 1 :]
        assert relative(np.array(found), expected) <= FLOAT32
        compared += agreed(tokens, expected[:STEPS], FLOAT32)
    assert compared >= 4 * STEPS


@pytest.mark.extras
def test_artifact_equals_transformers(artifact: Artifacts, open_subject: Callable[[str], Subject]):
    """With low-rank queries, for which one of their projections is replaced; test_parity.py has other structures."""
    subject = open_subject("micro-tp1")
    prompts = subject.truth.prompts[1:3]
    theirs = transformers_logits(artifact.checkpoint("micro-tp1"), prompts)
    with subject.probe as probe:
        for ids, expected in zip(prompts, theirs, strict=True):
            found = dict(probe.prompt(subject.paddings[0], ids[:200]))
            found |= {at: probe.decode(subject.rows, [(1, at, ids[at])])[0] for at in range(200, len(ids))}
            assert relative(np.array(list(found.values())), expected[list(found)]) <= FLOAT32


def test_bfloat16_artifact(open_subject: Callable[[str], Subject]):
    """A flipped route moves the logits by up to 0.3: the test compares the median, and tokens with a clear margin."""
    subject = open_subject("micro-tp1-afd-int8")  # its plain programs are bf16
    start = 140
    found: dict[tuple[int, int], np.ndarray] = {}
    with subject.probe as probe:
        for n, ids in enumerate(subject.truth.prompts):
            for position, logits in probe.prompt(subject.paddings[0], ids[:start], slot=n + 1):
                found[n, position] = logits
        for at in range(start, 190):
            batch = [(n + 1, at, ids[at]) for n, ids in enumerate(subject.truth.prompts)]
            for first in range(0, len(batch), subject.rows):
                rows = probe.decode(subject.rows, batch[first : first + subject.rows])
                found |= {(n, at): logits for n, logits in enumerate(rows, first)}
    expected = {(n, position): subject.truth.expected[n][position] for n, position in found}
    assert float(np.median([relative(found[key], expected[key]) for key in found])) <= BFLOAT16_MEDIAN
    decisive = [key for key in found if np.diff(np.sort(expected[key])[-2:])[0] > DECISIVE]
    assert len(decisive) > 50
    assert [key for key in decisive if np.argmax(found[key]) != np.argmax(expected[key])] == []


def test_the_store_is_the_same_for_every_tp(artifact: Artifacts):
    stored = [files_below(artifact(name) / "weights") for name in ("micro-tp2", "micro-tp1")]
    assert digest_of(stored[0]) == digest_of(stored[1])
    one, other = (artifact.manifest(name).weights for name in ("micro-tp2", "micro-tp1"))
    assert one == other
    assert sum(path.stat().st_size for path in stored[0].values()) == one.nbytes
