"""Damaged objects of sequence states: in shared memory, in files, and on both ends of a connection."""

import hashlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from random import Random

from ling3export.runners.engine.request import request_of
from ling3export.runners.hosts.rendezvous import HEAD, challenge, prove, receive
from ling3export.runners.state.form import empty, storable
from ling3export.runners.state.saved import Saved, _tensors, read_saved, write_saved
from ling3export.runners.transfer import folder as folders
from ling3export.runners.transfer import shm
from ling3export.runners.transfer.backend import Source
from ling3export.runners.transfer.folder import safetensors_head
from ling3export.runners.transfer.objects import HEADER
from ling3export.runners.transfer.tcp import ASK, OBJECT, ROLES, Tcp
from tests.fuzz.harness import Case, WrongResultError
from tests.fuzz.mutations import json_text, mutated, mutated_bytes
from tests.support.transfers import DESCRIPTION, TARGET_LAYOUT, backend, keys, same, segment, write

TRANSFER = "0" * 32
HOST = "127.0.0.1"


@contextmanager
def objects(folder: Path) -> Iterator[Case]:
    """Segments and files with damage in their headers or anywhere: a miss, or the very bytes; gc looks at them, too."""
    with closing(backend("shm", folder, deadline=0.05)) as shared, closing(backend("file", folder)) as files:

        def case(rng: Random) -> None:
            name, end = rng.choice((("shm", shared), ("file", files)))
            key = rng.choice(keys())
            write(end, key)
            path = segment(key) if name == "shm" else folder / f"{key.name}.safetensors"
            data = path.read_bytes()
            split = rng.choice((HEADER.size if name == "shm" else 1500, len(data)))
            path.write_bytes(mutated_bytes(rng, data[:split]) + data[split:])
            if rng.random() < 0.3:
                collected = shm.collect(dry_run=False) if name == "shm" else folders.collect(folder, dry_run=False)
                list(collected)
            (payload,) = end.fetch([key], None, time.monotonic() + 5)
            if payload is not None and not same(key, payload):
                raise WrongResultError("another payload than was written")
            path.unlink(missing_ok=True)

        yield case


@contextmanager
def pulls(folder: Path) -> Iterator[Case]:
    """Damaged words of a puller, behind its proof or before it; damaged words of a holder. Right ones are served."""
    with closing(backend("tcp", folder, deadline=2.0)) as holder, closing(backend("tcp", folder)) as puller:
        assert isinstance(holder, Tcp)
        source = Source(HOST, holder.port, TRANSFER)

        def case(rng: Random) -> None:
            key = rng.choice(keys())
            write(holder, key)
            memory = holder._objects[key.name]  # held here, so that it can be offered again
            holder.offer(TRANSFER, [key])
            if rng.random() < 0.5:
                _ask(rng, source, key.name)
                holder.offer(TRANSFER, [key])
                found, damaged = puller.fetch([key], source, time.monotonic() + 5)[0], False
                holder.offer(TRANSFER, [])
            else:
                found, damaged = _answered(rng, puller, key, memory.tobytes()), True
            if not same(key, found) and not (damaged and found is None):
                raise WrongResultError(f"a right pull got {found}; {dict(puller.counts)}")

        yield case


@contextmanager
def saved(folder: Path) -> Iterator[Case]:
    """Damaged files of saved sequences, half of them with the right digest: refused, or as whole as they say."""
    path, record = folder / "state", {"prompt_ids": [1, 2, 3], "max_tokens": 9, "sampling": {"seed": 3}}
    state = storable(empty(TARGET_LAYOUT, 1))
    write_saved(path, Saved(record, ((3, (-0.5, ((3, -0.5),))), (4, None)), 4, state), TARGET_LAYOUT, DESCRIPTION)
    data = path.read_bytes()
    head = 8 + int.from_bytes(data[:8], "little")
    text = json.loads(data[8:head])["__metadata__"]["ling3.state"]

    def case(rng: Random) -> None:
        right = rng.random() < 0.5
        if right:
            other = json_text(mutated(rng, json.loads(text), 2)).decode("utf-8", "replace")
            digest = hashlib.sha256(other.encode() + data[head:]).hexdigest()
            tensors = [(name, shape, dtype) for name, shape, dtype in _tensors(TARGET_LAYOUT, 4)]
            path.write_bytes(safetensors_head(tensors, {"ling3.state": other, "sha256": digest}) + data[head:])
        else:
            split = rng.choice((8, head, len(data)))
            path.write_bytes(mutated_bytes(rng, data[:split]) + data[split:])
        found = read_saved(path, TARGET_LAYOUT, DESCRIPTION, 100)
        with suppress(LookupError, TypeError):
            request_of(found.request)
        if not right and (found.request, found.stored) != (record, 4):
            raise WrongResultError(f"another sequence than was saved: {found}")

    yield case


def _ask(rng: Random, source: Source, name: str) -> None:
    """Says what a puller says, damaged."""
    text = json_text(mutated(rng, {"transfer": TRANSFER, "part": 0, "parts": 1, "names": [name, name]}))
    whole = HEAD.pack(ASK if rng.random() < 0.9 else rng.randbytes(1), len(text)) + text
    whole = mutated_bytes(rng, whole) if rng.random() < 0.3 else whole
    with socket.create_connection(source[:2], 2) as peer, suppress(OSError):
        if rng.random() < 0.8:
            prove(peer, "", 0, time.monotonic() + 2, ROLES)
        peer.sendall(whole)
        peer.shutdown(socket.SHUT_WR)
        while peer.recv(1 << 16):
            pass


def _answered(rng: Random, puller, key, data: bytes):
    """What a puller makes of a holder that proves the secret and sends damaged bytes."""
    split = 5 + HEADER.size if rng.random() < 0.5 else len(data) + 5
    whole = HEAD.pack(OBJECT, len(data)) + data
    whole = mutated_bytes(rng, whole[:split]) + whole[split:]
    with socket.create_server((HOST, 0)) as listener:
        listener.settimeout(2)

        def serve() -> None:
            with suppress(OSError, ValueError):
                peer, _ = listener.accept()
                with peer:
                    challenge(peer, "", time.monotonic() + 2, ROLES)
                    receive(peer, 1 << 16, time.monotonic() + 2)
                    peer.sendall(whole)

        thread = threading.Thread(target=serve)
        thread.start()
        source = Source(HOST, listener.getsockname()[1], TRANSFER)
        (found,) = puller.fetch([key], source, time.monotonic() + 2)
        thread.join()
    return found
