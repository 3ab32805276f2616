"""A store returns the state that was put into it, or a counted miss in time; leases end, and nothing is left."""

import os
import random
import signal
import stat
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
from safetensors.numpy import load_file

from ling3export.runners.state.sequence_state import StateBytes
from ling3export.runners.transfer.folder import FolderStore
from ling3export.runners.transfer.http import HttpStore
from ling3export.runners.transfer.options import Transfer
from ling3export.runners.transfer.store import StateAddress, TransferError
from tests.support import transfers
from tests.support.transfers import (
    DESCRIPTION,
    LAYOUT,
    LEASE,
    STORES,
    address,
    file_of,
    name_of,
    put,
    random_state,
    remove_all,
    same,
    store,
)
from tests.support.waiting import until

DEADLINE, GRACE = 2.0, 5.0  # seconds that a reader has, and further seconds for a busy machine
NAME = name_of(1)


def soon(seconds: float = 60.0) -> float:
    return time.monotonic() + seconds


class Clock:
    def __init__(self) -> None:
        self.now = time.time()

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture(params=STORES)
def kind(request):
    remove_all()
    return request.param


@pytest.fixture
def ends(kind, tmp_path, clock):
    """Two ends of a store with one clock: the writer and the reader."""
    found = [store(kind, tmp_path, clock=clock) for _ in range(2)]
    yield found
    for end in found:
        end.close()


def until_over(holder, reason: str) -> None:
    """Waits until a holder has counted the end of a state, which over HTTP happens a moment after the reader's end."""

    def over() -> bool:
        holder.expire()
        return holder.counts[reason] == 1

    until(over)


def test_a_state_is_taken_whole_and_once(ends):
    holder, taker = ends
    wanted = random_state()
    assert put(holder, NAME, wanted)
    holder.expire()
    assert same(taker.get(address(holder, NAME), soon()), wanted)
    until_over(holder, "pulled")
    assert taker.get(address(holder, NAME), soon()) is None
    counted = taker.counts
    assert counted["hit"] == 1 and counted["refused"] + counted["miss"] == 1
    assert (holder.counts["stored"], holder.counts["pulled"]) == (1, 1)


def test_a_state_that_is_given_up_was_never_there(ends):
    holder, taker = ends
    state = random_state()
    with pytest.raises(ZeroDivisionError):
        holder.put(NAME, state.descriptor, state.tokens, lambda new: 1 / 0)
    assert taker.get(address(holder, NAME), soon()) is None
    assert holder.counts["abandoned"] == 1 and put(holder, NAME, state)


def test_a_lease_ends(ends, clock):
    holder, taker = ends
    assert put(holder, NAME, random_state())
    clock.now += LEASE - 1
    for end in ends:
        end.expire()
    assert holder.counts == {"stored": 1} and not taker.counts, "nobody removes one that is leased"
    clock.now += 2
    holder.expire()
    assert holder.counts["expired"] == 1
    assert taker.get(address(holder, NAME), soon()) is None


@pytest.mark.parametrize("kind", ["shm", "file"], indirect=True)
def test_states_of_a_killed_server_go_after_their_lease(ends, clock):
    """Regression: a server that starts within the lease leaves them, but checked again only ten minutes later."""
    killed, next_server = ends
    assert put(killed, NAME, random_state())
    next_server.sweep()
    assert next_server.has(NAME)
    clock.now += LEASE + 1
    next_server.expire()
    assert not next_server.has(NAME) and next_server.counts["swept"] == 1


def test_a_released_name_is_free_at_once(ends):
    holder, taker = ends
    assert put(holder, NAME, random_state())
    taker.release(address(holder, NAME), soon())
    until(lambda: put(holder, NAME, random_state()))
    taker.release(address(holder, NAME), soon())
    holder.expire()
    assert taker.get(address(holder, NAME), soon()) is None


def test_leased_states_are_removed_with_their_store(kind, tmp_path):
    holder = store(kind, tmp_path)
    assert put(holder, NAME, random_state())
    holder.close()
    assert [*tmp_path.iterdir()] == [*transfers.SHM.iterdir()] == []


def test_a_state_of_another_artifact_is_a_miss_and_not_read(kind, tmp_path):
    holder, taker = store(kind, tmp_path), store(kind, tmp_path, description={**DESCRIPTION, "weights": "b"})
    assert put(holder, NAME, random_state())
    assert taker.get(address(holder, NAME), soon()) is None and taker.counts == {"other_state": 1}
    holder.close()
    taker.close()


