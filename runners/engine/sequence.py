"""A request on its way through the scheduler."""

from collections.abc import Callable
from time import perf_counter as now
from typing import TYPE_CHECKING, Any, NamedTuple

from ling3export.runners.engine.request import Completion, Likely, Request, Step

if TYPE_CHECKING:
    import numpy as np

    from ling3export.runners.engine.block_manager import BlockTable
    from ling3export.runners.engine.choice import Choice
    from ling3export.runners.load.sharded import ShardedState
    from ling3export.runners.state.prefix_cache import Node
    from ling3export.runners.state.sequence_state import SequenceState, TransferredState
    from ling3export.runners.text.detokenize import TextStream


class Call(NamedTuple):
    """A call that a sequence takes part in: ``request.Step``, but ``at`` is when it was dispatched, by ``now()``."""

    at: float
    kind: str
    padding: int
    tokens: int


class Sequence:
    """One request: its tokens, what of them lies in the pools, and how it ended.

    Args:
        request: Already checked.
        number: Its place in the order of arrival.
        limit: How many tokens may be generated.
        eos: Ids that end it.
        stream: Turns tokens into text and watches for stop strings; None without a tokenizer.
        arrived: When it was submitted; None for now.
        choice: What it asks of its rows beyond a token; None where that is nothing.

    Attributes:
        generated: Tokens known on the host.
        sampled: Tokens whose sampling was dispatched: those, and at most a few in flight.
        stored: Positions whose state was dispatched. The last sampled token is not among them.
        table: Its slot and pages, while it has them.
        prefilled: How many tokens of the prompt were ever dispatched.
        stop_reason: ``eos``, ``stop``, ``length``, ``scored``, ``saved``, ``cancelled`` or ``failed`` once it ended.
        error: Why it failed.
        started: When its first call was dispatched.
        times: When each token was read.
        calls: Those that it took part in, in order.
        cached: Tokens of the prompt that the prefix cache had.
        start: The prefix cache's name for the place before the first block.
        names: Of the blocks whose tokens are known, as far as they were needed.
        stops: Where prefill calls end, so that the state there can be kept.
        permanent_checkpoints: Those of the places that others may begin from, too; the rest is this turn's end so far.
        turn: The node with the state at this turn's end so far.
        pending: A position whose state was copied, before its tokens were read, and the snapshot's slot.
        kept: While it waits with its state in host memory: its home, None for any, and the state.
        fed: The token to decode next where the devices do not have it, else -1.
        exported_state: Waits for its state of ``stored`` positions, where that leaves the engine.
        transferred: What it came with, where it was begun elsewhere.
        saved_early: Whether its state left already, with the call that ended its prompt.
        saved: Whether its state is exported_state along when it ends.
    """

    def __init__(
        self,
        request: Request,
        number: int,
        limit: int,
        eos: frozenset[int],
        stream: "TextStream | None" = None,
        arrived: float | None = None,
        choice: "Choice | None" = None,
        transferred: "TransferredState | None" = None,
        saved: bool = False,
    ) -> None:
        self.request = request
        self.number = number
        self.limit = limit
        self.eos = frozenset() if request.ignore_eos else eos
        self.stream = stream
        self.choice = choice
        self.likely: list[Likely] = []
        self.generated: list[int] = []
        self.rows: list[np.ndarray] = []
        self.sampled = 0
        self.stored = 0
        self.prefilled = 0
        self.table: BlockTable | None = None
        self.stop_reason: str | None = None
        self.error: Exception | None = None
        self.text: str | None = None if stream is None else ""
        self.arrived = now() if arrived is None else arrived
        self.started: float | None = None
        self.times: list[float] = []
        self.calls: list[Call] = []
        self.cached = 0
        self.start = b""
        self.names: list[bytes] = []
        self.stops: list[int] = []
        self.permanent_checkpoints: set[int] = set()
        self.turn: Node | None = None
        self.pending: tuple[int, int] | None = None
        self.kept: tuple[int | None, Any] | None = None
        self.fed = -1
        self.exported_state: Callable[[], ShardedState | SequenceState] | None = None
        self.saved_early = False
        self.saved = saved
        self.transferred = (
            None if transferred is None else transferred._replace(state=None)
        )  # which is ``kept`` until it is stored
        if transferred is not None:
            self.stored = transferred.stored
            self.prefilled = self.cached = min(self.stored, self.length)
            self.kept = None if transferred.state is None else (None, transferred.state)
        # By position: log-probabilities of the next token and of the best one there, and the latter's id.
        self._scores: dict[int, tuple[float, float | None, int]] = {}

    @property
    def over(self) -> bool:
        """Whether it ended."""
        return self.stop_reason is not None

    @property
    def scoring(self) -> bool:
        """Whether it scores its tokens, and generates none."""
        return self.request.score_from is not None

    @property
    def slot(self) -> int:
        """Its state slot, while it has one."""
        assert self.table is not None
        return self.table.slot

    def stored_pages(self, page_size: int) -> list[int]:
        """The pages of the positions that are stored."""
        assert self.table is not None
        return self.table.pages[: -(-self.stored // page_size)]

    @property
    def length(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompt_ids)

    @property
    def known(self) -> int:
        """Tokens whose ids the host knows: the prompt and what was generated."""
        return self.length + len(self.generated)

    @property
    def unstored(self) -> int:
        """Known tokens that prefill has yet to store. The last token that is scored need not be."""
        return (self.stored_in_the_end if self.scoring else self.known) - self.stored

    @property
    def stored_in_the_end(self) -> int:
        """Positions that it will have stored if nothing ends it early: the last token is never fed back."""
        return self.length + self.limit - 1

    def tokens(self, start: int, stop: int) -> list[int]:
        """Known tokens at positions ``start`` to ``stop``."""
        prompt = self.request.prompt_ids[start:stop]
        return [*prompt, *self.generated[max(start - self.length, 0) : max(stop - self.length, 0)]]

    def next_tokens(self, start: int, stop: int) -> list[int]:
        """For scoring: the token to score behind each of the positions ``start`` to ``stop``, or -1 for none."""
        first = self.request.score_from
        assert first is not None
        prompt = self.request.prompt_ids
        return [prompt[position + 1] if position + 1 >= first else -1 for position in range(start, stop)]

    def accept(self, token: int, at: float, row: "np.ndarray | None" = None, likely: Likely | None = None) -> str:
        """Takes the next token, read at ``at``; sets ``stop_reason`` if it ends the sequence.

        Returns:
            The text that became certain with it.
        """
        self.times.append(at)
        self.generated.append(token)
        if row is not None:
            self.rows.append(row)
        if likely is not None:
            self.likely.append(likely)
        if self.choice is not None:
            self.choice.accept(token)
        piece = ""
        if token in self.eos:
            self.stop_reason = "eos"
        elif self.stream is not None:
            piece = self.stream.push(token)
            if self.stream.stopped:
                self.stop_reason = "stop"
        if self.stop_reason is None and self.choice is not None and self.choice.over:
            self.stop_reason = "stop"
        if self.stop_reason is None and len(self.generated) == self.limit:
            self.stop_reason = "length"
        if self.stop_reason is not None and self.stream is not None:
            piece += self.stream.finish()
        if self.text is not None:
            self.text += piece
        return piece

    def accept_scores(
        self, start: int, logprobs: list[float], best: list[int], best_logprobs: list[float] | None = None
    ) -> bool:
        """Takes what a call said behind the positions from ``start`` on; ends with the last one, and then is True."""
        those = [None] * len(best) if best_logprobs is None else best_logprobs
        self._scores.update(enumerate(zip(logprobs, those, best, strict=True), start))
        if start + len(logprobs) == self.stored_in_the_end:
            self.stop_reason = "scored"
        return self.over

    def completion(self) -> Completion:
        """What it came to, or what there was of it when it was cancelled.

        Raises:
            ValueError: It has not ended.
        """
        if self.stop_reason is None:
            raise ValueError(f"sequence {self.number}: expected one that ended, found one that runs")
        logits = None
        if self.request.logits and self.rows:
            import numpy as np

            logits = np.stack(self.rows)
        token_ms = [self._ms(at) for at in self.times]
        first, logprobs, best, best_logprobs = self.request.score_from, None, None, None
        if first is not None and self.stop_reason == "scored":
            scores = [self._scores[at - 1] for at in range(first, self.length)]
            logprobs, best_logprobs, best = map(list, zip(*scores, strict=True))
            best_logprobs = None if best_logprobs[0] is None else best_logprobs
        return Completion(
            list(self.request.prompt_ids),
            list(self.generated),
            self.text,
            self.stop_reason,
            token_ms[0] if token_ms else 0.0,
            token_ms[-1] if token_ms else 0.0,
            logits,
            0.0 if self.started is None else self._ms(self.started),
            token_ms,
            [Step(self._ms(call.at), call.kind, call.padding, call.tokens) for call in self.calls],
            logprobs,
            best,
            self.cached,
            best_logprobs,
            None if self.request.logprobs is None else list(self.likely),
            None if self.transferred is None or self.transferred.phases is None else self._phases(self.transferred),
        )

    def _phases(self, transferred: "TransferredState") -> dict[str, Any]:
        """Milliseconds of each phase up to the first token, elsewhere and here, and the bytes that came."""
        phases = transferred.phases or {}
        rest = (self._ms(self.times[0]) if self.times else 0.0) - phases.get("transfer", 0.0)
        return {"phases_ms": {**phases, "decode": rest}, "transfer_bytes": transferred.nbytes}

    def _ms(self, at: float) -> float:
        return 1e3 * (at - self.arrived)
