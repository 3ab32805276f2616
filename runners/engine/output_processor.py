"""The bookkeeping of results: sequences take the tokens and scores that calls brought, and end.

What is done for one sequence alone (its mask and edits, what a token does to its text and its grammar, its scores) may
raise whatever it likes: that sequence ends with RequestBroken, and the others go on. Calls for a sequence that has
ended meanwhile are dropped.
"""

from collections.abc import Mapping

import numpy as np

from ling3export.runners.engine.coordinator import PrefixCacheCoordinator
from ling3export.runners.engine.counters import Counters
from ling3export.runners.engine.handle import GrammarFailed, LogitsError, RequestFailed, broken
from ling3export.runners.engine.logits_processor import RESTRICTING, LogitsEdits
from ling3export.runners.engine.outputs import ModelRunnerOutput, NewToken, SchedulerOutput
from ling3export.runners.engine.request import Logprobs
from ling3export.runners.engine.scheduler import Scheduler
from ling3export.runners.engine.sequence import Sequence, now


class OutputProcessor:
    """Takes what calls brought. A sequence that samples a token beyond ``vocab_size`` fails."""

    def __init__(
        self, scheduler: Scheduler, coordinator: PrefixCacheCoordinator, counters: Counters, vocab_size: int, chunk: int
    ) -> None:
        self._scheduler, self._coordinator, self._counters = scheduler, coordinator, counters
        self._vocab_size, self._chunk = vocab_size, chunk
        self._emitted: list[NewToken] = []
        self._ended: list[Sequence] = []

    def take(self) -> tuple[list[NewToken], list[Sequence]]:
        """The tokens that were read and the sequences that ended by themselves since this was asked last, in order."""
        taken = self._emitted, self._ended
        self._emitted, self._ended = [], []
        return taken

    def accept_transferred(self, sequence: Sequence) -> None:
        """Tokens that a sequence comes with count as read now."""
        for token, row in () if sequence.transferred is None else sequence.transferred.tokens:
            try:
                logprobs = None if row is None or sequence.request.logprobs is None else Logprobs(*row)
                sequence.accept(token, now(), None, logprobs)
            except BaseException as error:
                return self.fail(sequence, broken(sequence.request, "its token to be taken", error))
            self._emitted.append(NewToken(sequence, token))
            sequence.num_sampled += 1
            if sequence.finished:
                return self.end(sequence)

    def logits_edits(self, output: SchedulerOutput) -> dict[int, LogitsEdits]:
        """Changes of the logits of a call, by row; rows of sequences that have ended leave the call.

        A sequence for which that cannot be said ends.
        """
        edits = {}
        for row in output.processed:
            sequence, processor = row.sequence, row.sequence.logits_processor
            if processor is not None and not sequence.finished:
                try:
                    edit = LogitsEdits(processor.edits, processor.mask(self._vocab_size))
                    if edit.mask is not None or edit.edits.shape[1]:
                        edits[row.row] = edit
                except BaseException as error:
                    self.fail(sequence, broken(sequence.request, RESTRICTING, error))
        output.rows = [row for row in output.rows if not row.sequence.finished]
        return edits

    def update_from_output(self, output: SchedulerOutput, result: ModelRunnerOutput) -> None:
        """Gives sequences what a call brought for them."""
        if result.scores is not None:
            self._update_scores(output, result.scores)
        tokens, logits, row_logprobs = result.tokens, result.logits, result.logprobs
        for sequence, row, _, _, call, _ in output.rows:
            if sequence.finished:
                continue
            token, request = tokens[row], sequence.request
            if not 0 <= token < self._vocab_size:
                problem = "NaN or infinity" if token == -1 else f"token {token} of {self._vocab_size}"
                self.fail(sequence, unusable(sequence, problem, sequence.num_tokens))
                continue
            sequence.calls.append(call)
            try:
                logprobs = None
                if request.logprobs is not None and row_logprobs is not None:
                    top = zip(row_logprobs["top_token"][row], row_logprobs["top_logprob"][row], strict=True)
                    logprobs = Logprobs(row_logprobs["logprob"][row], tuple(top)[: request.logprobs])
                taken_from = logits[row].copy() if logits is not None and request.logits else None
                sequence.accept(token, result.at, taken_from, logprobs)
                why = "" if sequence.logits_processor is None else sequence.logits_processor.error
            except BaseException as error:
                self.fail(sequence, broken(request, "its token to be taken", error))
                continue
            self._counters.tokens_out += 1
            self._coordinator.read(sequence)
            self._emitted.append(NewToken(sequence, token))
            if why:
                problem = f"{request.name}: expected a grammar that can be followed, found: {why}"
                self.fail(sequence, GrammarFailed(problem, "it is too complex; ask for less at once"))
            elif sequence.stop_reason is not None:
                self.end(sequence)

    def _update_scores(self, output: SchedulerOutput, scores: Mapping[str, np.ndarray]) -> None:
        for sequence, span, row in output.spans:
            if sequence.finished:
                continue
            at = row * self._chunk
            values = {name: array[at : at + len(span.tokens)] for name, array in scores.items()}
            first = max((sequence.request.score_from or 0) - 1, span.start)  # after it is the first token to score
            finite = np.isfinite(values["logprob"][first - span.start :])
            if not finite.all():
                self.fail(sequence, unusable(sequence, "NaN or infinity", first + int(finite.argmin()) + 1))
                continue
            try:
                rows = zip(*(values[name].tolist() for name in ("logprob", "best", "best_logprob")), strict=True)
                over = sequence.accept_scores(span.start, [Logprobs(own, ((id, top),)) for own, id, top in rows])
            except BaseException as error:
                self.fail(sequence, broken(sequence.request, "its scores to be taken", error))
                continue
            if over:
                self.end(sequence)

    def fail(self, sequence: Sequence, error: RequestFailed) -> None:
        """Ends a sequence by itself, with an error that is its own."""
        sequence.stop_reason = "failed"
        sequence.error = error
        self._counters.failed += 1
        if isinstance(error, LogitsError):
            self._coordinator.discard(sequence)
        self.end(sequence)

    def end(self, sequence: Sequence) -> None:
        """Takes back what a sequence holds that ended by itself, for whatever ``stop_reason``; its state may leave."""
        if sequence.error is None:
            if sequence.request.do_remote_decode:
                self._coordinator.export(sequence)
            self._coordinator.publish(sequence)
        self._scheduler.remove(sequence)
        self._ended.append(sequence)


def unusable(sequence: Sequence, problem: str, position: int) -> LogitsError:
    return LogitsError(
        f"logits of {sequence.request.name}: expected finite numbers, found {problem}, at position {position}",
        "some weight is not finite, or a number left its range: `ling3export verify` compares the programs",
    )
