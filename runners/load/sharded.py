"""One sequence's state in host memory as ``offload`` gave it: on each host the shards of its own devices.

A state that goes back to the devices that it came from needs nothing of other hosts. One that leaves the engine is
gathered on host 0, and then is a ``SequenceState`` (:mod:`ling3export.runners.state.sequence_state`).
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ling3export.foundation.dtypes import BY_NAME

if TYPE_CHECKING:  # receipts import this before the loader has said what jax needs in the environment
    import jax
    from jax.sharding import Sharding

Place = tuple[tuple[int, int], ...]  # first and last index plus one, of each axis
PAGED = "mla_latent"  # the array of pages; the others are a slot's


@dataclass(frozen=True)
class Shards:
    """The part of an array that this host's devices hold, each shard once.

    Attributes:
        shape: Shape of the whole array.
        parts: By place.
    """

    shape: tuple[int, ...]
    parts: dict[Place, np.ndarray]

    @classmethod
    def of(cls, array: "jax.Array") -> "Shards":
        shards = {_place(shard.index, array.shape): shard.data for shard in array.addressable_shards}
        return cls(array.shape, {place: np.asarray(data) for place, data in shards.items()})

    def array(self, sharding: "Sharding") -> "jax.Array":
        """The array on its devices again."""
        import jax

        def part(index: tuple[slice, ...] | None) -> np.ndarray:
            shard = self.parts.get(_place(index or (), self.shape))
            return self.whole()[index or ()] if shard is None else shard

        return jax.make_array_from_callback(self.shape, sharding, part)

    def whole(self) -> np.ndarray:
        """The array, where this host has every part of it."""
        first = next(iter(self.parts.values()))
        if first.shape == self.shape:
            return first
        array = np.empty(self.shape, first.dtype)
        for place, part in self.parts.items():
            array[tuple(slice(*ends) for ends in place)] = part
        return array


@dataclass(frozen=True)
class ShardedState:
    """A sequence's state, with one entry for each call of the program that offloads it.

    The first call has the slot's state, the others that of slot 0, which counts for nothing.

    Attributes:
        calls: The outputs of each call, by the name of the pool.
        places: For each call, the sequence's page at each place of the call; -1 for padding.
    """

    calls: tuple[dict[str, Shards], ...]
    places: tuple[np.ndarray, ...] = ()

    def arrays(self) -> dict[str, np.ndarray]:
        """The whole state by the name of the pool, its pages in the order of the sequence, where this host has it."""
        arrays = {name: shards.whole() for name, shards in self.calls[0].items()}
        first = arrays[PAGED]
        count = 1 + max(int(places.max()) for places in self.places)
        if len(self.calls) == 1 and np.array_equal(self.places[0][:count], np.arange(count)):
            return {**arrays, PAGED: first[:, :count]}
        arrays[PAGED] = np.empty((first.shape[0], count, *first.shape[2:]), first.dtype)
        for call, places in zip(self.calls, self.places, strict=True):
            arrays[PAGED][:, places[places >= 0]] = call[PAGED].whole()[:, places >= 0]
        return arrays

    def split(self) -> bytes:
        """The parts of this host that other hosts may not have, as a message (``arrays``)."""
        parts = [
            ((number, name, place), part)
            for number, call in enumerate(self.calls)
            for name, shards in call.items()
            for place, part in shards.parts.items()
            if part.shape != shards.shape
        ]
        return packed([which for which, _ in parts], [part for _, part in parts])

    def joined(self, messages: Iterable[bytes]) -> "ShardedState":
        """The state with the parts of other hosts; each ``split`` its own."""
        calls = tuple(
            {name: Shards(shards.shape, {**shards.parts}) for name, shards in call.items()} for call in self.calls
        )
        for message in messages:
            for (number, name, place), part in zip(*unpacked(message), strict=True):
                calls[number][name].parts[tuple((low, high) for low, high in place)] = part
        return ShardedState(calls, self.places)

    def replaced(self, made: Callable[[tuple[int, ...]], np.ndarray]) -> "ShardedState":
        """A state of the same form with numbers that ``made`` gives for a shape; equal parts stay equal."""

        def again(shards: Shards) -> Shards:
            return Shards(shards.shape, {at: made(part.shape).astype(part.dtype) for at, part in shards.parts.items()})

        return ShardedState(
            tuple({name: again(shards) for name, shards in call.items()} for call in self.calls), self.places
        )

    def compared(self, other: "ShardedState") -> tuple[int, int]:
        """(numbers that count, those of them that have other bits in ``other``); pages that are padding do not."""
        total = wrong = 0
        for number, (call, its) in enumerate(zip(self.calls, other.calls, strict=True)):
            for name, shards in call.items():
                if number and name != PAGED:
                    continue  # of slot 0, which every later call writes
                for at, part in shards.parts.items():
                    bits, theirs = np.dtype(f"u{part.itemsize}"), its[name].parts[at]
                    if name == PAGED and self.places:
                        used = self.places[number][slice(*at[1])] >= 0
                        part, theirs = part[:, used], theirs[:, used]
                    total += part.size
                    wrong += int(np.sum(part.view(bits) != theirs.view(bits)))
        return total, wrong


def call_of(arrays: Mapping[str, np.ndarray], places: np.ndarray) -> dict[str, Shards]:
    """The inputs of one call that onloads a whole state: the pages that stand at ``places``; -1 is any, for padding."""
    arrays = {**arrays, PAGED: arrays[PAGED][:, places]}
    return {name: Shards(array.shape, {tuple((0, n) for n in array.shape): array}) for name, array in arrays.items()}


def _place(index: tuple[slice, ...], shape: tuple[int, ...]) -> Place:
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


def whole_array(array: "jax.Array", parts: Callable[[bytes], list[bytes]]) -> np.ndarray:
    """Waits for an array; if it is split over hosts, host 0 gets it whole and the others a part.

    Args:
        array: The same on every host; every host calls this.
        parts: Collects the bytes of all hosts on host 0 (``Channel.parts``).
    """
    import jax

    if array.is_fully_addressable or array.is_fully_replicated:
        return np.asarray(array)
    whole = np.zeros(array.shape, array.dtype)
    held: dict[int, list[tuple[slice, ...]]] = {}  # the parts that each host's devices hold, in the mesh's order
    device: Any  # jax names no type for it
    for device, index in array.sharding.devices_indices_map(array.shape).items():
        assert index is not None
        held.setdefault(device.process_index, []).append(index)
    own = {shard.index: np.asarray(shard.data) for shard in array.addressable_shards}
    shards = [own[index] for index in held[jax.process_index()]]
    for index, shard in zip(held[jax.process_index()], shards, strict=True):
        whole[index] = shard
    for host, part in enumerate(parts(b"".join(shard.tobytes() for shard in shards))):
        at = 0
        for index in held[host]:
            target = whole[index]
            target[...] = np.frombuffer(part, array.dtype, target.size, at).reshape(target.shape)
            at += target.nbytes
    return whole


def packed(record: object, arrays: Iterable[np.ndarray]) -> bytes:
    """Arrays in a message between hosts: a JSON value with the arrays' forms, a zero byte, and their bytes.

    Args:
        record: Any JSON value.
        arrays: Sizes of the dtypes of a state.
    """
    whole = [np.ascontiguousarray(array) for array in arrays]
    head = json.dumps([record, [[array.dtype.name, array.shape] for array in whole]]).encode()
    return b"".join([head, b"\0", *(array.reshape(-1).view(np.uint8).data for array in whole)])


def unpacked(message: bytes) -> tuple[Any, list[np.ndarray]]:
    """The arguments of ``packed``; the arrays lie in the message."""
    at = message.index(b"\0") + 1
    record, forms = json.loads(message[: at - 1])
    arrays = []
    for name, shape in forms:
        dtype = BY_NAME[name].numpy
        size = dtype.itemsize * math.prod(shape)
        arrays.append(np.frombuffer(message, np.uint8, size, at).view(dtype).reshape(shape))
        at += size
    return record, arrays
