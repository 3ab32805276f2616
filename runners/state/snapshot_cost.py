"""What a snapshot costs to keep against what it saves: how far into a prompt the first one pays."""

from collections.abc import Mapping
from typing import NamedTuple

from ling3export.artifacts.schema import Target
from ling3export.runners.state.layout import layout_of, nbytes


class SnapshotCost(NamedTuple):
    """Both sides of whether a snapshot is kept. It is where ``keep < tokens before it · token``.

    Attributes:
        keep: What copying one state costs.
        token: What prefilling one token costs.
        unit: Of both: ``s`` as measured or estimated, or ``bytes`` that are moved where nobody knows the device. The
            bytes of prefill leave out what its products compute, and loops count once, so a snapshot is kept too rarely
            rather than too often.
    """

    keep: float
    token: float
    unit: str

    @property
    def least(self) -> int:
        """The fewest tokens behind which a snapshot is kept."""
        return int(self.keep / self.token) + 1

    def record(self) -> dict[str, float | str]:
        """Both sides and what follows, as JSON."""
        return {"keep": self.keep, "prefill_token": self.token, "unit": self.unit, "least_tokens": self.least}


def snapshot_cost(target: Target, measured: Mapping[str, float]) -> SnapshotCost | None:
    """What snapshots of a target with programs that move states are worth; None where nothing says so.

    Args:
        target: The manifest's.
        measured: Seconds of a call, by cell: the same on all hosts, which decide alike.
    """
    copy, prefill = (target.cells[f"{phase}@{target.paddings(phase)[-1]}"] for phase in ("copy", "prefill"))
    seconds = (
        (measured.get(copy.name), measured.get(prefill.name)),
        (copy.estimated_seconds, prefill.estimated_seconds),
    )
    for keep, whole in seconds:
        if keep and whole:
            return SnapshotCost(keep, whole / prefill.padding, "s")
    if not prefill.bytes_accessed:
        return None
    layout = layout_of(target)
    state = nbytes(layout.recurrent) + nbytes(layout.conv)
    return SnapshotCost(
        2 * state / target.tp, prefill.bytes_accessed / prefill.padding, "bytes"
    )  # it is read and written
