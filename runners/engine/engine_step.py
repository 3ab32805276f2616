"""Turns of the scheduler, from commands alone. Hosts that take the same commands turn by turn make the same calls."""

from collections.abc import Callable
from typing import NamedTuple

from ling3export.runners.engine.request import Request
from ling3export.runners.engine.scheduler import Emitted, Scheduler
from ling3export.runners.engine.sequence import Sequence


class Arrival(NamedTuple):
    """A request that was checked and accepted.

    Attributes:
        number: Its place in the order of arrival.
        request: What was asked.
        at: When, on the clock of ``sequence.now``; it is noted and decides nothing.
    """

    number: int
    request: Request
    at: float | None = None


class Commands(NamedTuple):
    """What reached the engine since the last turn: all that decides what the turn does, beside the tokens.

    Attributes:
        arrivals: In order.
        cancelled: Their numbers; unknown and ended ones count for nothing.
        compare: Whether hosts are to compare the tokens that they read.
    """

    arrivals: tuple[Arrival, ...] = ()
    cancelled: tuple[int, ...] = ()
    compare: bool = False


class Turn(NamedTuple):
    """What a turn brought.

    Attributes:
        emitted: Tokens that were read.
        ended: Sequences that ended, cancelled ones too.
        digests: Where hosts compared their tokens: of each host, by number, what it read since they last did.
    """

    emitted: list[Emitted]
    ended: list[Sequence]
    digests: tuple[bytes, ...] = ()


class Turns:
    """The scheduler behind a list of commands.

    Args:
        scheduler: Runs the sequences.
        sequence: Makes one of an arrival.
    """

    def __init__(self, scheduler: Scheduler, sequence: Callable[[Arrival], Sequence]) -> None:
        self.scheduler = scheduler
        self._sequence = sequence
        self._live: dict[int, Sequence] = {}

    @property
    def busy(self) -> bool:
        """Whether a turn without commands would do anything."""
        return self.scheduler.busy

    def turn(self, commands: Commands) -> Turn:
        """Takes the commands, then makes one step."""
        for arrival in commands.arrivals:
            sequence = self._live[arrival.number] = self._sequence(arrival)
            self.scheduler.submit(sequence)
        ended = []
        for number in commands.cancelled:
            found = self._live.pop(number, None)
            if found is not None:
                self.scheduler.cancel(found)
                ended.append(found)
        emitted = self.scheduler.step()
        for sequence in self.scheduler.take_scored():
            if self._live.pop(sequence.index, None) is not None:
                ended.append(sequence)
        for token in emitted:
            if token.sequence.over and self._live.pop(token.sequence.index, None) is not None:
                ended.append(token.sequence)
        return Turn(emitted, ended)

    def cancel_all(self) -> None:
        """Ends everything, and waits for what the devices still do."""
        for sequence in self._live.values():
            self.scheduler.cancel(sequence)
        self._live.clear()
        while self.busy:
            self.scheduler.step()
