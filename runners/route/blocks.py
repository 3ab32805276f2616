"""The blocks that a server has, as its events tell them, and how much of a prompt is among them.

A block is known by the digest of all tokens up to its end and of the salt before them, which any router can make of a
prompt; the names that a server gives its blocks only lead from one event to the next. What comes here comes from
outside: events of wrong form are refused, and there is a bound for everything that is kept.
"""

import hashlib
from array import array
from collections.abc import Sequence

import msgspec

from ling3export.runners.serve.kv_events import KINDS, AllBlocksCleared, BlockRemoved, BlockStored

MOST = 1 << 18  # blocks of a server
LATENTS, STATES = range(len(KINDS))  # the groups of what is known of a block

BlockEvent = BlockStored | BlockRemoved | AllBlocksCleared
_BATCH = msgspec.msgpack.Decoder(tuple[float, list[BlockStored | BlockRemoved | AllBlocksCleared], int])


class MalformedError(ValueError):
    """A message does not have the form of events."""


def events_of(data: bytes) -> list[BlockEvent]:
    """The events of a batch.

    Raises:
        MalformedError: It is no batch, or has other events.
    """
    try:
        return _BATCH.decode(data)[1]
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise MalformedError(f"events: expected a batch, found another message: {type(error).__name__}") from None


class Tokens:
    """A prompt's token ids, and the digests of its blocks, made once for each size.

    Args:
        ids: The tokens.
        salt: The request's; empty for none.

    Attributes:
        length: How many tokens there are.

    Raises:
        ValueError: A token is none.
    """

    def __init__(self, ids: Sequence[int], salt: str) -> None:
        self._ids, self.length, self._start = _packed(ids), len(ids), _start(salt)
        self._chains: dict[int, list[bytes]] = {}

    def chain(self, block: int) -> list[bytes]:
        """The digest of each whole block that a prompt can begin behind: its last token has to be computed."""
        if block not in self._chains:
            before, found, step = self._start, [], 4 * block
            for at in range(0, (self.length - 1) // block * step, step):
                before = _behind(before, self._ids[at : at + step])
                found.append(before)
            self._chains[block] = found
        return self._chains[block]


class Blocks:
    """The blocks and states of one server.

    Args:
        block: Tokens a block: another size is refused.
        most: Blocks that are kept; those that come when there are so many are not.
    """

    def __init__(self, block: int, most: int = MOST) -> None:
        self.block, self._most = block, most
        self._digests: dict[int, bytes] = {}  # by name, of blocks whose latents or whose state are known
        self._known: tuple[set[bytes], set[bytes]] = set(), set()  # digests, by group

    def __len__(self) -> int:
        return len(self._known[LATENTS])

    def take(self, events: Sequence[BlockEvent]) -> None:
        """Takes a batch.

        Raises:
            MalformedError: An event contradicts itself; what came before it is taken.
        """
        for event in events:
            if isinstance(event, BlockStored):
                self._store(event)
            elif isinstance(event, BlockRemoved):
                for name in event.block_hashes:
                    self._remove(name, _group(event))
            else:
                for each in (self._digests, *self._known):
                    each.clear()

    def hit(self, prompt: Tokens) -> int:
        """How many tokens of a prompt need not be computed."""
        hit = 0
        for at, digest in enumerate(prompt.chain(self.block), 1):
            if digest not in self._known[LATENTS]:
                break
            if digest in self._known[STATES]:
                hit = at
        return hit * self.block

    def _store(self, event: BlockStored) -> None:
        count, size, group = len(event.block_hashes), event.block_size, _group(event)
        if size != self.block or len(event.token_ids) != count * size:
            raise MalformedError(
                f"events: expected {self.block} tokens a block, found {len(event.token_ids)} of "
                f"{count} blocks of {size}"
            )
        ids, salt = _packed(event.token_ids), next(iter(event.extra_keys or ()), None)
        if event.parent_block_hash is None:
            before = _start(salt[0] if salt else "")
        elif (known := self._digests.get(event.parent_block_hash)) is not None:
            before = known
        else:
            return  # behind a block that was not kept: no prompt leads to it
        for at, name in enumerate(event.block_hashes):
            before = _behind(before, ids[4 * at * size : 4 * (at + 1) * size])
            if self._digests.get(name, before) != before:  # two texts of one name: the older one is forgotten
                self._remove(name, LATENTS)
                self._remove(name, STATES)
            if name not in self._digests and len(self._digests) >= self._most:
                return
            self._digests[name] = before
            self._known[group].add(before)

    def _remove(self, name: int, group: int) -> None:
        if (digest := self._digests.get(name)) is not None:
            self._known[group].discard(digest)
            if not any(digest in known for known in self._known):
                del self._digests[name]


def _group(event: BlockStored | BlockRemoved) -> int:
    if event.group_idx not in (LATENTS, STATES):
        raise MalformedError(f"events: expected one of {len(KINDS)} groups, found {event.group_idx}")
    return event.group_idx


def _packed(ids: Sequence[int]) -> bytes:
    try:
        return array("i", ids).tobytes()
    except (OverflowError, TypeError) as error:
        raise MalformedError("events: expected token ids of 31 bits, found others") from error


def _start(salt: str) -> bytes:
    return hashlib.sha256(salt.encode("utf-8", "replace")).digest()


def _behind(before: bytes, tokens: bytes) -> bytes:
    return hashlib.sha256(before + tokens).digest()[:16]
