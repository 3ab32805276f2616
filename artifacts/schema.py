"""The manifest's records: what every field of the format is called, and what it may hold. Nothing else states this.

FORMAT.md explains each field in a table of the same names and types; a test compares the two. A field that an artifact
need not have has the default None. Values that follow from another field are properties, not fields.
"""

from typing import Annotated

from msgspec import Meta, field

from ling3export.artifacts.parameters import PLAIN, WEIGHTS, Parameter, Tensor
from ling3export.artifacts.program_records import Array, CallRecord, Devices, Padding, Paddings, Program, Relative
from ling3export.artifacts.records import Digest, Record, expect, one_of, within

Versions = dict[str, str]
KERNELS = "kernels.so"  # the name of a target's library of native kernels, in the folder of its programs
GRAPH = "hlo.xz"  # the suffix of an optimized program's text, compressed
STATE = "state.exec"  # that of the program that gives its state
ConfigValue = bool | int | float | str | tuple[int | float, ...] | dict[str, int | float | str] | None


class FileRecord(Record, frozen=True):
    """A file of the artifact: where it is, how long, and the digest of its bytes."""

    path: Relative
    bytes: int
    sha256: Digest


class SourceFile(Record, frozen=True):
    """A file of the checkpoint: digest of the whole, or size and digest of a shard's header."""

    bytes: int | None = None
    sha256: Digest | None = None
    header_sha256: Digest | None = None


class SourceRecord(Record, frozen=True):
    """The checkpoint that an artifact was built from."""

    name: str
    digests: dict[str, SourceFile]
    form: Annotated[str, one_of("fp8", "int4")] | None = None
    quantized: dict[str, int] | None = None


class PlanRecord(Record, frozen=True):
    """Sizes that all targets share, and the limits that sized their pools."""

    paddings: Paddings
    decode_paddings: Paddings
    max_running: Annotated[int, within(1, 2**16)]
    page_size: Padding
    context: Annotated[int, within(1, 2**40)]
    dtype: Annotated[str, one_of("bfloat16", "float32")]
    memory_fraction: Annotated[float, within(0, 1)]
    state_memory: int
    weights: Annotated[str, one_of(*(name for name in WEIGHTS if name != PLAIN))] | None = None

    def __post_init__(self) -> None:
        for name, paddings in (("paddings", self.paddings), ("decode_paddings", self.decode_paddings)):
            expect(paddings == tuple(sorted(set(paddings))), "ascending paddings", paddings, name)

    @property
    def forms(self) -> str:
        """In which forms the weights are: ``bf16`` where none is quantized."""
        return self.weights or PLAIN


class Cell(Program, frozen=True, kw_only=True):
    """A program in the artifact: its files, and whether it was executed where it was built."""

    status: Annotated[str, one_of("compiled", "compiled, not executed")]
    stablehlo: FileRecord
    exec: FileRecord | None = None
    graph: FileRecord | None = None

    @property
    def files(self) -> tuple[FileRecord, ...]:
        """Both tiers, and the optimized program's text if it is kept."""
        return tuple(file for file in (self.stablehlo, self.exec, self.graph) if file is not None)


class StateArrayRecord(Array, frozen=True):
    """A donated array of the state, and a word for each of its axes."""

    axes: tuple[str, ...]


class State(Record, frozen=True):
    """The pools of a target. Slot 0 and page 0 are dummies that padding writes to; snapshots come after the slots."""

    placement: Annotated[str, one_of("replicated", "striped")]
    slots: Annotated[int, within(1, 2**16)]
    pages: Annotated[int, within(1, 2**22)]
    page_size: Padding
    max_pages: Annotated[int, within(1, 2**22)]
    chunk: Padding
    arrays: tuple[StateArrayRecord, ...]
    snapshots: Annotated[int, within(1, 2**16)] | None = None


class Mesh(Record, frozen=True):
    """The one mesh axis, the ids of its devices in order, and of each the number of its host."""

    axis: str
    devices: Devices
    hosts: Devices

    @property
    def processes(self) -> int:
        return max(self.hosts) + 1


class Requirements(Record, frozen=True):
    """Needs of a target's executables on a machine, except the devices of the mesh."""

    jaxlib: str
    platform: str
    device_kind: str
    machine: str | None = None
    cpu_features: tuple[str, ...] | None = None
    plugins: Versions | None = None


class Executable(Record, frozen=True):
    """An executable on its own, outside of an artifact: what it needs, its devices, and how it is called."""

    requires: Requirements
    mesh: Mesh
    call: CallRecord


