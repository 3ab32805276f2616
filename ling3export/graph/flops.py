"""Floating-point operations of the matrix products in an instruction of optimized HLO."""

import math
import re
from collections.abc import Mapping
from functools import lru_cache

from ling3export.graph.hlo import ARRAY, Computation, Instruction, Module, dims

MOST_PAIRS = 10**7  # of positions in one dimension of a convolution


def flops(module: Module, computation: Computation, instruction: Instruction) -> float:
    """Floating-point operations of the matrix products in an instruction, two for each multiplication."""
    if instruction.opcode == "fusion":
        inner = module.fused(instruction)
        return sum(flops(module, inner, one) for one in inner.instructions.values())
    if instruction.opcode not in ("dot", "convolution"):
        return 0.0
    left, right = (_dims(computation.instructions[name].shape) for name in instruction.operands[:2])
    if instruction.opcode == "dot":
        axes = re.search(r"lhs_contracting_dims=\{([0-9,]*)\}", instruction.attributes)
        summed = math.prod(left[int(axis)] for axis in axes[1].split(",") if axis) if axes else 1
        return 2.0 * math.prod(_dims(instruction.shape)) * summed
    return _convolution_flops(instruction, left, right)


def _dims(shape: str) -> tuple[int, ...]:
    match = ARRAY.search(shape)
    return dims(match[2]) if match else ()


def _convolution_flops(instruction: Instruction, left: tuple[int, ...], right: tuple[int, ...]) -> float:
    """Only products with an element of the input count: a batched product is a convolution over its batch."""
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", instruction.attributes)
    if labels is None:
        raise ValueError(f"{instruction.name}: a convolution without dim_labels")
    window = re.search(r"window=\{([^}]*)\}", instruction.attributes)
    settings = dict(part.split("=") for part in window[1].split()) if window else {}
    out = _dims(instruction.shape)
    total = 2.0 * out[labels[3].index("b")] * out[labels[3].index("f")] * right[labels[2].index("i")]
    for number in range(sum(letter.isdigit() for letter in labels[3])):
        digit, pick = str(number), lambda name, default, n=number: _setting(settings, name, n, default)
        low = int(pick("pad", "0_0").split("_")[0])
        total *= _positions(
            out[labels[3].index(digit)],
            right[labels[2].index(digit)],
            left[labels[1].index(digit)],
            int(pick("stride", "1")),
            low,
            int(pick("lhs_dilate", "1")),
            int(pick("rhs_dilate", "1")),
        )
    return total


def _setting(settings: Mapping[str, str], name: str, number: int, default: str) -> str:
    return settings[name].split("x")[number] if name in settings else default


@lru_cache(maxsize=4096)
def _positions(out: int, kernel: int, size: int, stride: int, low: int, dilated: int, spread: int) -> int:
    """Pairs of an output's and a kernel's position that meet an element of the input in one dimension."""
    if out * kernel > MOST_PAIRS:
        raise ValueError(f"a convolution of {out:,} by {kernel:,} positions")
    count = 0
    for place in range(out):
        for tap in range(kernel):
            at = place * stride - low + tap * spread
            count += 0 <= at <= (size - 1) * dilated and at % dilated == 0
    return count
