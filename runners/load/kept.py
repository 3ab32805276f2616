"""One sequence's state in host memory: what ``fetch`` gave, on each host the shards of its own devices.

No host needs what another has: the state goes back to the devices that it came from.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import Sharding

Place = tuple[tuple[int, int], ...]  # first and last index plus one, of each axis


@dataclass(frozen=True)
class Shards:
    """The part of an array that this host's devices hold, each shard once.

    Attributes:
        shape: Of the whole array.
        parts: By place.
    """

    shape: tuple[int, ...]
    parts: dict[Place, np.ndarray]

    @classmethod
    def of(cls, array: jax.Array) -> "Shards":
        """Waits for an array, and fetches it."""
        shards = {_place(shard.index, array.shape): shard.data for shard in array.addressable_shards}
        return cls(array.shape, {place: np.asarray(data) for place, data in shards.items()})

    def array(self, sharding: Sharding) -> jax.Array:
        """The array on its devices again."""
        return jax.make_array_from_callback(
            self.shape, sharding, lambda index: self.parts[_place(index or (), self.shape)]
        )


@dataclass(frozen=True)
class Kept:
    """A sequence's state, as as many calls of ``fetch`` gave it: by the name of the pool.

    The first call has the slot's state, the others that of slot 0, which counts for nothing.
    """

    calls: tuple[dict[str, Shards], ...]

    def replaced(self, made: Callable[[tuple[int, ...]], np.ndarray]) -> "Kept":
        """A state of the same form with numbers that ``made`` gives for a shape; equal parts stay equal."""

        def again(each: Shards) -> Shards:
            return Shards(each.shape, {at: made(part.shape).astype(part.dtype) for at, part in each.parts.items()})

        return Kept(tuple({name: again(each) for name, each in call.items()} for call in self.calls))

    def compared(self, other: "Kept") -> tuple[int, int]:
        """(numbers, those of them that have other bits in ``other``)."""
        total = wrong = 0
        for call, its in zip(self.calls, other.calls, strict=True):
            for name, shards in call.items():
                for at, part in shards.parts.items():
                    bits = np.dtype(f"u{part.itemsize}")
                    total += part.size
                    wrong += int(np.sum(part.view(bits) != its[name].parts[at].view(bits)))
        return total, wrong


def _place(index: tuple[slice, ...], shape: tuple[int, ...]) -> Place:
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))
