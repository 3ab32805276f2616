"""What backends carry is what was written, or a counted miss: never other bytes, never a wait beyond the deadline."""

import itertools
import os
import stat
import subprocess
import sys
import time
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from ling3export.runners.transfer import shm
from ling3export.runners.transfer.backend import Leases, Presence, Source, TransferError
from ling3export.runners.transfer.objects import HEADER
from ling3export.runners.transfer.shm import Shm
from ling3export.runners.transfer.tcp import Tcp
from tests.support import transfers
from tests.support.transfers import BACKENDS, LAYOUT, backend, keys, random_arrays, same, write

TRANSFER = "0" * 32


def soon(seconds: float = 5.0) -> float:
    return time.monotonic() + seconds


def source(where) -> Source | None:
    return Source("127.0.0.1", where.port, TRANSFER) if isinstance(where, Tcp) else None


@pytest.fixture(params=BACKENDS)
def both(request, tmp_path):
    """Two ends of a backend: who writes, and who reads."""
    ends = [backend(request.param, tmp_path) for _ in range(2)]
    yield ends
    for end in ends:
        end.close()


def test_what_was_written_is_read_once_whole(both):
    writer, reader = both
    wanted = keys()
    assert all(write(writer, key, seed) for seed, key in enumerate(wanted))
    writer.offer(TRANSFER, wanted)
    payloads = reader.fetch(wanted, source(writer), soon())
    assert all(same(key, payload, seed) for seed, (key, payload) in enumerate(zip(wanted, payloads, strict=True)))
    assert (writer.counts["stored"], reader.counts) == (4, {"hit": 4})
    until = soon()
    while not (sent := writer.sent()) and time.monotonic() < until:
        time.sleep(0.01)
    assert sent == {TRANSFER} and writer.sent() == set()


def test_what_is_there_is_not_written_again(both):
    writer, _ = both
    key = keys()[0]
    assert write(writer, key, 1) and not write(writer, key, 2)
    assert writer.counts == {"stored": 1, "exists": 1}
    writer.offer(TRANSFER, [key])
    assert same(key, both[1].fetch([key], source(writer), soon())[0], 1)


def test_what_two_transfers_share_stays_for_the_second_when_the_first_was_pulled(tmp_path):
    """The second save found the object there; it was pulled and gone before the second transfer was offered, which so
    lacked it: a prefill for nothing."""
    writer, reader = (backend("tcp", tmp_path, lease=0.2) for _ in range(2))
    key, other = keys()[0], Source("127.0.0.1", writer.port, "1" * 32)
    assert write(writer, key)
    writer.offer(TRANSFER, [key])
    assert writer.create(key) is None
    assert same(key, reader.fetch([key], source(writer), soon())[0])
    until = soon()
    while not writer.sent() and time.monotonic() < until:
        time.sleep(0.01)
    writer.offer(other.transfer, [key])
    assert same(key, reader.fetch([key], other, soon())[0])
    assert write(writer, key) or writer.create(key) is None  # a save that fails offers nothing:
    until = soon()
    while writer._fresh and time.monotonic() < until:
        time.sleep(0.05)
    assert not writer._fresh, "nothing is kept for it beyond a lease"
    writer.close()
    reader.close()


def test_what_is_not_there_is_a_miss(both):
    writer, reader = both
    there, absent = keys()[0], keys()[0]
    assert write(writer, there)
    writer.offer(TRANSFER, [there, absent])
    found = reader.fetch([absent, there], source(writer), soon())
    assert found[0] is None and same(there, found[1])
    assert reader.counts == {"miss": 1, "hit": 1}
    assert reader.look(absent) is Presence.ABSENT


def test_an_object_without_all_of_its_layers_never_becomes_ready(both):
    writer, reader = both
    key = keys()[-1]
    part = writer.create(key)
    part.write(1, {name: array[1] for name, array in random_arrays(key).items()})
    assert part.finish() is False
    writer.offer(TRANSFER, [key])
    assert reader.fetch([key], source(writer), soon()) == [None]
    # A writer over TCP also counts that it was asked, a moment after the reader has its answer.
    assert (writer.counts["abandoned"], reader.counts) == (1, {"miss": 1})
    assert write(writer, key)


def test_a_layer_is_written_once_and_whole(both):
    key = keys()[-1]
    part = both[0].create(key)
    arrays = {name: array[0] for name, array in random_arrays(key).items()}
    part.write(0, arrays)
    for wrong in (arrays, {"kda.conv": arrays["kda.conv"]}):
        with pytest.raises(TransferError, match=r"expected kda\.conv, kda\.recurrent of a new layer, found layer 0"):
            part.write(0, wrong)
    part.abandon()


