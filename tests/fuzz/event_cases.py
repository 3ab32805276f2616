"""Damaged events of a server: on their way into a router, and questions at a server that tells them."""

import asyncio
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from random import Random

import msgspec
import zmq

from ling3export.runners.route.blocks import Blocks, MalformedError, Tokens, events_of
from ling3export.runners.route.events import KVEventSubscriber, source_of
from ling3export.runners.serve.kv_events import END, Publisher, encoded
from ling3export.runners.state.prefix_cache import Cleared, Removed, Stored
from tests.fuzz.harness import Case, WrongResultError
from tests.fuzz.mutations import mutated, mutated_bytes

HOST = "127.0.0.1"
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
LAST = [Stored(NAMES[6:7], None, (1, 2, 3, 4), 4, state=state) for state in (False, True)]
PROMPT = Tokens([1, 2, 3, 4, 5], "")


def damaged(rng: Random) -> bytes:
    """A batch with other values in it, or other bytes."""
    data = encoded(1.0, EVENTS)
    if rng.random() < 0.6:
        with suppress(TypeError, ValueError, OverflowError, UnicodeEncodeError):  # what msgpack cannot say
            data = msgspec.msgpack.encode(mutated(rng, msgspec.msgpack.decode(data)))
    return mutated_bytes(rng, data) if rng.random() < 0.4 else data


@contextmanager
def batches(folder: Path) -> Iterator[Case]:
    """Refused, or taken within bounds; then a right batch is taken."""

    def case(rng: Random) -> None:
        blocks = Blocks(4, MOST)
        for _ in range(rng.randint(1, 8)):
            with suppress(MalformedError):
                blocks.take(events_of(damaged(rng)))
        if len(blocks) > MOST:
            raise WrongResultError(f"{len(blocks)} blocks of at most {MOST}")
        blocks.take(events_of(encoded(2.0, [Cleared(), *LAST])))
        if blocks.hit(PROMPT) != 4:
            raise WrongResultError("a right batch was not taken")
        source_of(
            mutated(
                rng,
                {
                    "kv_events": {
                        "port": 1,
                        "replay_port": 2,
                        "topic": "t",
                        "block_size": 4,
                        "instance": "i",
                        "sequence": 3,
                    }
                },
            )
        )

    yield case


@contextmanager
def messages(folder: Path) -> Iterator[Case]:
    """Damaged questions to a server, which goes on; damaged frames to a router, which has all a moment later."""
    with closing(Publisher(f"tcp://{HOST}:0")) as publisher, zmq.Context() as context:
        for event in LAST:
            publisher.tell(event)

        def case(rng: Random) -> None:
            _question(rng, context, publisher)
            asyncio.run(_heard(rng, context, publisher))

        yield case


def _question(rng: Random, context: zmq.Context, publisher: Publisher) -> None:
    """Asks wrongly, then rightly."""
    with context.socket(zmq.DEALER) as asking:
        asking.setsockopt(zmq.LINGER, 0)
        asking.connect(f"tcp://{HOST}:{publisher.record(4)['replay_port']}")
        for _ in range(rng.randint(0, 3)):
            frames = [b"", bytes(8)][: rng.randint(1, 2)] + [rng.randbytes(rng.choice((0, 1, 8, 100)))] * rng.randint(
                0, 2
            )
            asking.send_multipart([mutated_bytes(rng, each) if rng.random() < 0.5 else each for each in frames])
    with context.socket(zmq.DEALER) as asking:
        asking.setsockopt(zmq.LINGER, 0)
        asking.connect(f"tcp://{HOST}:{publisher.record(4)['replay_port']}")
        asking.send_multipart((b"", bytes(8)))
        found = []
        while asking.poll(5000) and (frames := asking.recv_multipart())[1] != END:
            found.append(frames)
        if not found:
            raise WrongResultError("a right question got no answer")


async def _heard(rng: Random, context: zmq.Context, publisher: Publisher) -> None:
    """Has a router hear wrong frames between right ones."""
    feed = KVEventSubscriber(HOST, pause=0.01)
    with context.socket(zmq.XPUB) as loud:
        loud.setsockopt(zmq.LINGER, 0)
        place = publisher.record(4) | {"port": loud.bind_to_random_port(f"tcp://{HOST}"), "topic": ""}
        feed.told({"kv_events": place})
        try:
            while not loud.poll(0) or not feed.live:
                await asyncio.sleep(0.005)
            for number in range(feed.last + 1, feed.last + 1 + rng.randint(1, 4)):
                frames = [b"", number.to_bytes(8, "big"), damaged(rng)]
                if rng.random() < 0.3:
                    frames = [mutated_bytes(rng, each) for each in frames] * rng.randint(0, 2) or [b""]
                loud.send_multipart(frames)
            await asyncio.sleep(0.03)
            feed.told({"kv_events": place | {"instance": "again"}})
            while not feed.live:
                await asyncio.sleep(0.005)
            if feed.hit(PROMPT) != 4:
                raise WrongResultError(f"a router that was told {feed.hit(PROMPT)} tokens: {feed.counts}")
        finally:
            feed.end()
            await asyncio.sleep(0.01)