@pytest.mark.parametrize("kind", ["shm", "http"], indirect=True)
def test_states_beyond_the_limit_find_no_room(kind, tmp_path):
    """Promised states stay: the new one is refused."""
    state = random_state()
    size = StateBytes(LAYOUT, state.descriptor, state.tokens).memory.nbytes
    for more, fits in ((-1, False), (0, True), (1, True)):
        exact = store(kind, tmp_path, limit=size + more)
        assert put(exact, NAME, state) == fits
        exact.close()
    end, names = store(kind, tmp_path, limit=2 * size + 200), [name_of(number) for number in range(3)]
    assert [put(end, name, state) for name in names] == [True, True, False]
    assert end.counts == {"stored": 2, "full": 1}
    end.release(address(end, names[0]), soon())
    until(lambda: put(end, names[2], state))
    end.close()


@pytest.mark.parametrize("kind", ["shm", "file"], indirect=True)
def test_files_are_private_and_any_reader_of_safetensors_opens_them(kind, tmp_path):
    folder = tmp_path / "made"
    end, state = store(kind, folder), random_state()
    assert put(end, NAME, state)
    path = file_of(kind, folder, NAME)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert kind == "shm" or stat.S_IMODE(folder.stat().st_mode) == 0o700
    found = load_file(path)
    assert {*found} == {*state.arrays, "tokens"} and found["tokens"].tolist() == state.tokens.tolist()
    end.close()


@pytest.mark.parametrize("kind", ["shm", "file"], indirect=True)
def test_a_flipped_bit_is_a_miss_and_the_file_is_removed(kind, tmp_path):
    rng = random.Random(1)
    end, path = store(kind, tmp_path), file_of(kind, tmp_path, NAME)
    for _ in range(20):
        assert put(end, NAME, random_state())
        with open(path, "r+b") as file:
            at = rng.randrange(path.stat().st_size)
            file.seek(at)
            (byte,) = file.read(1)
            file.seek(at)
            file.write(bytes([byte ^ 1 << rng.randrange(8)]))
        assert end.get(StateAddress(NAME), soon()) is None
        # a reader that claims to have another artifact does not release the state
        end.release(StateAddress(NAME), soon())
        end.expire()
    assert end.counts["corrupt"] + end.counts["other_state"] == 20 and end.counts["corrupt"] > 10
    end.close()


@pytest.mark.parametrize("found", ["mode", "link", "file", "owner"])
def test_a_folder_that_others_can_write_to_is_refused(found, tmp_path, monkeypatch):
    """Regression: folders with mode 777, of another user, and links were accepted. Their writers decide answers."""
    folder = tmp_path / "states"
    if found == "file":
        folder.write_text("")
    elif found == "link":
        (tmp_path / "other").mkdir(mode=0o700)
        folder.symlink_to(tmp_path / "other")
    else:
        folder.mkdir(mode=0o700)
        folder.chmod(0o777 if found == "mode" else 0o700)
    said = {"mode": "mode 777", "link": "a symbolic link", "file": "File exists", "owner": "one of user "}[found]
    if found == "owner":
        other = os.geteuid() + 1
        monkeypatch.setattr(os, "geteuid", lambda: other)
    with pytest.raises(TransferError, match=f"file: expected a folder that only this user can write, found {said}"):
        FolderStore(LAYOUT, DESCRIPTION, folder)


def test_a_folder_that_is_gone_stores_nothing(tmp_path, clock):
    end = store("file", tmp_path / "states", clock=clock)
    (tmp_path / "states").rmdir()
    assert not put(end, NAME, random_state()) and end.counts == {"full": 1}
    clock.now += 700
    assert not put(end, NAME, random_state()) and end.counts == {"full": 2}


@pytest.mark.parametrize("change", [{"host": "0.0.0.0"}, {"peers": ("10.0.0.1:80",)}])
def test_states_of_other_machines_need_a_secret(change):
    with pytest.raises(TransferError, match="is another machine's, and there is no secret"):
        HttpStore(LAYOUT, DESCRIPTION, Transfer("http", **change))


@pytest.mark.parametrize(("peers", "taken"), [((), True), (("127.0.0.1:1",), False), (("HERE",), True)])
def test_states_are_taken_from_known_addresses_only(tmp_path, peers, taken):
    """Regression: D connected to any address in a client's request."""
    holder = store("http", tmp_path)
    place = ":".join(map(str, holder.address))
    named = tuple(place if peer == "HERE" else peer for peer in peers)
    taker = HttpStore(LAYOUT, DESCRIPTION, Transfer("http", peers=named))
    assert put(holder, NAME, random_state())
    assert (taker.get(address(holder, NAME), soon()) is not None) == taken
    assert taken or (holder.counts == {"stored": 1} and taker.counts == {"refused": 1})
    far = HttpStore(LAYOUT, DESCRIPTION, Transfer("http"))
    assert far.get(StateAddress(NAME, "192.0.2.1", 80, 20), soon()) is None and far.counts == {"refused": 1}
    holder.close()


