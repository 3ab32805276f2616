"""What one device holds while a target runs, against what it has: weights, state, temporaries, programs.

All cells are loaded at once, and one runs at a time: programs add up, of temporaries the largest counts.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from ling3export.artifacts.schema import Program
from ling3export.foundation.errors import PlanError
from ling3export.foundation.tables import readable
from ling3export.model.config import Config
from ling3export.plan.plan import Plan
from ling3export.plan.pools import state_of_device, weight_bytes


@dataclass(frozen=True)
class Held:
    """Bytes on one device."""

    weights: int  # its share of the parameters
    state: int  # its share of slots and pages
    # What the cell with the most needs, its outputs that reuse no donated buffer included; None while nothing is
    # compiled.
    temporaries: int | None
    programs: int | None  # the code of all cells; None while nothing is compiled
    dearest: str | None  # the cell with the most temporaries
    total: int  # the sum of what is known
    memory: int | None  # what a device has; None where no table says so


def held(config: Config, plan: Plan, cells: Mapping[str, Program]) -> Held:
    """What a device of ``plan``'s target holds.

    Args:
        config: The model.
        plan: The target's plan.
        cells: Every cell as the compiler left it; empty while nothing is compiled.
    """
    memory = None if plan.target.chip is None else plan.target.chip.memory
    weights, state = weight_bytes(config, plan.geometry), state_of_device(config, plan.geometry)
    if not cells:
        return Held(weights, state, None, None, None, weights + state, memory)
    dearest = max(cells, key=lambda name: cells[name].memory.passing)
    temporaries, programs = cells[dearest].memory.passing, sum(cell.memory.code for cell in cells.values())
    return Held(weights, state, temporaries, programs, dearest, weights + state + temporaries + programs, memory)


def check_memory(config: Config, plan: Plan, cells: Mapping[str, Program]) -> None:
    """Refuses a compiled target that a device cannot hold. Pools are checked before anything is compiled.

    Raises:
        PlanError: With the sum, and the options that lower it.
    """
    found = held(config, plan, cells)
    if found.memory is None or found.total <= found.memory:
        return
    raise PlanError(
        f"memory of `{plan.target.text}`: expected room for weights ({readable(found.weights)}) + state "
        f"({readable(found.state)}) + temporaries of {found.dearest} ({readable(found.temporaries or 0)}) + "
        f"{len(cells)} programs ({readable(found.programs or 0)}) = {readable(found.total)} a device, "
        f"found {readable(found.memory)}",
        f"lower --memory-fraction or --pages (pools), --max-running, or the padding of {found.dearest}; or take a "
        "larger topology",
    )
