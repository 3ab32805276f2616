"""The thread that owns the device loop: everybody else hands it requests and cancellations, and takes tickets."""

import threading
from collections.abc import Sequence
from concurrent.futures import Future

from ling3export.runners.engine.core import Arrival, Commands, Turn, Turns
from ling3export.runners.engine.handle import EngineStopped, HostGone, QueueFull, Ticket, wake
from ling3export.runners.engine.request import Request
from ling3export.runners.engine.sequence import now
from ling3export.runners.load.loader import Timings

FIRST_STEP = "first_step"


class Loop:
    """Takes turns while there is work, and sleeps otherwise. Thread-safe.

    An error in a turn ends the loop: what the devices hold is in doubt then. Every ticket gets it.

    Args:
        turns: What to do; belongs to the thread from now on.
        timings: Gets the seconds to the first token that was ever read.
        max_requests: At most this many at once, waiting ones too; None for any number.
    """

    def __init__(self, turns: Turns, timings: Timings, max_requests: int | None = None) -> None:
        self._turns: Turns | None = turns
        self._timings = timings
        self._max_requests = max_requests
        self._changed = threading.Condition()
        self._arrivals: list[Arrival] = []
        self._cancelled: list[int] = []
        self._comparing: list[Future[tuple[bytes, ...]]] = []  # asked for in the next turn
        self._compared: list[Future[tuple[bytes, ...]]] = []  # and in this one
        self._tickets: dict[int, Ticket] = {}
        self._count = 0
        self._closing = False
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="ling3-engine", daemon=True)
        self._thread.start()

    def submit(self, requests: Sequence[Request]) -> list[Ticket]:
        """Hands over requests; they arrive together, in order.

        Raises:
            QueueFull: They would be more than max_requests; none was taken.
            EngineStopped: The loop has ended.
        """
        with self._changed:
            if self._closing or self._failure is not None:
                raise self._stopped()
            live, most = len(self._tickets), self._max_requests
            if most is not None and live + len(requests) > most:
                raise QueueFull(
                    f"engine: expected at most {most} requests at once, found {live} + {len(requests)} new ones",
                    "send them later, or allow more with max_requests",
                )
            tickets, at = [], now()
            for request in requests:
                ticket = Ticket(request, self._count, self.cancel)
                self._tickets[ticket.index] = ticket
                self._arrivals.append(Arrival(ticket.index, request, at))
                self._count += 1
                tickets.append(ticket)
            self._changed.notify()
        return tickets

    def cancel(self, index: int) -> None:
        """Cancels a request, soon; an unknown or ended one counts for nothing."""
        with self._changed:
            if index in self._tickets:
                self._cancelled.append(index)
                self._changed.notify()

    def compare(self) -> tuple[bytes, ...]:
        """Has the hosts compare the tokens that they read since the last time; waits for their digests, by host.

        Raises:
            EngineStopped: The loop has ended, or does before that.
        """
        asked: Future[tuple[bytes, ...]] = Future()
        with self._changed:
            if self._closing or self._failure is not None:
                raise self._stopped()
            self._comparing.append(asked)
            self._changed.notify()
        return asked.result()

    @property
    def running(self) -> bool:
        """Whether it takes requests: it was not closed and did not fail."""
        return not self._closing and self._failure is None

    @property
    def live(self) -> int:
        """Requests that have not ended."""
        return len(self._tickets)

    @property
    def stopped(self) -> EngineStopped | None:
        """Why it takes no requests; None while it does."""
        return None if self.running else self._stopped()

    def abandon(self, text: str) -> None:
        """Another host is gone: requests get HostGone from now on. The thread may be in a step that never ends."""
        with self._changed:
            self._failure = HostGone(f"engine: expected every host to run, found one gone: {text}")
        self._fail_all()

    def close(self) -> None:
        """Ends the thread; requests that have not ended get EngineStopped. May be called again, from any thread."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        turns = self._turns
        assert turns is not None
        started: float | None = None
        try:
            while (commands := self._next(turns)) is not None:
                started = now() if started is None else started
                turn = turns.turn(commands)
                if turn.emitted:
                    self._timings.seconds.setdefault(FIRST_STEP, now() - started)
                self._deliver(turn)
            turns.cancel_all()
        except BaseException as error:
            self._failure = self._failure or error
        finally:
            self._turns = None  # programs, weights and state go with it
            del turns
            self._fail_all()

    def _next(self, turns: Turns) -> Commands | None:
        """The commands of the next turn, once there are some or there is work; None when the loop is to end."""
        with self._changed:
            while not (self._closing or self._arrivals or self._cancelled or self._comparing or turns.busy):
                self._changed.wait()
            if self._closing:
                return None
            commands = Commands(tuple(self._arrivals), tuple(self._cancelled), bool(self._comparing))
            self._arrivals, self._cancelled = [], []
            self._compared, self._comparing = self._comparing, []
        return commands

    def _deliver(self, turn: Turn) -> None:
        """Fills the tickets, and wakes who waits for them."""
        touched: dict[int, Ticket] = {}
        for sequence, token, text in turn.emitted:
            ticket = self._tickets.get(sequence.index)
            if ticket is not None:
                ticket.push(token, text)
                touched[ticket.index] = ticket
        for sequence in turn.ended:
            with self._changed:
                ticket = self._tickets.pop(sequence.index, None)
            if ticket is not None:  # else the loop was abandoned meanwhile
                ticket.finish(sequence.completion())
                touched[ticket.index] = ticket
        wake(touched.values())
        for asked in self._compared:
            asked.set_result(turn.digests)

    def _fail_all(self) -> None:
        with self._changed:
            tickets = list(self._tickets.values())
            self._tickets.clear()
            asked = [each for each in (*self._compared, *self._comparing) if not each.done()]
        for ticket in tickets:
            ticket.finish(self._stopped())
        for each in asked:
            each.set_exception(self._stopped())
        wake(tickets)

    def _stopped(self) -> EngineStopped:
        if self._failure is None:
            return EngineStopped("engine: expected it open, found it closed")
        error = self._failure
        if isinstance(error, HostGone):
            return HostGone(error.message, error.hint)
        stopped = EngineStopped(
            f"engine: expected every step to run, found {type(error).__name__}: {error}",
            "what the devices held is lost: load the artifact again",
        )
        stopped.__cause__ = error
        return stopped
