"""Both sides of a segment, as threads of one process: what travels, and how each ends when the other does."""

import gc
import os
import stat
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ling3export.foundation.dtypes import BY_NAME, MASK
from ling3export.foundation.errors import Ling3Error
from ling3export.runners.ffn.connector import AttentionConnector, FfnConnector, owners
from ling3export.runners.ffn.context import SIZE, ContextError
from ling3export.runners.ffn.schedule import FLAG, ScheduleTimeout
from ling3export.runners.ffn.segment import (
    FOLDER,
    HERE,
    LEFT,
    NEVER,
    SESSIONS,
    WORKER,
    FfnGone,
    Segment,
    WorkerInfo,
    layout,
    path_of,
)
from tests.support.waiting import until

TOKENS, CHOSEN, EXPERTS, LAYERS, WIDTH, MICRO = 3, 2, 8, 2, 6, 2
ROW, DIGEST = np.dtype((np.float32, (WIDTH,))), "d" * 64
SOON = 0.4  # seconds of a wait that has to end by itself
ONE = WorkerInfo(0, 1, DIGEST)
IDS = np.array([[0, 5], [7, 2], [MASK, MASK]], np.int32)


@pytest.fixture
def name(request: pytest.FixtureRequest) -> Iterator[str]:
    """A name of this test's own; nothing of it is left."""
    yield (chosen := f"test-{os.getpid()}-{abs(hash(request.node.nodeid)) % 10**9}")
    left = [path.name for path in FOLDER.glob(f"*{chosen}*")]
    for path in FOLDER.glob(f"*{chosen}*"):
        path.unlink()
    assert left == []


def worker(name: str, sessions: int = 1, share: WorkerInfo = ONE) -> Segment:
    context = layout(sessions, MICRO, TOKENS, CHOSEN, EXPERTS, ROW, ROW)
    return Segment.create(name, context, share, ROW, ROW)


def link(*names: str, wait: float = 20) -> AttentionConnector:
    return AttentionConnector(names, artifact=DIGEST, experts=EXPERTS, there=ROW, back=ROW, wait=wait)


def connector(segment: Segment, **limits: float) -> FfnConnector:
    return FfnConnector(segment, layers=LAYERS, experts=EXPERTS, there=ROW, **limits)


def end(segment: Segment) -> None:
    segment.buffers.stop()
    segment.drop_name()
    segment.close()


