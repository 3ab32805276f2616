"""The engine's steps, from their inputs alone. Hosts that take the same inputs step by step make the same calls.

Host 0 sends the inputs of each step before it takes them; the other hosts take what they receive, in silence. A step
depends only on its inputs and the tokens read before, and every host reads the same tokens. So inputs are all that
travels, and with each step a digest of the tokens that host 0 read before it: a host that read others says so and ends,
before it would make other calls, which none of the hosts would ever come back from.
"""

import hashlib
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ling3export.artifacts.paddings import Shapes
from ling3export.foundation.errors import RankDivergence
from ling3export.runners.engine.coordinator import PrefixCacheCoordinator
from ling3export.runners.engine.counters import Counters
from ling3export.runners.engine.executor import Executor
from ling3export.runners.engine.handle import broken
from ling3export.runners.engine.mask_queue import MaskQueue, WaitingRow
from ling3export.runners.engine.output_processor import OutputProcessor
from ling3export.runners.engine.outputs import DeviceArray, InFlightSample, InFlightScore, NewToken, SchedulerOutput
from ling3export.runners.engine.request import request_of
from ling3export.runners.engine.scheduler import Scheduler
from ling3export.runners.engine.sequence import Sequence, now
from ling3export.runners.hosts.channel import DIVERGED, END, STEP, Channel
from ling3export.runners.load.sharded import packed, unpacked
from ling3export.runners.state.block_manager import BlockManager
from ling3export.runners.state.prefix_cache import PrefixCache
from ling3export.runners.state.sequence_state import SequenceState, Token, TransferredState

if TYPE_CHECKING:
    from ling3export.runners.transfer.prefix_store import PrefixStore

SHORT = 8  # bytes of a digest that travel with every step


class StepInputs(NamedTuple):
    """Arrivals since the last step. They and the tokens decide the step.

    Attributes:
        cancelled: Numbers of arrivals; unknown and ended ones count for nothing.
        compare: Whether the hosts are to compare the tokens that they read.
    """

    arrivals: tuple[Sequence, ...] = ()
    cancelled: tuple[int, ...] = ()
    compare: bool = False


class StepOutputs(NamedTuple):
    """The results of a step.

    Attributes:
        ended: Sequences that ended, cancelled and failed ones too.
        digests: If the hosts compared their tokens: the digest of each host's, by host.
    """

    emitted: list[NewToken]
    ended: list[Sequence]
    digests: tuple[bytes, ...] = ()


