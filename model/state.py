"""The table of state arrays, which hold a sequence's state between steps."""

import math
from dataclasses import dataclass

from ling3export.model.config import Config
from ling3export.model.geometry import AXIS, Geometry


@dataclass(frozen=True)
class StateArray:
    """One donated state array."""

    name: str  # key in the state dict
    shape: tuple[int, ...]  # whole shape
    dtype: str  # numpy dtype name
    axes: tuple[str, ...]  # a word for each axis
    split: str | None  # the axis that is cut over devices, ``heads`` or ``pages``; None for a replicated array

    @property
    def spec(self) -> tuple[str | None, ...]:
        """The mesh axis of each leading axis. No trailing None is spelled: jax would compile again for it."""
        return () if self.split is None else (*(None,) * self.axes.index(self.split), AXIS)


def state_arrays(config: Config, geometry: Geometry) -> list[StateArray]:
    """Every state array, sorted by name. Slot 0 and page 0 are dummies that padding writes to."""
    slots, heads, key = geometry.slots + geometry.snapshots + 1, config.num_attention_heads, config.head_dim
    kda, taps = len(config.layers("kda")), config.short_conv_kernel_size - 1
    pages = geometry.pages + (geometry.tp if geometry.striped else 1)  # a dummy page on every device that has its own
    latent = (len(config.layers("mla")), pages, geometry.page_size, geometry.latent_row)
    # A head's last inputs of q, k and v in one row: one gather and one scatter a layer, of whole lanes.
    conv = (kda, slots, heads, taps * 3 * key)
    rows = [
        StateArray("kda_conv", conv, geometry.dtype, ("layers", "slots", "heads", "taps"), "heads"),
        StateArray(
            "kda_recurrent",
            (kda, slots, heads, key, key),
            "float32",
            ("layers", "slots", "heads", "key", "value"),
            "heads",
        ),
        StateArray("last_token", (slots,), "int32", ("slots",), None),
        StateArray(
            "mla_latent",
            latent,
            geometry.dtype,
            ("layers", "pages", "page", "row"),
            "pages" if geometry.striped else None,
        ),
    ]
    return [row for row in rows if row.shape[0]]  # none of a kind that no layer has


def snapshot_bytes(config: Config, geometry: Geometry) -> int:
    """Bytes of a slot on all devices together, without its last token."""
    slotted = [row for row in state_arrays(config, geometry) if row.split == "heads"]
    return sum(_bytes(row) // row.shape[1] for row in slotted)


def state_bytes(config: Config, geometry: Geometry) -> int:
    """Bytes of the whole state on all ``tp`` devices together: a replicated array counts once a device."""
    total = 0
    for row in state_arrays(config, geometry):
        copies = 1 if row.split else geometry.tp
        total += copies * _bytes(row)
    return total


def _bytes(row: StateArray) -> int:
    return math.prod(row.shape) * (2 if row.dtype == "bfloat16" else 4)