@pytest.mark.parametrize("name", ["shm", "tcp"])
def test_objects_beyond_the_limit_find_no_room(name, tmp_path):
    """In shared memory the least recently used one goes, where that helps."""
    first, second, third, large = keys()[0], keys()[0], keys()[0], keys()[-1]
    each = HEADER.size + LAYOUT.nbytes(first)
    transfers.remove_all()
    end = backend(name, tmp_path, limit=2 * each)
    try:
        assert write(end, first) and write(end, second)
        if name == "tcp":
            assert not write(end, third) and end.counts == {"stored": 2, "full": 1}
            return
        assert same(first, end.fetch([first], None, soon())[0])  # and so it was used after the second
        assert write(end, third)
        assert end.removed == [second.name]
        assert [end.look(key) for key in (first, second, third)] == [Presence.READY, Presence.ABSENT, Presence.READY]
        assert LAYOUT.nbytes(large) + HEADER.size > 2 * each and not write(end, large)
        assert end.counts["full"] == 1 and end.look(first) is Presence.READY
    finally:
        end.close()


def test_segments_are_listed_once_for_all_objects_of_a_state(monkeypatch):
    """Each object listed all segments of this user: 30 ms an object where killed processes had left 1,300. With less
    than half of the limit left each one does, so that no limit is passed."""
    listed, before = [], shm._segments
    monkeypatch.setattr(shm, "_segments", lambda: (listed.append(1), before())[1])
    monkeypatch.setattr(shm, "RECENT", 60.0)
    transfers.remove_all()
    wanted = keys(tokens=8 * 12)
    *_, whole = totals = [*itertools.accumulate(HEADER.size + LAYOUT.nbytes(key) for key in wanted)]
    beyond = sum(total > whole // 2 for total in totals)
    assert 0 < beyond < len(wanted)
    for limit, count in ((2 * whole, 1), (whole, 1 + beyond)):
        end = Shm(LAYOUT, limit, 5.0)
        assert all(write(end, key) for key in wanted)
        assert (len(listed), end.counts["stored"]) == (count, len(wanted))
        listed.clear()
        end.close()
    end = Shm(LAYOUT, whole // 2, 5.0)
    assert all(write(end, key) for key in wanted)
    assert sum(status.st_size for _, status in before()) <= whole // 2 and end.counts["evicted"] > 0
    end.close()


def test_segments_are_this_users_alone_and_other_libraries_can_attach_to_them(tmp_path, monkeypatch):
    monkeypatch.setattr(shm, "FOLDER", Path("/dev/shm"))
    end, key = backend("shm", tmp_path), keys()[0]
    try:
        assert write(end, key)
        path = shm.FOLDER / transfers.segment(key).name
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert path.name.startswith(f"u{os.geteuid()}_l3x_")
        if sys.version_info >= (3, 13):
            attached = SharedMemory(path.name, track=False)
            assert bytes(attached.buf[:4]) == b"L3XS"
            attached.close()
    finally:
        end.close()
    assert not path.exists()


def test_a_file_is_one_that_any_safetensors_reader_opens(tmp_path):
    end, key = backend("file", tmp_path), keys()[-1]
    assert write(end, key, 3)
    (file,) = tmp_path.iterdir()
    assert file.name == f"{key.name}.safetensors"
    found, wanted = load_file(file), random_arrays(key, 3)
    assert {*found} == {f"{name}.{layer}" for name in wanted for layer in range(3)}
    for name, array in wanted.items():
        for layer in range(3):
            assert np.array_equal(found[f"{name}.{layer}"].view(np.uint8), array[layer].view(np.uint8))


WRITING = """
import sys, time
from tests.support import transfers
from ling3export.runners.transfer.objects import Key, Kind
end = transfers.backend("shm", None)
key = transfers.keys(salt=sys.argv[1])[-1]
part = end.create(key)
part.write(0, {name: array[0] for name, array in transfers.random_arrays(key).items()})
print("written", flush=True)
sys.stdin.readline()
for layer in (1, 2):
    part.write(layer, {name: array[layer] for name, array in transfers.random_arrays(key).items()})
part.finish()
print("ready", flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def writing():
    """A process that has written a part of an object into shared memory: its key, and the process."""
    salt = transfers.fresh_salt()
    paths = os.pathsep.join(path for path in sys.path if path)
    with subprocess.Popen(
        [sys.executable, "-c", WRITING, salt],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": paths},
    ) as process:
        assert process.stdout.readline() == "written\n"
        key = keys(salt=salt)[-1]
        try:
            yield key, process
        finally:
            process.kill()
            transfers.remove([key])


def test_a_reader_waits_for_a_writer_at_work_until_its_deadline(writing):
    key, process = writing
    end = Shm(LAYOUT, transfers.LIMIT, 0.2)
    assert end.look(key) is Presence.WRITING
    assert not write(end, key)
    begun = time.monotonic()
    assert end.fetch([key], None, soon()) == [None]
    assert 0.2 <= time.monotonic() - begun < 3
    assert end.counts == {"timeout": 1, "exists": 1}
    process.stdin.write("\n")
    process.stdin.flush()
    assert same(key, Shm(LAYOUT, transfers.LIMIT, 20.0).fetch([key], None, soon(20))[0])


def test_a_writer_that_is_killed_is_no_wait_and_its_object_can_be_written_again(writing):
    key, process = writing
    process.kill()
    process.wait()
    end = Shm(LAYOUT, transfers.LIMIT, 20.0)
    assert end.look(key) is Presence.ABSENT
    begun = time.monotonic()
    assert end.fetch([key], None, soon(20)) == [None]
    assert time.monotonic() - begun < 10
    assert end.counts == {"writer_gone": 1}
    assert write(end, key) and same(key, end.fetch([key], None, soon())[0])
    end.close()


def test_a_folder_that_cannot_be_written_stores_nothing(tmp_path):
    """What the disk does not take is counted, and nobody is told that it is there."""
    end, key = backend("file", tmp_path / "states"), keys()[0]
    (tmp_path / "states").rmdir()
    assert write(end, key) is False
    assert end.counts == {"full": 1} and end.look(key) is Presence.ABSENT
    (tmp_path / "file").write_text("")
    with pytest.raises(TransferError, match="file: expected a folder, found File exists"):
        backend("file", tmp_path / "file")


def test_a_backend_that_cannot_start_says_why(tmp_path):
    first = backend("tcp", tmp_path)
    try:
        with pytest.raises(TransferError, match=f"tcp: expected a free port .* at 127.0.0.1 port {first.port}"):
            Tcp(LAYOUT, 1, 1.0, ("127.0.0.1", first.port), "", 1.0)
        with pytest.raises(TransferError, match=r"tcp 0\.0\.0\.0: expected a secret where other machines reach it"):
            Tcp(LAYOUT, 1, 1.0, ("0.0.0.0", 0), "", 1.0)
        with pytest.raises(TransferError, match="found --shm-bytes 5"):
            Shm(LAYOUT, 5, 1.0)
    finally:
        first.close()


def test_a_transfer_ends_with_its_lease_and_with_each_part_once(tmp_path):
    holder, puller = backend("tcp", tmp_path, lease=0.5), backend("tcp", tmp_path)
    try:
        key = keys()[0]
        assert write(holder, key)
        holder.offer(TRANSFER, [key])
        parts = [source(holder)._replace(part=part, parts=3) for part in range(3)]
        assert same(key, puller.fetch([key], parts[0], soon())[0])
        assert puller.fetch([key], parts[0], soon()) == [None]
        assert puller.fetch([key], parts[1]._replace(parts=2), soon()) == [None]
        assert puller.counts == {"hit": 1, "refused": 2} and holder.sent() == set()
        until = soon(10)
        while not (sent := holder.sent()) and time.monotonic() < until:
            time.sleep(0.05)
        assert sent == {TRANSFER} and holder.counts["expired"] == 1
        assert puller.fetch([key], parts[2], soon()) == [None]
        assert write(holder, key), "its memory is free again"
    finally:
        holder.close()
        puller.close()


def test_a_puller_with_another_secret_is_a_stranger(tmp_path):
    holder = Tcp(LAYOUT, transfers.LIMIT, 5.0, ("127.0.0.1", 0), "a secret of sixteen", 60.0)
    puller = backend("tcp", tmp_path)
    try:
        key = keys()[0]
        assert write(holder, key)
        holder.offer(TRANSFER, [key])
        assert puller.fetch([key], source(holder), soon()) == [None]
        until = soon()
        while not holder.counts["stranger"] and time.monotonic() < until:  # the holder counts after it has hung up
            time.sleep(0.01)
        assert (puller.counts, holder.counts["stranger"]) == ({"refused": 1}, 1)
    finally:
        holder.close()
        puller.close()


@pytest.mark.parametrize("name", ["shm", "file"])
def test_what_was_promised_goes_with_its_lease(name, tmp_path):
    writer, reader = (backend(name, tmp_path, lease=0.01) for _ in range(2))
    wanted = keys()
    assert all(write(writer, key) for key in wanted)
    assert reader.fetch(wanted[:1], None, soon())[0] is not None
    writer.offer("a", wanted)
    until = soon(60)
    while not (over := writer.sent()) and time.monotonic() < until:
        time.sleep(0.01)
    assert over == {"a"} and all(writer.look(key) is Presence.ABSENT for key in wanted)
    assert writer.counts == {"stored": 4} | ({"pulled": 1, "expired": 3} if name == "shm" else {"released": 4})


def test_a_lease_ends_what_no_other_lease_holds(tmp_path):
    at = [0.0]
    held, kept = (Leases(each, lambda name: tmp_path / name, lambda: at[0]) for each in (10.0, None))
    held.add("a", ["x", "y"])
    kept.add("c", ["x", "y"])
    assert kept.take_over() == ({"c"}, set()) and held.take_over() == (set(), set())
    at[0] = 5.0
    held.add("b", ["y"])
    at[0] = 10.0
    assert held.take_over() == ({"a"}, {"x"}) and held.take_over() == (set(), set())
    held.close()
    assert list(tmp_path.iterdir()) == []
