"""NVIDIA cards as XLA's compiler wants them described, so that it compiles for one that is not here.

Numbers are NVIDIA's: the CUDA programming guide's table of technical specifications for compute capability 9.0 (blocks,
warps, registers, shared memory), the Hopper architecture paper (multiprocessors, L2 cache, units) and the data sheets
that ``targets.py`` cites (memory, bandwidth).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ling3export.plan.targets import Target

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


@dataclass(frozen=True)
class Card:
    """What a target's table of facts does not hold.

    Attributes:
        name: As the driver reports it, and so jax's device kind: an executable is for that.
    """

    name: str


CARDS = {"h100": Card("NVIDIA H100 80GB HBM3"), "h200": Card("NVIDIA H200")}


def target_config(target: "Target") -> str:
    """The card of ``target`` as the text of XLA's ``GpuTargetConfigProto``."""
    assert target.chip is not None
    chip, card = target.chip, CARDS[target.chip.kind]
    major, minor = CAPABILITY
    described = {
        **LIMITS,
        **HOPPER,
        "device_memory_size": chip.memory,
        "memory_bandwidth": int(chip.bandwidth),
        # With what only this generation has (its matrix instructions): such code runs on no other.
        "cuda_compute_capability": {"major": major, "minor": minor, "feature_extension": "ACCELERATED_FEATURES"},
        "name": f'"{card.name}"',
    }
    return _text({"gpu_device_info": described, "platform_name": '"CUDA"', "device_description_str": f'"{card.name}"'})


def _text(fields: Mapping[str, Any]) -> str:
    parts = [
        f"{name} {{ {_text(value)} }}" if isinstance(value, Mapping) else f"{name}: {value}"
        for name, value in fields.items()
    ]
    return " ".join(parts)
