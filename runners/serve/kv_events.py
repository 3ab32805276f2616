"""What prompts can hit on a server, told as it changes, in the messages of vLLM's KV events.

A message has three frames: the topic, a number that counts up from 0 (8 bytes, the highest first), and a batch in
msgpack: ``[time, [event, …], 0]``. An event is a map with its name as ``type``, as vLLM 0.26 writes it; up to 0.23 it
was an array. Blocks belong to group 0, ``mla_attention``; recurrent states behind blocks to group 1, ``mamba``,
each of which is named like the block that it stands behind. A prompt goes on from the last of its blocks that has a
state, and group 0 has only blocks that lead to one: who does not know groups counts too much by what lies between.

Who missed something asks a second socket for all from a number on, and gets the number and the batch of each, then
the number -1. Asked from 0, it gives what is true now: batches that are too old to be kept one by one are joined, and
what was removed since is left out of them.
"""

import logging
import os
import queue
import re
import secrets
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
import zmq

from ling3export.foundation.errors import Ling3Error
from ling3export.foundation.threads import GuardedThread, attempt
from ling3export.runners.state.prefix_cache import Cleared, Event, Removed, Stored

LOG = logging.getLogger(__name__)
TOPIC = "kv-events"
ENDPOINT = re.compile(r"tcp://(\*|\[[0-9A-Fa-f:.]+\]|[^:/\[\]\s]+):(\d{1,5})")
MOST = 1 << 14  # what an event may cost, and from which on nothing joins a batch: tokens, and NAMED for each block
NAMED = 80
BATCHES = 1024  # that are kept one by one for those who missed some
BYTES = 16 << 20  # of them
WAITING = 1 << 10  # messages that wait for a reader before it loses some
ANSWERS = 1 << 12  # messages of answers that wait for who asked
QUESTION = 1 << 12  # bytes of one, and of a topic that is listened to
END = (-1).to_bytes(8, "big", signed=True)
MEDIUM = "GPU"  # vLLM's word for the memory that the model computes from, whatever the device
KINDS = ("mla_attention", "mamba")


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True):
    """Blocks that prompts can hit from now on, one behind the other."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[str, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class BlockRemoved(msgspec.Struct, tag=True, omit_defaults=True):
    """Blocks that prompts cannot hit any more."""

    block_hashes: list[int]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, tag=True):
    """Prompts hit nothing from now on."""


def number_of(name: bytes) -> int:
    """A block's name as others have it: 64 bits."""
    return int.from_bytes(name[-8:], "big")


