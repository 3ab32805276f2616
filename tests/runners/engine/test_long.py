"""The engine with long prompts: its logits are the plain model's, also with caching, pre-emption and moved states."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from ling3export.checkpoint.synth import synthesize
from ling3export.foundation.errors import RequestError
from ling3export.runners.engine.engine import Engine
from ling3export.runners.engine.request import Completion, Request
from ling3export.runners.transfer.options import Transfer
from tests.support.artifacts_fixture import Artifacts
from tests.support.direct import relative
from tests.support.kept_reference import KeptReference
from tests.support.long_prompts import FIELDS, logits_at, prompt
from tests.support.tolerances import FLOAT32
from tests.support.transfers import moved

pytestmark = pytest.mark.extras

LONG, ANSWER, PAGE = 100_000, 4, 256
PAGES = -(-(LONG + ANSWER) // PAGE) + 1
SIZES = "--tp 1 --dtype float32 --paddings 512 --decode-paddings 1 --max-running 2 --snapshots 4".split()
OPTIONS = [*SIZES, *f"--context 131072 --page-size {PAGE} --pages {PAGES}".split()]


@pytest.fixture(scope="module")
def checkpoint(artifact: Artifacts):
    return artifact.kept("long", FIELDS, lambda path: synthesize(path, "micro", 0, overrides=FIELDS))


@pytest.fixture(scope="module")
def engine(artifact: Artifacts, checkpoint) -> Iterator[Engine]:
    built, told = artifact.built("long.ling3", checkpoint, *OPTIONS), {"check": "programs", "report": lambda text: None}
    with Engine(built, transfer=Transfer("shm", deadline=60.0, limit=1 << 30), **told) as engine:
        yield engine


def asked(ids: Sequence[int], count: int = ANSWER) -> Request:
    return Request(tuple(ids), count, ignore_eos=True, logits=True, logprobs=2)


@pytest.fixture(scope="module")
def right(checkpoint):
    return comparison(checkpoint)


def comparison(checkpoint: Path) -> Callable[[Sequence[int], Completion], bool]:
    """Whether the logits of a request's last tokens are the plain model's."""
    reference = KeptReference(checkpoint)

    def right(ids: Sequence[int], done: Completion) -> bool:
        first = len(ids) + len(done.token_ids) - ANSWER
        whole = [*ids, *done.token_ids]
        expected = logits_at(reference, whole[:-1], range(first - 1, len(whole) - 1))
        return relative(done.logits[-ANSWER:], expected) < FLOAT32

    return right


def test_a_prompt_of_100_000_tokens_computed_cached_and_moved(engine, right):
    """Computed alone, after a hit in the prefix cache, and decoded from a state that was moved."""
    ids = prompt(LONG)
    (alone,) = engine.complete([asked(ids)])
    assert alone.cached_tokens == 0 and right(ids, alone)
    other = [*ids[: LONG - 300], *prompt(300, seed=1)]
    (hit,) = engine.complete([asked(other)])
    (again,) = engine.complete([asked(ids)])
    assert again.cached_tokens > LONG - 2 * PAGE and right(other, hit)
    assert relative(again.logits, alone.logits) < FLOAT32
    _, taking = moved(engine, replace(asked(ids), logits=False))
    (done,) = engine.complete([taking])
    assert done.token_ids == alone.token_ids and done.cached_tokens == LONG
    assert [each.top for each in done.logprobs] == [each.top for each in again.logprobs]


def test_a_prompt_of_67_000_tokens_that_gives_its_pages_back_in_the_middle(engine, right):
    """The older sequence, at 32k tokens, needs a page that is not free while the younger one is prefilled."""
    before, first = engine.stats(), prompt(128 * PAGE - 60, seed=2)
    second = prompt((PAGES - 128) * PAGE - 10, seed=3)
    older, younger = engine.complete([asked(first, 70), asked(second)])
    after = engine.stats()
    assert after["preempted"] == before["preempted"] + 1
    assert after["tokens_in"] - before["tokens_in"] == len(first) + len(second), "no token was computed twice"
    assert right(first, older) and right(second, younger)


@pytest.mark.parametrize(("original", "length", "page"), [(64, 128 - ANSWER, 16), (131_072, 131_400, PAGE)])
def test_yarn_doubles_an_artifacts_context_and_decodes_as_the_plain_model_does(artifact, original, length, page):
    """Beyond the original context in prefill and decode; the short context is filled to its end."""
    scaling = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": original}
    fields = FIELDS | {"max_position_embeddings": original, "rope_scaling": scaling}
    checkpoint = artifact.kept("yarn", fields, lambda path: synthesize(path, "micro", 0, overrides=fields))
    sizes = ["--context", str(2 * original), "--page-size", str(page), "--pages", str(length // page + 2)]
    built = artifact.built(f"yarn-{original}.ling3", checkpoint, *SIZES, *sizes)
    with Engine(built, check="programs", report=lambda text: None) as engine:
        ids = prompt(length)
        (done,) = engine.complete([asked(ids)])
        assert comparison(checkpoint)(ids, done)
        assert engine.limits.context == 2 * original
        with pytest.raises(RequestError, match=f"within the context of {2 * original} tokens|at most .* pages"):
            engine.complete([asked(prompt(2 * original))])
