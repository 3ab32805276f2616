"""Runs the scheduler's decisions: on the devices of this process, of several hosts, or with experts elsewhere."""

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Many
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from ling3export.runners.engine.counters import Counters
from ling3export.runners.engine.inputs import GREEDY, Fields, decode_fields, prefill_fields, sample_fields
from ling3export.runners.engine.logits_processor import LogitsEdits, adjust_inputs, rank_fields
from ling3export.runners.engine.outputs import (
    CopyStates,
    DeviceArray,
    InFlightSample,
    InFlightScore,
    ModelRunnerOutput,
    OffloadState,
    SchedulerOutput,
    StateMove,
)
from ling3export.runners.engine.sequence import now
from ling3export.runners.hosts.channel import Channel
from ling3export.runners.load.sharded import whole_array
from ling3export.runners.state.block_manager import BlockManager
from ling3export.runners.state.sequence_state import SequenceState

if TYPE_CHECKING:
    from ling3export.runners.load.model_runner import ModelRunner
    from ling3export.runners.load.sharded import ShardedState


class Executor(Protocol):
    """Runs calls on devices. All hosts of a target make the same calls in the same order."""

    def execute_model(self, output: SchedulerOutput) -> DeviceArray | Mapping[str, DeviceArray]:
        """Dispatches a call, and the moves of states before and after it.

        Returns:
            Logits ``[rows, vocab]`` of a prefill or decode call, for :meth:`sample_tokens`; the outputs of a score
            call by name; None where nothing is computed.
        """

    def sample_tokens(
        self, output: SchedulerOutput, logits: DeviceArray, edits: Mapping[int, LogitsEdits]
    ) -> InFlightSample:
        """Dispatches the sampling of a call's rows, and the log-probabilities that they ask for."""

    def read(self, call: InFlightSample | InFlightScore) -> ModelRunnerOutput:
        """Waits for a call, and fetches its results."""

    def export(self, slot: int, pages: Many[int]) -> "Callable[[], ShardedState]":
        """Dispatches the copy of a state to the host; any thread may wait for it. Host 0 gets the parts of all."""

    def gathered(self, state: "ShardedState") -> "ShardedState":
        """An offloaded state, on host 0 with the parts of all hosts."""

    def close(self) -> None:
        """Gives back what is not this process's own."""


