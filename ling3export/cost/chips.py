"""Facts about the accelerators that programs are compiled for, and the card of this machine. Imports no jax.

``CHIPS`` holds what plans and estimates need. Memory is what the compiler lets a program have on one device (a refused
300 GiB program names it); the rest is from the vendors' tables, a chip's numbers divided by its devices.

The second half describes NVIDIA cards as XLA's compiler wants them described, so that it compiles for one that is not
here. Those numbers are NVIDIA's: the CUDA programming guide's table of technical specifications for compute
capability 9.0 (blocks, warps, registers, shared memory), the Hopper architecture paper (multiprocessors, L2 cache,
units) and the data sheets that ``CHIPS`` cites.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ling3export.foundation.errors import PlanError

GIB = 2**30

DRIVER = Path("/proc/driver/nvidia/gpus")  # a folder a card, each with a file `information`
HERE = "here"  # stands where a TPU target has its topology: compiled, and autotuned, on the card itself


@dataclass(frozen=True)
class Chip:
    """One kind of accelerator, as jax sees it: per device, not per chip."""

    platform: str  # ``tpu`` or ``cuda``
    kind: str  # its name in a target
    memory: int  # bytes a program may have
    bandwidth: float  # bytes a second to and from that memory
    flops: float  # bf16 operations a second, dense
    devices: int  # jax devices of a chip (two where a chip has two cores that are not fused)
    chips_per_host: int  # how many chips each host of a slice has
    topologies: tuple[str, ...]  # names that the compiler knows, of up to 16 devices
    lanes: int  # the multiple that the memory layout pads the minor dimension to
    clock: float  # cycles a second that the compiler's cycle estimates are divided by (assumed, not published)
    sources: tuple[str, ...]  # where the numbers come from

    def count(self, topology: str) -> int:
        """Devices of a topology."""
        return math.prod(int(side) for side in topology.split("x")) * self.devices


CLOCK = 1.75e9
CHIPS = {
    (chip.platform, chip.kind): chip
    for chip in (
        Chip("tpu", "v6e", int(31.24 * GIB), 1640e9, 918e12, 1, 4, ("1x1", "2x2", "2x4", "4x4"), 128, CLOCK,
             ("https://cloud.google.com/tpu/docs/v6e",)),
        Chip("tpu", "v5e", int(15.75 * GIB), 819e9, 197e12, 1, 4, ("1x1", "2x2", "2x4", "4x4"), 128, CLOCK,
             ("https://cloud.google.com/tpu/docs/v5e",)),
        Chip("tpu", "v5p", int(95.73 * GIB), 2765e9, 459e12, 1, 4, ("1x1x1", "2x2x1", "2x2x2", "2x2x4"), 128, CLOCK,
             ("https://cloud.google.com/tpu/docs/v5p",)),
        Chip("tpu", "tpu7x", int(94.74 * GIB), 7380e9 / 2, 2307e12 / 2, 2, 4, ("1x1x1", "2x2x1", "2x2x2"), 128, CLOCK,
             ("https://cloud.google.com/tpu/docs/tpu7x",)),
        Chip("cuda", "h100", 80 * 10**9, 3350e9, 989e12, 1, 8, (), 1, 1.755e9,
             ("https://www.nvidia.com/en-us/data-center/h100/",)),
        Chip("cuda", "h200", 141 * 10**9, 4800e9, 989e12, 1, 8, (), 1, 1.755e9,
             ("https://www.nvidia.com/en-us/data-center/h200/",)),
    )
}  # fmt: skip
# The processor whose bounds price programs for cpu: one socket of 56 cores, 1,024 bf16 operations a cycle and core at
# 2 GHz, 8 channels of DDR5-4800. Its virtual devices share it.
PROCESSOR = Chip("cpu", "processor", 512 * GIB, 307.2e9, 56 * 2e9 * 1024, 1, 1, (), 1, 2e9,
    ("https://www.intel.com/content/www/us/en/products/sku/231746/specifications.html",))  # fmt: skip


def device(platform: str, kind: str | None, count: int) -> Chip | None:
    """A target's device; of a cpu target, one of ``count`` that share a processor. None for an unknown kind."""
    if platform == "cpu":
        return replace(PROCESSOR, bandwidth=PROCESSOR.bandwidth / count, flops=PROCESSOR.flops / count)
    return CHIPS.get((platform, kind or ""))


CAPABILITY = (9, 0)  # Hopper
# https://docs.nvidia.com/cuda/cuda-c-programming-guide/#features-and-technical-specifications
LIMITS = {
    "threads_per_warp": 32,
    "threads_per_block_limit": 1024,
    "threads_per_core_limit": 2048,
    "registers_per_block_limit": 2**16,
    "registers_per_core_limit": 2**16,
    "shared_memory_per_block": 48 * 2**10,
    "shared_memory_per_block_optin": 227 * 2**10,
    "shared_memory_per_core": 228 * 2**10,
    "block_dim_limit_x": 2**31 - 1,
    "block_dim_limit_y": 2**16 - 1,
    "block_dim_limit_z": 2**16 - 1,
}
# https://resources.nvidia.com/en-us-hopper-architecture/nvidia-h100-tensor-c: the SXM5 boards
HOPPER = {"core_count": 132, "fpus_per_core": 128, "l2_cache_size": 50 * 2**20, "clock_rate_ghz": 1.98}
# Kind of a card → the name that its driver reports, which is jax's device kind: an executable is for that.
CARDS = {"h100": "NVIDIA H100 80GB HBM3", "h200": "NVIDIA H200"}


def target_config(chip: Chip) -> str:
    """The card as the text of XLA's ``GpuTargetConfigProto``."""
    card = f'"{CARDS[chip.kind]}"'
    major, minor = CAPABILITY
    described = {
        **LIMITS,
        **HOPPER,
        "device_memory_size": chip.memory,
        "memory_bandwidth": int(chip.bandwidth),
        # With what only this generation has (its matrix instructions): such code runs on no other.
        "cuda_compute_capability": {"major": major, "minor": minor, "feature_extension": "ACCELERATED_FEATURES"},
        "name": card,
    }
    return _text({"gpu_device_info": described, "platform_name": '"CUDA"', "device_description_str": card})


def _text(fields: Mapping[str, Any]) -> str:
    parts = [
        f"{name} {{ {_text(value)} }}" if isinstance(value, Mapping) else f"{name}: {value}"
        for name, value in fields.items()
    ]
    return " ".join(parts)


def kind_here(text: str, kind: str | None = None) -> str:
    """The kind of this machine's first card.

    Args:
        text: The target as the user wrote it.
        kind: The one that it must be; None takes any that is known.

    Raises:
        PlanError: There is no card, or it is another one; names both.
    """
    files = sorted(DRIVER.glob("*/information"))
    if not files:
        raise PlanError(
            f"target `{text}`: this machine has no NVIDIA card: nothing is in {DRIVER}",
            "cuda:h100 and cuda:h200 are compiled without one",
        )
    facts = dict(line.split(":", 1) for line in files[0].read_text().splitlines() if ":" in line)
    model = facts.get("Model", "").strip()
    card = next((known for known, name in CARDS.items() if name == model), None)
    if card is None or kind not in (None, card):
        wanted = ", ".join(name for known, name in CARDS.items() if kind in (None, known))
        raise PlanError(f"target `{text}`: expected a card that calls itself {wanted}, found `{model}` in {files[0]}")
    return card
