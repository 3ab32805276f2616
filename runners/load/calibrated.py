"""This machine as calibrations name it, and what one beside an artifact says of its prefill calls."""

import os
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

from ling3export.artifacts.calibration import Measuring, found_beside
from ling3export.artifacts.records import canonical, to_json
from ling3export.artifacts.schema import Manifest
from ling3export.machine.verdict import seen_here

if TYPE_CHECKING:
    from ling3export.runners.hosts.channel import Channel

OTHERS = "calibration: not used: expected the same beside the artifact of each host, found others"
CPUINFO = Path("/proc/cpuinfo")


def processor(cpuinfo: Path = CPUINFO) -> str:
    """What this processor calls itself; ``unknown`` where the kernel does not say."""
    try:
        rows = dict(line.partition(":")[::2] for line in cpuinfo.read_text().splitlines())
    except OSError:
        rows = {}
    return next((value.strip() for name, value in rows.items() if name.strip() == "model name"), "unknown")


def measuring() -> Measuring:
    """This machine; starts jax's backend."""
    seen = seen_here()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Measuring(
        seen.platform,
        seen.device_kind,
        len(seen.devices),
        seen.processes,
        seen.machine,
        processor(),
        cores,
        {"jaxlib": seen.jaxlib, **seen.plugins},
    )


def calls_measured(
    folder: Path, manifest: Manifest, target: str, report: Callable[[str], None], channel: "Channel | None"
) -> dict[str, float]:
    """The measured seconds of each cell's call, where a calibration beside the artifact is of this target and machine.

    Several hosts decide alike: they use it where each of them has the same one.

    Args:
        folder: The artifact.
        manifest: Its manifest.
        target: The target that runs.
        report: Told that one is used, or why one is there and not used.
        channel: The connection to the other hosts, every one of which calls this; None where this one runs alone.
    """
    found, note = found_beside(folder, manifest, measuring)
    if found is not None and (made := found.target) != target:
        found, note = None, f"calibration: not used: made for {made}, found {target}"
    if channel is not None:
        said = sha256(b"" if found is None else canonical(to_json(found))).digest()
        if len({*channel.gather(said)}) > 1:
            found, note = None, OTHERS
    if note is not None:
        report(note)
    if found is None:
        return {}
    report(f"prefill paddings are chosen by the calibration of {found.made}")
    return {name: times.median for name, times in found.cells.items()}