class ModelExecutor:
    """The executor of one process."""

    def __init__(
        self, runner: "ModelRunner", chunk: int, blocks: BlockManager, vocab_size: int, counters: Counters
    ) -> None:
        self._runner, self._chunk, self._blocks = runner, chunk, blocks
        self._vocab_size, self._counters = vocab_size, counters
        self._sampling = np.full(len(blocks.page_table), GREEDY)  # how the tokens of each state slot are sampled

    def execute_model(self, output: SchedulerOutput) -> DeviceArray | Mapping[str, DeviceArray]:
        for slot, sampling in output.admitted:
            self._sampling[slot] = (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, sampling.seed)
        if output.before:
            self._move(output.before)
        outputs = self._call(output) if output.phase else None
        if output.after:
            self._move(output.after)
        return outputs

    def _call(self, output: SchedulerOutput) -> DeviceArray | Mapping[str, DeviceArray]:
        phase, padding, pages = output.phase, output.padding, self._blocks.page_table
        if phase == "decode":
            rows = output.rows
            self._counters.count(output.cell, padding, len(rows))
            positions = [row.position - 1 for row in rows]
            fields = decode_fields(padding, [row.slot for row in rows], positions, pages, [row.token for row in rows])
            return self._decode(padding, fields)
        spans, scores = [scheduled.span for scheduled in output.spans], phase == "score"
        self._counters.count(output.cell, padding, sum(len(span.tokens) for span in spans))
        fields = prefill_fields(padding, spans, self._chunk, pages, score=scores)
        if scores:
            return self._runner.score(padding, fields)
        return self._runner.step(phase, padding, fields)

    def _decode(self, padding: int, fields: Fields) -> DeviceArray:
        return self._runner.step("decode", padding, fields)

    def _move(self, moves: Many[StateMove]) -> None:
        for move in moves:
            if isinstance(move, CopyStates):
                self._runner.copy(move.sources, move.targets)
            elif isinstance(move, OffloadState):
                move.copy.state = self._runner.fetch(move.slot, move.pages)()
            else:
                state = move.copy.state
                if isinstance(state, SequenceState):
                    state = state.pool_arrays(self._blocks.page_size)
                self._runner.store(move.slot, move.pages, state)

    def sample_tokens(
        self, output: SchedulerOutput, logits: DeviceArray, edits: Mapping[int, LogitsEdits]
    ) -> InFlightSample:
        rows = output.rows
        if not rows:
            return InFlightSample(output, logits)
        count = output.padding if output.phase == "decode" else output.padding // self._chunk
        # Rows ascend: these are the first ones, or some of many. numpy takes a slice in a third of a list's time.
        places = slice(len(rows)) if rows[-1].row < len(rows) else [row.row for row in rows]
        slots, positions = [row.slot for row in rows], [row.position for row in rows]
        fields = sample_fields(count, places, slots, positions, self._sampling)
        self._counters.count(f"sample@{count}", count, len(rows))
        changed = logits
        if edits:
            self._counters.count(f"logits_processor@{count}", count, len(edits))
            changed = self._runner.adjust(logits, count, *adjust_inputs(count, self._vocab_size, edits))["logits"]
        tokens, logprobs = self._runner.sample(changed, count, fields), None
        wanted = {row.row: row.sequence.request.logprobs for row in rows if row.sequence.request.logprobs is not None}
        if wanted:
            self._counters.count(f"logits_processor@{count}", count, len(wanted))
            ranked = rank_fields(count, list(wanted), list(wanted.values()))
            logprobs = self._runner.adjust(logits, count, ranked, token=tokens)
        kept = any(row.sequence.request.logits for row in rows)
        return InFlightSample(output, logits if kept else None, tokens, logprobs)

    def read(self, call: InFlightSample | InFlightScore) -> ModelRunnerOutput:
        read = self._read
        if isinstance(call, InFlightScore):
            scores = {
                name: read(call.scores[name]) for name in ("logprob", "best", "best_logprob") if name in call.scores
            }
            return ModelRunnerOutput(now(), scores=scores)
        if not call.output.rows:
            self._runner.wait(call.logits)
            return ModelRunnerOutput(now())
        tokens, at = read(call.tokens).tolist(), now()
        logits = None if call.logits is None else read(call.logits)
        names = () if call.logprobs is None else ("logprob", "top_token", "top_logprob")
        logprobs = {name: read(call.logprobs[name]).tolist() for name in names if call.logprobs is not None}
        return ModelRunnerOutput(at, tokens, logits, logprobs)

    def _read(self, array: DeviceArray) -> np.ndarray:
        return self._runner.read(array)

    def export(self, slot: int, pages: Many[int]) -> "Callable[[], ShardedState]":
        return self._runner.fetch(slot, pages)

    def gathered(self, state: "ShardedState") -> "ShardedState":
        return state

    def close(self) -> None:
        """Nothing is held."""


class HostsExecutor(ModelExecutor):
    """The executor of one of several hosts: host 0 gets arrays whole that are split over them."""

    def __init__(self, channel: Channel, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._channel = channel

    def _read(self, array: DeviceArray) -> np.ndarray:
        return whole_array(array, self._channel.parts)

    def export(self, slot: int, pages: Many[int]) -> "Callable[[], ShardedState]":
        # All hosts wait here.
        state = self.gathered(self._runner.fetch(slot, pages)())
        return lambda: state

    def gathered(self, state: "ShardedState") -> "ShardedState":
        # All hosts wait here.
        return state.joined(self._channel.parts(state.split()))


class SplitExecutor(ModelExecutor):
    """The executor of an attention process: an FFN worker computes the experts of its decode steps.

    Args:
        decode: Runs a decode step; gives its logits, fp32 ``[rows, vocab]``.
    """

    def __init__(self, decode: Callable[[Fields], np.ndarray], close: Callable[[], None], *arguments: Any) -> None:
        super().__init__(*arguments)
        self._through, self._leave = decode, close

    def _decode(self, padding: int, fields: Fields) -> DeviceArray:
        return self._runner.logits(self._through(fields))

    def close(self) -> None:
        self._leave()
