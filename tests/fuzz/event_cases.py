"""Damaged events of a server, on their way into a router."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random

import msgspec

from ling3export.runners.route.blocks import Blocks, BlockStored, MalformedError, Tokens, events_of
from ling3export.runners.route.events import source_of
from ling3export.runners.serve.kv_events import encoded
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
