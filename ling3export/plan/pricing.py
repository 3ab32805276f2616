"""``ling3export plan``: what a build would make, and whether the machines hold it, without compiling anything.

Weights, state and roofline bounds follow from the configuration by formula. Only the compiler knows temporaries:
``ling3export inspect`` shows them.
"""

from dataclasses import dataclass, replace

from msgspec import structs

from ling3export.artifacts.program_records import RooflineBound
from ling3export.cost.chips import CHIPS, Chip
from ling3export.cost.roofline import TOKENS, roofline_bound
from ling3export.foundation.errors import listed
from ling3export.foundation.tables import readable, selected
from ling3export.machine.environment import usable_memory
from ling3export.model.config import Config
from ling3export.model.state import state_bytes
from ling3export.plan.here import SHARE
from ling3export.plan.memory import Held, OnMachine, by_form, held, in_words, on_machine
from ling3export.plan.options import Options
from ling3export.plan.plan import Plan, make_plans

BOUND_COLUMNS = ("bound ms", "bound by", "by memory", "by compute", "MB moved", "Gflop")
BY_LOSS = ("bf16", "int8", "int4", "int4-small")  # the least loss first: docs/log/evaluation.md
MACHINES = (8, 16, 32)  # GB of memory


class PricedBound(RooflineBound, frozen=True):
    """A cell's roofline bound: the larger one of two times."""

    memory_seconds: float
    compute_seconds: float


@dataclass(frozen=True)
class PricedForm:
    """Memory and cost of weights in one form."""

    weights: int  # bytes on a device
    read: int  # bytes that a device reads and writes in a step of the smallest decode padding
    seconds: float | None  # the roofline bound of that step; None if no table has the machine
    fits: bool | None  # whether they fit a device, or this machine, with the planned state; None if it is unknown


@dataclass(frozen=True)
class PricedTarget:
    """Memory and cost of one target."""

    target: str  # the target as a user writes it
    tp: int
    hosts: int
    notes: tuple[str, ...]  # what was chosen, and why
    device: Held  # bytes on one device
    tokens_a_sequence: int  # cached tokens that loops over pages are counted for
    cells: dict[str, PricedBound | None]  # by name; None if no table has the machine
    machine: OnMachine | None  # what one machine holds and has; None for accelerators
    forms: dict[str, PricedForm]  # by the names of --weights
    recommended: str | None  # the form with the least loss that fits; None if none does, or if it is unknown
    recommended_by_memory: dict[str, str | None]  # the same for machines of 8, 16 and 32 GB; empty for accelerators


@dataclass(frozen=True)
class Priced:
    """Everything that ``ling3export plan`` shows."""

    dtype: str
    paddings: tuple[int, ...]
    decode_paddings: tuple[int, ...]
    score_paddings: tuple[int, ...]
    context: int
    targets: dict[str, PricedTarget]


def priced(config: Config, options: Options, tokens: int = TOKENS) -> Priced:
    """Plans every target and prices it.

    Args:
        tokens: Cached by each decoding sequence; at most the context counts.

    Raises:
        PlanError: The plan cannot be built.
    """
    plans = make_plans(config, options)
    first = plans[0]
    return Priced(
        options.dtype,
        first.paddings,
        first.decode_paddings,
        first.score_paddings,
        first.context,
        {plan.target.name: _target(config, plan, min(tokens, plan.context)) for plan in plans},
    )


def _target(config: Config, plan: Plan, tokens: int) -> PricedTarget:
    target, geometry = plan.target, plan.geometry
    cells = {
        cell.name: None if target.chip is None else _bound(config, plan, cell.phase, cell.padding, target.chip, tokens)
        for cell in plan.cells
    }
    device = held(config, target, geometry)
    machine = on_machine(config, target, geometry, usable_memory()) if target.platform == "cpu" else None
    forms = _forms(config, plan, device, machine, tokens)
    return PricedTarget(
        target.text,
        target.tp,
        target.processes,
        plan.notes,
        device,
        tokens,
        cells,
        machine,
        forms,
        next((name for name in BY_LOSS if name in forms and forms[name].fits), None),
        {} if machine is None else _by_memory(config, plan, forms),
    )


def _bound(config: Config, plan: Plan, phase: str, padding: int, chip: Chip, tokens: int) -> PricedBound:
    bound = roofline_bound(config, plan.geometry, phase, padding, chip, tokens)
    memory, compute = bound.moved / chip.bandwidth, bound.flops / chip.flops
    return PricedBound(**structs.asdict(bound), memory_seconds=memory, compute_seconds=compute)


def _forms(config: Config, plan: Plan, device: Held, machine: OnMachine | None, tokens: int) -> dict[str, PricedForm]:
    target, forms = plan.target, dict[str, PricedForm]()
    chip = target.chip or next(iter(CHIPS.values()))  # bytes are the same on any
    if machine is None:
        room, fixed, devices = device.memory, device.total - device.weights, 1
    else:
        room, fixed, devices = machine.available or machine.memory, machine.state, target.tp // target.processes
    for name, size in by_form(config, plan.geometry).items():
        geometry = replace(plan.geometry, weights=name)
        bound = roofline_bound(config, geometry, "decode", plan.decode_paddings[0], chip, tokens)
        seconds = None if target.chip is None else bound.seconds
        forms[name] = PricedForm(size, bound.moved, seconds, fixed + size * devices <= room if room else None)
    return forms


