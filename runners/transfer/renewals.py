"""Leases of states that this process was promised and has not taken yet: each is renewed at a third of its length."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ling3export.runners.transfer.backend import Source

PART = 3  # renewals in a lease: two may be lost


@dataclass
class _Held:
    sources: Sequence[Source]
    every: float
    at: float  # of the next renewal
    until: float  # the lease is over, unless it was renewed


class Renewals:
    """Renews leases in a thread of its own, which begins with the first of them.

    Args:
        renew: Asks a source for another lease; ``renewed``, or why there is none.
        clock: Gives seconds.

    Attributes:
        counts: What ``renew`` said, how often; a failure as ``renewal_`` and the reason.
    """

    def __init__(self, renew: Callable[[Source], str], clock: Callable[[], float] = time.monotonic) -> None:
        self._renew, self._clock = renew, clock
        self.counts: Counter[str] = Counter()
        self._held: dict[str, _Held] = {}
        self._over: set[str] = set()  # whose renewals were refused
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False

    def add(self, name: str, sources: Sequence[Source], lease: float) -> None:
        """Renews a lease of so many seconds, which has just begun, until ``drop``."""
        every, begun = lease / PART, self._clock()
        with self._changed:
            self._held[name] = _Held(sources, every, begun + every, begun + lease)
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._run, name="ling3-leases", daemon=True)
                self._thread.start()
            self._changed.notify()

    def drop(self, name: str) -> bool:
        """Renews a lease no more; an unknown one counts for nothing. Whether it is known to be over."""
        with self._changed:
            held, over = self._held.pop(name, None), name in self._over
            self._over.discard(name)
            return over or (held is not None and held.until <= self._clock())

    def renew_due(self) -> None:
        """Renews what is due. Who does not answer is asked for nothing else in this round, and no more for these."""
        silent: set[tuple[str, int]] = set()
        for name, held in self._take_due():
            until = self._clock() + PART * held.every
            for source in held.sources:
                address = source.host, source.port
                said = "peer_gone" if address in silent else self._renew(source)
                self.counts[said if said == "renewed" else f"renewal_{said}"] += 1
                if said != "renewed":
                    silent |= {address} if said != "refused" else set()
                    self._lose(name, over=said == "refused")
                    break
            else:
                held.until = until

    def close(self) -> None:
        """Ends the thread, once the renewal that runs has ended."""
        with self._changed:
            self._closed = True
            self._held.clear()
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()

    def _lose(self, name: str, *, over: bool) -> None:
        with self._changed:
            if self._held.pop(name, None) is not None and over:
                self._over.add(name)

    def _take_due(self) -> list[tuple[str, _Held]]:
        with self._changed:
            now = self._clock()
            due = [(name, held) for name, held in self._held.items() if held.at <= now]
            for _, held in due:
                held.at = now + held.every
            return due

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
