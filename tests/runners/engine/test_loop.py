"""The engine's thread on the fake model: handles, streams, cancellation at any moment, errors, closing, and a soak."""

import asyncio
import gc
import random
import threading
import time
import tracemalloc
from concurrent.futures import Future
from contextlib import aclosing

import pytest

from ling3export.runners.engine.handle import EngineStalled, EngineStopped, QueueFull
from ling3export.runners.engine.request import Sampling
from ling3export.runners.evals.trials import Transcript
from ling3export.runners.state.block_manager import BlockManager
from tests.support.fake_backend import VOCAB, answer
from tests.support.loop_rig import PAGE, PAGES, SLOTS, WAIT, Rig, expected, request

CLOSED = "expected it open, found it closed"


def test_a_handle_gives_tokens_text_and_times():
    asked = request(range(20), 9)
    with Rig() as rig:
        (handle,) = rig.submit(asked)
        done = handle.result(WAIT)
        assert handle.done
    assert done.token_ids == expected(asked)
    assert done.text == "".join(chr(65 + i) for i in done.token_ids)
    assert done.stop_reason == "length"
    # 20 tokens are a full call and the rest; then each token but the first is one decode call.
    assert [(step.kind, step.padding, step.tokens) for step in done.steps] == [
        ("prefill", 16, 16),
        ("prefill", 4, 4),
        *[("decode", 2, 1)] * 8,
    ]
    times = [step.t_ms for step in done.steps]
    assert times == sorted(times)
    assert len(done.token_ms) == 9 and done.token_ms == sorted(done.token_ms)
    assert 0 <= done.queue_ms == times[0] <= done.ttft_ms == done.token_ms[0] <= done.e2e_ms == done.token_ms[-1]
    assert sum(done.gaps_ms) == pytest.approx(done.e2e_ms - done.ttft_ms)
    assert rig.timings.seconds["first_step"] > 0
    steps = Transcript.of(done).steps
    assert [(s.t_ms, s.kind, s.bucket, s.n_tokens) for s in steps] == [tuple(step) for step in done.steps]


def test_a_stream_says_what_the_completion_says():
    async def read(rig, asked):
        (handle,) = rig.submit(asked)
        return [piece async for piece in handle.pieces()]

    with Rig() as rig:
        asked = request([1, 2, 3], 30, stop=("~~",))
        pieces = asyncio.run(read(rig, asked))
    assert [piece.completion is None for piece in pieces] == [True] * (len(pieces) - 1) + [False]
    done = pieces[-1].completion
    assert [token for piece in pieces for token in piece.token_ids] == done.token_ids == expected(asked)
    assert "".join(piece.text for piece in pieces) == done.text


def test_unread_pieces_of_a_slow_reader_become_one():
    async def read(rig):
        (handle,) = rig.submit(request([1, 2, 3], 30))
        assert handle.result(WAIT)  # blocks this event loop until the answer is complete
        return [piece async for piece in handle.pieces()]

    with Rig() as rig:
        (piece,) = asyncio.run(read(rig))
    assert piece.token_ids == piece.completion.token_ids == answer([1, 2, 3], 30)


@pytest.mark.parametrize("leave", ["break", "aclose", "task", "wait"])
def test_leaving_a_stream_cancels_the_request(leave):
    async def read(handle, started, go):
        if leave == "wait":
            started.set()
            return await handle.wait()
        if leave == "break":
            async for _ in handle.pieces():
                started.set()
                return await go.wait()
        async with aclosing(handle.pieces()) as pieces:
            async for _ in pieces:
                started.set()
                await go.wait()
                return None

    async def run(rig):
        rig.backend.hold()
        (handle,) = rig.submit(request([1, 2, 3], 50))
        started, go = asyncio.Event(), asyncio.Event()
        task = asyncio.create_task(read(handle, started, go))
        await asyncio.to_thread(rig.backend.reach)
        await asyncio.to_thread(rig.backend.let_one)  # the first token is out, a decode step in flight
        await started.wait()
        if leave in ("task", "wait"):
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        else:
            go.set()
            await task
            until = time.monotonic() + WAIT
            while not handle.cancelled and time.monotonic() < until:
                await asyncio.sleep(0.001)  # asyncio closes an abandoned generator soon
        rig.backend.let_go()
        return await asyncio.to_thread(handle.result, WAIT)

    with Rig() as rig:
        done = asyncio.run(run(rig))
        assert (done.stop_reason, done.token_ids) == ("cancelled", answer([1, 2, 3], 2))


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("moment", ["queued", "prefilling", "decoding"])
def test_cancelling_with_a_step_in_flight(moment, ahead):
    """The devices are held in the middle of a step. The cancelled request emits nothing more, the others continue."""
    with Rig(ahead) as rig:
        backend = rig.backend
        backend.hold()
        others = rig.submit(*(request([n, n, n], 12) for n in range(SLOTS if moment == "queued" else 2)))
        backend.reach()
        (handle,) = rig.submit(request(range(40), 20))
        for _ in range({"queued": 3, "prefilling": 3, "decoding": 12}[moment]):
            backend.let_one()
        sequence = rig.core.live[handle.number]
        found = "queued" if sequence.table is None else "prefilling" if sequence.num_sampled == 0 else "decoding"
        assert found == moment
        had = len(sequence.generated)
        handle.cancel()
        handle.cancel()
        backend.let_go()
        done = handle.result(WAIT)
        # The read in which the devices were held may belong to the cancelled request.
        assert done.stop_reason == "cancelled" and len(done.token_ids) <= had + 1
        assert done.token_ids == answer(list(range(40)), 20)[: len(done.token_ids)]
        for number, other in enumerate(others):
            assert other.result(WAIT).token_ids == answer([number] * 3, 12)


