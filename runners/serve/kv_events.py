"""Publishes which blocks prompts can hit on a server, in the messages of vLLM's KV events.

A message has three frames: the topic, a number that counts up from 0 (8 bytes, big-endian), and a batch in msgpack:
``[time, [event, …], 0]``. An event is a map with its name as ``type``, as vLLM 0.26 writes it; up to 0.23 it was an
array. Blocks belong to group 0, ``mla_attention``. Recurrent states after blocks belong to group 1, ``mamba``; each has
the name of the block that it follows. A prompt goes on from its last block that has a state. Group 0 has only blocks
that lead to one: a reader that does not know groups counts too much by the blocks between.
"""

import logging
import re
import secrets
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import msgspec
import zmq

from ling3export.foundation.errors import Ling3Error
from ling3export.foundation.threads import JobThread, ThreadEnded
from ling3export.runners.state.prefix_cache import Cleared, Event, Removed

LOG = logging.getLogger(__name__)
TOPIC = "kv-events"
ENDPOINT = re.compile(r"tcp://(\*|\[[0-9A-Fa-f:.]+\]|[^:/\[\]\s]+):(\d{1,5})")
WAITING = 1 << 10  # messages that wait for a reader before it loses some
SUBSCRIPTION = 1 << 12  # bytes of a reader's topic
CLOSING = 10.0  # seconds to publish what waits at the end
MEDIUM = "GPU"  # vLLM's word for the memory that the model computes from, whatever the device
KINDS = ("mla_attention", "mamba")


def number_of(name: bytes) -> int:
    """A block's name as others have it: 64 bits."""
    return int.from_bytes(name[-8:], "big")


def encoded(at: float, events: Sequence[Event]) -> bytes:
    """A batch of events of the time ``at``, in seconds since 1970."""
    return msgspec.msgpack.encode((at, [_written(event) for event in events], 0))


def _written(event: Event) -> dict[str, Any]:
    """An event as vLLM declares it: its fields in their order, without those that have their default."""
    if isinstance(event, Cleared):
        return {"type": "AllBlocksCleared"}
    names = [number_of(name) for name in event.hashes]
    if isinstance(event, Removed):
        return {"type": "BlockRemoved", "block_hashes": names, "medium": MEDIUM, "group_idx": int(event.state)}
    salted = event.salt and event.parent is None  # as vLLM has it: with a sequence's first block
    salt = event.salt.encode("utf-8", "replace").decode()  # halves of characters cannot be written
    return {
        "type": "BlockStored",
        "block_hashes": names,
        "parent_block_hash": None if event.parent is None else number_of(event.parent),
        "token_ids": event.tokens,
        "block_size": event.block,
        "lora_id": None,
        "medium": MEDIUM,
        "lora_name": None,
        "extra_keys": [(salt,) if salted else None, *[None] * (len(names) - 1)],
        "group_idx": int(event.state),
        "kv_cache_spec_kind": KINDS[event.state],
    }


class Publisher:
    """Publishes events. Any thread may call ``tell``, which waits for nobody.

    Args:
        endpoint: ``tcp://HOST:PORT``. Port 0 takes one that is free, and ``*`` all addresses of this machine.

    Raises:
        Ling3Error: The endpoint is malformed, or the port is taken.
    """

    def __init__(self, endpoint: str, topic: str = TOPIC) -> None:
        parts = ENDPOINT.fullmatch(endpoint)
        if parts is None or int(parts[2]) > 65535:
            raise Ling3Error(f"--kv-events: expected tcp://HOST:PORT, found {endpoint[:100]}")
        host, port = parts[1], int(parts[2])
        self.host, self._topic, self._instance = host.strip("[]"), topic.encode(), secrets.token_hex(8)
        self._next, self._closed = 0, False  # the number of the next message
        self._events: deque[Event] = deque()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PUB)
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.SNDHWM, WAITING),
            (zmq.MAXMSGSIZE, SUBSCRIPTION),
            (zmq.IPV6, int(host == "*" or host.startswith("["))),
        ):
            self._socket.setsockopt(option, value)
        try:
            self._socket.bind(f"tcp://{host}:{port or '*'}")
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise Ling3Error(
                f"--kv-events {endpoint}: expected a port that is free here, found {error.strerror}",
                "take another; port 0 is any free one",
            ) from error
        self._port = int(self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
        self._jobs = JobThread("ling3-kv-events", LOG.error)

    def tell(self, event: Event) -> None:
        """Publishes one event, soon, after those before it."""
        self._events.append(event)
        self._jobs.put("publish events", self._publish, self._lost)

    def record(self, block: int) -> dict[str, Any]:
        """The port, the topic and the number of the last message, as JSON; ``block`` is the number of tokens in one."""
        return {
            "port": self._port,
            "topic": self._topic.decode(),
            "block_size": block,
            "instance": self._instance,
            "sequence": self._next - 1,
        }

    def close(self) -> None:
        """Publishes the events that wait, and ends. May be called again."""
        if not self._closed:
            self._closed = True
            self._jobs.close(CLOSING)
            self._context.destroy(linger=0)

    def _lost(self, error: BaseException) -> None:
        """Drops the events that could not be published, and tells the readers to forget all blocks."""
        self._events.clear()
        if not isinstance(error, ThreadEnded):
            self._send([Cleared()])

    def _publish(self) -> None:
        """Sends the events that wait: those of several calls of ``tell`` in one batch."""
        if batch := [self._events.popleft() for _ in range(len(self._events))]:
            self._send(batch)

    def _send(self, batch: list[Event]) -> None:
        self._socket.send_multipart((self._topic, self._next.to_bytes(8, "big"), encoded(time.time(), batch)))
        self._next += 1
