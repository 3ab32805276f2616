"""How many latent pages a target gets: what is asked for, or what its memory holds beside weights and slots."""

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from ling3export.errors import PlanError
from ling3export.model.config import Config
from ling3export.model.geometry import Geometry
from ling3export.model.parameters import arguments
from ling3export.model.state import state_bytes
from ling3export.targets import Target

if TYPE_CHECKING:
    from ling3export.plan import Options


def readable(count: float) -> str:
    """Bytes as a person reads them."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= scale:
            return f"{count / scale:.2f} {unit}"
    return f"{count:.0f} B"


def weight_bytes(config: Config, geometry: Geometry) -> int:
    """Bytes of parameters on one device."""
    total = 0
    for argument in arguments(config, geometry):
        width = 4 if "float32" in (argument.parameter.dtype, geometry.dtype) else 2
        total += width * math.prod(argument.shape) // (geometry.tp if argument.split else 1)
    return total


def size_pages(config: Config, geometry: Geometry, options: "Options", target: Target) -> tuple[Geometry, str]:
    """Gives the latent pool its pages; refuses what does not fit, with the sum.

    Returns:
        The geometry with its pages, and a line for the user.

    Raises:
        PlanError: The state does not fit ``--state-memory`` (cpu) or ``--memory-fraction`` of a chip's memory.
    """
    if options.pages is not None and options.pages < 1:
        raise PlanError(f"--pages: expected a positive number, found {options.pages}")
    step = geometry.tp if geometry.cut_pages else 1  # every device has as many pages
    if options.pages is not None and options.pages % step:
        how = f"{geometry.placement} over as many devices"
        raise PlanError(f"--pages: expected a multiple of {step} ({how}), found {options.pages}")
    if target.chip is not None:
        return _on_chip(config, geometry, options, target, step)
    empty = state_bytes(config, geometry)  # the dummy page is in it
    each = state_bytes(config, replace(geometry, pages=1)) - empty
    most = geometry.slots * geometry.max_pages
    fits = max(0, (options.state_memory - empty) // each)
    pages = min(most, fits) if options.pages is None else options.pages
    need = empty + each * (pages if options.pages is not None else geometry.max_pages)
    if need > options.state_memory:
        asked = pages if options.pages is not None else geometry.max_pages
        raise PlanError(
            f"--state-memory: expected room for {geometry.slots + 1} slots and one page ({readable(empty)}) "
            f"+ {asked} pages of {geometry.page_size} tokens ({readable(each)} each) = {readable(need)}, "
            f"on {geometry.tp} devices together, found {readable(options.state_memory)}",
            "lower --max-running, --context or --pages, or raise --state-memory",
        )
    why = _why(options, geometry, pages == most, readable(options.state_memory))
    note = f"latent pool: {pages} pages of {geometry.page_size} tokens, {why}; "
    return replace(geometry, pages=pages), note + f"state {readable(empty + each * pages)} in all"


def _why(options: "Options", geometry: Geometry, all_of_them: bool, limit: str) -> str:
    if options.pages is not None:
        return "as asked"
    return f"all that {geometry.slots} full sequences need" if all_of_them else f"what fits {limit}"


def _on_chip(config: Config, geometry: Geometry, options: "Options", target: Target, step: int) -> tuple[Geometry, str]:
    assert target.chip is not None
    tp, memory = geometry.tp, target.chip.memory
    budget = int(options.memory_fraction * memory)
    weights = weight_bytes(config, geometry)
    empty = -(-state_bytes(config, geometry) // tp)
    each = (state_bytes(config, replace(geometry, pages=step)) // tp - empty) / step  # of one device, a page
    most = -(-geometry.slots * geometry.max_pages // step) * step
    fits = max(0, int((budget - weights - empty) / each)) // step * step
    pages = min(most, fits) if options.pages is None else options.pages
    fewest = pages if options.pages is not None else -(-geometry.max_pages // step) * step
    need = weights + empty + each * fewest
    if need > budget:
        raise PlanError(
            f"--memory-fraction of `{target.text}`: expected room for weights ({readable(weights)}) "
            f"+ {geometry.slots + 1} slots and one page ({readable(empty)}) + {fewest} pages of {geometry.page_size} "
            f"tokens ({readable(each * fewest)}) = {readable(need)} a device, found {readable(budget)}, which is "
            f"{options.memory_fraction:g} of {readable(memory)}",
            "lower --max-running, --context or --pages, raise --memory-fraction, or take a larger topology",
        )
    why = _why(options, geometry, pages == most, f"{options.memory_fraction:g} of {readable(memory)} a device")
    note = f"latent pool: {pages} pages of {geometry.page_size} tokens ({geometry.placement}), {why}; a device holds "
    note += f"{readable(weights)} of weights and {readable(empty + each * pages)} of state"
    return replace(geometry, pages=pages), note