def test_an_error_in_a_step_reaches_every_waiter():
    async def read(handles):
        return await asyncio.gather(*(handle.wait() for handle in handles), return_exceptions=True)

    with Rig() as rig:
        rig.backend.hold()
        handles = rig.submit(*(request([n], 20) for n in range(7)))
        rig.backend.failure = RuntimeError("RESOURCE_EXHAUSTED: no memory")
        threading.Timer(0.05, rig.backend.let_go).start()
        errors = asyncio.run(read(handles))
        said = "engine: expected every step to run, found RuntimeError: RESOURCE_EXHAUSTED: no memory"
        assert [(type(error), error.message) for error in errors] == [(EngineStopped, said)] * 7
        assert all(error.__cause__ is rig.backend.failure for error in errors)
        with pytest.raises(EngineStopped, match="found RuntimeError: RESOURCE_EXHAUSTED"):
            rig.submit(request([1], 1))
        rig.loop.close()
        rig.blocks = BlockManager(SLOTS, PAGES, PAGE)  # the state on the devices is lost


def test_running_requests_get_the_reason_when_the_engine_closes():
    """Closing an engine twice is allowed."""
    with Rig() as rig:
        rig.backend.hold()
        handles = rig.submit(*(request([n], 50) for n in range(7)))
        rig.backend.reach()
        threading.Timer(0.05, rig.backend.let_go).start()
        for _ in range(2):
            rig.loop.close()
        for handle in handles:
            with pytest.raises(EngineStopped, match=CLOSED):
                handle.result(WAIT)
        with pytest.raises(EngineStopped, match=CLOSED):
            rig.submit(request([1], 1))


def test_a_future_that_takes_no_error_leaves_no_coroutine_asleep(monkeypatch):
    """Regression: an InvalidStateError of one future ended the callback that wakes the coroutines."""

    class Answered(Future):
        def done(self):
            return False  # the answer arrives between this check and the error

    async def read(handle):
        return await asyncio.gather(asyncio.wait_for(handle.wait(), WAIT), return_exceptions=True)

    def answered():
        future: Future = Answered()
        future.set_result(())
        return future

    monkeypatch.setattr("ling3export.runners.engine.loop.Future", answered)
    with Rig() as rig:
        rig.backend.hold()
        assert rig.loop.compare() == ()
        (handle,) = rig.submit(request([1], 20))
        rig.backend.failure = RuntimeError("no memory")
        threading.Timer(0.05, rig.backend.let_go).start()
        (error,) = asyncio.run(read(handle))
        assert isinstance(error, EngineStopped)
        rig.loop.close()
        rig.blocks = BlockManager(SLOTS, PAGES, PAGE)


def test_a_call_that_does_not_return_stops_the_engine_by_name():
    """The devices are held; the watchdog names the cell and the seconds."""
    said = "^engine: expected `prefill@16` to return within 0.2 s, found it still running"
    with Rig(step_timeout=0.2) as rig:
        (first,) = rig.submit(request([5], 4))
        assert first.result(WAIT).token_ids == answer([5], 4)
        rig.backend.hold()
        handles = rig.submit(request([1, 2], 20), request([3], 5))
        for handle in handles:
            with pytest.raises(EngineStalled, match=said):
                handle.result(WAIT)
        assert isinstance(rig.loop.stopped, EngineStalled)
        with pytest.raises(EngineStalled, match=said):
            rig.submit(request([1], 1))
        rig.backend.let_go()
        rig.until_ended()
        rig.blocks = BlockManager(SLOTS, PAGES, PAGE)


def test_steps_that_return_in_time_are_let_be():
    """Calls that together take several times the timeout, and idle time beyond it."""
    with Rig(step_timeout=0.3) as rig:
        read = rig.backend.read
        rig.backend.read = lambda handle: time.sleep(0.02) or read(handle)
        (handle,) = rig.submit(request([1, 2, 3], 40))
        assert handle.result(WAIT).token_ids == answer([1, 2, 3], 40)
        time.sleep(0.4)
        assert rig.loop.stopped is None


