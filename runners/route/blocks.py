"""The blocks that a server has, as its events tell them, and how much of a prompt is among them.

A block is known by the digest of all tokens up to its end and of the salt before them, which any router can make of a
prompt; the names that a server gives its blocks only lead from one event to the next. What comes here comes from
outside: events of wrong form are refused, and there is a bound for everything that is kept.
"""

import hashlib
from array import array
from collections.abc import Sequence
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

MOST = 1 << 18  # blocks and states of a server
KEYS = 1 << 12  # bytes of what a block depends on beside its tokens
RECURRENT = "mamba"
ATTENTION = (None, "full_attention", "mla_attention", "sink_full_attention")
NIL = b"\xc0"

Name = Annotated[int, Meta(ge=0)] | Annotated[bytes, Meta(max_length=64)]


class BlockStored(msgspec.Struct, tag=True):
    """Blocks that a prompt can hit."""

    block_hashes: list[Name]
    parent_block_hash: Name | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[msgspec.Raw] | None = None
    group_idx: Annotated[int, Meta(ge=0, lt=8)] | None = None
    kv_cache_spec_kind: str | None = None


class BlockRemoved(msgspec.Struct, tag=True):
    """Blocks that it cannot hit any more."""

    block_hashes: list[Name]
    medium: str | None = None
    group_idx: Annotated[int, Meta(ge=0, lt=8)] | None = None


class AllBlocksCleared(msgspec.Struct, tag=True):
    """It hits nothing."""


class _StoredInOrder(BlockStored, tag="BlockStored", array_like=True):
    pass


class _RemovedInOrder(BlockRemoved, tag="BlockRemoved", array_like=True):
    pass


class _ClearedInOrder(AllBlocksCleared, tag="AllBlocksCleared", array_like=True):
    pass


class _Batch(msgspec.Struct, array_like=True):
    ts: float
    events: list[msgspec.Raw]


Event = BlockStored | BlockRemoved | AllBlocksCleared
_BATCH = msgspec.msgpack.Decoder(_Batch)
_NAMED = msgspec.msgpack.Decoder(BlockStored | BlockRemoved | AllBlocksCleared)
_IN_ORDER = msgspec.msgpack.Decoder(_StoredInOrder | _RemovedInOrder | _ClearedInOrder)


class MalformedError(ValueError):
    """A message has another form than events have."""


def events_of(data: bytes) -> list[Event]:
    """The events of a batch: maps, as vLLM 0.26 writes them, or arrays, as it did up to 0.23.

    Raises:
        MalformedError: It is no batch, or has other events.
    """
    try:
        return [
            (_IN_ORDER if bytes(raw)[0] >> 4 == 9 or bytes(raw)[0] in (0xDC, 0xDD) else _NAMED).decode(raw)
            for raw in _BATCH.decode(data).events
        ]
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
        self._ids, self.length = _packed(ids), len(ids)
        self._start = _start(msgspec.msgpack.encode([salt.encode("utf-8", "replace").decode()]) if salt else NIL)
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


class _Known(NamedTuple):
    digest: bytes
    groups: int  # a bit for each that has it


class Blocks:
    """What one server has.

    Args:
        block: Tokens a block: another size is refused.
        most: Blocks and states that are kept; those that come when there are so many are not.
    """

    def __init__(self, block: int, most: int = MOST) -> None:
        self.block, self._most = block, most
        self._known: dict[int | bytes, _Known] = {}
        self._blocks: set[bytes] = set()
        self._states: set[bytes] = set()
        self._recurrent = 0  # a bit for each group of states
        self._other = 0  # and for each that says nothing of prompts

    def __len__(self) -> int:
        return len(self._blocks)

    def take(self, events: Sequence[Event]) -> None:
        """Takes a batch.

        Raises:
            MalformedError: An event contradicts itself; what came before it is taken.
        """
        for event in events:
            if isinstance(event, BlockStored):
                self._store(event)
            elif isinstance(event, BlockRemoved):
                self._remove(event.block_hashes, 1 << (event.group_idx or 0))
            else:
                self._known.clear()
                self._blocks.clear()
                self._states.clear()

    def hit(self, prompt: Tokens) -> int:
        """How many tokens of a prompt need not be computed."""
        hit = 0
        for at, digest in enumerate(prompt.chain(self.block), 1):
            if digest not in self._blocks:
                break
            if not self._recurrent or digest in self._states:
                hit = at
        return hit * self.block

    def _store(self, event: BlockStored) -> None:
        group = 1 << (event.group_idx or 0)
        if event.kv_cache_spec_kind == RECURRENT:
            self._recurrent |= group
        elif event.kv_cache_spec_kind not in ATTENTION:
            self._other |= group
        count, size = len(event.block_hashes), event.block_size
        keys = [NIL] * count if event.extra_keys is None else [bytes(each) for each in event.extra_keys]
        if size != self.block or len(event.token_ids) != count * size or len(keys) != count:
            raise MalformedError(
                f"events: expected {self.block} tokens a block, found {len(event.token_ids)} of "
                f"{count} blocks of {size}"
            )
        if any(len(each) > KEYS for each in keys):
            raise MalformedError("events: expected short keys of blocks, found longer ones")
        if self._other & group:
            return
        ids = _packed(event.token_ids)
        if event.parent_block_hash is None:
            before = _start(keys[0]) if keys else b""
        elif (known := self._known.get(event.parent_block_hash)) is not None:
            before = known.digest
        else:
            return  # behind a block that was not kept: no prompt leads to it
        for at, (name, key) in enumerate(zip(event.block_hashes, keys, strict=True)):
            later = key if at or event.parent_block_hash is not None else NIL
            before = _behind(before, ids[4 * at * size : 4 * (at + 1) * size], later)
            if not self._keep(name, before, group):
                return

    def _keep(self, name: int | bytes, digest: bytes, group: int) -> bool:
        known = self._known.get(name)
        if known is None and len(self._known) >= self._most:
            return False
        if known is not None and known.digest != digest:  # two texts of one name: the older one is forgotten
            self._remove([name], ~0)
            known = None
        self._known[name] = _Known(digest, group | (known.groups if known else 0))
        (self._states if group & self._recurrent else self._blocks).add(digest)
        return True

    def _remove(self, names: Sequence[int | bytes], group: int) -> None:
        for name in names:
            if (known := self._known.get(name)) is None:
                continue
            left = known.groups & ~group
            if not left & self._recurrent:
                self._states.discard(known.digest)
            if not left & ~self._recurrent:
                self._blocks.discard(known.digest)
            if left:
                self._known[name] = known._replace(groups=left)
            else:
                del self._known[name]


def _packed(ids: Sequence[int]) -> bytes:
    try:
        return array("i", ids).tobytes()
    except (OverflowError, TypeError) as error:
        raise MalformedError("events: expected token ids of 31 bits, found others") from error


def _start(keys: bytes) -> bytes:
    return hashlib.sha256(b"" if keys == NIL else keys).digest()


def _behind(before: bytes, tokens: bytes, keys: bytes = NIL) -> bytes:
    return hashlib.sha256(before + tokens + (b"" if keys == NIL else keys)).digest()[:16]
