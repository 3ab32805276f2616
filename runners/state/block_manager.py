"""Slots, pages and snapshots of the state pools, and their users. Slot 0 and page 0 are never assigned.

A page may have many users: sequences with a common beginning, and the prefix cache. A shared page is only read. It is
free once it has no user.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ling3export.artifacts.schema import Target
from ling3export.foundation.errors import ArtifactError


@dataclass(eq=False)
class BlockTable:
    """Memory of one sequence: a state slot, and the pages of its positions in order.

    Attributes:
        slot: 1 … slots.
        home: The device of its first page where pages are striped; else 0.
        pages: Page numbers; page ``p // page_size`` holds position p.
    """

    slot: int
    home: int = 0
    pages: list[int] = field(default_factory=list)


class BlockManager:
    """Hands out slots and pages.

    Where every device holds every page, any page serves any sequence. Where pages are striped, page n lies on device
    (n - 1) mod ``stripes``; the programs take any page in any place. A sequence then has a home: its page j lies on
    device (home + j) mod ``stripes``, so that one long sequence and many short ones burden all alike. It gets the home
    that the fewest sequences have; among equals the one with most free pages, then the first.

    Args:
        slots: How many sequences may hold state at once.
        pages: Usable pages, on all devices together.
        max_pages: How many pages one sequence may have; all of them by default.
        stripes: Over how many devices pages are striped; 1 where every device holds every page.
        snapshots: Slots after those of sequences that keep copies of their states.

    Attributes:
        page_table: int32 ``[slots + 1, max_pages]``: the pages that a slot's sequence holds, in order, then zeros.

    Raises:
        ArtifactError: Pages that cannot be shared out evenly.
    """

    def __init__(
        self, slots: int, pages: int, page_size: int, max_pages: int | None = None, stripes: int = 1, snapshots: int = 0
    ) -> None:
        if pages % stripes:
            raise ArtifactError(
                f"state pages: expected a multiple of {stripes} (striped over as many devices), found {pages}, "
                "in the manifest"
            )
        self.page_size = page_size
        self.page_table = np.zeros((slots + 1, max_pages or pages), np.int32)
        self._pages, self._stripes, self._snapshots = pages, stripes, snapshots
        self.reset()

    def reset(self) -> None:
        """Frees every slot and page."""
        pages, stripes = self._pages, self._stripes
        self.page_table[:] = 0
        self._slots = list(range(len(self.page_table) - 1, 0, -1))  # a stack: the lowest number is on top
        self._held: set[int] = set()  # slots
        self._living: Counter[int] = Counter()  # sequences by home
        self._holders = [0] * (pages + 1)  # how many hold each page
        self._spare = list(range(len(self.page_table) - 1 + self._snapshots, len(self.page_table) - 1, -1))
        self._pools = [list(range(pages - stripes + 1 + d, 0, -stripes)) for d in range(stripes)]  # free pages

    @classmethod
    def of(cls, target: Target) -> "BlockManager":
        state = target.state
        stripes = target.tp if state.placement == "striped" else 1
        return cls(state.slots, state.pages, state.page_size, state.max_pages, stripes, state.snapshots or 0)

    @property
    def free_slots(self) -> int:
        return len(self._slots)

    @property
    def free_pages(self) -> int:
        return sum(len(pool) for pool in self._pools)

    @property
    def free_snapshots(self) -> int:
        return len(self._spare)

    def admit(self, tokens: int, shared: Sequence[int] = (), home: int | None = None) -> BlockTable | None:
        """A slot, and pages for ``tokens`` positions; None, and nothing taken, if they are not all free.

        Args:
            shared: Pages of the first positions that others hold already, as many as ``tokens`` need or fewer.
            home: The home that the sequence must have; by default that of ``shared``, or the one that suits best.
        """
        if not self._slots:
            return None
        if shared:
            home = self._place(shared[0])
        order = sorted(range(len(self._pools)), key=lambda home: (self._living[home], -len(self._pools[home]), home))
        for place in order if home is None else [home]:
            table = BlockTable(self._slots[-1], place, list(shared))
            if self.grow(table, tokens):
                self.incref(shared)
                self.page_table[table.slot, : len(shared)] = shared
                self._held.add(self._slots.pop())
                self._living[place] += 1
                return table
        return None

    def incref(self, pages: Sequence[int]) -> None:
        """Adds a user to each of ``pages``, which have users already."""
        for page in pages:
            self._holders[page] += 1

    def decref(self, pages: Sequence[int]) -> None:
        """Removes a user from each of ``pages``; pages without users become free, the last one of a sequence first."""
        for page in reversed(pages):
            self._holders[page] -= 1
            if not self._holders[page]:
                self._pools[self._place(page)].append(page)

    def is_unshared(self, page: int) -> bool:
        return self._holders[page] == 1

    def take_snapshot(self) -> int | None:
        """A free snapshot's slot number; None if there is none."""
        return self._spare.pop() if self._spare else None

    def free_snapshot(self, slot: int) -> None:
        self._spare.append(slot)

    def grow(self, table: BlockTable, tokens: int) -> bool:
        """Takes what pages are missing for ``tokens`` positions; False, and nothing taken, if they are not all free."""
        held = len(table.pages)
        if tokens <= held * self.page_size:
            return True
        taken: list[tuple[int, list[int]]] = []
        for index in range(held, -(-tokens // self.page_size)):
            pool = self._pool(table, index)
            if not pool:
                for page, back in reversed(taken):
                    back.append(page)
                return False
            taken.append((pool.pop(), pool))
        for page, _ in taken:
            self._holders[page] = 1
        table.pages.extend(page for page, _ in taken)
        self.page_table[table.slot, held : len(table.pages)] = table.pages[held:]
        return True

    def release(self, table: BlockTable) -> None:
        """Takes a slot and its pages back. Raises ValueError: the block table was given back before."""
        if table.slot not in self._held:
            raise ValueError(f"slot {table.slot}: expected a block table that is held, found one given back before")
        self._held.remove(table.slot)
        self._living[table.home] -= 1
        self._slots.append(table.slot)
        self.decref(table.pages)
        table.pages.clear()
        self.page_table[table.slot] = 0

    def could_free_page_for(self, other: BlockTable, table: BlockTable) -> bool:
        """Whether ``other`` holds a page that could be the next one of ``table``."""
        pool = self._pool(table, len(table.pages))
        return any(self._pool(other, index) is pool for index in range(len(other.pages)))

    def _place(self, page: int) -> int:
        """The device whose pool a page belongs to."""
        return (page - 1) % self._stripes

    def _pool(self, table: BlockTable, index: int) -> list[int]:
        """The free pages that may become page ``index`` of a sequence."""
        return self._pools[(table.home + index) % len(self._pools)]
