"""The memory of one device while a target runs: weights, state, temporaries, programs.

The latent pool gets `--pages` pages, or those that fit next to weights and slots. All cells are loaded
at once, and one runs at a time: programs add up, of temporaries the largest counts.
"""

import contextlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from ling3export.artifacts.parameters import WEIGHTS
from ling3export.artifacts.program_records import Program
from ling3export.foundation.dtypes import BY_NAME
from ling3export.foundation.errors import PlanError
from ling3export.foundation.tables import readable
from ling3export.model.config import Config
from ling3export.model.geometry import Geometry
from ling3export.model.parameters import parameters
from ling3export.model.state import snapshot_bytes, state_bytes
from ling3export.plan.options import Options
from ling3export.plan.targets import TargetSpec


def weight_bytes(config: Config, geometry: Geometry) -> int:
    """Bytes of parameters on one device."""
    total = 0
    for parameter in parameters(config, geometry):
        width = BY_NAME[parameter.dtype].nbytes
        total += width * math.prod(parameter.shape) // (geometry.tp if parameter.split else 1)
    return total


def by_form(config: Config, geometry: Geometry) -> dict[str, int]:
    """:func:`weight_bytes` in each form that the model's weights can have."""
    sizes = {}
    for weights in WEIGHTS:
        with contextlib.suppress(PlanError):
            sizes[weights] = weight_bytes(config, replace(geometry, weights=weights))
    return sizes