def _by_memory(config: Config, plan: Plan, forms: dict[str, PricedForm]) -> dict[str, str | None]:
    """The form with the least loss for each of MACHINES: SHARE of its memory holds the weights and one sequence of the
    whole context."""
    geometry, devices = plan.geometry, plan.target.tp // plan.target.processes
    state = state_bytes(config, replace(geometry, slots=1, snapshots=0, pages=geometry.max_pages))
    state //= plan.target.processes
    names: dict[str, str | None] = {}
    for size in MACHINES:
        fitting = (
            name for name in BY_LOSS if name in forms and forms[name].weights * devices + state <= SHARE * size * 1e9
        )
        names[f"{size} GB"] = next(fitting, None)
    return names


def described(priced: Priced, *, wide: bool = False) -> str:
    """The text for a person; ``wide`` adds columns that 80 characters do not hold."""
    paddings = {"prefill": priced.paddings, "decode": priced.decode_paddings, "score": priced.score_paddings}
    phases = [f"{phase} {','.join(map(str, values))}" for phase, values in paddings.items() if values]
    lines = [f"plan  {', '.join(phases)}, {priced.dtype}, context {priced.context}"]
    for name, target in priced.targets.items():
        lines += ["", *_target_lines(name, target, wide)]
    return "\n".join(lines)


def _target_lines(name: str, target: PricedTarget, wide: bool) -> list[str]:
    device, machine, hosts = target.device, target.machine, target.hosts
    sizes = f"{readable(device.weights)} of weights + {readable(device.state)} of state"
    total = f"{readable(device.total)} a device"
    if device.memory is not None:
        total += f", {device.total / device.memory:.1%} of {readable(device.memory)}"
    lines = [
        f"target {name}: {target.tp} device{'s' * (target.tp > 1)} on {hosts} host{'s' * (hosts > 1)}",
        *(f"  {note}" for note in target.notes),
    ]
    if machine is None or machine.total != device.total:  # else the device is the machine, and one sum is enough
        lines.append(f"  {sizes} = {total}")
    if machine is not None:
        lines.append(f"  one machine: {in_words(machine)}")
    lines += _form_lines(target)
    lines.append("  temporaries and programs: unknown until compiled")
    bounds = {name: bound for name, bound in target.cells.items() if bound is not None}
    if not bounds:
        return [*lines, "  roofline bounds: none, the bandwidth and FLOP/s of this machine's processor are in no table"]
    lines.append(f"  roofline bounds at {target.tokens_a_sequence} tokens a sequence, without collectives")
    rows = [_columns(name, bound) for name, bound in bounds.items()]
    return lines + selected(rows, ("cell", *BOUND_COLUMNS[: 6 if wide else 2]))


def _form_lines(target: PricedTarget) -> list[str]:
    """The bytes and the time of each form, and which of them fit a device, or this machine."""
    machine, forms = target.machine, target.forms
    step = min((name for name in target.cells if name.startswith("decode@")), key=lambda name: int(name[7:]))
    timed = any(form.seconds is not None for form in forms.values())
    weights = [f"{name} {readable(form.weights)}" for name, form in forms.items()]
    costs = [
        f"{name} {readable(form.read) if form.seconds is None else f'{1e3 * form.seconds:.3f} ms'}"
        for name, form in forms.items()
    ]
    lines = [
        f"  weights a device, by --weights: {', '.join(weights)}",
        f"  {step} {'takes' if timed else 'reads'} at the least: {', '.join(costs)}",
    ]
    if any(form.fits is not None for form in forms.values()):
        fitting = [name for name, form in forms.items() if form.fits]
        room = f"a device ({readable(target.device.memory or 0)})"
        if machine is not None:
            free = " free" if machine.available else ""
            room = f"this machine ({readable(machine.available or machine.memory)}{free})"
        names = listed(fitting, len(forms)) if fitting else "none"
        lines.append(f"  of these, {names} {'fit' if len(fitting) > 1 else 'fits'} {room}, state included")
        if target.recommended is not None:
            lines.append(f"  recommended: --weights {target.recommended}, the least loss of those that fit")
    if target.recommended_by_memory:
        names = ", ".join(f"{size}: {name or 'none'}" for size, name in target.recommended_by_memory.items())
        lines.append(f"  recommended by a machine's memory: {names}")
    return lines


def _columns(name: str, bound: PricedBound) -> dict[str, str]:
    memory, compute = bound.memory_seconds, bound.compute_seconds
    return {
        "cell": name,
        "bound ms": f"{1e3 * bound.seconds:.3f}",
        "bound by": "memory" if memory >= compute else "compute",
        "by memory": f"{1e3 * memory:.3f}",
        "by compute": f"{1e3 * compute:.3f}",
        "MB moved": f"{bound.moved / 1e6:,.1f}",
        "Gflop": f"{bound.flops / 1e9:,.2f}",
    }
