"""Prefill calls of a target that is cut at its groups of layers: the backend of the scheduler that makes them.

State can leave while later groups compute: behind each group, what ``offload_group`` gives of the sequences that leave
is handed on, still being computed, before the next group's call is dispatched.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ling3export.artifacts.schema import Manifest, Target
from ling3export.runners.load.sharded import PAGED, ShardedState

if TYPE_CHECKING:
    import jax

    from ling3export.runners.load.model_runner import ModelRunner

Layers = Mapping[str, range]  # a group's, by the name of the pool
Hand = Callable[
    [list[Callable[[], ShardedState]] | None], None
]  # takes a group's states, each waited for; None ends a step


class PendingSave(NamedTuple):
    """A sequence whose state leaves in the call that ends its prompt.

    Attributes:
        number: Its arrival's.
        request: What was asked.
        slot: Of its recurrent and conv state.
        pages: Of its latents, in order.
    """

    number: int
    request: Any
    slot: int
    pages: Sequence[int]


def groups_of(manifest: Manifest, target: Target) -> tuple[Layers, ...]:
    """The layers of each group: its last is MLA, the others KDA; an incomplete last group has MLA alone."""
    numbers = {name: value for name, value in manifest.config.items() if isinstance(value, int)}
    size, count = numbers["layer_group_size"], numbers["num_hidden_layers"]
    pools = {array.name: array.shape[0] for array in target.state.arrays if array.name != "last_token"}
    found = []
    for number, first in enumerate(range(0, count, size)):
        whole = first + size <= count
        kda = range(number * (size - 1), number * (size - 1) + (size - 1) * whole)
        mla = range(number, number + 1 if whole else pools[PAGED])
        found.append({name: mla if name == PAGED else kda for name in pools})
    return tuple(found)


def rows_of(layers: range, given: int, total: int) -> slice:
    """Where a group's layers stand among the ``given`` ones that ``offload_group`` gives of a pool of ``total``."""
    first = min(layers.start, total - given)
    return slice(layers.start - first, layers.stop - first)


class SegmentedRunner:
    """A model runner whose prefill calls go group by group: the scheduler's backend, as ``ModelRunner`` is.

    Args:
        runner: The loaded programs.
        manifest: What it was loaded from.
        target: Which of its targets.

    Attributes:
        begin: Told of the sequences that leave in a step; gives what takes their states, group by group. None where
            nothing leaves early.
    """

    def __init__(self, runner: "ModelRunner", manifest: Manifest, target: Target) -> None:
        self._runner, self._target = runner, target
        self._groups = len(groups_of(manifest, target))
        self._saves: list[PendingSave] = []
        self.begin: Callable[[list[PendingSave]], Hand] | None = None

    def __getattr__(self, name: str) -> Any:
        """Whatever is not a prefill call is the model runner's."""
        return getattr(self._runner, name)

    def save_async(self, save: PendingSave) -> bool:
        """Starts to save a sequence's state in the next prefill call; False where nothing is saved early."""
        if self.begin is not None:
            self._saves.append(save)
        return self.begin is not None

    def step(self, phase: str, padding: int, fields: Mapping[str, np.ndarray]) -> "jax.Array":
        """As ``ModelRunner.step``: a prefill call is one for the embedding, one a group, and one for the logits."""
        if phase != "prefill":
            return self._runner.step(phase, padding, fields)
        saves, self._saves = self._saves, []
        hand = self.begin(saves) if saves and self.begin is not None else None
        try:
            hidden = self._call("embed", padding, fields, {})["hidden"]
            for group in range(self._groups):
                at = {**fields, "group": np.array([group], np.int32)}
                hidden = self._call("group", padding, at, {"hidden": hidden})["hidden"]
                if hand is not None:
                    hand([self._runner.slicing(each.slot, each.pages, group) for each in saves])
            return self._call("unembed", padding, fields, {"hidden": hidden})["logits"]
        finally:
            if hand is not None:
                hand(None)

    def _call(
        self, phase: str, padding: int, fields: Mapping[str, np.ndarray], batch: Mapping[str, Any]
    ) -> "dict[str, jax.Array]":
        cell = self._target.cells[f"{phase}@{padding}"]
        return self._runner.call(cell.name, {each.name: fields[each.name] for each in cell.fields}, batch)
