"""How long the cells of one target take on one machine, recorded next to the artifact in ``NAME.calibration.json``.

The record names the machine and, by digest, the programs and the weights, so that it is used for no others.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

from msgspec import structs

from ling3export.artifacts.files import replace_file
from ling3export.artifacts.records import (
    Digest,
    Record,
    WrongRecordError,
    from_json,
    laid_out,
    one_of,
    reading,
    sha256_of,
    to_json,
    within,
)
from ling3export.artifacts.schema import Manifest, Receipts, Target, Versions
from ling3export.foundation.errors import ArtifactError, shown
from ling3export.foundation.strict_json import LARGEST, read_json

SCHEMA = "ling3.calibration/1"
AGAIN = "measure again: ling3export verify ARTIFACT --time"
Seconds = Annotated[float, within(0, 1e6)]
Count = Annotated[int, within(1, 2**31)]


class Measuring(Record, frozen=True):
    """The machine that measured: host 0, except that ``devices`` counts those of all hosts."""

    platform: Annotated[str, one_of("cpu", "gpu", "tpu")]
    kind: str
    devices: Count
    hosts: Count
    system: str
    processor: str
    cores: Count
    versions: Versions

    def __str__(self) -> str:
        devices = f"{self.devices} {self.platform} devices" if self.devices > 1 else f"1 {self.platform} device"
        hosts = f" on {self.hosts} hosts" if self.hosts > 1 else ""
        kind = "" if self.kind == self.platform else f" ({self.kind})"
        return f"{devices}{kind}{hosts}, {self.processor}, {self.cores} cores"


class CellTimes(Record, frozen=True):
    """Seconds from a cell's call until all its outputs are computed, as the host sees them."""

    calls: Count
    median: Seconds
    fastest: Seconds
    slowest: Seconds


class Calibration(Record, frozen=True):
    """Measured times and errors of one target.

    Attributes:
        programs: Digest of the target's record in the manifest.
        made: The day, in UTC.
        tokens_a_sequence: Tokens that decoding sequences have cached.
        receipts: The errors of the executed cells on this machine.
    """

    schema: Annotated[str, one_of(SCHEMA)]
    target: str
    programs: Digest
    weights: Digest
    made: str
    machine: Measuring
    tokens_a_sequence: int
    receipts: Receipts
    cells: dict[str, CellTimes]


def beside(artifact: Path) -> Path:
    """``NAME.calibration.json`` in the folder of ``NAME.ling3``."""
    folder = artifact.resolve()
    return folder.with_name(f"{folder.name.removesuffix('.ling3')}.calibration.json")


def programs_digest(target: Target) -> str:
    """The sha256 of a target's record in the manifest, which has the digests of its files."""
    return sha256_of(to_json(target))


def write_calibration(path: Path, calibration: Calibration) -> None:
    """Writes or replaces a file in one step.

    Raises:
        ArtifactError: It cannot be written.
    """
    replace_file(path, f"{laid_out(to_json(calibration))}\n".encode())


def read_calibration(path: Path) -> Calibration:
    """Reads a file: types, bounds, and that times and receipts are of the same cells.

    Raises:
        ArtifactError: The file is missing or holds something else; says what, and where.
    """
    with reading(f"calibration `{path.name}`", path, ArtifactError, AGAIN):
        record = from_json(Calibration, read_json(path, LARGEST))
        if other := sorted(record.cells.keys() ^ record.receipts.cells.keys()):
            raise WrongRecordError("times and a receipt of each cell", f"only one of them for {other[0]}", ("cells",))
    return record


def misfit(record: Calibration, manifest: Manifest, machine: Measuring | None = None) -> str | None:
    """Why a calibration does not apply to an artifact, or to ``machine`` if given; None if it does."""
    target = manifest.targets.get(record.target)
    digests = {"programs": None if target is None else programs_digest(target), "weights": manifest.weights_digest}
    for name, digest in digests.items():
        if getattr(record, name) != digest:
            actual = "none" if digest is None else digest[:12]
            return f"another artifact's: measured with {name} {getattr(record, name)[:12]}, found {actual}"
    assert target is not None
    if other := sorted(record.cells.keys() ^ target.cells.keys()):
        return f"another artifact's: measured with other cells, such as {shown(other[0])}"
    for name, measured in structs.asdict(record.machine).items():
        if machine is not None and measured != getattr(machine, name):
            return f"another machine's: measured with {name} {measured}, found {getattr(machine, name)}"
    return None


def found_beside(
    artifact: Path, manifest: Manifest, machine: Callable[[], Measuring | None] = lambda: None
) -> tuple[Calibration | None, str | None]:
    """The artifact's calibration if it applies; otherwise a line that says why it is not used, if there is one."""
    path = beside(artifact)
    if not path.exists():
        return None, None
    try:
        record = read_calibration(path)
    except ArtifactError as error:
        return None, f"{error.message}: not used"
    reason = misfit(record, manifest, machine())
    return (record, None) if reason is None else (None, f"calibration `{path.name}`: not used: {reason}")
