"""What travels: objects of one sequence's state, their names and their header of 128 bytes.

An object is one block of latents, of all layers, or one snapshot of the recurrent and conv state, of all layers and a
range of heads. Its payload goes layer by layer, and within a layer array by array, little-endian, in canonical order:
heads from 0 on, whatever the parallelism.

Header, little-endian: magic ``L3XS``, version u16, kind u8, state u8, payload bytes u64, key (16 bytes), state_abi (32
bytes), crc32 u32, bitmap of the layers that are there u64, created u64 (ns since 1970), the writer's process id u32 and
its start u64 (clock ticks since boot), 32 bytes zero. The crc32 is of the header without state, bitmap and crc32, and
then of the payload.
"""

import hashlib
import json
import math
import os
import struct
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import NamedTuple

import numpy as np

from ling3export.artifacts.records import sha256_of
from ling3export.foundation.dtypes import BY_NAME
from ling3export.foundation.errors import Ling3Error, RequestError, listed
from ling3export.runners.transfer.plan import Range

HEADER = struct.Struct("<4sHBBQ16s32sIQQIQ32s")
MAGIC, VERSION = b"L3XS", 1
LARGEST = 1 << 30  # bytes of a payload
MOST_LAYERS = 64  # bits of the bitmap
PREFIX = "l3x_"


class StateMismatch(Ling3Error):
    """Two artifacts whose sequences cannot go on from each other's state."""


class Kind(IntEnum):
    """What an object holds."""

    BLOCK = 1
    SNAPSHOT = 2


class State(IntEnum):
    """How far an object is."""

    WRITING = 0
    READY = 1
    DEAD = 2


class Piece(NamedTuple):
    """One array of every layer of a kind of object.

    Attributes:
        name: What it is called, such as ``kda.recurrent``.
        kind: The objects that it is in.
        shape: In one layer, of all heads; of a block, that of one token.
        dtype: Its name.
        axis: The heads' axis of ``shape``; None where there is one head for all ranks.
    """

    name: str
    kind: Kind
    shape: tuple[int, ...]
    dtype: str
    axis: int | None = None


@dataclass(frozen=True)
class Key:
    """What names an object.

    Attributes:
        state_abi: Of the artifact, 64 hexadecimal digits (:func:`state_abi`).
        kind: Block or snapshot.
        prefix: The chained hash of all tokens up to the object's end (:func:`prefix_hashes`).
        heads: The range of heads; (0, 1) of a block.
        tokens: Those of a block; of a snapshot 0.
    """

    state_abi: str
    kind: Kind
    prefix: bytes
    heads: Range
    tokens: int = 0

    @property
    def digest(self) -> bytes:
        """16 bytes: blake2b of ``state_abi ‖ kind ‖ prefix hash ‖ head range``."""
        whole = bytes.fromhex(self.state_abi) + bytes([self.kind]) + self.prefix + struct.pack("<HH", *self.heads)
        return hashlib.blake2b(whole, digest_size=16).digest()

    @property
    def name(self) -> str:
        """``l3x_`` and 32 hexadecimal digits."""
        return PREFIX + self.digest.hex()


@dataclass(frozen=True)
class Layout:
    """What the objects of an artifact hold.

    Attributes:
        pieces: Every array.
        layers: How many layers an object of a kind has.
        heads: Of the recurrent state.
        block: Tokens of a whole block.
    """

    pieces: tuple[Piece, ...]
    layers: Mapping[Kind, int]
    heads: int
    block: int

    def __post_init__(self) -> None:
        if not all(0 < count <= MOST_LAYERS for count in self.layers.values()) or {*self.layers} != {*Kind}:
            raise Ling3Error(f"state layout: expected 1 to {MOST_LAYERS} layers of both kinds, found {self.layers}")

    def of(self, kind: Kind) -> Iterator[Piece]:
        """The pieces of a kind, in the order of the payload."""
        return (piece for piece in self.pieces if piece.kind == kind)

    def shape(self, piece: Piece, heads: Range, tokens: int = 0) -> tuple[int, ...]:
        """The shape of a piece in one layer of an object."""
        if piece.kind == Kind.BLOCK:
            return (tokens, *piece.shape)
        shape = list(piece.shape)
        if piece.axis is not None:
            shape[piece.axis] = heads[1] - heads[0]
        return tuple(shape)

    def nbytes(self, key: Key) -> int:
        """Bytes of an object's payload."""
        each = sum(_size(self.shape(piece, key.heads, key.tokens), piece.dtype) for piece in self.of(key.kind))
        return each * self.layers[key.kind]

    def arrays(self, key: Key, payload: np.ndarray) -> dict[str, np.ndarray]:
        """The arrays in a payload [bytes] uint8 by name, [layers, ...], without copying."""
        rows, found, at = payload.reshape(self.layers[key.kind], -1), {}, 0
        for piece in self.of(key.kind):
            shape = self.shape(piece, key.heads, key.tokens)
            size = _size(shape, piece.dtype)
            found[piece.name] = rows[:, at : at + size].view(BY_NAME[piece.dtype].numpy).reshape(-1, *shape)
            at += size
        return found


