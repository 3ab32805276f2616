"""Portable programs of any target, run with the processor's compiler: what can be proven of a machine that is not here.

The very ``.stablehlo`` files of a target are compiled for as many virtual devices as it has, and the vectors run
through them. They hold every decision of ours; what stays unproven of a target is what its own compiler makes of them.
"""

from collections.abc import Mapping
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

from ling3export.artifacts.manifest import read_checked
from ling3export.artifacts.schema import GIVERS, MOVING, SPLIT, Manifest, Mesh, PortableReceipts, Target

DEFAULT_BYTES = (
    10**9
)  # of weights: programs of larger checkpoints are run on the processor only where that is asked for
Calls = dict[str, tuple[str, ...]]  # by cell, names of custom calls


def too_large(manifest: Manifest, name: str) -> str | None:
    """Why a target's portable programs are not run unless that is asked for; None where they are."""
    weights, target = manifest.weights.nbytes, manifest.targets[name]
    if weights > DEFAULT_BYTES:
        return f"{weights / 1e9:.1f} GB of weights, more than {DEFAULT_BYTES / 1e9:g} GB"
    split = {array.name: any(axis is not None for axis in array.spec) for array in target.state.arrays}
    state = sum(array.nbytes * (1 if split[array.name] else target.tp) for array in target.state.arrays)
    if state > manifest.plan.state_memory:
        return f"{state / 1e9:.1f} GB of state on all devices, more than --state-memory"
    return None


def measure_portable(artifact: Path, name: str, manifest: Manifest) -> PortableReceipts:
    """Runs every vector through the portable programs of a target, compiled for this processor's virtual devices.

    Raises:
        ArtifactError: A program is damaged, does not compile here, or does not run.
    """
    from ling3export.runners.load.loader import load
    from ling3export.runners.load.targets import prepare

    target = on_processor(manifest.targets[name])
    prepare(target)  # before jax is imported
    from ling3export.runners.calibrate.vectors import measured
    from ling3export.runners.load.pjrt import lacking

    left = not_run(
        target, {cell: lacking(read_checked(artifact, target.cells[cell].stablehlo)) for cell in target.cells}
    )
    target = replace(target, cells={cell: record for cell, record in target.cells.items() if cell not in left})
    receipts = measured(
        load(
            artifact,
            target=name,
            programs="allow-compile",
            check="programs",
            report=lambda _: None,
            manifest=replace(manifest, targets={name: target}),
        )
    )
    return PortableReceipts(**vars(receipts), compiler=f"jaxlib {version('jaxlib')}", lacking=left)


def on_processor(target: Target) -> Target:
    """A target with its portable programs alone, for as many virtual devices of one process."""
    cells = {name: replace(cell, exec=None, call=None) for name, cell in target.cells.items()}
    mesh = Mesh(target.mesh.axis, tuple(range(target.tp)), (0,) * target.tp)
    return replace(target, platform="cpu", mesh=mesh, cells=cells, kernels=None, state_program=None)


def not_run(target: Target, calls: Mapping[str, tuple[str, ...]]) -> Calls:
    """The cells that cannot be run, and why: custom calls of their own, or of all cells that they need.

    Args:
        target: Its cells and what they are.
        calls: By cell, the custom calls that the processor's compiler lacks.
    """

    def union(phases: tuple[str, ...], rows: int | None = None) -> tuple[str, ...]:
        cells = [cell for cell in target.cells.values() if cell.phase in phases and rows in (None, cell.rows)]
        return tuple(sorted({call for cell in cells for call in calls[cell.name]}))

    found = {}
    for name, cell in target.cells.items():
        needed = calls[name]
        if cell.phase in ("sample", "adjust"):
            needed += union(GIVERS, cell.rows)
        elif cell.phase in (*MOVING, *SPLIT):
            needed += union(MOVING if cell.phase in MOVING else (*SPLIT, "prefill"))
        elif cell.phase == "decode":
            needed += union(("prefill",))
        if needed:
            found[name] = tuple(sorted(set(needed)))
    return found