class Target(Record, frozen=True, kw_only=True):
    """One machine's programs, state and parameters."""

    platform: Annotated[str, one_of("cpu", "tpu", "cuda")]
    kind: str | None = None
    topology: str | None = None
    mesh: Mesh
    requires: Requirements
    toolchain: Versions
    portable: Annotated[str, Meta(pattern=r"\A\d{1,4}(\.\d{1,4}){2}\Z", description="a version of StableHLO")]
    fingerprint: Digest
    state_abi: Digest
    geometry: dict[str, int | str]
    parameters: tuple[Parameter, ...]
    state: State
    cells: dict[str, Cell]
    kernels: FileRecord | None = None
    state_program: FileRecord | None = None

    def shards(self, host: int) -> list[tuple[str, int, int | None]]:
        """The weights that a host's devices hold: tensor, first shard, and the shard after the last (None: all)."""
        places = [place for place, number in enumerate(self.mesh.hosts) if number == host]
        ranges: dict[tuple[str, int, int | None], None] = {}
        for parameter in self.parameters:
            if parameter.split is None:
                ranges[parameter.tensor, 0, None] = None
                continue
            count = parameter.shape[0] // self.tp
            for place in places:
                ranges[parameter.tensor, place * count, (place + 1) * count] = None
        whole = {name for name, _, stop in ranges if stop is None}
        return [part for part in ranges if part[2] is None or part[0] not in whole]

    @property
    def kernel_names(self) -> str:
        """Suffix of the names of its native kernels; empty where its executables call none."""
        return str(self.geometry.get("kernels", ""))

    @property
    def files(self) -> tuple[FileRecord, ...]:
        """Its programs, the kernels that they call, and the program that gives its state."""
        programs = tuple(file for cell in self.cells.values() for file in cell.files)
        return (*programs, *(file for file in (self.kernels, self.state_program) if file is not None))

    @property
    def state_bytes(self) -> int:
        """Bytes of the state on one device."""
        return sum(array.nbytes // (self.tp if array.spec else 1) for array in self.state.arrays)

    @property
    def text(self) -> str:
        """Its name in a build, without TP: ``tpu:v6e:4x4``."""
        return ":".join(part for part in (self.platform, self.kind, self.topology) if part)

    @property
    def tp(self) -> int:
        return len(self.mesh.devices)

    @property
    def processes(self) -> int:
        return self.mesh.processes

    def paddings(self, phase: str) -> tuple[int, ...]:
        return tuple(sorted(cell.padding for cell in self.cells.values() if cell.phase == phase))


class WeightsRecord(Record, frozen=True):
    """The weight store: sizes of its files, and every tensor by name; both empty where there are programs alone."""

    files: dict[Relative, int]
    index: dict[str, Tensor]

    @property
    def nbytes(self) -> int:
        return sum(self.files.values())


class MarginsRecord(Record, frozen=True):
    """The smallest distances between a routing choice and the next, where there are choices."""

    expert: float | None = None
    group: float | None = None


class SequenceRecord(Record, frozen=True):
    """A test vector: token ids, how many are the prompt, and the positions whose logits are stored under a name."""

    ids: tuple[int, ...]
    prompt: int
    positions: tuple[int, ...]
    logits: str


class Tolerance(Record, frozen=True):
    """The bound of a cell's relative error: of its largest, or of its median over positions."""

    measure: Annotated[str, one_of("largest", "median")]
    bound: float


class Receipt(Record, frozen=True):
    """How far one cell is from the stored expectations: L2 of the logits at a position, relative and absolute."""

    status: Annotated[str, one_of("passed", "failed")]
    relative: float
    median: float
    absolute: float
    positions: int
    log_probabilities: float | None = None
    wrong_best: int | None = None


class Receipts(Record, frozen=True):
    """Measurements of a target's cells by a fresh process."""

    tolerance: Tolerance
    cells: dict[str, Receipt]
    agreement: dict[str, float]

    @property
    def passed(self) -> bool:
        return all(receipt.status == "passed" for receipt in self.cells.values())


class PortableReceipts(Receipts, frozen=True):
    """Results of the portable programs, compiled for the processor, on virtual devices of a fresh process.

    A cell without a run has the custom calls that the processor's compiler lacks, or those of cells that it needs.
    """

    compiler: str
    lacking: dict[str, tuple[str, ...]]


class Vectors(Record, frozen=True):
    """Sequences with expected logits, what computed them, and receipts by target."""

    source: str
    seed: int
    margins: MarginsRecord
    sequences: tuple[SequenceRecord, ...]
    expected: FileRecord | None = None
    receipts: dict[str, Receipts] = field(default_factory=dict)
    portable: dict[str, PortableReceipts] | None = None


class Manifest(Record, frozen=True):
    """Everything that an artifact holds. Its digests are set by `write_manifest`."""

    producer: Versions
    source: SourceRecord
    config: dict[str, ConfigValue]
    plan: PlanRecord
    targets: dict[str, Target]
    weights: WeightsRecord
    vectors: Vectors
    tokenizer: tuple[FileRecord, ...]
    notes: tuple[str, ...]
    programs_digest: Digest | None = None
    weights_digest: Digest | None = None
    sha256: Digest | None = None

    @property
    def has_weights(self) -> bool:
        """Whether it can run; programs alone wait for weights to be attached."""
        return bool(self.weights.index)

    def measured(self, target: str) -> Receipts | None:
        """Measurements of a target: of its executables, else of its portable programs; None where neither ran."""
        return self.vectors.receipts.get(target) or (self.vectors.portable or {}).get(target)

    def receipt(self, target: str, cell: str) -> Receipt | None:
        receipts = self.vectors.receipts.get(target)
        return None if receipts is None else receipts.cells.get(cell)

    def state_of(self, target: str) -> dict[str, str | None]:
        """Two artifacts that hand sequences over must share this: the form of the target's state, and the weights."""
        return {"form": self.targets[target].state_abi, "weights": self.weights_digest}

    @property
    def vocab_size(self) -> int:
        size = self.config["vocab_size"]
        assert isinstance(size, int)
        return size

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a text."""
        ids = self.config["eos_token_id"]
        assert isinstance(ids, tuple)
        return tuple(map(int, ids))