def serve(segment: Segment, errors: list[Ling3Error] | None = None, **limits: float) -> threading.Thread:
    """A worker whose expert e of layer l adds ``100 l + e`` to every number."""

    def run() -> None:
        link = connector(segment, **limits)
        try:
            while (taken := link.recv_attn_output()) is not None:
                found, data = taken
                ids = found.expert_ids
                added = 100 * found.layer_ids[:, None, None] + ids
                link.send_ffn_output(found, (data.astype(np.float32) + added[..., None]).astype(ROW.base))
        except Ling3Error as error:
            segment.say(error.message)
            assert errors is not None
            errors.append(error)
        finally:
            end(segment)

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def tokens(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((TOKENS, WIDTH)).astype(ROW.base)


def expected(data: np.ndarray, layer: int) -> np.ndarray:
    live = IDS < MASK
    return np.where(live[..., None], data[:, None].astype("f4") + (100 * layer + IDS)[..., None], 0).astype(ROW.base)


@pytest.mark.parametrize(("workers", "dtype"), [(1, "float32"), (2, "float32"), (3, "float32"), (2, "bfloat16")])
def test_every_pair_comes_back_from_the_worker_that_has_its_expert(
    name: str, workers: int, dtype: str, monkeypatch: pytest.MonkeyPatch
):
    """Micro batches of different layers are in flight at once, and come back in any order."""
    monkeypatch.setattr(sys.modules[__name__], "ROW", np.dtype((BY_NAME[dtype].numpy, (WIDTH,))))
    names = [f"{name}.{index}" for index in range(workers)]
    segments = [worker(each, 2, WorkerInfo(index, workers, DIGEST)) for index, each in enumerate(names)]
    threads = [serve(segment) for segment in segments]
    first, second = link(*names), link(*reversed(names))
    assert [first.session, second.session] == [0, 1]
    for turn in range(5):
        for number, side in enumerate((first, second)):
            for micro in range(MICRO):
                side.send_attn_output(micro, (turn + micro) % LAYERS, tokens(10 * turn + micro + number), IDS)
        for number, side in enumerate((second, first)):
            for micro in reversed(range(MICRO)):
                wanted = expected(tokens(10 * turn + micro + 1 - number), (turn + micro) % LAYERS)
                assert np.array_equal(side.recv_ffn_output(micro), wanted)
    assert (
        first.phases.sent == 5 * MICRO * 4 * ROW.itemsize
    )  # four pairs have an expert, whatever the number of workers
    first.close()
    second.close()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()


def test_a_synchronous_worker_takes_each_micro_batch_from_all_sessions_until_they_leave(name: str):
    """Also where a session has no expert of this worker, and once another has left."""
    segment = worker(name, 2, replace(ONE, synchronous=True))
    thread = serve(segment, quiet=60)
    first, second = link(name), link(name)
    assert first.synchronous
    for turn in range(4):
        first.send_attn_output(turn % MICRO, 0, tokens(0), IDS)
        assert not segment.back_info[0, turn % MICRO, FLAG]  # the other has not published it
        second.send_attn_output(turn % MICRO, 1, tokens(1), np.full_like(IDS, MASK))
        assert np.array_equal(first.recv_ffn_output(turn % MICRO), expected(tokens(0), 0))
        assert not second.recv_ffn_output(turn % MICRO).any()
    first.close()
    second.send_attn_output(0, 1, tokens(1), IDS)
    assert np.array_equal(second.recv_ffn_output(0), expected(tokens(1), 1))
    second.close()
    thread.join(60)
    assert not thread.is_alive()


def test_experts_are_shared_out_whole_and_in_order():
    assert owners(8, 3).tolist() == [0, 0, 0, 1, 1, 1, 2, 2]
    assert owners(8, 1).tolist() == [0] * 8


def test_a_micro_batch_without_experts_waits_for_nobody(name: str):
    segment = worker(name)
    side = link(name)
    side.send_attn_output(0, 0, tokens(0), np.full_like(IDS, MASK))
    assert not side.recv_ffn_output(0).any()
    side.close()
    end(segment)


def test_the_name_goes_once_all_sessions_came(name: str):
    """So whatever is killed from then on, nothing is left behind."""
    segment = worker(name, 2)
    thread = serve(segment)
    first = link(name)
    time.sleep(0.2)
    assert path_of(name).exists()
    second = link(name)
    until(lambda: not path_of(name).exists())
    first.close()
    second.close()
    thread.join(120)


def test_a_worker_that_dies_ends_who_waits_for_it(name: str):
    segment = worker(name)
    side = link(name)
    side.send_attn_output(0, 0, tokens(0), IDS)
    segment.unlock(WORKER)  # as the kernel does when the process is killed
    started = time.monotonic()
    with pytest.raises(FfnGone, match="found its process gone"):
        side.recv_ffn_output(0)
    assert time.monotonic() - started < 60
    assert not path_of(name).exists()
    side.close()
    segment.close()


def test_a_worker_that_lives_and_does_not_answer_is_a_timeout(name: str):
    segment = worker(name)
    side = link(name, wait=SOON)
    side.send_attn_output(1, 1, tokens(0), IDS)
    with pytest.raises(ScheduleTimeout, match=r"expected micro batch 1 of layer 1 within 0\.4 s, found no answer"):
        side.recv_ffn_output(1)
    side.close()
    end(segment)


def test_a_cleared_run_flag_ends_both_sides(name: str):
    segment, errors = worker(name), list[Ling3Error]()
    thread = serve(segment, errors)
    side = link(name)
    segment.buffers.stop()
    thread.join(120)
    assert not thread.is_alive() and errors == []
    side.send_attn_output(0, 0, tokens(0), IDS)
    with pytest.raises(FfnGone, match="found it ended: in order"):
        side.recv_ffn_output(0)
    side.close()


def test_a_session_that_dies_ends_the_worker_and_with_it_the_others(name: str):
    segment, errors = worker(name, 2), list[Ling3Error]()
    thread = serve(segment, errors)
    first = Segment.attach(name, ROW, ROW, 20)
    assert first.claim() == 0
    second = link(name)
    first.unlock(1)
    thread.join(120)
    assert str(errors[0]) == f"session 0 of `{name}`: expected a live process, found none"
    second.send_attn_output(0, 0, tokens(0), IDS)
    with pytest.raises(FfnGone, match="found it ended: session 0 of"):
        second.recv_ffn_output(0)
    first.close()
    second.close()


@pytest.mark.parametrize(
    ("sessions", "synchronous", "limits", "late"),
    [
        (2, True, {"quiet": SOON}, "sessions [0] to publish"),
        (1, False, {"quiet": SOON}, "sessions [0] to publish"),
        (3, False, {"wait": SOON}, "sessions [1, 2]"),
    ],
    ids=["a session of a synchronous worker", "a session", "sessions that never come"],
)
def test_sessions_that_a_worker_waits_for_in_vain_are_named(name: str, sessions, synchronous, limits, late):
    segment, errors = worker(name, sessions, replace(ONE, synchronous=synchronous)), list[Ling3Error]()
    thread = serve(segment, errors, **limits)
    sides = [link(name) for _ in range(1 + synchronous)]
    if synchronous:
        sides[1].send_attn_output(0, 0, tokens(0), IDS)
    thread.join(60)
    assert isinstance(errors[0], ScheduleTimeout) and f"expected {late} within 0.4 s" in str(errors[0])
    for side in sides:
        side.close()


@pytest.mark.parametrize(
    ("layer", "expert", "message"),
    [
        (0, EXPERTS, "expert ids: expected them below 8, found 8 for token 1 of session 0"),
        (LAYERS, 0, "layer ids: expected them below 2, found 2"),
        (-1, 0, "layer ids: expected them below 2, found -1"),
    ],
)
def test_ids_out_of_range_end_the_worker_by_name(name: str, layer: int, expert: int, message: str):
    segment, errors = worker(name), list[Ling3Error]()
    thread = serve(segment, errors)
    side = Segment.attach(name, ROW, ROW, 20)
    ids = np.full((TOKENS, CHOSEN), MASK, np.int32)
    ids[1, 0] = expert
    side.buffers.announce(side.claim(), 0, layer, ids)
    thread.join(120)
    assert [error.message for error in errors] == [message]
    with pytest.raises(FfnGone, match=message):
        side.check_worker()
    side.close()


def test_no_worker_is_said_with_the_command_that_starts_one(name: str):
    with pytest.raises(FfnGone, match=r"within 0\.1 s, found none\nhint: start it: ling3-runner ffn-worker ARTIFACT"):
        link(name, wait=0.1)


def test_what_a_dead_worker_left_is_removed_and_a_live_one_stays(name: str):
    """By a worker of any name, too: else a worker that was killed before its sessions came left its memory for ever."""
    for left in (name, f"{name}.other"):
        dead = worker(left)
        dead.close()
    live = worker(name)
    assert not path_of(f"{name}.other").exists()
    with pytest.raises(ContextError, match="expected a free name, found `"):
        worker(name)
    assert link(name).session == 0
    end(live)


def test_a_session_takes_what_is_free_and_leaves_in_order(name: str):
    segment = worker(name)
    side = link(name)
    with pytest.raises(ContextError, match="expected a free session of 1, found it taken"):
        link(name)
    assert segment.states.tolist() == [HERE]
    side.close()
    assert segment.states.tolist() == [LEFT]
    end(segment)


def test_a_session_that_is_refused_leaves_none_of_another_process(name: str):
    """The second worker's session 0 is somebody else's; it was marked as left when this one gave up."""
    names = [f"{name}.0", f"{name}.1"]
    segments = [worker(each, 2, WorkerInfo(index, 2, DIGEST)) for index, each in enumerate(names)]
    other = Segment.attach(names[1], ROW, ROW, 20)
    assert other.claim() == 0
    with pytest.raises(ContextError, match="expected session 0 to be free of 2, found it taken"):
        link(*names)
    assert [segment.states.tolist() for segment in segments] == [[LEFT, NEVER], [HERE, NEVER]]
    for each in (other, *segments):
        end(each) if each in segments else each.close()


def damaged(name: str, at: int, data: bytes, size: int | None = None) -> Segment:
    """A live worker's segment with other bytes, as another program or version may have written it."""
    segment = worker(name)
    segment.memory[at : at + len(data)] = data
    if size is not None:
        os.truncate(path_of(name), size)
    return segment


@pytest.mark.parametrize(
    ("at", "data", "size", "message"),
    [
        (SIZE, b"other", None, "expected one of an FFN worker, version 2, found another"),
        (SIZE + 8, b"\7", None, "expected one of an FFN worker, version 2, found version 7"),
        (0, b"\0\0\0\0", None, "context `session_num`: expected 1 to 1024, found 0"),
        (0, b"\xff\0\0\0", None, "context `ffn_token_info_size`: expected at least"),
        (24, b"\1\0\0\0", None, "context `ffn_to_attn_token_size`: expected a multiple of 512"),
        (0, b"", SESSIONS - 1, f"expected at least {SESSIONS} bytes, found {SESSIONS - 1}"),
        (0, b"", SESSIONS + 512, "context `ffn_token_info_buf`: expected a place within"),
        (272, b"\xff\xff\xff", None, "context buffer: expected"),
    ],
)
def test_a_segment_that_is_none_of_this_version_is_refused(name: str, at: int, data: bytes, size: int | None, message):
    segment = damaged(name, at, data, size)
    with pytest.raises(ContextError) as refused:
        link(name)
    assert message in str(refused.value)
    segment.drop_name()
    segment.close()


@pytest.mark.parametrize(
    ("shares", "message"),
    [
        ([WorkerInfo(0, 2, DIGEST)], "expected each share of 1 once, found 0/2"),
        ([WorkerInfo(0, 2, DIGEST), WorkerInfo(0, 2, DIGEST)], "expected each share of 2 once, found 0/2, 0/2"),
        ([WorkerInfo(0, 1, "e" * 64)], "expected a worker of this artifact, found one of another"),
    ],
)
def test_workers_of_other_shares_or_artifacts_are_refused(name: str, shares: list[WorkerInfo], message: str):
    names = [f"{name}.{number}" for number in range(len(shares))]
    segments = [worker(each, share=share) for each, share in zip(names, shares, strict=True)]
    with pytest.raises(ContextError, match=message):
        link(*names)
    for segment in segments:
        end(segment)


@pytest.mark.parametrize("other", [(2, False), (1, True)])
def test_workers_of_other_sizes_and_schedules_are_refused(name: str, other: tuple[int, bool]):
    names = [f"{name}.0", f"{name}.1"]
    segments = [
        worker(each, sessions, WorkerInfo(index, 2, DIGEST, synchronous))
        for index, (each, (sessions, synchronous)) in enumerate(zip(names, ((1, False), other), strict=True))
    ]
    with pytest.raises(ContextError, match="expected workers of one size and schedule, found 2"):
        link(*names)
    for segment in segments:
        end(segment)


@pytest.mark.parametrize("wrong", ["", "../up", "a/b", "-x", "x" * 65])
def test_names_that_could_be_other_files_are_refused(wrong: str):
    with pytest.raises(ContextError, match="expected a name of letters"):
        path_of(wrong)


def test_a_segment_is_for_its_user_alone(name: str, monkeypatch: pytest.MonkeyPatch):
    """Who may write it could answer anything, and who made it reads all tokens."""
    segment = worker(name)
    assert stat.S_IMODE(path_of(name).stat().st_mode) == 0o600
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    with pytest.raises(ContextError, match=f"expected a file of this user, {user + 1}, found one of user {user}"):
        link(name, wait=0)
    with pytest.raises(ContextError, match="expected a free name, found `"):
        worker(name)  # it is left alone, whether its worker lives or not
    monkeypatch.undo()
    end(segment)


@pytest.mark.parametrize("made", [os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path)])
def test_what_is_no_file_is_neither_opened_nor_removed(name: str, made: Any):
    made(path_of(name))
    with pytest.raises(ContextError, match="expected a file"):
        link(name, wait=0)
    with pytest.raises(ContextError, match="expected a free name, found `"):
        worker(name)
    assert os.path.lexists(path_of(name))
    path_of(name).rmdir() if path_of(name).is_dir() else path_of(name).unlink()


def test_a_refused_segment_leaves_no_open_file(name: str):
    gc.collect()  # what earlier tests left to it closes files, too
    live, before = worker(name), len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(ContextError):
            worker(name)
        for micro, size, said in ((0, TOKENS, "expected 1 to 64, found 0"), (64, 1 << 20, "bytes of free memory")):
            context = layout(1024, micro, size, CHOSEN, EXPERTS, ROW, ROW)
            with pytest.raises(ContextError, match=said):
                Segment.create(f"{name}.other", context, ONE, ROW, ROW)
    assert len(os.listdir("/proc/self/fd")) == before
    end(live)


def test_the_context_of_a_segment_is_one_of_the_published_layout(name: str):
    segment = worker(name, 2)
    segment.context.check(ROW.itemsize, len(segment.memory))
    assert segment.context.data_shape == (2, MICRO, TOKENS, CHOSEN, 512)
    assert segment.context == replace(segment.context, run_flag=1, attention_micro_batch_id=MICRO - 1)
    end(segment)
