"""Leases of states that this process was promised and has not taken yet: each is renewed at a third of its length."""

import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from ling3export.runners.transfer.store import StateAddress

PART = 3  # renewals in a lease: two may be lost


@dataclass
class _Held:
    address: StateAddress
    every: float
    at: float  # of the next renewal


class Renewals:
    """Renews leases in a thread of its own, which begins with the first of them.

    Args:
        renew: Asks for another lease; ``renewed``, or why there is none.
        clock: Gives seconds.

    Attributes:
        counts: What ``renew`` said, how often; a failure as ``renewal_`` and the reason.
    """

    def __init__(self, renew: Callable[[StateAddress], str], clock: Callable[[], float] = time.monotonic) -> None:
        self._renew, self._clock = renew, clock
        self.counts: Counter[str] = Counter()
        self._held: dict[str, _Held] = {}
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False

    def __len__(self) -> int:
        """How many leases are renewed."""
        return len(self._held)

    def add(self, address: StateAddress, lease: float, *, threaded: bool = True) -> None:
        """Renews a lease of so many seconds, which has just begun, until ``drop``; ``threaded``: in the thread."""
        every = lease / PART
        with self._changed:
            self._held[address.name] = _Held(address, every, self._clock() + every)
            if threaded and self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._run, name="ling3-leases", daemon=True)
                self._thread.start()
            self._changed.notify()

    def drop(self, name: str) -> None:
        """Renews a lease no more; an unknown one counts for nothing."""
        with self._changed:
            self._held.pop(name, None)

    def renew_due(self) -> None:
        """Renews what is due. Who does not answer is asked for nothing else in this round, and no more for these."""
        silent: set[tuple[str, int]] = set()
        with self._changed:
            due = [held for held in self._held.values() if held.at <= self._clock()]
            for held in due:
                held.at = self._clock() + held.every
        for held in due:
            where = held.address.host, held.address.port
            said = "peer_gone" if where in silent else self._renew(held.address)
            self.counts[said if said == "renewed" else f"renewal_{said}"] += 1
            if said != "renewed":
                silent |= {where} if said != "refused" else set()
                self.drop(held.address.name)

    def close(self) -> None:
        """Ends the thread, once the renewal that runs has ended."""
        with self._changed:
            self._closed = True
            self._held.clear()
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._closed and (left := self._left()) != 0:
                    self._changed.wait(left)
                if self._closed:
                    return
            self.renew_due()

    def _left(self) -> float | None:
        """Seconds until the next renewal; None where nothing is held."""
        return max(0.0, min(held.at for held in self._held.values()) - self._clock()) if self._held else None
