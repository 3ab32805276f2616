"""The manifest's records of one program: how it is called, and what it takes and costs; and the types of all fields.

The other records of a manifest are in `schema`.
"""

import math
from typing import Annotated

from msgspec import Meta

from ling3export.artifacts.records import Digest, Record, at_most, expect, one_of, within
from ling3export.foundation.dtypes import BY_NAME
from ling3export.foundation.phases import PHASES

_STEP = r"(?!\.{1,2}(?:/|\Z))[^/]+"  # a name of a path, neither . nor ..
Relative = Annotated[
    str,
    Meta(
        pattern=rf"\A{_STEP}(?:/{_STEP})*\Z",
        description="a path below the artifact's folder, with /, in its shortest form, that never climbs out",
    ),
]
Positive = Annotated[int, within(1, 2**40)]
Padding = Annotated[int, within(1, 2**20)]
Paddings = Annotated[tuple[Padding, ...], at_most(64)]
Device = Annotated[int, within(0, 2**31)]
Devices = Annotated[tuple[Device, ...], Meta(min_length=1, max_length=4096, description="1 to 4,096 devices")]
Shape = Annotated[tuple[Positive, ...], at_most(8)]
Spec = Annotated[tuple[str | None, ...], at_most(8)]
Dtype = Annotated[str, one_of(*BY_NAME)]
Phase = Annotated[str, one_of(*PHASES)]


def check_shape(shape: tuple[int, ...]) -> None:
    """Bounds an array's size, for whoever allocates it."""
    expect(math.prod(shape) < 2**46, "fewer than 2**46 elements", shape, "shape")


class Array(Record, frozen=True):
    """An array of a call: its name in the program, whole shape, dtype, and a mesh axis or null for each axis."""

    name: str
    shape: Shape
    dtype: Dtype
    spec: Spec

    def __post_init__(self) -> None:
        check_shape(self.shape)
        expect(not self.spec or self.spec[-1] is not None, "mesh axes without trailing nulls", self.spec, "spec")

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * BY_NAME[self.dtype].nbytes


class CallInput(Array, frozen=True):
    """An input of an executable; one that is not kept is not passed to it."""

    donated: bool
    kept: bool


class Leaf(Array, frozen=True):
    """An input or output of a cell, in flattening order."""

    group: Annotated[str, one_of("params", "state", "batch", "out")]


class FieldRecord(Record, frozen=True):
    """A named range of the packed int32 batch; floats are bit-cast."""

    name: str
    offset: int
    shape: Shape
    dtype: Annotated[str, one_of("int32", "float32")]

    def __post_init__(self) -> None:
        check_shape(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)


class CallRecord(Record, frozen=True):
    """How an executable is called, without pickle: flat inputs and outputs, and the routines that it calls by name."""

    inputs: tuple[CallInput, ...]
    outputs: tuple[Array, ...]
    custom_calls: tuple[str, ...]


class Memory(Record, frozen=True):
    """Bytes of one device while a program runs; ``alias`` counts in both arguments and outputs."""

    arguments: int
    outputs: int
    temporaries: int
    alias: int
    code: int
    compiler_peak: int | None = None

    @property
    def passing(self) -> int:
        """Bytes that a step needs on top of its arguments: temporaries, and outputs that reuse no donated buffer."""
        return self.temporaries + self.outputs - self.alias

    @property
    def peak(self) -> int:
        """The most that a device holds while the program runs: its arguments, its code, and what passes."""
        return self.arguments + self.code + self.passing


class Collective(Record, frozen=True):
    """How often a kind of collective runs; its bytes where the compiled program was counted."""

    count: int
    bytes: int | None = None


class Estimate(Record, frozen=True):
    """Seconds of one call as the compiler's cycles say, never measured."""

    seconds: float
    unseen: int
    tokens_a_sequence: int
    clock_hz: float

    @property
    def at_least(self) -> str:
        """Words before ``seconds`` and before anything that follows from it: ``"at least "``, or nothing."""
        return "at least " if self.unseen else ""


class RooflineBound(Record, frozen=True):
    """Bytes and FLOPs of a call that no program can do without, and the seconds that follow; collectives apart."""

    bytes: dict[str, int]
    flops: int
    seconds: float
    collectives: int
    collective_seconds: float

    @property
    def moved(self) -> int:
        """All bytes that must move to or from a device's memory."""
        return sum(self.bytes.values())


class Lowering(Record, frozen=True):
    """How an executable was lowered where that was not from the portable program."""

    direct: bool
    forward_compatible: bool


class Origin(Record, frozen=True):
    """Where a build took a cell from, its keys in the cache, and what jax did for it."""

    source: Annotated[str, one_of("compiler", "program cache", "cache")]
    program: Digest
    traces: int
    compiles: int
    key: Digest | None = None


class LoweredProgram(Record, frozen=True, kw_only=True):
    """A program of one phase and padding before it is compiled: what it takes and gives, in flattening order."""

    phase: Phase
    padding: Padding
    fields: tuple[FieldRecord, ...]
    inputs: tuple[Leaf, ...]
    outputs: tuple[Leaf, ...]
    collectives: dict[str, Collective]
    lower_seconds: float

    @property
    def name(self) -> str:
        return f"{self.phase}@{self.padding}"

    @property
    def packed(self) -> int:
        return sum(field.size for field in self.fields)

    @property
    def rows(self) -> int:
        """Rows of logits that it gives; of ``sample``, those that it takes; 0 where it knows none."""
        return next((array.shape[0] for array in (*self.inputs, *self.outputs) if array.name == "logits"), 0)


class Program(LoweredProgram, frozen=True, kw_only=True):
    """A program as its compiler left it: how to call it, and what it costs."""

    compile_seconds: float
    memory: Memory
    call: CallRecord | None = None
    flops: float | None = None
    bytes_accessed: float | None = None
    estimate: Estimate | None = None
    floor: RooflineBound | None = None
    lowering: Lowering | None = None
    origin: Origin | None = None

    @property
    def estimated_seconds(self) -> float | None:
        """The compiler's estimate of one call; see :attr:`at_least`."""
        return None if self.estimate is None else self.estimate.seconds

    @property
    def at_least(self) -> str:
        """Words before ``estimated_seconds``: see :attr:`Estimate.at_least`."""
        return "" if self.estimate is None else self.estimate.at_least
