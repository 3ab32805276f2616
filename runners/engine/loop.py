"""The thread that owns the device loop: everybody else hands it requests and cancellations, and takes handles."""

import threading
from collections.abc import Sequence as Many
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ling3export.foundation.threads import GuardedThread
from ling3export.runners.engine.core import EngineCore, StepInputs, StepOutputs
from ling3export.runners.engine.handle import (
    EngineStalled,
    EngineStopped,
    HostGone,
    QueueFull,
    RequestHandle,
    broken,
    wake,
)
from ling3export.runners.engine.request import Completion, Request
from ling3export.runners.engine.sequence import Sequence, now
from ling3export.runners.load.loader import Timings

if TYPE_CHECKING:
    from ling3export.runners.state.sequence_state import TransferredState
    from ling3export.runners.transfer.prefix_store import PrefixStore
    from ling3export.runners.transfer.transfer_queue import Exported, TransferQueue


class Loop:
    """Takes steps while there is work, and sleeps otherwise. Thread-safe.

    An error in a step stops the loop: what the devices hold is in doubt then. Every handle gets it.

    Args:
        timings: Gets the seconds to the first token that was ever read.
        step_timeout: Seconds after which a call that did not return stops the loop; None for any time.
    """

    def __init__(
        self,
        core: EngineCore,
        timings: Timings,
        max_requests: int | None = None,
        *,
        step_timeout: float | None = None,
        transfers: "TransferQueue | None" = None,
        store: "PrefixStore | None" = None,
    ) -> None:
        self._transfers, self._store = transfers, store
        self._awaited: dict[int, Sequence] = {}  # whose states are being loaded
        self._timings, self._max_requests = timings, max_requests
        self._changed = threading.Condition()
        self._watchdog: GuardedThread | None = None
        self._handles: dict[int, RequestHandle] = {}
        self._count = self._calls = 0
        self._closing = False
        self.core: EngineCore | None = core
        self._arrivals: list[Sequence] = []
        self._cancelled: list[int] = []
        self._comparing: list[Future[tuple[bytes, ...]]] = []  # asked for in the next step
        self._compared: list[Future[tuple[bytes, ...]]] = []  # and in this one
        self._failure: BaseException | None = None
        self._ended = threading.Event()
        self._thread = GuardedThread("ling3-engine", self._run, self._thread_failed)
        if step_timeout is not None:
            watch = partial(self._watch, core, self._ended, step_timeout)
            self._watchdog = GuardedThread("ling3-watchdog", watch, self._thread_failed)

    def _thread_failed(self, error: BaseException) -> None:
        """Ends the loop: one of its threads ended outside a step."""
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify()
        self._ended.set()
        self._fail_all()

    def submit(self, requests: Many[Request]) -> list[RequestHandle]:
        """Hands over requests that ``Engine.check`` took; they arrive together, in order.

        Raises:
            QueueFull: They would be more than max_requests; none was taken.
            EngineStopped: The loop has ended.
        """
        with self._changed:
            self._check_open()
            self.check_room(len(requests))
            handles, at = [], now()
            for place, request in enumerate(requests):
                handle = RequestHandle(request, self._count, self.cancel)
                self._handles[handle.number] = handle
                self._await(Sequence(request, handle.number, at, turn=self._calls + place))
                self._count += 1
                handles.append(handle)
            self._calls += 1
            self._changed.notify()
        return handles

    def _await(self, sequence: Sequence) -> None:
        """Has a sequence arrive with its state, once that is here, or without it."""
        number, request = sequence.number, sequence.request
        source: TransferQueue | PrefixStore | None = None
        if request.do_remote_prefill:
            source = self._transfers  # there is one: the engine checks requests
        elif request.score_from is None:
            source = self._store
        if source is None:
            self._arrivals.append(sequence)
            return

        def arrive(transferred: "TransferredState | None") -> None:
            with self._changed:
                if self._awaited.pop(number, None) is not None:
                    sequence.begin_from(transferred)
                    self._arrivals.append(sequence)
                    self._changed.notify()

        self._awaited[number] = sequence
        source.load(number, request, arrive)

    def check_room(self, count: int) -> None:
        """Passes if ``count`` requests could be handed over now; nothing is reserved for them.

        Raises:
            QueueFull: They would be more than max_requests.
        """
        live, most = len(self._handles), self._max_requests
        if most is not None and live + count > most:
            raise QueueFull(
                f"engine: expected at most {most} requests at once, found {live} + {count} new ones",
                "send them later, or allow more with max_requests",
            )

    def cancel(self, number: int) -> None:
        """Cancels a request, soon; an unknown or ended one counts for nothing."""
        with self._changed:
            if number in self._handles:
                self._give_up_waiting(number)
                self._cancelled.append(number)
                self._changed.notify()

    def _give_up_waiting(self, number: int) -> None:
        """Has a request arrive without the state that it waits for."""
        if (sequence := self._awaited.pop(number, None)) is not None:
            if sequence.request.do_remote_prefill and self._transfers is not None:
                self._transfers.drop(number)
            self._arrivals.append(sequence)

    def compare(self) -> tuple[bytes, ...]:
        """Has the hosts compare the tokens that they read since the last time; waits for their digests, by host.

        Raises:
            EngineStopped: The loop has ended, or does before that.
        """
        digests: Future[tuple[bytes, ...]] = Future()
        with self._changed:
            self._check_open()
            self._comparing.append(digests)
            self._changed.notify()
        return digests.result()

    @property
    def live(self) -> int:
        return len(self._handles)

    @property
    def stopped(self) -> EngineStopped | None:
        """Why it takes no requests; None while it does."""
        return self._reason() if self._over else None

    def abandon(self, text: str) -> None:
        """Another host is gone: requests get HostGone from now on. The thread may be in a step that never ends."""
        with self._changed:
            self._failure = HostGone(f"engine: expected every host to run, found one gone: {text}")
        self._fail_all()

    def close(self) -> None:
        """Ends the thread; requests that have not ended get EngineStopped. May be called again, from any thread.

        A thread whose call does not return is left: nothing can end it but the end of the process.
        """
        with self._changed:
            self._closing = True
            self._changed.notify()
        if not isinstance(self._failure, EngineStalled):
            self._thread.join()
            if self._watchdog is not None:
                self._watchdog.join()

    def _run(self) -> None:
        core = self.core
        assert core is not None
        started: float | None = None
        try:
            while (inputs := self._next(core)) is not None:
                started = now() if started is None else started
                outputs = core.step(inputs)
                if outputs.emitted:
                    self._timings.seconds.setdefault("first_step", now() - started)
                self._deliver(outputs)
            if self._failure is None:
                core.cancel_all()
            else:
                core.fail(self._failure)
        except BaseException as error:
            self._failure = self._failure or error
            core.fail(error)
        finally:
            self.core = None  # programs, weights and state go with it
            del core
            self._ended.set()
            self._fail_all()

    def _watch(self, core: EngineCore, ended: threading.Event, seconds: float) -> None:
        """Stops the loop once one call of the devices takes longer than ``step_timeout``."""
        left = seconds
        while not ended.wait(left):
            doing = core.doing
            left = seconds if doing is None else doing[1] + seconds - now()
            if doing is not None and left <= 0:
                with self._changed:
                    self._failure = self._failure or EngineStalled(
                        f"engine: expected `{doing[0]}` to return within {seconds:g} s, found it still running",
                        "a device does not answer, and nothing can cancel its call: end this process",
                    )
                self._fail_all()
                return core.fail(self._failure)

    def _next(self, core: EngineCore) -> StepInputs | None:
        """The inputs of the next step, once there are some or there is work; None when the loop is to end."""
        with self._changed:
            while not (self._over or self._arrivals or self._cancelled or self._comparing or core.busy):
                self._changed.wait()
            if self._over:
                return None
            inputs = StepInputs(tuple(self._arrivals), tuple(self._cancelled), bool(self._comparing))
            self._arrivals, self._cancelled = [], []
            self._compared, self._comparing = self._comparing, []
        return inputs

    def _deliver(self, outputs: StepOutputs) -> None:
        """Fills the handles, and wakes their waiters."""
        touched: dict[int, RequestHandle] = {}
        for sequence, _ in outputs.emitted:
            handle = self._handles.get(sequence.number)
            if handle is not None:
                handle.update(sequence.output)
                touched[handle.number] = handle
        for sequence in outputs.ended:
            exported = sequence.exported_state
            if exported is not None and sequence.request.do_remote_decode and self._transfers is not None:
                self._hand_over(sequence, exported, self._transfers)
                continue
            with self._changed:
                handle = self._handles.pop(sequence.number, None)
            if handle is not None:  # else the loop was abandoned meanwhile
                handle.finish(outcome(sequence))
                touched[handle.number] = handle
        wake(touched.values())
        for future in self._compared:
            future.set_result(outputs.digests)

    def _hand_over(self, sequence: Sequence, exported: "Exported", transfers: "TransferQueue") -> None:
        """Ends a request once its state is where another engine can take it."""
        completion, begun = outcome(sequence), now()

        def done(params: dict[str, Any] | None) -> bool:
            with self._changed:
                handle = self._handles.pop(sequence.number, None)
            if handle is None:  # the loop ended
                return False
            if isinstance(completion, Exception):
                handle.finish(completion)
                wake([handle])
                return False
            phases = {
                "queue": completion.queue_ms,
                "prefill": completion.e2e_ms - completion.queue_ms,
                "save": 1e3 * (now() - begun),
            }
            if params is not None:
                logprobs = completion.logprobs[0] if completion.logprobs else None
                tail = {"token": completion.token_ids[0], "logprobs": logprobs}
                params |= {"tail": tail, "phases_ms": phases}
            handle.finish(replace(completion, kv_transfer_params=None if handle.cancelled else params))
            wake([handle])
            return not handle.cancelled

        transfers.save(sequence.number, sequence.request, exported, done)

    def _fail_all(self) -> None:
        with self._changed:
            self._awaited.clear()
            handles = list(self._handles.values())
            self._handles.clear()
            futures = [future for future in (*self._compared, *self._comparing) if not future.done()]
        for handle in handles:
            handle.finish(self._reason())
        wake(handles)
        for future in futures:
            with suppress(InvalidStateError):  # it was cancelled, or answered meanwhile
                future.set_exception(self._reason())

    @property
    def _over(self) -> bool:
        return self._closing or self._failure is not None

    def _check_open(self) -> None:
        if (stopped := self.stopped) is not None:
            raise stopped

    def _reason(self) -> EngineStopped:
        if self._failure is None:
            return EngineStopped("engine: expected it open, found it closed")
        error = self._failure
        if isinstance(error, EngineStopped):  # another one for each waiter: a traceback belongs to one thread
            return type(error)(error.message, error.hint)
        stopped = EngineStopped(
            f"engine: expected every step to run, found {type(error).__name__}: {error}",
            "what the devices held is lost: start the process again",
        )
        stopped.__cause__ = error
        return stopped


def outcome(sequence: Sequence) -> Completion | Exception:
    try:
        return sequence.error or sequence.completion()
    except BaseException as error:
        return broken(sequence.request, "its answer to be put together", error)