def test_a_full_engine_takes_none_of_what_is_too_much():
    with Rig(max_requests=3) as rig:
        rig.backend.hold()
        first = rig.submit(request([1], 3), request([2], 3))
        with pytest.raises(QueueFull, match="expected at most 3 requests at once, found 2 \\+ 2 new ones"):
            rig.submit(request([3], 3), request([4], 3))
        last = rig.submit(request([3], 3))
        rig.backend.let_go()
        assert [t.result(WAIT).token_ids for t in (*first, *last)] == [answer([n], 3) for n in (1, 2, 3)]
        rig.submit(*(request([n], 1) for n in range(3)))


def test_a_later_call_waits_for_a_row_or_two_of_a_large_one():
    """Regression: a plain call waited for all 40 rows of another client's call."""
    with Rig() as rig:
        ended, step = [], rig.core.step

        def noted(inputs):
            outputs = step(inputs)
            ended.extend(sequence.number for sequence in outputs.ended)
            return outputs

        rig.core.step = noted
        rig.backend.hold()
        large = rig.submit(*(request([n], 3) for n in range(20)))
        rig.backend.reach()  # a row for each slot has begun
        late = [rig.submit(request([n], 3))[0] for n in (20, 21)]
        rig.backend.let_go()
        for n, handle in enumerate((*large, *late)):
            assert handle.result(WAIT).token_ids == answer([n], 3)
    assert sorted(ended[: SLOTS + 2]) == [0, 1, 2, 3, 20, 21] and ended[SLOTS + 2 :] == [*range(4, 20)]


def test_a_timeout_leaves_the_request_running():
    with Rig() as rig:
        rig.backend.hold()
        (handle,) = rig.submit(request([5], 4, name="mine"))
        with pytest.raises(TimeoutError, match=r"mine: expected an answer within 0\.01 s, found it still running"):
            handle.result(0.01)
        rig.backend.let_go()
        assert handle.result(WAIT).token_ids == answer([5], 4)


def test_an_event_loop_that_closed_is_no_reader():
    """A client vanished with its event loop: its request is cancelled, and the engine continues."""

    async def read(handle):
        return [piece async for piece in handle.pieces()]

    with Rig() as rig:
        rig.backend.hold()
        (handle,) = rig.submit(request([1], 50))
        gone = asyncio.new_event_loop()
        reader = gone.create_task(read(handle))
        gone.run_until_complete(asyncio.sleep(0))
        gone.close()
        rig.backend.let_go()
        assert handle.result(WAIT).stop_reason == "cancelled" and not reader.done()
        (other,) = rig.submit(request([5], 4))
        assert other.result(WAIT).token_ids == answer([5], 4)


async def client(rig, rng):
    """Sends a request, and reads it, waits for it, or leaves at some point."""
    asked = request(
        [rng.randrange(VOCAB) for _ in range(rng.randint(1, 24))],
        rng.randint(1, 16),
        sampling=Sampling(rng.choice([0.0, 1.0]), seed=rng.randrange(100)),
    )
    (handle,) = rig.submit(asked)
    ways = rng.random()
    if ways < 0.2:  # a disconnect: the reading task is cancelled
        task = asyncio.create_task(handle.wait())
        await asyncio.sleep(rng.choice([0, 0.001, 0.003]))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    elif ways < 0.4:
        async with aclosing(handle.pieces()) as pieces:
            async for _ in pieces:
                if rng.random() < 0.3:
                    break
    elif ways < 0.5:
        handle.cancel()
    done = await handle.wait()
    assert done.token_ids == expected(asked)[: len(done.token_ids)]
    assert done.stop_reason == "cancelled" or len(done.token_ids) == asked.max_tokens


async def crowd(rig, rng, count, at_once=40):
    places = asyncio.Semaphore(at_once)

    async def one():
        async with places:
            await client(rig, rng)

    await asyncio.gather(*(one() for _ in range(count)))


def test_hundreds_of_requests_leak_nothing():
    """A soak with the fake model; ``python -m bench soak`` does the same with real programs."""
    rng = random.Random(3)
    with Rig() as rig:
        threads, free = set(threading.enumerate()), rig.free()
        tracemalloc.start()
        try:
            held = []
            for count in (200, 600):  # the first requests make objects that stay
                asyncio.run(crowd(rig, rng, count))
                rig.backend.calls.clear()
                gc.collect()
                held.append(tracemalloc.get_traced_memory()[0])
        finally:
            tracemalloc.stop()
        assert rig.loop.live == 0
        assert (rig.free(), set(threading.enumerate()) - threads) == (free, set())
        assert not rig.core.busy and not rig.core.live
        assert held[1] - held[0] < 200_000, held  # a leaked handle for each of 600 requests would be four times that
        assert 400 < rig.counters.started <= 800  # those cancelled in the queue never started
