"""An error in one request ends only that request, with its name; the others continue with the same tokens."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from ling3export.foundation.errors import RankDivergence
from ling3export.runners.engine.core import StepInputs
from ling3export.runners.engine.handle import RequestBroken, RequestHandle
from ling3export.runners.engine.logits_processor import LogitsProcessorState
from ling3export.runners.engine.request import Limits, Request, Sampling
from ling3export.runners.engine.sequence import Sequence
from ling3export.runners.state.sequence_state import TransferredState
from ling3export.runners.text.grammar import Grammars, Matcher
from ling3export.runners.text.vocabulary import TextStream
from tests.support.choosing import changed, greedy
from tests.support.fake_backend import answer
from tests.support.scheduler_rig import Rig, Wire
from tests.support.toy_artifact import logits

PROMPT = [5, 9, 7]
SIZES = [63, 64, 65, 127, 128, 129, 300]


def applied(processor: LogitsProcessorState, row: np.ndarray) -> np.ndarray:
    """A row of logits after ``logits_processor`` (FORMAT.md)."""
    tokens, scales, addends = processor.edits
    assert len(set(tokens.tolist())) == len(tokens)
    out = row.astype(np.float64)
    for token, scale, addend in zip(tokens, scales.view(np.float32), addends.view(np.float32), strict=True):
        out[token] = (out[token] / scale if out[token] > 0 else out[token] * scale) + addend
    return out


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("of", ["logit_bias", "prompt", "both", "answer"])
def test_edits_of_any_number_of_tokens_are_what_numpy_says(of, size):
    """Regression: 65 biases, or a repetition_penalty with a prompt of 65 tokens, ended the whole engine."""
    rng = np.random.default_rng(size)
    row, names = rng.standard_normal(1000).astype(np.float32), rng.permutation(1000).tolist()
    bias = {token: float(at % 7 - 3.5) for at, token in enumerate(names[:size])} if of in ("logit_bias", "both") else {}
    prompt = names[size // 2 : size // 2 + size] if of in ("prompt", "both") else [names[0]]
    penalties = {"presence_penalty": 0.5, "frequency_penalty": 0.25, "repetition_penalty": 1.5}
    how = {} if of == "logit_bias" else penalties
    processor = LogitsProcessorState(Request(tuple(prompt), 2000, Sampling(logit_bias=bias, **how)), None)
    generated = names[-size:] + names[-size // 3 :] if of == "answer" else []
    for token in generated:
        processor.accept(token)
    asked = {"presence": 0.5, "frequency": 0.25, "repetition": 1.5} if how else {}
    expected = changed(row, prompt, generated, bias=bias, **asked)
    np.testing.assert_allclose(applied(processor, row), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("size", SIZES)
def test_an_engine_takes_any_number_of_biases(engine, size):
    bias = {token: float(token % 5) for token in range(size)}
    (found,) = engine.complete([Request(tuple(PROMPT), 12, Sampling(logit_bias=bias), ignore_eos=True)])
    assert found.token_ids == greedy(logits, PROMPT, 12, bias=bias)


class Panic(BaseException):
    """An error like those that Rust libraries raise."""


GRAMMAR: dict[str, Any] = {"grammar": ("regex", "[a-z]{20}")}
PENALTY: dict[str, Any] = {"sampling": Sampling(frequency_penalty=1.0)}
TAKEN_IN, RESTRICTED = "expected it to be taken in", "expected its next token to be restricted"
READ, TOGETHER = "expected its token to be taken", "expected its answer to be put together"
# The function of the engine's thread that raises, the number of calls before, the error, and fields of the request that
# reaches it.
PLACES: list[tuple[type, str, int, str, dict[str, Any]]] = [
    (Limits, "answer", 0, TAKEN_IN, {}),
    (LogitsProcessorState, "__init__", 0, TAKEN_IN, {"sampling": Sampling(logit_bias={3: 1.0})}),
    (Grammars, "matcher", 0, TAKEN_IN, GRAMMAR),
    (TextStream, "__init__", 0, TAKEN_IN, {"stop": ("mine",)}),
    (LogitsProcessorState, "edits", 0, RESTRICTED, PENALTY),
    (LogitsProcessorState, "edits", 4, RESTRICTED, {"sampling": Sampling(logit_bias={3: 1.0})}),
    (Matcher, "fill", 0, RESTRICTED, GRAMMAR),
    (Matcher, "fill", 3, RESTRICTED, GRAMMAR),
    (LogitsProcessorState, "accept", 2, READ, PENALTY),
    (Matcher, "accept", 3, READ, GRAMMAR),
    (Matcher, "over", 3, READ, GRAMMAR),
    (Matcher, "error", 0, READ, GRAMMAR),
    (TextStream, "push", 2, READ, {"stop": ("mine",)}),
    (TextStream, "finish", 0, READ, {"stop": ("mine",)}),
    (Sequence, "accept", 0, READ, {"logprobs": 3}),
    (Sequence, "accept", 5, READ, {"logits": True}),
    (Sequence, "completion", 0, TOGETHER, {}),
]


def break_for_mine(patch: pytest.MonkeyPatch, owner: type, name: str, after: int, does: Callable[[], None]) -> None:
    """Makes a function call ``does`` when it handles the request `mine` in the engine's thread."""
    before, calls = vars(owner)[name], iter(range(after))

    def is_mine(self: Any, args: tuple[Any, ...]) -> bool:
        if isinstance(self, (Sequence, Limits)):
            request = args[0] if isinstance(self, Limits) else self.request
            return bool(request.name == "mine")
        return not isinstance(self, TextStream) or "mine" in (args[1] if name == "__init__" else self.stop)

    def call(self: Any, *args: Any, **options: Any) -> Any:
        if threading.current_thread().name == "ling3-engine" and is_mine(self, args) and next(calls, None) is None:
            does()
        return before.fget(self) if isinstance(before, property) else before(self, *args, **options)

    patch.setattr(owner, name, property(call) if isinstance(before, property) else call)


