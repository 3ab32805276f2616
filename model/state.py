"""The table of state arrays: what a sequence leaves behind between steps."""

import math
from dataclasses import dataclass

from ling3export.model.config import Config
from ling3export.model.geometry import Geometry


@dataclass(frozen=True)
class StateArray:
    """One donated state array.

    Attributes:
        name: Key in the state dict.
        shape: Whole shape.
        dtype: numpy dtype name.
        axes: A word for each axis; ``heads`` is the one that is cut over devices.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    axes: tuple[str, ...]


def state_arrays(config: Config, geometry: Geometry) -> list[StateArray]:
    """Every state array, in a fixed order. Slot 0 and page 0 are dummies that padding writes to."""
    slots, heads, key = geometry.slots + 1, config.num_attention_heads, config.head_dim
    kda, taps = len(config.kda_layers), config.short_conv_kernel_size - 1
    rows = []
    if kda:
        rows = [
            StateArray(f"kda_conv_{x}", (kda, slots, taps, heads * key), geometry.dtype,
                       ("layers", "slots", "taps", "heads"))
            for x in "kqv"
        ]  # fmt: skip
        rows.append(
            StateArray("kda_recurrent", (kda, slots, heads, key, key), "float32",
                       ("layers", "slots", "heads", "key", "value"))
        )  # fmt: skip
    rows.append(StateArray("last_token", (slots,), "int32", ("slots",)))
    latent = (len(config.mla_layers), geometry.pages + 1, geometry.page_size, geometry.latent_row)
    rows.append(StateArray("mla_latent", latent, geometry.dtype, ("layers", "pages", "page", "row")))
    return sorted(rows, key=lambda row: row.name)


def state_bytes(config: Config, geometry: Geometry) -> int:
    """Bytes of the whole state on all ``tp`` devices together: a replicated array counts once a device."""
    total = 0
    for row in state_arrays(config, geometry):
        copies = 1 if "heads" in row.axes else geometry.tp
        total += copies * math.prod(row.shape) * (2 if row.dtype == "bfloat16" else 4)
    return total
