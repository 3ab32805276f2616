"""A request on its way through the engine, from its arrival to its end."""

import enum
from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from time import perf_counter as now
from typing import TYPE_CHECKING, Any, NamedTuple

from ling3export.runners.engine.request import Completion, EngineStep, Logprobs, Request

if TYPE_CHECKING:
    import numpy as np

    from ling3export.runners.engine.logits_processor import LogitsProcessorState
    from ling3export.runners.load.sharded import ShardedState
    from ling3export.runners.state.block_manager import BlockTable
    from ling3export.runners.state.sequence_state import SequenceState, TransferredState
    from ling3export.runners.text.vocabulary import TextStream


class Status(enum.Enum):
    """Where a sequence is."""

    ARRIVED = enum.auto()  # not in the scheduler yet; maybe its state is being loaded
    WAITING = enum.auto()  # for a slot and pages
    PREFILLING = enum.auto()
    RUNNING = enum.auto()  # its whole prompt is dispatched


class DispatchedCall(NamedTuple):
    """A call that a sequence takes part in: ``request.EngineStep``, but ``at`` is on the clock of ``now``."""

    at: float
    kind: str
    padding: int
    tokens: int


@dataclass(slots=True, eq=False)
class SequenceOutput:
    """The tokens and text of a sequence so far. The engine's thread appends to it; other threads read only announced
    tokens.

    Attributes:
        text: The certain part of their text; None without a tokenizer.
        logprobs: How likely each token was, if the request asks for it.
    """

    token_ids: list[int] = field(default_factory=list)
    text: str | None = None
    logprobs: list[Logprobs] = field(default_factory=list)


