"""What a machine made of one target of an artifact, cell by cell: errors and times. It stands beside the artifact.

``NAME.calibration.json`` is one JSON object, read as strictly as a manifest. It names the machine, and by digests the
programs and the weights, so that nobody takes it for that of others.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from ling3export.artifacts.files import replace_file
from ling3export.artifacts.records import (
    Digest,
    WrongRecordError,
    at_most,
    from_json,
    laid_out,
    one_of,
    sha256_of,
    shown,
    to_json,
    within,
)
from ling3export.artifacts.schema import Manifest, Receipts, Target, Versions
from ling3export.foundation.errors import ArtifactError
from ling3export.foundation.strict_json import LARGEST, read_json

SCHEMA = "ling3.calibration/1"
AGAIN = "calibrate again: ling3-runner calibrate ARTIFACT --force"
Seconds = Annotated[float, within(0, 1e6)]
Count = Annotated[int, within(1, 2**31)]


@dataclass(frozen=True)
class Measuring:
    """The machine that measured, on host 0: the platform and the kind of its devices, their number over all hosts."""

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


@dataclass(frozen=True, kw_only=True)
class CellTimes:
    """Seconds of a cell's call, and what was expected of them.

    ``median``, ``fastest`` and ``slowest`` last until all that it gives is there, ``dispatch`` until the call returns.
    ``device`` goes from the first operation's begin to the last one's end, as a profiler saw it; ``by_kind`` is the
    operations' own time on a device. ``estimate`` is the compiler's, ``bound`` the roofline bound.
    """

    calls: Count
    median: Seconds
    fastest: Seconds
    slowest: Seconds
    dispatch: Seconds
    device: Seconds | None = None
    by_kind: dict[str, Seconds] | None = None
    estimate: Seconds | None = None
    bound: Seconds | None = None


@dataclass(frozen=True)
class Calibration:
    """What was measured of one target.

    Attributes:
        schema: SCHEMA.
        name: The artifact's checkpoint.
        target: Its name in the manifest.
        programs: Digest of all that the manifest says of the target.
        weights: The manifest's digest of the weights.
        made: The day, in UTC.
        machine: What measured.
        tokens_a_sequence: Tokens that decoding sequences have cached.
        load: Seconds of each stage of the start; those in threads overlap.
        receipts: How far the executed cells are from the expectations, on this machine.
        cells: Their times, by name.
    """

    schema: Annotated[str, one_of(SCHEMA)]
    name: str
    target: str
    programs: Digest
    weights: Digest
    made: str
    machine: Measuring
    tokens_a_sequence: int
    load: Annotated[dict[str, Seconds], at_most(64)]
    receipts: Receipts
    cells: dict[str, CellTimes]


def beside(artifact: Path) -> Path:
    """``NAME.calibration.json`` beside ``NAME.ling3``."""
    folder = artifact.resolve()
    return folder.with_name(f"{folder.name.removesuffix('.ling3')}.calibration.json")


def programs_digest(target: Target) -> str:
    """The sha256 of what a manifest says of a target, files' digests included."""
    return sha256_of(to_json(target))


def write_calibration(path: Path, calibration: Calibration) -> None:
    """Writes or replaces a file in one step.

    Raises:
        ArtifactError: It cannot be written.
        WrongRecordError: A value that no reader would take.
    """
    value = to_json(calibration)
    from_json(Calibration, value)
    replace_file(path, f"{laid_out(value)}\n".encode())


def read_calibration(path: Path) -> Calibration:
    """Reads a file: types, bounds, and that times and receipts are of the same cells.

    Raises:
        ArtifactError: There is none, it is cut or no JSON, or it holds something else; says what, and where.
    """
    what = f"calibration `{path.name}`"
    try:
        found = from_json(Calibration, read_json(path, LARGEST))
        if other := sorted(found.cells.keys() ^ found.receipts.cells.keys()):
            raise WrongRecordError("times and a receipt of each cell", f"one of them alone of {other[0]}", ("cells",))
    except OSError as error:
        raise ArtifactError(f"{what}: expected a file, found {error.strerror}, at {path}", AGAIN) from error
    except WrongRecordError as error:
        at = f" `{error.where}`" if error.path else ""
        raise ArtifactError(f"{what}{at}: expected {error.expected}, found {error.found}, in {path}", AGAIN) from error
    except ValueError as error:
        raise ArtifactError(f"{what}: expected JSON, found {error}, in {path}", AGAIN) from error
    return found


def misfit(found: Calibration, manifest: Manifest, here: Callable[[], Measuring] | None = None) -> str | None:
    """Why a calibration says nothing of an artifact, or of the machine that ``here`` gives; None if it does."""
    target = manifest.targets.get(found.target)
    digests = {"programs": None if target is None else programs_digest(target), "weights": manifest.weights_digest}
    for name, digest in digests.items():
        if getattr(found, name) != digest:
            there = "none" if digest is None else digest[:12]
            return f"another artifact's: measured with {name} {getattr(found, name)[:12]}, found {there}"
    assert target is not None
    if other := sorted(found.cells.keys() ^ target.cells.keys()):
        return f"another artifact's: measured with other cells, such as {shown(other[0])}"
    machine = found.machine if here is None else here()
    for name, measured in vars(found.machine).items():
        if measured != getattr(machine, name):
            return f"another machine's: measured with {name} {measured}, found {getattr(machine, name)}"
    return None


def found_beside(
    artifact: Path, manifest: Manifest, here: Callable[[], Measuring] | None = None
) -> tuple[Calibration | None, str | None]:
    """The calibration beside an artifact if it fits, and otherwise a line that says why one is there and not used."""
    path = beside(artifact)
    if not path.exists():
        return None, None
    try:
        found = read_calibration(path)
    except ArtifactError as error:
        return None, f"{error.message}: not used"
    reason = misfit(found, manifest, here)
    return (found, None) if reason is None else (None, f"calibration `{path.name}`: not used: {reason}")