class EngineCore:
    """The scheduler, the executor and the bookkeeping, driven by the inputs of each step alone.

    The next call is dispatched before the last one's tokens are read: decode takes its token from the devices.

    Args:
        prepare: Gives a sequence that arrives what the artifact adds to it.
        ahead: Calls that may be dispatched before an earlier one was waited for; 0 waits for each at once.

    Attributes:
        live: The sequences that have not ended, by the number of their arrival.
        doing: The cell whose call a step dispatches or waits for, and since when; None between steps.
    """

    def __init__(
        self,
        executor: Executor,
        shapes: Shapes,
        blocks: BlockManager,
        vocab_size: int,
        prepare: Callable[[Sequence], object],
        *,
        ahead: int = 1,
        counters: Counters | None = None,
        cache: PrefixCache | None = None,
        supports_state_copy: bool = False,
        store: "PrefixStore | None" = None,
        channel: Channel | None = None,
    ) -> None:
        self.executor = executor
        self.counters = Counters() if counters is None else counters
        self.doing: tuple[str, float] | None = None
        coordinator = PrefixCacheCoordinator(
            executor, blocks, self.counters, cache, supports_state_copy=supports_state_copy, store=store
        )
        self._scheduler = Scheduler(shapes, blocks, self.counters, coordinator)
        self._processor = OutputProcessor(self._scheduler, coordinator, self.counters, vocab_size, shapes.chunk)
        self._masks = MaskQueue(vocab_size, self._processor.fail, channel)
        self._prepare, self._ahead = prepare, ahead
        self.live: dict[int, Sequence] = {}
        self._flight: deque[InFlightSample | InFlightScore] = deque()

    @property
    def busy(self) -> bool:
        """Whether a step without inputs would do anything."""
        return self._scheduler.busy or bool(self._flight) or bool(self._masks)

    def step(self, inputs: StepInputs) -> StepOutputs:
        """Takes the inputs, dispatches a call, and waits for the oldest ones where enough are in flight."""
        for sequence in inputs.arrivals:
            self.live[sequence.number] = sequence
            try:
                self._prepare(sequence)
            except BaseException as error:
                self._processor.fail(sequence, broken(sequence.request, "it to be taken in", error))
            else:
                self.submit(sequence)
        cancelled = [ended_early for number in inputs.cancelled if (ended_early := self.cancel(number)) is not None]
        output = self._scheduler.schedule(self._settle, self._masks.holds)
        self._dispatch(output)
        while len(self._flight) > (self._ahead if output.phase else 0):
            self._collect()
        self.doing = None
        emitted, ended = self._processor.take()
        ended = [sequence for sequence in ended if self.live.pop(sequence.number, None) is not None]
        return StepOutputs(emitted, cancelled + ended)

    def submit(self, sequence: Sequence) -> None:
        """Queues a sequence; the tokens that it comes with may end it."""
        self.live[sequence.number] = sequence
        self._processor.accept_transferred(sequence)
        if not sequence.finished:
            self._scheduler.submit(sequence)

    def cancel(self, number: int) -> Sequence | None:
        """Ends a sequence, wherever it is; what it holds is free at once. None for an unknown or ended one."""
        sequence = self.live.pop(number, None)
        if sequence is not None and not sequence.finished:
            sequence.stop_reason = "cancelled"
            self._scheduler.remove(sequence)
        return sequence

    def _dispatch(self, output: SchedulerOutput) -> None:
        """Has a call run, and what it samples."""
        if output.phase:
            self.doing = output.cell, output.at
        result = self.executor.execute_model(output)
        if output.phase == "score":
            self._flight.append(InFlightScore(output, result))
        elif output.phase:
            if output.processed:
                processors = [row.sequence.logits_processor for row in output.processed]
                if any(processor is not None and processor.needs_tokens for processor in processors):
                    # The mask depends on tokens that were not read: they are now, and it is filled while the call runs.
                    self._settle()
                    self.doing = output.cell, now()
                self._masks.add(output, result)
            filled = self._fill_masks()
            own = [waiting.row for waiting in filled if waiting.output is output]
            if own:
                output.rows = sorted([*output.rows, *own], key=attrgetter("row"))
                output.processed = [*output.processed, *own]
            self._sample(output, result)
            return self._sample_waiting([waiting for waiting in filled if waiting.output is not output])
        self._sample_waiting(self._fill_masks())

    def _fill_masks(self) -> list[WaitingRow]:
        others = bool(self._masks) and self._scheduler.runs_besides(attrgetter("has_grammar"))
        return self._masks.fill(others=others)

    def _sample(self, output: SchedulerOutput, logits: DeviceArray) -> None:
        edits = self._processor.logits_edits(output)
        self._flight.append(self.executor.sample_tokens(output, logits, edits))

    def _sample_waiting(self, filled: list[WaitingRow]) -> None:
        """Dispatches the sampling of rows of earlier calls, whose masks were filled since, call by call."""
        calls: dict[int, list[WaitingRow]] = {}
        for waiting in filled:
            calls.setdefault(id(waiting.output), []).append(waiting)
        for call in calls.values():
            rows = sorted((waiting.row for waiting in call), key=attrgetter("row"))
            self._sample(replace(call[0].output, rows=rows, processed=rows, spans=()), call[0].logits)

    def _settle(self) -> bool:
        """Waits for all calls in flight; False if there are none."""
        waited = bool(self._flight)
        while self._flight:
            self._collect()
        return waited

    def _collect(self) -> None:
        call = self._flight.popleft()
        self.doing = call.output.cell, now()
        self._processor.update_from_output(call.output, self.executor.read(call))

    def cancel_all(self) -> None:
        """Ends everything, and waits for what the devices still do."""
        for number in list(self.live):
            self.cancel(number)
        self._settle()

    def fail(self, error: BaseException) -> None:
        """No step follows, because of ``error``: whoever waits for one is told."""


