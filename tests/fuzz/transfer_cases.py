"""Damaged states of sequences: in shared memory, in files, and on both ends of a connection."""

import io
import json
import socket
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from random import Random

from ling3export.runners.state.sequence_state import StateBytes, fill, read_state
from ling3export.runners.transfer.http import PROOF
from ling3export.runners.transfer.store import StateAddress
from tests.fuzz.harness import Case, WrongResultError
from tests.fuzz.mutations import json_text, mutated, mutated_bytes
from tests.support.transfers import DESCRIPTION, LAYOUT, bytes_of, file_of, name_of, put, random_state, same, store

NAME, HOST = name_of(7), "127.0.0.1"
PATIENCE = 60.0  # seconds; both ends close finished connections, so only a stalled machine takes this long


@contextmanager
def objects(folder: Path) -> Iterator[Case]:
    """Files and segments, damaged in their heads or anywhere: the reader gets a miss, or the exact bytes."""
    with closing(store("shm", folder)) as shared, closing(store("file", folder)) as files:

        def case(rng: Random) -> None:
            kind, end = rng.choice((("shm", shared), ("file", files)))
            state, path = random_state(rng.randint(1, 30)), file_of(kind, folder, NAME)
            put(end, NAME, state)
            data = path.read_bytes()
            split = rng.choice((600, len(data)))
            path.write_bytes(mutated_bytes(rng, data[:split]) + data[split:])
            found = end.get(StateAddress(NAME), time.monotonic() + PATIENCE)
            path.unlink(missing_ok=True)
            end.expire()
            if found is not None and not same(found, state):
                raise WrongResultError("another state than was written")

        yield case


@contextmanager
def pulls(folder: Path) -> Iterator[Case]:
    """Damaged bytes from a holder that knows the secret: the reader gets a miss, or the exact state."""
    with closing(store("http", folder, deadline=PATIENCE)) as taker, socket.create_server((HOST, 0)) as listener:
        listener.settimeout(PATIENCE)
        state = random_state(20)
        data = StateBytes(LAYOUT, state.descriptor, state.tokens)
        fill(data.state, state)
        memory = data.seal().tobytes()
        head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(memory)}\r\n{PROOF}: {taker.proof(NAME)}\r\n\r\n"

        def case(rng: Random) -> None:
            data = head.encode() + memory
            split = 600 if rng.random() < 0.5 else len(data)
            data = mutated_bytes(rng, data[:split]) + data[split:]

            def serve() -> None:
                with suppress(OSError):
                    peer, _ = listener.accept()
                    with peer:
                        peer.recv(1 << 16)
                        peer.sendall(data)

            thread = threading.Thread(target=serve)
            thread.start()
            until = time.monotonic() + PATIENCE
            found = taker.get(StateAddress(NAME, HOST, listener.getsockname()[1], 20), until)
            thread.join()
            if found is not None and not same(found, state):
                raise WrongResultError(f"another state than was sent; {dict(taker.counts)}")

        yield case


@contextmanager
def saved(folder: Path) -> Iterator[Case]:
    """Damaged bytes of states, half of them with the right digest: refused, or complete according to their header."""
    record = {"prompt_ids": [1, 2, 3], "max_tokens": 9, "sampling": {"seed": 3}}
    data = bytes_of(random_state(4), {"state": DESCRIPTION, "request": record})
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
            damaged = len(start).to_bytes(8, "little") + start + data[head:]
        else:
            split = rng.choice((8, head, len(data)))
            damaged = mutated_bytes(rng, data[:split]) + data[split:]
        try:
            found = read_state(io.BytesIO(damaged), len(damaged), LAYOUT, DESCRIPTION)
        except ValueError:
            return
        if not right and (found.descriptor["request"], found.stop) != (record, 4):
            raise WrongResultError(f"another state than was written: {found}")

    yield case
