"""Slots and pages of the state pools: who holds which. Slot 0 and page 0 are dummies and are never handed out."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ling3export.errors import ArtifactError

PLACEMENTS = ("replicated", "striped", "by_sequence")


@dataclass(eq=False)
class Lease:
    """What one sequence holds: a slot, and the pages of its positions in order.

    Attributes:
        slot: 1 … slots.
        home: The device of its first page, where the placement is striped, of all of them, where it is by sequence;
            else 0.
        pages: Page numbers; page ``p // page_size`` holds position p.
    """

    slot: int
    home: int = 0
    pages: list[int] = field(default_factory=list)


class Allocator:
    """Hands out slots and pages by the manifest's placement.

    - ``replicated``: every device holds every page, so any page serves any sequence in any row of a batch.
    - ``striped``: page n lies on device (n - 1) mod TP; the programs take any page in any place. A sequence has a home:
      its page j lies on device (home + j) mod TP, so that one long sequence and many short ones burden all alike.
    - ``by_sequence``: device d has pages d·pages/TP + 1 … (d + 1)·pages/TP. A sequence has a home: all its pages are
      there, and in a decode call of B rows it stands in a row r of that device, r·TP // B = home. A device that has no
      row in the largest decode call is nobody's home.

    A sequence gets the home that the fewest have; of equals the one with most free pages, then the first.

    Args:
        slots: Sequences at once.
        pages: Usable pages, on all devices together.
        page_size: Tokens a page.
        placement: The manifest's.
        devices: TP.
        rows: Of the largest decode call; None is one a device or more.

    Attributes:
        page_size: Tokens a page.
        longest: Pages that one sequence can have at most.

    Raises:
        ArtifactError: A placement that this runner does not know, or pages that cannot be shared out evenly.
    """

    def __init__(
        self, slots: int, pages: int, page_size: int, placement: str = "replicated", devices: int = 1,
        rows: int | None = None,
    ) -> None:  # fmt: skip
        if placement not in PLACEMENTS:
            raise ArtifactError(
                f"state placement: expected {' or '.join(PLACEMENTS)}, found {placement}, in the manifest",
                "run it with a newer ling3export",
            )
        if placement != "replicated" and pages % devices:
            raise ArtifactError(
                f"state pages: expected a multiple of {devices} ({placement} over as many devices), found {pages}, "
                "in the manifest"
            )
        self.page_size = page_size
        self._placement = placement
        self._devices = devices
        self._slots = list(range(slots, 0, -1))  # a stack: the lowest number is on top
        self._held: set[int] = set()  # slots
        self._living: Counter[int] = Counter()  # sequences by home
        self._homes = [0]
        each = pages // devices
        self.longest = pages
        if placement == "replicated":
            self._pools = [list(range(pages, 0, -1))]
        elif placement == "striped":
            self._pools = [list(range(pages - devices + 1 + d, 0, -devices)) for d in range(devices)]
            self._homes = list(range(devices))
        else:
            self.longest = each
            self._pools = [list(range((d + 1) * each, d * each, -1)) for d in range(devices)]
            self._homes = sorted({self._device(row, rows or devices) for row in range(rows or devices)})

    @classmethod
    def of(cls, target: Mapping[str, Any]) -> "Allocator":
        """The allocator of a manifest's target."""
        state = target["state"]
        rows = max(cell["padding"] for cell in target["cells"].values() if cell["phase"] == "decode")
        return cls(state["slots"], state["pages"], state["page_size"], state["placement"], target["tp"], rows)

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
        for home in sorted(self._homes, key=lambda home: (self._living[home], -len(self._pools[home]), home)):
            lease = Lease(self._slots[-1], home)
            if self.grow(lease, tokens):
                self._held.add(self._slots.pop())
                self._living[home] += 1
                return lease
        return None

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
        self._living[lease.home] -= 1
        self._slots.append(lease.slot)
        for index in reversed(range(len(lease.pages))):
            self._pool(lease.home, index).append(lease.pages[index])
        lease.pages.clear()

    def rows(self, leases: Sequence[Lease], padding: int) -> list[int | None]:
        """The row of each lease in a decode call of ``padding`` rows; None for those that find no room."""
        if self._placement != "by_sequence":
            return [row if row < padding else None for row in range(len(leases))]
        free: dict[int, list[int]] = {}
        for row in reversed(range(padding)):
            free.setdefault(self._device(row, padding), []).append(row)
        return [rows.pop() if (rows := free.get(lease.home)) else None for lease in leases]

    def blocks(self, other: Lease, lease: Lease) -> bool:
        """Whether ``other`` holds a page that could be the next one of ``lease``."""
        pool = self._pool(lease.home, len(lease.pages))
        return any(self._pool(other.home, index) is pool for index in range(len(other.pages)))

    def _device(self, row: int, padding: int) -> int:
        """Where a row of a decode call lives."""
        return row * self._devices // padding

    def _pool(self, home: int, index: int) -> list[int]:
        """The free pages that may become page ``index`` of a sequence at ``home``."""
        return self._pools[(home + index) % len(self._pools) if self._placement == "striped" else home]