@pytest.mark.parametrize(
    ("error", "stream"), [(IndexError("out of bounds"), False), (Panic("unwrap"), True)], ids=["exception", "panic"]
)
@pytest.mark.parametrize(("owner", "name", "after", "said", "asked"), PLACES)
def test_an_error_in_one_request_ends_that_one(engine, monkeypatch, owner, name, after, said, asked, error, stream):
    """Regression: any of these errors ended the engine, and with it every request of every client."""
    others = [Request((n, 2), 20, ignore_eos=True, logprobs=n % 2 or None, name=f"other {n}") for n in range(5)]
    mine = Request(tuple(PROMPT), 20, name="mine", ignore_eos=True, **asked)
    before = engine.stats()["failed"]

    def fail() -> None:
        raise error

    break_for_mine(monkeypatch, owner, name, after, fail)
    first, handle, *rest = engine.submit(others[0], mine, *others[1:])
    with pytest.raises(RequestBroken) as raised:
        asyncio.run(read(handle)) if stream else handle.result(60)
    assert raised.value.message == f"mine: {said}, found {type(error).__name__}: {error}"
    assert raised.value.__cause__ is error
    for request, done in zip(others, [each.result(60) for each in (first, *rest)], strict=True):
        assert done.token_ids == greedy(logits, list(request.prompt_ids), 20)
    stats = engine.stats()
    assert (engine.stopped, stats["live"], stats["free"]) == (None, 0, stats["pools"])
    assert stats["failed"] == before + (name != "completion")


async def read(handle: RequestHandle) -> None:
    async for _ in handle.pieces():
        pass


def test_bad_tokens_of_a_request_fail_only_that_request(monkeypatch):
    rig = Rig()
    transferred = TransferredState(((3, None), (4, None)), None)
    mine = Sequence(Request((1, 2), 9, name="mine"), 0, transferred=transferred)
    monkeypatch.setattr(mine, "accept", Mock(side_effect=IndexError("mine")))
    rig.core.submit(mine)
    rig.add(Sequence(Request((5,), 7), 1))
    rig.run()
    rig.check()
    assert isinstance(mine.error, RequestBroken) and mine.error.message.startswith("mine: expected its token")


class Host(Rig):
    """A host of several with the fake model; preparing a sequence raises ``error``."""

    def __init__(self, number: int, error: Exception | None) -> None:
        self.wire, self.error = Wire(number), error
        super().__init__(channel=self.wire)

    def prepare(self, sequence: Sequence) -> Sequence:
        if sequence.request.name == "mine" and self.error is not None:
            raise self.error
        return super().prepare(sequence)


def hosts(*errors: Exception | None) -> list[Host]:
    return [Host(number, error) for number, error in enumerate(errors)]


def arrivals() -> StepInputs:
    return StepInputs((Sequence(Request((1, 2), 5, name="mine"), 0), Sequence(Request((3, 4), 5, name="other"), 1)))


def test_hosts_that_fail_a_request_alike_go_on_together():
    lead, follower = hosts(ValueError("both"), ValueError("both"))
    inputs, ended = arrivals(), []
    while lead.core.busy or inputs.arrivals:
        ended += lead.core.step(inputs).ended
        ended += follower.core.received(lead.wire.sent[-1]).ended
        inputs = StepInputs()
    assert not follower.core.busy
    found = [(each.number, each.stop_reason) for each in ended]
    assert found == [(0, "failed")] * 2 + [(1, "length")] * 2
    assert ended[2].generated == ended[3].generated == answer([3, 4], 5)


@pytest.mark.parametrize("errors", [(ValueError("one"), None), (None, ValueError("one"))])
def test_a_host_that_fails_a_request_alone_ends_all_before_its_next_call(errors):
    lead, follower = hosts(*errors)
    lead.core.step(arrivals())
    follower.core.received(lead.wire.sent[-1])
    lead.core.step(StepInputs())
    before = list(follower.backend.calls)
    with pytest.raises(RankDivergence, match="expected those of host 0, found others on host 1"):
        follower.core.received(lead.wire.sent[-1])
    assert follower.wire.failed and follower.backend.calls == before


@pytest.mark.parametrize("error", [MemoryError("no room"), OSError("no file")])
def test_an_error_of_a_machine_ends_all_hosts(error):
    """The other hosts do not get this error, so they would make other calls."""
    (lead,) = hosts(error)
    with pytest.raises(type(error)):
        lead.core.step(arrivals())