def pieces(event: Stored, most: int = MOST) -> Iterator[Stored]:
    """An event as some that cost no more than ``most`` each, or have one block."""
    count, parent = max(1, most // (event.block + NAMED)), event.parent
    for at in range(0, len(event.hashes), count):
        names = event.hashes[at : at + count]
        tokens = event.tokens[at * event.block : (at + count) * event.block]
        yield event._replace(hashes=names, parent=parent, tokens=tokens)
        parent = names[-1]


def _cost(event: Event) -> int:
    if isinstance(event, Cleared):
        return NAMED
    return NAMED * len(event.hashes) + (len(event.tokens) if isinstance(event, Stored) else 0)


def encoded(at: float, events: Sequence[Event]) -> bytes:
    """A batch of events of the time ``at``, in seconds since 1970."""
    return msgspec.msgpack.encode((at, [_written(event) for event in events], 0))


def _written(event: Event) -> msgspec.Struct:
    if isinstance(event, Stored):
        salted = event.salt and event.parent is None  # as vLLM has it: with a sequence's first block
        salt = event.salt.encode("utf-8", "replace").decode()  # halves of characters cannot be written
        keys: list[tuple[str, ...] | None] = [(salt,) if salted else None, *[None] * (len(event.hashes) - 1)]
        parent = None if event.parent is None else number_of(event.parent)
        return BlockStored(
            [number_of(name) for name in event.hashes],
            parent,
            list(event.tokens),
            event.block,
            None,
            MEDIUM,
            None,
            keys,
            int(event.state),
            KINDS[event.state],
        )
    if isinstance(event, Removed):
        return BlockRemoved([number_of(name) for name in event.hashes], MEDIUM, int(event.state))
    return AllBlocksCleared()


class _Batch(NamedTuple):
    number: int
    at: float
    events: tuple[Event, ...]
    data: bytes


class History:
    """What was told: the last batches as they were, and what is left of those before.

    Args:
        batches: How many are kept as they were.
        size: Bytes that these may have.
    """

    def __init__(self, batches: int = BATCHES, size: int = BYTES) -> None:
        self._most, self._size, self._bytes = batches, size, 0
        self._last: deque[_Batch] = deque()
        self._left: dict[tuple[bool, bytes], tuple[_Batch, Stored]] = {}  # one block each, in the order of the numbers
        self.next = 0

    def add(self, at: float, events: Sequence[Event]) -> tuple[int, bytes]:
        """A new batch: its number and its bytes."""
        batch = _Batch(self.next, at, tuple(events), encoded(at, events))
        self.next += 1
        self._last.append(batch)
        self._bytes += len(batch.data)
        while len(self._last) > self._most or (self._bytes > self._size and len(self._last) > 1):
            old = self._last.popleft()
            self._bytes -= len(old.data)
            self._fold(old)
        return batch.number, batch.data

    def since(self, number: int) -> Iterator[tuple[int, bytes]]:
        """Numbers and bytes of the batches from ``number`` on; from 0, what is left of those that are not kept."""
        if number == 0:
            yield from self._joined()
        for batch in self._last:
            if batch.number >= number:
                yield batch.number, batch.data

    def _fold(self, batch: _Batch) -> None:
        for event in batch.events:
            if isinstance(event, Cleared):
                self._left.clear()
            elif isinstance(event, Removed):
                for name in event.hashes:
                    self._left.pop((event.state, name), None)
            else:
                for each in pieces(event, 0):
                    key = each.state, each.hashes[0]
                    self._left.pop(key, None)
                    self._left[key] = batch, each

    def _joined(self) -> Iterator[tuple[int, bytes]]:
        events: list[Event] = []
        before: _Batch | None = None
        cost = 0
        for batch, event in self._left.values():
            if before is not None and batch.number != before.number and cost >= MOST:
                yield before.number, encoded(before.at, events)
                events, cost = [], 0
            events.append(event)
            cost, before = cost + _cost(event), batch
        if before is not None:
            yield before.number, encoded(before.at, events)


class Publisher:
    """Tells events to whoever listens. Any thread may call ``tell``, which waits for nobody.

    Args:
        endpoint: ``tcp://HOST:PORT``; questions are answered at the next port. Port 0 takes two that are free, and
            ``*`` all addresses of this machine.
        topic: The first frame of each message.

    Raises:
        Ling3Error: The endpoint is none, or a port is taken.
    """

    def __init__(self, endpoint: str, topic: str = TOPIC) -> None:
        found = ENDPOINT.fullmatch(endpoint)
        if found is None or int(found[2]) > 65534:
            raise Ling3Error(f"--kv-events: expected tcp://HOST:PORT with a port below 65535, found {endpoint[:100]}")
        host, port = found[1], int(found[2])
        self.host, self._topic, self._instance = host.strip("[]"), topic.encode(), secrets.token_hex(8)
        self._context = zmq.Context()
        self._history, self._told, self._closed, self._finished = History(), -1, False, False
        self._events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        try:
            self._out, self._port = self._bound(zmq.PUB, host, port, WAITING)
            self._asked, self._asked_port = self._bound(zmq.ROUTER, host, port and port + 1, ANSWERS)
            self._asked.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a message that finds no room raises
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            os.close(self._wake)
            raise Ling3Error(
                f"--kv-events {endpoint}: expected two ports that are free here, found {error.strerror}",
                "take others; port 0 is any two free ones",
            ) from error
        self._thread = GuardedThread("ling3-kv-events", self._run)

    def _bound(self, kind: int, host: str, port: int, most: int) -> tuple[zmq.Socket[bytes], int]:
        made = self._context.socket(kind)
        made.setsockopt(zmq.LINGER, 0)
        made.setsockopt(zmq.SNDHWM, most)
        made.setsockopt(zmq.MAXMSGSIZE, QUESTION)
        made.setsockopt(zmq.IPV6, int(host == "*" or host.startswith("[")))
        made.bind(f"tcp://{host}:{port or '*'}")
        return made, int(made.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])

    def tell(self, event: Event) -> None:
        """Tells one event, soon, behind those before it."""
        if not self._closed and self._thread.running:
            self._events.put(event)
            os.eventfd_write(self._wake, 1)

    def record(self, block: int) -> dict[str, Any]:
        """Where it is heard and how far it is, as JSON; ``block`` are the tokens of one."""
        return {
            "port": self._port,
            "replay_port": self._asked_port,
            "topic": self._topic.decode(),
            "block_size": block,
            "instance": self._instance,
            "sequence": self._told,
        }

    def close(self) -> None:
        """Tells what waits, and ends."""
        if not self._closed:
            self._closed = True
            self._events.put(None)
            os.eventfd_write(self._wake, 1)
            self._thread.join()
            self._context.destroy(linger=0)
            os.close(self._wake)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wake, zmq.POLLIN)
        poller.register(self._asked, zmq.POLLIN)
        while not self._finished:
            ready = dict(poller.poll())
            if self._wake in ready:
                os.eventfd_read(self._wake)
                attempt("publish events", self._publish, self._lost, LOG.error)
            if self._asked in ready:
                attempt("replay events", self._answer, lambda error: None, LOG.error)

    def _lost(self, error: BaseException) -> None:
        """Tells the readers to forget all blocks: they do not get the events that could not be sent."""
        self._send([Cleared()])

    def _publish(self) -> None:
        """Sends the events that wait."""
        batch: list[Event] = []
        cost = 0
        while True:
            try:
                event = self._events.get_nowait()
            except queue.Empty:
                break
            if event is None:
                self._finished = True
                break
            for part in pieces(event) if isinstance(event, Stored) else (event,):
                batch.append(part)
                cost += _cost(part)
                if cost >= MOST:
                    self._send(batch)
                    batch, cost = [], 0
        if batch:
            self._send(batch)

    def _send(self, batch: list[Event]) -> None:
        number, data = self._history.add(time.time(), batch)
        self._out.send_multipart((self._topic, number.to_bytes(8, "big"), data))
        self._told = number

    def _answer(self) -> None:
        frames = self._asked.recv_multipart()
        if len(frames) != 3 or frames[1] or len(frames[2]) != 8:
            return  # no question
        try:
            for number, data in self._history.since(int.from_bytes(frames[2], "big")):
                self._asked.send_multipart((frames[0], b"", number.to_bytes(8, "big"), data), zmq.NOBLOCK)
            self._asked.send_multipart((frames[0], b"", END, b""), zmq.NOBLOCK)
        except zmq.ZMQError:  # who asked is gone or reads nothing: without the end it knows that this is not all
            pass