@dataclass(frozen=True)
class Header:
    """The first 128 bytes of an object; the module says where each field lies.

    Attributes:
        kind: Block or snapshot.
        state: Writing, ready or dead.
        length: Bytes of the payload.
        key: The 16 bytes that its name spells.
        state_abi: 32 bytes.
        crc32: Of header and payload; 0 until it is ready.
        layers: Bit n is set once layer n is there.
        created: ns since 1970.
        pid: The writer's process.
        started: When that began, in clock ticks since boot; another process of the same id began later.
    """

    kind: Kind
    state: State
    length: int
    key: bytes
    state_abi: bytes
    crc32: int = 0
    layers: int = 0
    created: int = 0
    pid: int = 0
    started: int = 0

    @classmethod
    def of(cls, key: Key, length: int) -> "Header":
        """That of an object which this process begins to write now."""
        abi, pid = bytes.fromhex(key.state_abi), os.getpid()
        return cls(key.kind, State.WRITING, length, key.digest, abi, 0, 0, time.time_ns(), pid, start_of(pid) or 0)

    def pack(self) -> bytes:
        """The 128 bytes."""
        return HEADER.pack(
            MAGIC,
            VERSION,
            self.kind,
            self.state,
            self.length,
            self.key,
            self.state_abi,
            self.crc32,
            self.layers,
            self.created,
            self.pid,
            self.started,
            bytes(32),
        )

    @classmethod
    def parse(cls, data: bytes) -> "Header":
        """Reads 128 bytes.

        Raises:
            ValueError: They are no header of this version; the text follows "found".
        """
        if len(data) != HEADER.size:
            raise ValueError(f"{len(data)} bytes")
        magic, version, kind, state, length, key, abi, crc, layers, created, pid, started, rest = HEADER.unpack(data)
        if magic != MAGIC or version != VERSION:
            raise ValueError("other magic bytes" if magic != MAGIC else f"version {version}")
        if kind not in iter(Kind) or state not in iter(State):
            raise ValueError(f"kind {kind} in state {state}")
        if not 0 < length <= LARGEST or any(rest):
            raise ValueError(f"{length:,} bytes of payload" if not any(rest) else "bytes where zeros belong")
        return cls(Kind(kind), State(state), length, key, abi, crc, layers, created, pid, started)

    def crc(self, payload: np.ndarray) -> int:
        """The crc32 that belongs to this header and a payload [bytes] uint8."""
        fixed = replace(self, state=State.READY, crc32=0, layers=0).pack()
        return zlib.crc32(payload, zlib.crc32(fixed))

    def fault(self, key: Key, layout: Layout) -> str | None:
        """Why a ready object with this header is not the one of ``key``: ``other_state`` or ``corrupt``; else None."""
        if self.state_abi != bytes.fromhex(key.state_abi):
            return "other_state"
        whole = (1 << layout.layers[key.kind]) - 1
        same = (self.kind, self.key, self.length, self.layers) == (key.kind, key.digest, layout.nbytes(key), whole)
        return None if same else "corrupt"


def start_of(pid: int) -> int | None:
    """When a process of this machine began, in clock ticks since boot; None where there is none."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[19])
    except OSError:
        return None


def prefix_hashes(state_abi: str, salt: str, tokens: Sequence[int], block: int) -> list[bytes]:
    """The chained hash of every block of ``tokens``, the last one of fewer tokens included.

    ``h(0) = sha256(state_abi ‖ salt)``, ``h(i) = sha256(h(i-1) ‖ tokens of block i as int32)``. Who shares a server and
    gives another salt shares nothing.

    Raises:
        RequestError: The salt is no text, or a token no int32.
    """
    if not isinstance(salt, str):
        raise RequestError(f"cache_salt: expected a text, found {type(salt).__name__}")
    try:
        ids = np.asarray(tokens, np.int64)
        if ids.size and not 0 <= ids.min() <= ids.max() < 1 << 31:
            raise ValueError
    except (ValueError, TypeError, OverflowError) as error:
        raise RequestError("prompt: expected token ids from 0 on, of 31 bits, found others") from error
    return list(chained(chain_start(state_abi, salt), ids, block))


def chain_start(state_abi: str, salt: str) -> bytes:
    """``h(0)`` of :func:`prefix_hashes`: the name before the first block."""
    return hashlib.sha256(state_abi.encode() + salt.encode("utf-8", "surrogatepass")).digest()


def chained(before: bytes, tokens: Sequence[int] | np.ndarray, block: int) -> Iterator[bytes]:
    """``h(i)`` of every block of ``tokens``, the first of which follows the block that is called ``before``."""
    ids = np.asarray(tokens, "<i4")
    for at in range(0, len(ids), block):
        before = hashlib.sha256(before + ids[at : at + block].tobytes()).digest()
        yield before


def state_abi(description: Mapping[str, object]) -> str:
    """The sha256 of what decides whether sequences can go on from each other's state, as canonical JSON.

    Args:
        description: What both sides must share, by name: of a target, what `Manifest.state_of` gives.
    """
    return sha256_of(description)


def check_same_state(mine: Mapping[str, object], theirs: Mapping[str, object]) -> None:
    """Passes where both artifacts may exchange state.

    Raises:
        StateMismatch: They may not; it names the fields that differ.
    """
    if state_abi(mine) == state_abi(theirs):
        return
    ours, others = dict(_flat(mine)), dict(_flat(theirs))
    names = sorted(name for name in {*ours, *others} if ours.get(name) != others.get(name))
    raise StateMismatch(
        f"state of another artifact: expected the same {listed(names)}, found others",
        "both sides must serve the same weights in the same format; paddings, TP and batch may differ",
    )


def _flat(tree: object, name: str = "") -> Iterator[tuple[str, str]]:
    """(dotted name, JSON) of every leaf."""
    if isinstance(tree, Mapping) and tree:
        for key, value in tree.items():
            yield from _flat(value, f"{name}.{key}" if name else str(key))
    else:
        yield name, json.dumps(tree)


def _size(shape: tuple[int, ...], dtype: str) -> int:
    return BY_NAME[dtype].nbytes * math.prod(shape)
