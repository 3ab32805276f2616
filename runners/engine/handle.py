"""A request in the engine's hands: its text as it comes, its end, its cancellation; for threads and for asyncio."""

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Iterable
from dataclasses import dataclass

from ling3export.foundation.errors import Ling3Error
from ling3export.runners.engine.request import Completion, Logprobs, Request
from ling3export.runners.engine.sequence import SequenceOutput


class RequestFailed(Ling3Error):
    """A request that was accepted ended without an answer."""


class LogitsError(RequestFailed):
    """No token can be taken from a request's logits. Other requests go on."""


class GrammarFailed(RequestFailed):
    """A request's grammar turned out too complex to be followed. Other requests go on."""


class RequestBroken(RequestFailed):
    """The work for one request raised an error, which is its cause. Other requests go on."""


class EngineStopped(RequestFailed):
    """The engine was closed, or failed: it will not finish this request."""


class EngineStalled(EngineStopped):
    """A call of the devices did not return in time; nothing can cancel it."""


class HostGone(EngineStopped):
    """Another host is gone, and this process ends soon."""


class QueueFull(Ling3Error):
    """The engine has reached its limit of requests; try again later."""


@dataclass(frozen=True)
class RequestDelta:
    """The text and tokens since the piece before.

    Attributes:
        text: Whole characters without any part of a stop string; may be empty.
        token_ids: The tokens that were generated.
        logprobs: Log-probabilities of each, if requested.
        completion: The whole answer; with the last piece only.
    """

    text: str
    token_ids: list[int]
    completion: Completion | None = None
    logprobs: tuple[Logprobs, ...] = ()

    @classmethod
    def whole(cls, completion: Completion) -> "RequestDelta":
        return cls(completion.text or "", completion.token_ids, completion, tuple(completion.logprobs or ()))


class RequestHandle:
    """A submitted request. The engine's thread fills it; one reader takes from it, in any thread or coroutine.

    Nothing waits for a slow reader: what it did not take yet is joined into one piece, which max_tokens bounds.
    """

    def __init__(self, request: Request, number: int, cancel: Callable[[int], None]) -> None:
        self.request = request
        self.number = number
        self.cancelled = False
        self._cancel = cancel
        self._lock = threading.Lock()
        self._output = SequenceOutput()
        self._there = self._taken = 0, 0, 0  # tokens, characters and logprobs of it that may be, and were, taken
        self._completion: Completion | None = None
        self._error: Exception | None = None
        self._over = threading.Event()
        self._listener: tuple[asyncio.AbstractEventLoop, asyncio.Event, bool] | None = None

    @property
    def done(self) -> bool:
        return self._over.is_set()

    def cancel(self) -> None:
        """Ends it, wherever it is; it keeps the tokens it has. Does nothing once it ended."""
        if not self.done:
            self.cancelled = True
            self._cancel(self.number)

    def result(self, timeout: float | None = None) -> Completion:
        """Waits for the end.

        Returns:
            The completion; of a cancelled request, what there was of it.

        Raises:
            TimeoutError: The request has not ended; it goes on.
            LogitsError: Its logits are not finite.
            EngineStopped: The engine ended first.
        """
        if not self._over.wait(timeout):
            raise TimeoutError(f"{self.request.name}: expected an answer within {timeout} s, found it still running")
        return self._outcome()

    async def wait(self) -> Completion:
        """``result()`` for a coroutine. If the coroutine is cancelled, so is the request.

        Raises:
            RequestFailed: For the reasons that ``result`` gives.
        """
        event = self._listen(every_token=False)
        try:
            await event.wait()
        finally:
            self.cancel()
        return self._outcome()

    async def pieces(self) -> AsyncGenerator[RequestDelta, None]:
        """The answer as it comes; the last piece has the completion. Leaving early cancels the request.

        Leaving is: the task is cancelled, ``aclose()``, or a ``break`` (then when the generator is collected).

        Raises:
            RequestFailed: For the reasons that ``result`` gives.
        """
        event = self._listen(every_token=True)
        try:
            while True:
                await event.wait()
                event.clear()
                piece = self._take()
                if piece is not None:
                    yield piece
                    if piece.completion is not None:
                        return
        finally:
            self.cancel()

    # The function that the engine's thread calls; ``wake`` afterwards.

    def update(self, output: SequenceOutput) -> None:
        """Tokens of the answer were read: what ``output`` has now may be taken."""
        with self._lock:
            self._output = output
            self._there = len(output.token_ids), len(output.text or ""), len(output.logprobs)

    def finish(self, outcome: Completion | Exception) -> None:
        with self._lock:
            if isinstance(outcome, Completion):
                self._completion = outcome
            else:
                self._error = outcome
        self._over.set()

    def listener(self) -> tuple[asyncio.AbstractEventLoop, asyncio.Event] | None:
        """The event loop and the event of the coroutine that is to be woken now, if one is."""
        listener = self._listener
        return listener[:2] if listener is not None and (self.done or listener[2]) else None

    def _listen(self, *, every_token: bool) -> asyncio.Event:
        event = asyncio.Event()
        self._listener = (asyncio.get_running_loop(), event, every_token)
        # Earlier pieces woke no listener.
        if self.done or (every_token and self._there != self._taken):
            event.set()
        return event

    def _take(self) -> RequestDelta | None:
        with self._lock:
            output, completion = self._output, self._completion
            tokens, text, logprobs = map(slice, self._taken, self._there)
            self._taken = self._there
        if self._error is not None:
            raise self._error
        if tokens.start == tokens.stop and completion is None:
            return None
        taken = tuple(output.logprobs[logprobs])
        return RequestDelta((output.text or "")[text], output.token_ids[tokens], completion, taken)

    def _outcome(self) -> Completion:
        if self._error is not None:
            raise self._error
        assert self._completion is not None
        return self._completion


def wake(handles: Iterable[RequestHandle]) -> None:
    """Wakes the coroutines that wait for these handles: one call an event loop, however many they are.

    A handle whose event loop has closed is cancelled: nobody will read it.
    """
    waiting: dict[asyncio.AbstractEventLoop, list[tuple[RequestHandle, asyncio.Event]]] = {}
    for handle in handles:
        listener = handle.listener()
        if listener is not None:
            waiting.setdefault(listener[0], []).append((handle, listener[1]))
    for loop, sleepers in waiting.items():
        try:
            loop.call_soon_threadsafe(_set_all, [event for _, event in sleepers])
        except RuntimeError:  # closed
            for handle, _ in sleepers:
                handle.cancel()


def _set_all(events: list[asyncio.Event]) -> None:
    for event in events:
        event.set()


def broken(request: Request, doing: str, error: BaseException) -> RequestBroken:
    """The error of a request for which something could not be done.

    Libraries in Rust panic with a BaseException of their own; what ends a process is not taken for one.

    Raises:
        KeyboardInterrupt, SystemExit: The process is to end.
    """
    if isinstance(error, (KeyboardInterrupt, SystemExit)):
        raise error
    failure = RequestBroken(
        f"{request.name}: expected {doing}, found {type(error).__name__}: {error}",
        "this is a fault of the runner or of a library that it uses, not of the request; other requests go on",
    )
    failure.__cause__ = error
    return failure