def state_of_device(config: Config, geometry: Geometry) -> int:
    """Bytes of state on one device."""
    return -(-state_bytes(config, geometry) // geometry.tp)


class _Room(NamedTuple):
    """The memory for a pool, and the option that limits it."""

    option: str  # limits it, as it is named in a refusal
    where: str  # the bytes are counted
    budget: int  # bytes there may be
    limit: str  # the budget in words
    fixed: dict[str, int]  # what is there before the first page: bytes by name
    page: float  # bytes of a page
    hint: str  # what to change

    def need(self, pages: int) -> float:
        """Bytes with ``pages`` pages."""
        return sum(self.fixed.values()) + self.page * pages


def _room(config: Config, geometry: Geometry, options: Options, target: TargetSpec, step: int) -> _Room:
    slots = f"{geometry.slots + 1} slots and one page"  # the dummies are in it
    kept = geometry.snapshots * snapshot_bytes(config, geometry)
    snapshots = {f"{geometry.snapshots} snapshots": kept} if kept else {}
    empty = state_bytes(config, geometry)
    page = (state_bytes(config, replace(geometry, pages=step)) - empty) / step
    knobs = "--max-running, --snapshots, --context or --pages" if kept else "--max-running, --context or --pages"
    if target.chip is None:
        devices = f"on {geometry.tp} devices together" if geometry.tp > 1 else "on 1 device"
        hint = f"lower {knobs}, or raise --state-memory"
        limit = readable(options.state_memory)
        fixed = {slots: empty - kept} | snapshots
        return _Room("--state-memory", devices, options.state_memory, limit, fixed, page, hint)
    budget = int(options.memory_fraction * target.chip.memory)
    share = f"{options.memory_fraction:g} of {readable(target.chip.memory)}"
    limit = f"{readable(budget)}, which is {share}"
    share_of_slots = state_of_device(config, geometry) - kept // geometry.tp
    fixed = {"weights": weight_bytes(config, geometry), slots: share_of_slots}
    fixed |= {name: size // geometry.tp for name, size in snapshots.items()}
    hint = f"lower {knobs}, raise --memory-fraction, or take a larger topology"
    option = f"--memory-fraction of `{target.text}`"
    return _Room(option, "a device", budget, limit, fixed, page / geometry.tp, hint)


def size_pages(config: Config, geometry: Geometry, options: Options, target: TargetSpec) -> tuple[Geometry, str]:
    """Gives the latent pool its pages; refuses a pool that does not fit, with the sum.

    Returns:
        The geometry with its pages, and a line for the user.

    Raises:
        PlanError: The state does not fit ``--state-memory`` (cpu) or ``--memory-fraction`` of a chip's memory.
    """
    step = geometry.tp if geometry.striped else 1  # every device of a striped pool has the same number of pages
    room = _room(config, geometry, options, target, step)
    if options.pages is not None and options.pages % step:
        reason = f"{geometry.placement} over as many devices"
        raise PlanError(f"--pages: expected a multiple of {step} ({reason}), found {options.pages}")
    most = -(-geometry.slots * geometry.max_pages // step) * step
    fitting = max(0, int((room.budget - room.need(0)) / room.page))
    pages = min(most, fitting // step * step) if options.pages is None else options.pages
    # The fewest that will do: one sequence of the whole context.
    needed = -(-geometry.max_pages // step) * step if options.pages is None else pages
    if room.need(needed) > room.budget:
        parts = " + ".join(f"{name} ({readable(count)})" for name, count in room.fixed.items())
        raise PlanError(
            f"{room.option}: expected room for {parts} + {needed} pages of {geometry.page_size} tokens "
            f"({readable(room.page)} each) = {readable(room.need(needed))} {room.where}, found {room.limit}",
            room.hint,
        )
    if options.pages is not None:
        why = "as asked"
        if pages < geometry.max_pages:
            why += f", too few for one sequence of the whole context ({geometry.max_pages} pages)"
    elif pages == most:
        why = f"all that {geometry.slots} full sequences need"
    else:
        why = f"what fits {room.limit} {room.where}"
    note = f"latent pool: {pages} pages of {geometry.page_size} tokens ({geometry.placement}), {why}; "
    weights = room.fixed.get("weights", 0)
    held = f"{readable(weights)} of weights and " if weights else ""
    note += f"{held}{readable(room.need(pages) - weights)} of state {room.where}"
    if geometry.snapshots:
        size = readable(snapshot_bytes(config, geometry))
        note += f", of it {geometry.snapshots} snapshots of {size} over all devices"
    return replace(geometry, pages=pages), note


@dataclass(frozen=True)
class Held:
    """Bytes on one device before anything is compiled."""

    weights: int  # its share of the parameters
    state: int  # its share of slots and pages
    total: int
    memory: int | None  # what a device has; None where no table says so


def held(config: Config, target: TargetSpec, geometry: Geometry) -> Held:
    """The memory of a device of ``target``."""
    weights, state = weight_bytes(config, geometry), state_of_device(config, geometry)
    return Held(weights, state, weights + state, None if target.chip is None else target.chip.memory)


@dataclass(frozen=True)
class OnMachine:
    """Bytes that one machine holds of a target for processors, all of its devices together."""

    weights: int
    state: int
    total: int
    memory: int  # what the machine or its control group has; 0 where that is not known
    available: int  # what is free of it; 0 where that is not known


def on_machine(config: Config, target: TargetSpec, geometry: Geometry, memory: tuple[int, int]) -> OnMachine:
    """The memory of a machine of ``target``, with all and free ``memory`` of ``environment.usable_memory``."""
    weights = weight_bytes(config, geometry) * target.tp // target.processes
    state = state_bytes(config, geometry) // target.processes
    return OnMachine(weights, state, weights + state, *memory)


def in_words(sizes: OnMachine) -> str:
    """The sum, compared with the memory of this machine."""
    text = f"{readable(sizes.weights)} of weights + {readable(sizes.state)} of state = {readable(sizes.total)}"
    if not sizes.memory:
        return text
    free = f", {readable(sizes.available)} free" if sizes.available else ""
    text += f" of the {readable(sizes.memory)} that are here{free}"
    return text if sizes.total <= (sizes.available or sizes.memory) else f"{text}: too much"


def check_memory(config: Config, target: TargetSpec, geometry: Geometry, cells: Mapping[str, Program]) -> None:
    """Refuses a compiled target that a device cannot hold. Pools are checked before anything is compiled.

    Raises:
        PlanError: With the sum, and the options that lower it.
    """
    device = held(config, target, geometry)
    dearest = max(cells, key=lambda name: cells[name].memory.passing)
    temporaries, programs = cells[dearest].memory.passing, sum(cell.memory.code for cell in cells.values())
    total = device.total + temporaries + programs
    if device.memory is None or total <= device.memory:
        return
    raise PlanError(
        f"memory of `{target.text}`: expected room for weights ({readable(device.weights)}) + state "
        f"({readable(device.state)}) + temporaries of {dearest} ({readable(temporaries)}) + "
        f"{len(cells)} programs ({readable(programs)}) = {readable(total)} a device, found {readable(device.memory)}",
        f"lower --memory-fraction or --pages (pools), --max-running, or the padding of {dearest}; or take a larger "
        "topology",
    )