class Sequence:
    """One request: its tokens, how many of them lie in the pools, and how it ended.

    Args:
        arrived: When it was submitted, on the clock of ``now``; None for now. This is noted and decides nothing.
        transferred: Its state, if it began elsewhere.
        turn: Its call's number plus its place in that call, so that a later call waits for no more than a row or two
            of a large one; None for ``number``.

    Attributes:
        max_new_tokens: How many tokens may be generated.
        eos: Ids that end it.
        stream: Turns tokens into text and watches for stop strings; None without a tokenizer.
        logits_processor: The changes of its logits before a token is sampled; None where nothing does.
        num_sampled: Tokens whose sampling was dispatched: those of ``generated``, and at most a few in flight.
        num_computed_tokens: Positions whose state was dispatched. The last sampled token is not among them.
        num_prefilled: How many tokens of the prompt were ever dispatched.
        num_cached_tokens: Tokens of the prompt that the prefix cache had.
        table: Its slot and pages, while it has them.
        next_token: The token to decode next where the devices do not have it, else -1.
        stop_reason: ``eos``, ``stop``, ``length``, ``scored``, ``cancelled`` or ``failed`` once it ended.
        started: When its first call was dispatched.
        rows: The logits that each token was taken from, if the request asks for them.
        exported_state: Waits for its state of the computed positions, where that leaves the engine.
        awaits_mask: Whether its next logits are computed, but the mask of its grammar is not filled.
    """

    def __init__(
        self,
        request: Request,
        number: int,
        arrived: float | None = None,
        transferred: "TransferredState | None" = None,
        turn: int | None = None,
    ) -> None:
        self.request = request
        self.number = number
        self.turn = number if turn is None else turn
        self.arrived = now() if arrived is None else arrived
        self.status = Status.ARRIVED
        self.max_new_tokens = request.max_tokens
        self.eos: frozenset[int] = frozenset()
        self.stream: TextStream | None = None
        self.logits_processor: LogitsProcessorState | None = None
        self.output = SequenceOutput()
        self.generated = self.output.token_ids
        self.num_sampled = 0
        self.table: BlockTable | None = None
        self.next_token = -1
        self.stop_reason: str | None = None
        self.error: Exception | None = None
        self.started: float | None = None
        self.times: list[float] = []
        self.calls: list[DispatchedCall] = []
        self.rows: list[np.ndarray] = []
        self.exported_state: Callable[[], ShardedState | SequenceState] | None = None
        self.awaits_mask = False
        # By position: log-probabilities of the next token and of the best one there, and the latter's id.
        self._scores: dict[int, Logprobs] = {}
        self.begin_from(transferred)

    def begin_from(self, transferred: "TransferredState | None") -> None:
        """Begins with what was computed elsewhere, before it reaches the scheduler."""
        self.transferred = transferred
        self.num_computed_tokens = 0 if transferred is None else transferred.stored
        self.num_prefilled = self.num_cached_tokens = min(self.num_computed_tokens, self.num_prompt_tokens)

    def prepare(
        self,
        max_new_tokens: int,
        eos: frozenset[int],
        stream: "TextStream | None" = None,
        logits_processor: "LogitsProcessorState | None" = None,
    ) -> "Sequence":
        """Sets what the artifact adds to its request; returns it."""
        self.max_new_tokens, self.eos = max_new_tokens, frozenset() if self.request.ignore_eos else eos
        self.stream, self.logits_processor = stream, logits_processor
        self.output.text = None if stream is None else ""
        return self

    @property
    def order(self) -> tuple[int, int, int]:
        """Its place among others: the lowest goes first."""
        return self.request.priority, self.turn, self.number

    @property
    def finished(self) -> bool:
        return self.stop_reason is not None

    @property
    def has_grammar(self) -> bool:
        return self.logits_processor is not None and self.logits_processor.matcher is not None

    @property
    def scoring(self) -> bool:
        return self.request.score_from is not None

    @property
    def slot(self) -> int:
        """Its state slot, while it has one."""
        assert self.table is not None
        return self.table.slot

    def computed_pages(self, page_size: int) -> list[int]:
        """The pages of the positions that are computed."""
        assert self.table is not None
        return self.table.pages[: -(-self.num_computed_tokens // page_size)]

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def num_tokens(self) -> int:
        """Tokens known on the host: prompt and answer."""
        return len(self.request.prompt_ids) + len(self.generated)

    @property
    def num_tokens_to_prefill(self) -> int:
        """Known tokens that prefill has yet to compute. The last token that is scored need not be."""
        return (self.max_num_tokens if self.scoring else self.num_tokens) - self.num_computed_tokens

    @property
    def max_num_tokens(self) -> int:
        """Positions that it will have computed if nothing ends it early: the last token is never fed back."""
        return self.num_prompt_tokens + self.max_new_tokens - 1

    def tokens(self, start: int, stop: int) -> list[int]:
        """Known tokens at positions ``start`` to ``stop``."""
        prompt, length = self.request.prompt_ids, self.num_prompt_tokens
        return [*prompt[start:stop], *self.generated[max(start - length, 0) : max(stop - length, 0)]]

    def next_tokens(self, start: int, stop: int) -> list[int]:
        """For scoring: the token to score after each of the positions ``start`` to ``stop``, or -1 for none."""
        first = self.request.score_from
        assert first is not None
        prompt = self.request.prompt_ids
        return [prompt[position + 1] if position + 1 >= first else -1 for position in range(start, stop)]

    def accept(self, token: int, at: float, row: "np.ndarray | None" = None, logprobs: Logprobs | None = None) -> None:
        """Takes the next token, read at ``at``; sets ``stop_reason`` if it ends the sequence."""
        self.times.append(at)
        self.generated.append(token)
        if row is not None:
            self.rows.append(row)
        if logprobs is not None:
            self.output.logprobs.append(logprobs)
        processor, stream, piece = self.logits_processor, self.stream, ""
        if processor is not None:
            processor.accept(token)
        if token in self.eos:
            self.stop_reason = "eos"
        elif token in self.request.stop_token_ids:
            self.stop_reason = "stop"
        if stream is not None and (not self.finished or self.request.include_stop_str_in_output):
            piece = stream.push(token, watch=len(self.generated) > self.request.min_tokens)
            if stream.stopped and not self.finished:
                self.stop_reason = "stop"
        if self.stop_reason is None and processor is not None and processor.over:
            self.stop_reason = "stop"
        if self.stop_reason is None and len(self.generated) == self.max_new_tokens:
            self.stop_reason = "length"
        if stream is not None:
            self.output.text = f"{self.output.text}{piece}{stream.finish() if self.finished else ''}"

    def accept_scores(self, start: int, scores: Many[Logprobs]) -> bool:
        """Takes what a call said after the positions from ``start`` on; ends with the last one, and then is True."""
        self._scores.update(enumerate(scores, start))
        if start + len(scores) == self.max_num_tokens:
            self.stop_reason = "scored"
        return self.finished

    def completion(self) -> Completion:
        """Its result, or the part before it was cancelled. Raises ValueError: it has not ended."""
        if self.stop_reason is None:
            raise ValueError(f"sequence {self.number}: expected one that ended, found one that runs")
        logits = None
        if self.request.logits and self.rows:
            import numpy as np

            logits = np.stack(self.rows)
        token_ms = [self._ms(at) for at in self.times]
        logprobs = None if self.request.logprobs is None else list(self.output.logprobs)
        if (first := self.request.score_from) is not None:
            places = range(first - 1, self.num_prompt_tokens - 1)
            logprobs = [self._scores[at] for at in places] if self.stop_reason == "scored" else None
        return Completion(
            prompt_ids=list(self.request.prompt_ids),
            token_ids=list(self.generated),
            text=self.output.text,
            stop_reason=self.stop_reason,
            ttft_ms=token_ms[0] if token_ms else 0.0,
            e2e_ms=token_ms[-1] if token_ms else 0.0,
            logits=logits,
            queue_ms=0.0 if self.started is None else self._ms(self.started),
            token_ms=token_ms,
            steps=[EngineStep(self._ms(at), kind, padding, tokens) for at, kind, padding, tokens in self.calls],
            cached_tokens=self.num_cached_tokens,
            logprobs=logprobs,
            kv_transfer_params=self._transfer_times(),
        )

    def _transfer_times(self) -> dict[str, Any] | None:
        """Milliseconds of each phase up to the first token, elsewhere and here, and the bytes that came."""
        if self.transferred is None or self.transferred.phases is None:
            return None
        phases = self.transferred.phases
        rest = (self._ms(self.times[0]) if self.times else 0.0) - phases.get("transfer", 0.0)
        return {"phases_ms": {**phases, "decode": rest}, "transfer_bytes": self.transferred.nbytes}

    def _ms(self, at: float) -> float:
        return 1e3 * (at - self.arrived)
