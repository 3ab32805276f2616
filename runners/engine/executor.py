"""Runs what the scheduler decided: from a ``SchedulerOutput`` the calls of a model runner, and what they brought."""

from collections.abc import Mapping
from collections.abc import Sequence as Many
from typing import TYPE_CHECKING

import numpy as np

from ling3export.runners.engine.block_manager import BlockManager
from ling3export.runners.engine.counters import Counters
from ling3export.runners.engine.inputs import GREEDY, decode_fields, prefill_fields, sample_fields
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
from ling3export.runners.state.sequence_state import SequenceState

if TYPE_CHECKING:
    from ling3export.runners.load.model_runner import ModelRunner


class Executor:
    """Makes the calls.

    Args:
        backend: Runs the programs: a ``ModelRunner``, or what stands before one.
        chunk: Padded tokens a chunk.
        blocks: Has the page table.
        vocab_size: Token ids are below it.
        counters: Told of the calls.
    """

    def __init__(
        self, backend: "ModelRunner", chunk: int, blocks: BlockManager, vocab_size: int, counters: Counters
    ) -> None:
        self._backend, self._chunk, self._blocks = backend, chunk, blocks
        self._vocab_size, self._counters = vocab_size, counters
        self._sampling = np.full(len(blocks.page_table), GREEDY)  # how the tokens of each state slot are sampled

    def execute_model(self, output: SchedulerOutput) -> DeviceArray | Mapping[str, DeviceArray]:
        """Dispatches a call, and the moves of states around it.

        Returns:
            Logits ``[rows, vocab]`` of a prefill or decode call, for :meth:`sample_tokens`; what a score call gives;
            None where nothing is computed.
        """
        for slot, how in output.admitted:
            self._sampling[slot] = how.temperature, how.top_k, how.top_p, how.min_p, how.seed
        if output.before:
            self._move(output.before)
        found = self._call(output) if output.phase else None
        if output.behind:
            self._move(output.behind)
        return found

    def _call(self, output: SchedulerOutput) -> DeviceArray | Mapping[str, DeviceArray]:
        phase, padding, pages = output.phase, output.padding, self._blocks.page_table
        if phase == "decode":
            rows = output.rows
            self._counters.count(output.cell, padding, len(rows))
            positions = [row.position - 1 for row in rows]
            fields = decode_fields(padding, [row.slot for row in rows], positions, pages, [row.token for row in rows])
            return self._backend.step(phase, padding, fields)
        spans, scores = [each.span for each in output.spans], phase == "score"
        self._counters.count(output.cell, padding, sum(len(span.tokens) for span in spans))
        fields = prefill_fields(padding, spans, self._chunk, pages, score=scores)
        if scores:
            return self._backend.score(padding, fields)
        return self._backend.step(phase, padding, fields)

    def _move(self, moves: Many[StateMove]) -> None:
        for move in moves:
            if isinstance(move, CopyStates):
                self._backend.copy(move.sources, move.targets)
            elif isinstance(move, OffloadState):
                move.copy.state = self._backend.fetch(move.slot, move.pages)
            else:
                state = move.copy.state
                whole = isinstance(state, SequenceState)
                given = state.pool_arrays(self._blocks.page_size) if whole else state
                self._backend.store(move.slot, move.pages, given)

    def sample_tokens(
        self, output: SchedulerOutput, logits: DeviceArray, edits: Mapping[int, LogitsEdits]
    ) -> InFlightSample:
        """Dispatches the sampling of a call's rows, and what is said of their tokens.

        Args:
            output: The call.
            logits: What it gave.
            edits: What changes which rows of them.
        """
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
            changed = self._backend.adjust(logits, count, *adjust_inputs(count, self._vocab_size, edits))["logits"]
        tokens, logprobs = self._backend.sample(changed, count, fields), None
        wanted = {row.row: row.sequence.request.logprobs for row in rows if row.sequence.request.logprobs is not None}
        if wanted:
            self._counters.count(f"logits_processor@{count}", count, len(wanted))
            ranked = rank_fields(count, list(wanted), list(wanted.values()))
            logprobs = self._backend.adjust(logits, count, ranked, token=tokens)
        kept = any(row.sequence.request.logits for row in rows)
        return InFlightSample(output, logits if kept else None, tokens, logprobs)

    def read(self, call: InFlightSample | InFlightScore) -> ModelRunnerOutput:
        """Waits for a call, and fetches what it brought."""
        read = self._backend.read
        if isinstance(call, InFlightScore):
            scores = {
                name: read(call.scores[name]) for name in ("logprob", "best", "best_logprob") if name in call.scores
            }
            return ModelRunnerOutput(now(), scores=scores)
        if not call.output.rows:
            self._backend.wait(call.logits)
            return ModelRunnerOutput(now())
        tokens, at = read(call.tokens).tolist(), now()
        logits = None if call.logits is None else read(call.logits)
        names = () if call.logprobs is None else ("logprob", "top_token", "top_logprob")
        logprobs = {name: read(call.logprobs[name]).tolist() for name in names if call.logprobs is not None}
        return ModelRunnerOutput(at, tokens, logits, logprobs)
