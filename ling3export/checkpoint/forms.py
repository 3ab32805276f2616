"""The forms of a matrix in a checkpoint: bf16, FP8 in blocks, packed INT4; and the numbers of the last two.

A quantized matrix is a few tensors, whose names tell its form. Each of its numbers is a code times the scale of its
block. Both forms have few codes and few scales, so their products are a table. It is made with integers and float64,
where none of them is subnormal: it does not depend on how the processor treats subnormal numbers.

Source of the layouts: the public FP8 and INT4 checkpoints of Ling-3.0-tiny; OCP's E4M3 and E8M0; compressed-tensors'
``pack-quantized``.
"""

import functools
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ling3export.foundation.errors import CheckpointError
from ling3export.model.parameters import BF16, TensorInfo
from ling3export.model.quantization import Quantization

STRIPE = 128  # rows that are decoded at a time
EMBEDDINGS, HEAD = "model.word_embeddings.weight", "lm_head.weight"


@dataclass(frozen=True)
class Form:
    """A form of quantized matrices.

    Attributes:
        codes: Suffix of a weight's name in the name of the tensor of its codes.
        scales: Suffix for the scales.
        block: Rows and columns that share a scale; cut at the right and the bottom edge.
        fraction: Bits of the fraction of the decoded numbers: 7 for bf16, 23 for fp32.
    """

    name: str
    codes: str
    scales: str
    block: tuple[int, int]
    fraction: int

    def parts(self, name: str, info: TensorInfo) -> dict[str, TensorInfo]:
        """The tensors, by name, in which a weight ``[out, in]`` is stored.

        Raises:
            CheckpointError: The form does not allow its shape.
        """
        out, width = info.shape
        scales = (-(-out // self.block[0]), -(-width // self.block[1]))
        if self is FP8:
            return {name: TensorInfo(info.shape, ("F8_E4M3",)), name + self.scales: TensorInfo(scales, ("F8_E8M0",))}
        if width % self.block[1]:
            expected = f"a multiple of {self.block[1]} inputs in INT4"
            raise CheckpointError(f"tensor `{name}{self.codes}`: expected {expected}, found {width}")
        return {
            name + self.codes: TensorInfo((out, width // 8), ("I32",)),
            name + self.scales: TensorInfo(scales, BF16),
            name + SHAPE: TensorInfo((2,), ("I64", "I32")),
        }

    @functools.cached_property
    def table(self) -> NDArray[np.unsignedinteger]:
        """The bits of every number, ``[scales, codes]``; those of a NaN if the dtype does not hold the number."""
        if self is FP8:
            bytes_ = np.arange(256)
            scales = np.where(bytes_ == 255, np.nan, np.ldexp(1.0, bytes_ - 127))
            return encoded(scales[:, None] * float_values(bytes_, 4, 3), self.fraction)
        return encoded(float_values(np.arange(1 << 16), 8, 7)[:, None] * np.arange(-8, 8), self.fraction)

    def decoded(self, codes: NDArray[np.uint8], scales: NDArray[np.unsignedinteger]) -> NDArray[np.unsignedinteger]:
        """The bits of a matrix ``[out, in]``.

        Args:
            codes: ``[out, in]``.
            scales: The bits of the scales, ``[out, in]`` in blocks.
        """
        flat, (rows, columns) = self.table.reshape(-1), self.block
        out = np.empty(codes.shape, flat.dtype)
        for start in range(0, len(codes), STRIPE):
            stripe = codes[start : start + STRIPE]
            base = scales[start // rows : -(-(start + len(stripe)) // rows)].astype(np.intp) * self.table.shape[1]
            index = np.repeat(base, columns, axis=1)[:, : codes.shape[1]] + stripe
            np.take(flat, index, out=out[start : start + STRIPE], mode="clip")
        return out

    def is_none(self, bits: NDArray[np.unsignedinteger]) -> NDArray[np.bool_]:
        """Whether the table has no number."""
        return bits == _nan(self.fraction)


SHAPE = "_shape"
FP8 = Form("fp8", "", "_scale_inv", (128, 128), 7)
INT4 = Form("int4", "_packed", "_scale", (1, 32), 23)


def float_values(codes: NDArray[np.integer], exponent: int, fraction: int) -> NDArray[np.float64]:
    """The numbers of floating-point codes: a sign, ``exponent`` bits, ``fraction`` bits; NaN if not finite.

    Four exponent bits are E4M3 as FP8 has it: no infinities, and one NaN of each sign.
    """
    sign = np.where(codes >> (exponent + fraction) & 1, -1.0, 1.0)
    power, digits = codes >> fraction & (1 << exponent) - 1, codes & (1 << fraction) - 1
    last = power == (1 << exponent) - 1
    none = last & (digits == 7) if exponent == 4 else last
    whole = digits + np.where(power > 0, 1 << fraction, 0)
    numbers = sign * np.ldexp(whole.astype(np.float64), np.maximum(power, 1) - (1 << exponent - 1) + 1 - fraction)
    return np.where(none, np.nan, numbers)


def encoded(numbers: NDArray[np.float64], fraction: int) -> NDArray[np.unsignedinteger]:
    """The bits of bf16 (``fraction`` 7) or fp32 (23) that are exactly these numbers; of a NaN if none are."""
    size = np.abs(np.nan_to_num(numbers))
    power = np.where(size > 0, np.maximum(np.frexp(size)[1] + 126, 1), 1)  # as the bits have it, if not subnormal
    whole = np.ldexp(size, fraction + 127 - power)  # in units of the last digit
    bits = (power.astype(np.int64) - 1 << fraction) + whole.astype(np.int64)
    bits |= np.signbit(numbers).astype(np.int64) << fraction + 8
    none = np.isnan(numbers) | (power > 254) | (whole != np.floor(whole))
    return np.where(none, _nan(fraction), bits).astype(np.uint16 if fraction == 7 else np.uint32)


def _nan(fraction: int) -> int:
    return (0x1FF << fraction - 1) & (1 << fraction + 8) - 1


def unpacked(words: NDArray[np.int32]) -> NDArray[np.uint8]:
    """INT4's codes ``[out, in]``, q + 8, from words ``[out, in / 8]`` whose lowest four bits come first."""
    pairs = np.ascontiguousarray(words).view(np.uint8)
    codes = np.empty((len(pairs), 2 * pairs.shape[1]), np.uint8)
    codes[:, 0::2], codes[:, 1::2] = pairs & 15, pairs >> 4
    return codes


def may_be_quantized(name: str, info: TensorInfo) -> bool:
    """Whether a weight may have another form: those of all linear modules but the router."""
    return len(info.shape) == 2 and info.dtypes == BF16 and name != EMBEDDINGS


def forms_of(expected: Mapping[str, TensorInfo], present: Collection[str]) -> dict[str, Form]:
    """The form of each quantized weight, by the names of the checkpoint's tensors."""
    able = [name for name, info in expected.items() if may_be_quantized(name, info)]
    in_fp8 = {name: FP8 for name in able if name + FP8.scales in present}
    return {name: INT4 for name in able if name + INT4.codes in present} | in_fp8


def check_quantization(
    quantization: Quantization | None, forms: Mapping[str, Form], expected: Mapping[str, TensorInfo], where: str
) -> None:
    """Passes if the tensors are quantized as ``quantization_config`` says.

    Raises:
        CheckpointError: A weight has another form.
    """
    for name, info in expected.items():
        if not may_be_quantized(name, info):
            continue
        covered = quantization is not None and quantization.covers(name.removesuffix(".weight"))
        wanted = quantization.form if quantization is not None and covered else "bf16"
        form = forms[name].name if name in forms else "bf16"
        if form != wanted and not (form == "bf16" and name == HEAD):  # which is left out of "linear" by custom
            says = "there is no quantization_config" if quantization is None else "quantization_config says"
            raise CheckpointError(f"tensor `{name}`: expected {wanted}, as {says}, found {form}, in {where}")
