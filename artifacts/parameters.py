"""The weights of an artifact: the forms that they may have, a tensor of the store, a parameter of a program.

A form says how a matrix is stored. The model's table of weights (model/parameters.py) gives for each weight the tensors
of the store and the parameters of a target's programs; the manifest keeps both, and the runner loads by them.
"""

import math
from typing import NamedTuple

import numpy as np

from ling3export.artifacts.program_records import Dtype, Relative, Shape, check_shape
from ling3export.artifacts.records import Digest, Record, expect
from ling3export.foundation.dtypes import BY_NAME

ALIGNMENT = 64  # jax on CPU aliases mapped memory from here on, and copies below


class Form(NamedTuple):
    """A form of a quantized matrix: two tensors, ``q`` and ``scale``; a weight is its value times its scale.

    Attributes:
        q: The dtype of ``q``.
        bits: Bits of a value in ``q``.
        scale: The dtype of ``scale``; ``uint16`` for words of two factors (artifacts/FORMAT.md).
        group: Neighbouring inputs that share a scale; None where all inputs of an output do.
        values: The value of each code in ``q``, ascending; empty for those of two's complement.
    """

    q: str
    bits: int
    scale: str
    group: int | None
    values: tuple[int, ...] = ()


class FormsOfMatrices(NamedTuple):
    """A form for each kind of matrix: routed experts, embeddings and the output head, and the other large ones."""

    experts: str
    tables: str
    others: str


PLAIN = "bf16"  # the form of a matrix that is not quantized: one tensor, in the artifact's dtype
FORMS = {
    "int8": Form("int8", 8, "bfloat16", 32),
    "int4": Form("uint8", 4, "bfloat16", 32),
    "int8-channel": Form("int8", 8, "float32", None),
    "code4": Form("uint8", 4, "uint16", 32, (-63, -52, -40, -30, -22, -15, -9, -4, 1, 6, 11, 17, 24, 31, 41, 55)),
    "code6": Form("uint8", 6, "uint16", 32, tuple(range(-32, 32))),
}
UNIT = -48  # the power of two of a uint16 scale whose exponent is 0
# By the name that a build gives its weights.
WEIGHTS = {
    PLAIN: FormsOfMatrices(PLAIN, PLAIN, PLAIN),
    "int8": FormsOfMatrices("int8", "int8", "int8"),
    "int4": FormsOfMatrices("int4", "int8", "int8"),
    "int4-small": FormsOfMatrices("code4", "code6", "code4"),
    "int4-experts": FormsOfMatrices("int4", PLAIN, PLAIN),
    "int8-channel": FormsOfMatrices("int8-channel", "int8-channel", "int8-channel"),
}


class Tensor(Record, frozen=True):
    """A tensor of the weight store: its shape, and where it lies once it is written.

    Attributes:
        shape: The whole shape. A tensor that is split over devices has a leading axis of shards.
        shards: How many; 0 for a tensor that is not split.
        file: The file, relative to the artifact.
        offset: Its first byte in the file.
        sha256: The digest of each shard, or of the whole.
    """

    shape: Shape
    dtype: Dtype
    shards: int = 0
    file: Relative = ""
    offset: int = 0
    sha256: tuple[Digest, ...] = ()

    def __post_init__(self) -> None:
        check_shape(self.shape)
        expect(all(size > 0 for size in self.shape), "no empty axis", self.shape, "shape")
        expect(self.dtype in BY_NAME, " or ".join(BY_NAME), self.dtype, "dtype")
        leading = f"a leading axis of {self.shards} shards"
        expect(not self.shards or self.shape[:1] == (self.shards,), leading, self.shape, "shape")

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * BY_NAME[self.dtype].nbytes

    @property
    def parts(self) -> int:
        """How many shards there are, and digests: one of a tensor that is not split."""
        return max(self.shards, 1)

    @property
    def shard_bytes(self) -> int:
        """Bytes of one shard; of the whole tensor where it is not split."""
        return self.nbytes // self.parts

    @property
    def aligned(self) -> bool:
        """Whether every shard starts at a multiple of ALIGNMENT if the tensor does."""
        return self.shard_bytes % ALIGNMENT == 0


class Parameter(Record, frozen=True):
    """A parameter of a target's programs: a stored tensor, or one layer of it.

    Attributes:
        name: Its keys in the tree of parameters with dots between: stack, weight, layer, ``q`` or ``scale``.
        tensor: The stored tensor.
        shape: Without the axis of layers where the parameter is one layer.
        split: The logical axis that is cut over devices along the shards; None for a parameter that all devices have.
        layer: Which layer of the stack; None for the whole tensor.
    """

    name: str
    tensor: str
    shape: Shape
    dtype: Dtype
    split: str | None = None
    layer: int | None = None

    def __post_init__(self) -> None:
        check_shape(self.shape)

    @property
    def path(self) -> tuple[str, ...]:
        """Keys in the tree of parameters."""
        return tuple(self.name.split("."))

    @property
    def stack_axis(self) -> int:
        """The axis of the stored tensor along which layers are stacked."""
        return 0 if self.split is None else 1

    def of(self, tensor: np.ndarray) -> np.ndarray:
        """The parameter, a view of its stored tensor."""
        return tensor if self.layer is None else tensor[(slice(None),) * self.stack_axis + (self.layer,)]

    @property
    def spec(self) -> tuple[str, ...]:
        """The mesh axis of each leading axis: a split parameter is cut along its shards."""
        return () if self.split is None else ("tp",)
