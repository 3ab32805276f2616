"""Damaged events of a server: on their way into a router, and questions at a server that tells them."""

import asyncio
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import zmq

from ling3export.foundation.processes import LOOPBACK
from ling3export.runners.route.blocks import Blocks, BlockStored, MalformedError, Tokens, events_of
from ling3export.runners.route.events import KVEventSubscriber, source_of
from ling3export.runners.serve.kv_events import END, Publisher, encoded
from ling3export.runners.state.prefix_cache import Cleared, Removed, Stored
from tests.fuzz.harness import Case, WrongResultError
from tests.fuzz.mutations import mutated, mutated_bytes

MOST = 64
NAMES = tuple(bytes(31) + bytes([n]) for n in range(8))
EVENTS = (
    Cleared(),
    Stored(NAMES[:4], None, tuple(range(16)), 4, "me"),
    Stored(NAMES[3:4], NAMES[2], (12, 13, 14, 15), 4, "me", True),
    Stored(NAMES[4:6], NAMES[3], tuple(range(8)), 4, "me"),
    Removed(NAMES[5:6]),
    Removed(NAMES[3:4], True),
)
LAST = Stored(NAMES[6:7], None, (1, 2, 3, 4), 4)
PLACE = {"kv_events": {"port": 1, "replay_port": 2, "topic": "t", "block_size": 4, "instance": "i", "sequence": 3}}
# What right events say of each group.
KINDS = {
    each.group_idx or 0: each.kv_cache_spec_kind
    for each in events_of(encoded(1.0, EVENTS))
    if isinstance(each, BlockStored)
}
PROMPT = Tokens([1, 2, 3, 4, 5], "")


def damaged(rng: Random) -> bytes:
    """A batch with other values in it, or other bytes."""
    data = encoded(1.0, EVENTS)
    if rng.random() < 0.6:
        with suppress(TypeError, ValueError, OverflowError, UnicodeEncodeError):  # what msgpack cannot say
            data = msgspec.msgpack.encode(mutated(rng, msgspec.msgpack.decode(data)))
    return mutated_bytes(rng, data) if rng.random() < 0.4 else data


def is_of_another_kind(event: object) -> bool:
    """Whether an event says something else of a group of blocks than the right ones do."""
    return isinstance(event, BlockStored) and KINDS.get(event.group_idx or 0) not in (None, event.kv_cache_spec_kind)


@contextmanager
def batches(folder: Path) -> Iterator[Case]:
    """Refused, or taken within bounds; then a right batch is taken."""

    def case(rng: Random) -> None:
        blocks, other = Blocks(4, MOST), False
        for _ in range(rng.randint(1, 8)):
            with suppress(MalformedError):
                events = events_of(damaged(rng))
                other |= any(is_of_another_kind(each) for each in events)
                blocks.take(events)
        if len(blocks) > MOST:
            raise WrongResultError(f"{len(blocks)} blocks of at most {MOST}")
        blocks.take(events_of(encoded(2.0, [Cleared(), LAST, LAST._replace(state=True)])))
        if not other and blocks.hit(PROMPT) != 4:
            raise WrongResultError("a right batch was not taken")
        source_of(mutated(rng, PLACE))

    yield case


@contextmanager
def messages(folder: Path) -> Iterator[Case]:
    """Damaged questions to a server, which goes on; damaged frames to a router, which has all a moment later."""
    with closing(Publisher(f"tcp://{LOOPBACK}:0")) as publisher, zmq.Context() as context:
        publisher.tell(LAST)
        publisher.tell(LAST._replace(state=True))
        place = publisher.record(4)

        def case(rng: Random) -> None:
            with _asking(context, place) as asking:
                for _ in range(rng.randint(0, 3)):
                    frames = [b"", bytes(8), *[rng.randbytes(rng.choice((0, 1, 8, 100)))] * 2][: rng.randint(1, 4)]
                    asking.send_multipart([mutated_bytes(rng, each) if rng.random() < 0.5 else each for each in frames])
            with _asking(context, place) as asking:
                asking.send_multipart((b"", bytes(8)))
                if not asking.poll(5000) or asking.recv_multipart()[1] == END:
                    raise WrongResultError("a right question got no answer")
            asyncio.run(_heard(rng, context, place))

        yield case


def _asking(context: zmq.Context[zmq.Socket[bytes]], place: dict[str, Any]) -> zmq.Socket[bytes]:
    """A socket for questions about what was missed."""
    asking = context.socket(zmq.DEALER)
    asking.setsockopt(zmq.LINGER, 0)
    asking.connect(f"tcp://{LOOPBACK}:{place['replay_port']}")
    return asking


async def _heard(rng: Random, context: zmq.Context[zmq.Socket[bytes]], place: dict[str, Any]) -> None:
    """Has a router hear wrong frames behind the right answer."""
    heard = KVEventSubscriber(LOOPBACK, pause=0.01)
    with context.socket(zmq.XPUB) as loud:
        loud.setsockopt(zmq.LINGER, 0)
        place = place | {"port": loud.bind_to_random_port(f"tcp://{LOOPBACK}"), "topic": ""}
        heard.told({"kv_events": place})
        try:
            while not loud.poll(0) or not heard.live:
                await asyncio.sleep(0.005)
            for number in range(heard.last + 1, heard.last + 1 + rng.randint(1, 4)):
                frames = [b"", number.to_bytes(8, "big"), damaged(rng)]
                if rng.random() < 0.3:
                    frames = [mutated_bytes(rng, each) for each in frames] * rng.randint(0, 2) or [b""]
                loud.send_multipart(frames)
            await asyncio.sleep(0.03)
            if asyncio.all_tasks() == {asyncio.current_task()}:
                raise WrongResultError("a router that follows events no more")
            heard.told({"kv_events": place | {"instance": "again"}})
            while not heard.live:
                await asyncio.sleep(0.005)
            if heard.hit(PROMPT) != 4:
                raise WrongResultError(f"a router that was told {heard.hit(PROMPT)} tokens: {heard.counts}")
        finally:
            heard.end()
            await asyncio.sleep(0.01)  # in which it closes its sockets