class SharedCore(EngineCore):
    """Steps that all hosts take alike: host 0 sends the inputs of each to the others.

    Every host hashes the tokens that it reads, in the order of reading, as little-endian int32, and which requests
    failed. All compare these digests where the inputs ask for it, and the others with host 0's before each step. So a
    request that fails by itself has to fail on all hosts: what it meets follows from its inputs and its tokens, unless
    it is an error of this machine, which ends all hosts.
    """

    def __init__(self, channel: Channel, *core: Any, **options: Any) -> None:
        super().__init__(*core, channel=channel, **options)
        self._channel = channel
        self._read = hashlib.sha256()

    def received(self, payload: bytes) -> StepOutputs:
        """Takes the inputs that host 0 sent.

        Raises:
            RankDivergence: Host 0 read other tokens than this host, which would now make other calls.
        """
        inputs = decode(payload[SHORT:])
        if not inputs.compare and payload[:SHORT] != self._read.digest()[:SHORT]:
            number = self._channel.hosts.number
            error = RankDivergence(f"sampled tokens: expected those of host 0, found others on host {number}")
            self._channel.fail(error.message, DIVERGED)
            raise error
        return self.step(inputs)

    def step(self, inputs: StepInputs) -> StepOutputs:
        """Sends the inputs where this is host 0, and takes them. Any failure here ends every host."""
        with self._channel.together():
            if self._channel.leads:
                self._channel.send(STEP, self._read.digest()[:SHORT] + encode(inputs))
            digests: tuple[bytes, ...] = ()
            if inputs.compare:  # what each host read since the last time
                mine, self._read = self._read.digest(), hashlib.sha256()
                digests = self._channel.gather(mine)
            outputs = super().step(inputs)
            self._read.update(b"".join(token.token.to_bytes(4, "little", signed=True) for token in outputs.emitted))
            for sequence in outputs.ended:
                if sequence.error is not None:
                    check_alike(sequence.error)
                    self._read.update(f"failed {sequence.number}".encode())
        return outputs._replace(digests=digests)

    def cancel_all(self) -> None:
        """Ends everything on all hosts."""
        if self._channel.leads:
            self._channel.send(END)
        super().cancel_all()
        self._channel.finish()

    def fail(self, error: BaseException) -> None:
        """Ends all hosts, if what failed has not done so."""
        self._channel.fail(f"the engine failed: {error}")


def check_alike(error: Exception) -> None:
    """Passes an error of a request that every host meets.

    Raises:
        MemoryError, OSError: It is this machine's, and its cause.
    """
    if isinstance(error.__cause__, (MemoryError, OSError)):
        raise error.__cause__


def encode(inputs: StepInputs) -> bytes:
    """Inputs as they travel, nothing for none. When a request arrived, and where else it was, is host 0's affair."""
    if inputs == StepInputs():
        return b""
    records, arrays = list[Any](), list[np.ndarray]()
    for sequence in inputs.arrivals:
        transferred = sequence.transferred
        state = None if transferred is None else transferred.state
        begun = None if transferred is None else [transferred.tokens, None if state is None else list(state.arrays)]
        records.append([sequence.number, sequence.turn, asdict(sequence.request), begun])
        arrays += [] if state is None else [state.tokens, *state.arrays.values()]
    return packed({**inputs._asdict(), "arrivals": records}, arrays)


def decode(payload: bytes) -> StepInputs:
    if not payload:
        return StepInputs()
    (record, arrays), arrivals = unpacked(payload), []
    left = iter(arrays)
    for number, turn, fields, begun in record["arrivals"]:
        transferred = None
        if begun is not None:
            tokens, names = begun
            state = None if names is None else SequenceState({}, next(left), {name: next(left) for name in names})
            transferred = TransferredState(tuple(_token(*row) for row in tokens), state)
        arrivals.append(Sequence(request_of(fields), number, None, transferred, turn))
    return StepInputs(tuple(arrivals), tuple(record["cancelled"]), record["compare"])


def _token(token: int, logprobs: Any) -> Token:
    return token, None if logprobs is None else (logprobs[0], tuple((id, value) for id, value in logprobs[1]))
