"""Damaged states of sequences: in shared memory, in files, and on both ends of a connection."""

import json
import socket
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from random import Random

from ling3export.runners.engine.request import request_of
from ling3export.runners.hosts.handshake import HEAD, challenge, prove, receive
from ling3export.runners.state.sequence_state import StateBytes, load_state, save_state
from ling3export.runners.transfer import folder as folders
from ling3export.runners.transfer.store import StateAddress, put
from ling3export.runners.transfer.tcp import ASK, ROLES, STATE, TAKE
from tests.fuzz.harness import Case, WrongResultError
from tests.fuzz.mutations import json_text, mutated, mutated_bytes
from tests.support.transfers import DESCRIPTION, LAYOUT, address, file_of, name_of, random_state, same, store

NAME, HOST = name_of(7), "127.0.0.1"
PATIENCE = 60.0  # seconds; both ends close what they are done with, so that only a machine that stands still needs them


@contextmanager
def objects(folder: Path) -> Iterator[Case]:
    """Files and segments with damage in their heads or anywhere: a miss, or the very bytes; gc looks at them, too."""
    with closing(store("shm", folder)) as shared, closing(store("file", folder)) as files:

        def case(rng: Random) -> None:
            kind, end = rng.choice((("shm", shared), ("file", files)))
            state, path = random_state(rng.randint(1, 30)), file_of(kind, folder, NAME)
            put(end, NAME, state)
            data = path.read_bytes()
            split = rng.choice((600, len(data)))
            path.write_bytes(mutated_bytes(rng, data[:split]) + data[split:])
            if rng.random() < 0.3:
                list(folders.collect(path.parent))
            found = end.get(StateAddress(NAME), time.monotonic() + PATIENCE)
            path.unlink(missing_ok=True)
            end.ended()
            if found is not None and not same(found, state):
                raise WrongResultError("another state than was written")

        yield case


@contextmanager
def pulls(folder: Path) -> Iterator[Case]:
    """Damaged words of a taker, behind its proof or before it; damaged words of a holder. Right ones are served."""
    with closing(store("tcp", folder, deadline=PATIENCE)) as holder, closing(store("tcp", folder)) as taker:

        def case(rng: Random) -> None:
            state = random_state(20)
            put(holder, NAME, state)
            memory = StateBytes(LAYOUT, state.descriptor, state.tokens).fill(state).seal().tobytes()
            if rng.random() < 0.5:
                _ask(rng, address(holder, NAME))
                put(holder, NAME, state)  # which the damaged words may have taken
                found, damaged = taker.get(address(holder, NAME), time.monotonic() + PATIENCE), False
            else:
                found, damaged = _answered(rng, taker, memory), True
                taker.release(address(holder, NAME), time.monotonic() + PATIENCE)
            if not same(found, state) and not (damaged and found is None):
                raise WrongResultError(f"a right pull got {found}; {dict(taker.counts)}")

        yield case


@contextmanager
def saved(folder: Path) -> Iterator[Case]:
    """Damaged files of saved sequences, half of them with the right digest: refused, or as whole as they say."""
    path, record = folder / "state", {"prompt_ids": [1, 2, 3], "max_tokens": 9, "sampling": {"seed": 3}}
    save_state(path, replace(random_state(4), descriptor={"state": DESCRIPTION, "request": record}), LAYOUT)
    data = path.read_bytes()
    head = 8 + int.from_bytes(data[:8], "little")
    text = json.loads(data[8:head])["__metadata__"]["ling3.state"]

    def case(rng: Random) -> None:
        right = rng.random() < 0.5
        if right:
            other = json_text(mutated(rng, json.loads(text), 2)).decode("utf-8", "replace")
            tree = json.loads(data[8:head])
            check = f"{zlib.crc32(data[head:], zlib.crc32(other.encode())):08x}"
            tree["__metadata__"] = {"ling3.state": other, "crc32": check}
            start = json.dumps(tree, separators=(",", ":")).encode()
            start += b" " * (-(8 + len(start)) % 64)
            path.write_bytes(len(start).to_bytes(8, "little") + start + data[head:])
        else:
            split = rng.choice((8, head, len(data)))
            path.write_bytes(mutated_bytes(rng, data[:split]) + data[split:])
        found = load_state(path, LAYOUT, DESCRIPTION)
        with suppress(LookupError, TypeError):
            request_of(found.descriptor["request"])
        if not right and (found.descriptor["request"], found.stop) != (record, 4):
            raise WrongResultError(f"another sequence than was saved: {found}")

    yield case


def _ask(rng: Random, where: StateAddress) -> None:
    """Says what a taker says, damaged."""
    text = json_text(mutated(rng, {"what": TAKE, "name": NAME}))
    whole = HEAD.pack(ASK if rng.random() < 0.9 else rng.randbytes(1), len(text)) + text
    whole = mutated_bytes(rng, whole) if rng.random() < 0.3 else whole
    with socket.create_connection((where.host, where.port), PATIENCE) as peer, suppress(OSError):
        if rng.random() < 0.8:
            prove(peer, "", 0, time.monotonic() + PATIENCE, ROLES)
        peer.sendall(whole)
        peer.shutdown(socket.SHUT_WR)
        while peer.recv(1 << 16):
            pass


def _answered(rng: Random, taker, data: bytes):
    """What a taker makes of a holder that proves the secret and sends damaged bytes."""
    split = 600 if rng.random() < 0.5 else len(data) + 5
    whole = HEAD.pack(STATE, len(data)) + data
    whole = mutated_bytes(rng, whole[:split]) + whole[split:]
    with socket.create_server((HOST, 0)) as listener:
        listener.settimeout(PATIENCE)

        def serve() -> None:
            with suppress(OSError, ValueError):
                peer, _ = listener.accept()
                with peer:
                    challenge(peer, "", time.monotonic() + PATIENCE, ROLES)
                    receive(peer, 1 << 16, time.monotonic() + PATIENCE)
                    peer.sendall(whole)

        thread = threading.Thread(target=serve)
        thread.start()
        found = taker.get(StateAddress(NAME, HOST, listener.getsockname()[1], 20), time.monotonic() + PATIENCE)
        thread.join()
    return found