CHILD = """
import sys, time
from pathlib import Path
from tests.support.transfers import put, random_state, store
kind, folder, how, name = sys.argv[1:]
end = store(kind, Path(folder), lease=600.0)
state = random_state()
if how == "half":
    def half(new):
        new.arrays["kda.conv"][...] = 1
        print(end.address[1], flush=True)
        time.sleep(100)
    end.put(name, state.descriptor, state.tokens, half)
else:
    assert put(end, name, state)
if how == "stuck":
    from ling3export.runners.serve import app as states
    async def pieces(self, memory):
        yield memory[: len(memory) // 2]
        time.sleep(100)
    states._StateResponse._pieces = pieces
print(end.address[1], flush=True)
time.sleep(100)
"""


@pytest.fixture
def child(tmp_path):
    """Starts a process that has a state, or half of one; returns the process and its port."""
    started = []

    def start(kind: str, how: str) -> tuple[subprocess.Popen, int]:
        paths = os.pathsep.join(path for path in sys.path if path)
        process = subprocess.Popen(
            [sys.executable, "-c", CHILD, kind, str(tmp_path), how, NAME],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": paths},
        )
        started.append(process)
        return process, int(process.stdout.readline())

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.mark.parametrize("kind", ["shm", "file"], indirect=True)
@pytest.mark.parametrize("how", ["half", "whole"])
def test_files_of_a_killed_process_are_removed_and_block_no_other(kind, how, child, tmp_path, clock):
    """Regression: states of a killed P stayed in a folder forever; a segment without its header blocked its name."""
    process, _ = child(kind, how)
    end, path = store(kind, tmp_path, clock=clock), file_of(kind, tmp_path, NAME)
    assert len([*path.parent.iterdir()]) == 1 and path.exists() == (how == "whole"), "nobody touches a live one's"
    process.kill()
    process.wait()
    if how == "half":
        assert put(end, NAME, random_state()), "its name is free"
        end.release(StateAddress(NAME), soon())
        end.expire()
    assert len([*path.parent.iterdir()]) == 1, "it may be another machine's that still writes, or its lease runs"
    clock.now += 700
    end.expire()
    assert [*path.parent.iterdir()] == [] and end.counts["swept"] == 1
    end.close()


@pytest.mark.parametrize(
    ("how", "reason"), [("killed", "peer_gone"), ("killed while it sends", "peer_gone"), ("stopped", "timeout")]
)
def test_a_holder_that_is_gone_is_a_miss_in_time(how, reason, child, tmp_path):
    process, port = child("http", "stuck" if how == "killed while it sends" else "whole")
    taker = store("http", tmp_path)
    if how == "stopped":
        process.send_signal(signal.SIGSTOP)
    elif how == "killed":
        process.kill()
        process.wait()
    else:
        threading.Timer(0.3, process.kill).start()
    begun = time.monotonic()
    assert taker.get(StateAddress(NAME, "127.0.0.1", port, 20), begun + DEADLINE) is None
    assert time.monotonic() - begun < DEADLINE + GRACE and taker.counts == {reason: 1}
    taker.close()


def test_only_one_of_two_concurrent_readers_gets_a_state(tmp_path):
    holder, takers = store("http", tmp_path), [store("http", tmp_path) for _ in range(2)]
    state = random_state()
    assert put(holder, NAME, state)
    with ThreadPoolExecutor(len(takers)) as pool:
        found = list(pool.map(lambda end: end.get(address(holder, NAME), soon()), takers))
    assert sorted(same(each, state) for each in found) == [False, True]
    assert sum((each.counts for each in takers), Counter()) == {"hit": 1, "refused": 1}
    for end in (holder, *takers):
        end.close()


def test_a_taker_with_another_secret_is_a_stranger(tmp_path):
    holder, taker = store("http", tmp_path, secret="a secret of sixteen"), store("http", tmp_path)
    assert put(holder, NAME, random_state())
    assert taker.get(address(holder, NAME), soon()) is None and taker.counts == {"refused": 1}
    until(lambda: holder.counts["stranger"])  # the holder counts it after closing the connection
    holder.close()
    taker.close()
