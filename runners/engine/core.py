"""The engine's steps, from their inputs alone. Hosts that take the same inputs step by step make the same calls.

Host 0 sends the inputs of each step before it takes them; the other hosts take what they receive, in silence. What a
step does follows from its inputs and the tokens read before, and every host reads the same tokens. So inputs are all
that travels, and with each step a digest of the tokens that host 0 read before it: a host that read others says so and
ends, before it would make other calls, which none of the hosts would ever come back from.
"""

import hashlib
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, NamedTuple

import numpy as np

from ling3export.foundation.errors import RankDivergence
from ling3export.runners.engine.handle import broken
from ling3export.runners.engine.request import Request, request_of
from ling3export.runners.engine.scheduler import Emitted, Scheduler
from ling3export.runners.engine.sequence import Sequence
from ling3export.runners.hosts.channel import DIVERGED, END, STEP, Channel
from ling3export.runners.load.arrays import packed, unpacked
from ling3export.runners.state.sequence_state import SequenceState, Token, TransferredState

SHORT = 8  # bytes of a digest that travel with every step


class Arrival(NamedTuple):
    """A request that was checked and accepted.

    Attributes:
        number: Its place in the order of arrival.
        request: What was asked.
        at: When it arrived, on the clock of ``sequence.now``; this is noted and decides nothing.
        transferred: The state that it comes with, where it was begun elsewhere.
        saved: Whether its state is taken along when it ends.
    """

    number: int
    request: Request
    at: float | None = None
    transferred: TransferredState | None = None
    saved: bool = False


class StepInputs(NamedTuple):
    """What reached the engine since the last step: all that decides what the step does, beside the tokens.

    Attributes:
        arrivals: In order.
        cancelled: Numbers of arrivals; unknown and ended ones count for nothing.
        compare: Whether the hosts are to compare the tokens that they read.
        saved: Numbers of arrivals that end where they are, so that they can go on elsewhere.
    """

    arrivals: tuple[Arrival, ...] = ()
    cancelled: tuple[int, ...] = ()
    compare: bool = False
    saved: tuple[int, ...] = ()


class StepOutputs(NamedTuple):
    """What a step brought.

    Attributes:
        emitted: The tokens that were read.
        ended: Sequences that ended, cancelled and failed ones too.
        digests: If the hosts compared their tokens: the digest of each host's, by host.
    """

    emitted: list[Emitted]
    ended: list[Sequence]
    digests: tuple[bytes, ...] = ()


class EngineCore:
    """The scheduler, driven by the inputs of each step alone.

    Args:
        scheduler: Runs the sequences.
        sequence: Makes a sequence of an arrival.
    """

    def __init__(self, scheduler: Scheduler, sequence: Callable[[Arrival], Sequence]) -> None:
        self.scheduler = scheduler
        self._sequence = sequence
        self._live: dict[int, Sequence] = {}

    @property
    def busy(self) -> bool:
        """Whether a step without inputs would do anything."""
        return self.scheduler.busy

    def step(self, inputs: StepInputs) -> StepOutputs:
        """Takes the inputs, then has the scheduler dispatch a call and read what is due."""
        for arrival in inputs.arrivals:
            try:
                sequence = self._sequence(arrival)
            except BaseException as error:
                request = arrival.request
                sequence = Sequence(request, arrival.number, request.max_tokens, frozenset(), arrived=arrival.at)
                self._live[arrival.number] = sequence
                self.scheduler.fail(sequence, broken(request, "it to be taken in", error))
            else:
                self._live[arrival.number] = sequence
                self.scheduler.submit(sequence)
        ended = []
        for number in inputs.cancelled:
            found = self._live.pop(number, None)
            if found is not None:
                self.scheduler.cancel(found)
                ended.append(found)
        for number in inputs.saved:
            if number in self._live:
                self.scheduler.save(self._live[number])
        emitted = self.scheduler.step()
        over = self.scheduler.take_ended()
        ended += [sequence for sequence in over if self._live.pop(sequence.number, None) is not None]
        return StepOutputs(emitted, ended)

    def cancel_all(self) -> None:
        """Ends everything, and waits for what the devices still do."""
        for sequence in self._live.values():
            self.scheduler.cancel(sequence)
        self._live.clear()
        while self.busy:
            self.scheduler.step()

    def fail(self, error: BaseException) -> None:
        """No step follows, because of ``error``: whoever waits for one is told."""


class SharedCore(EngineCore):
    """Steps that all hosts take alike: host 0 sends the inputs of each to the others.

    Every host hashes the tokens that it reads, in the order of reading, as little-endian int32, and which requests
    failed. All compare these digests where the inputs ask for it, and the others with host 0's before each step. So a
    request that fails by itself has to fail on all hosts: what it meets follows from its inputs and its tokens, unless
    it is an error of this machine, which ends all hosts.

    Args:
        scheduler: Runs the sequences.
        sequence: Makes a sequence of an arrival.
        channel: Between the hosts.
    """

    def __init__(self, scheduler: Scheduler, sequence: Callable[[Arrival], Sequence], channel: Channel) -> None:
        super().__init__(scheduler, sequence)
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
        """Sends the inputs where this is host 0, and takes them. Whatever fails here ends every host."""
        with self._channel.together():
            if self._channel.leads:
                self._channel.send(STEP, self._read.digest()[:SHORT] + encode(inputs))
            digests: tuple[bytes, ...] = ()
            if inputs.compare:  # what each host read since the last time
                mine, self._read = self._read.digest(), hashlib.sha256()
                digests = self._channel.gather(mine)
            outputs = super().step(inputs)
            self._read.update(b"".join(each.token.to_bytes(4, "little", signed=True) for each in outputs.emitted))
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
    said, arrays = list[Any](), list[np.ndarray]()
    for number, request, _, transferred, saved in inputs.arrivals:
        state = None if transferred is None else transferred.state
        begun = None if transferred is None else [transferred.tokens, None if state is None else list(state.arrays)]
        said.append([number, asdict(request), begun, saved])
        arrays += [] if state is None else [state.tokens, *state.arrays.values()]
    return packed({**inputs._asdict(), "arrivals": said}, arrays)


def decode(payload: bytes) -> StepInputs:
    """What ``encode`` wrote."""
    if not payload:
        return StepInputs()
    (said, arrays), arrivals = unpacked(payload), []
    left = iter(arrays)
    for number, fields, begun, saved in said["arrivals"]:
        transferred = None
        if begun is not None:
            tokens, names = begun
            state = None if names is None else SequenceState({}, next(left), {name: next(left) for name in names})
            transferred = TransferredState(tuple(_token(*each) for each in tokens), state)
        arrivals.append(Arrival(number, request_of(fields), None, transferred, saved))
    return StepInputs(tuple(arrivals), tuple(said["cancelled"]), said["compare"], tuple(said["saved"]))


def _token(token: int, likely: Any) -> Token:
    return token, None if likely is None else (likely[0], tuple((each, value) for each, value in likely[1]))
