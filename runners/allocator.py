"""Slots and pages of the state pools: who holds which. Slot 0 and page 0 are dummies and are never handed out."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ling3export.errors import ArtifactError

PLACEMENTS = ("replicated",)


@dataclass(eq=False)
class Lease:
    """What one sequence holds: a slot, and the pages of its positions in order.

    Attributes:
        slot: 1 … slots.
        home: The device group that its pages live on: always 0 in a replicated pool.
        pages: Page numbers; page ``p // page_size`` holds position p.
    """

    slot: int
    home: int = 0
    pages: list[int] = field(default_factory=list)


class Allocator:
    """Hands out slots and pages by the manifest's placement.

    In a ``replicated`` latent pool every device holds every page, so any page serves any sequence and any row of a
    batch. The other placements of the step contract restrict both; they differ in ``_pool`` and ``rows`` alone.

    Args:
        slots: Sequences at once.
        pages: Usable pages.
        page_size: Tokens a page.
        placement: The manifest's.

    Raises:
        ArtifactError: A placement that this runner does not know.
    """

    def __init__(self, slots: int, pages: int, page_size: int, placement: str = "replicated") -> None:
        if placement not in PLACEMENTS:
            raise ArtifactError(
                f"state placement: expected {' or '.join(PLACEMENTS)}, found {placement}, in the manifest",
                "run it with a newer ling3export",
            )
        self.page_size = page_size
        self._slots = list(range(slots, 0, -1))  # a stack: the lowest number is on top
        self._pools = [list(range(pages, 0, -1))]
        self._held: set[int] = set()  # slots

    @classmethod
    def of(cls, state: dict[str, Any]) -> "Allocator":
        """The allocator of a manifest's state record."""
        return cls(state["slots"], state["pages"], state["page_size"], state["placement"])

    @property
    def free_slots(self) -> int:
        """Slots that nobody holds."""
        return len(self._slots)

    @property
    def free_pages(self) -> int:
        """Pages that nobody holds."""
        return sum(len(pool) for pool in self._pools)

    def admit(self, tokens: int) -> Lease | None:
        """A slot, and pages for ``tokens`` positions; None, and nothing taken, if they are not all free."""
        if not self._slots:
            return None
        lease = Lease(self._slots[-1], self._home())
        if not self.grow(lease, tokens):
            return None
        self._slots.pop()
        self._held.add(lease.slot)
        return lease

    def grow(self, lease: Lease, tokens: int) -> bool:
        """Takes what pages are missing for ``tokens`` positions; False, and nothing taken, if they are not all free."""
        taken: list[tuple[int, list[int]]] = []
        for index in range(len(lease.pages), -(-tokens // self.page_size)):
            pool = self._pool(lease.home, index)
            if not pool:
                for page, back in reversed(taken):
                    back.append(page)
                return False
            taken.append((pool.pop(), pool))
        lease.pages.extend(page for page, _ in taken)
        return True

    def release(self, lease: Lease) -> None:
        """Takes a slot and its pages back.

        Raises:
            ValueError: The lease was given back before.
        """
        if lease.slot not in self._held:
            raise ValueError(f"slot {lease.slot}: expected a lease that is held, found one given back before")
        self._held.remove(lease.slot)
        self._slots.append(lease.slot)
        for index in reversed(range(len(lease.pages))):
            self._pool(lease.home, index).append(lease.pages[index])
        lease.pages.clear()

    def rows(self, leases: Sequence[Lease], padding: int) -> list[int]:
        """The row of each lease in a decode call of ``padding`` rows."""
        return list(range(len(leases)))

    def _home(self) -> int:
        return 0

    def _pool(self, home: int, index: int) -> list[int]:
        """The free pages that may become page ``index`` of a sequence at ``home``."""
        return self._pools[0]
