"""``ling3export plan``: what a build would make, and whether the machines hold it, without compiling anything.

Weights, state and roofline bounds follow from the configuration by formula. Temporaries only the compiler knows: they
come from an artifact that was built alike, or are said to be unknown.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path

from ling3export.artifacts.calibration import Calibration, CellTimes, found_beside
from ling3export.artifacts.manifest import read_manifest
from ling3export.artifacts.paddings import CALL
from ling3export.artifacts.program_records import RooflineBound
from ling3export.artifacts.schema import Cell, Manifest
from ling3export.cost.chips import CHIPS
from ling3export.cost.roofline import TOKENS, roofline_bound
from ling3export.foundation.errors import listed
from ling3export.foundation.tables import aligned, readable, selected
from ling3export.machine.environment import usable_memory
from ling3export.model.config import Config
from ling3export.model.geometry import CHUNK
from ling3export.plan.memory import Held, OnMachine, by_form, held, in_words, on_machine
from ling3export.plan.options import Options, spelled
from ling3export.plan.paddings import (
    DecodeWaste,
    Histogram,
    Length,
    Padded,
    PrefillWaste,
    best_paddings,
    decode_waste,
    grid,
    prefill_waste,
    split_by_context,
)
from ling3export.plan.plan import Plan, make_plans
from ling3export.plan.recorded import layout_difference

COST = f"a call counted as its padded tokens and {CALL} more"
BOUND_COLUMNS = ("bound ms", "bound by", "by memory", "by compute", "MB moved", "Gflop")
COMPILED_COLUMNS = ("temporaries MB", "estimate ms")
MEASURED = "measured ms"


@dataclass(frozen=True)
class PricedBound(RooflineBound):
    """A cell's roofline bound, and the two times of which it is the larger one."""

    memory_seconds: float
    compute_seconds: float


@dataclass(frozen=True)
class PricedCell:
    """What one cell would cost."""

    bound: PricedBound | None  # the roofline bound; None where no table knows the machine
    temporaries: int | None  # bytes on one device; None while nothing is compiled
    # The compiler's estimate; None while nothing is compiled, or where it estimates nothing.
    estimated_seconds: float | None
    measured_seconds: float | None = None  # what a machine measured, by the calibration beside the artifact
    unseen: int = 0  # custom calls, whose time the estimate does not have


@dataclass(frozen=True)
class Pool:
    """Slots and latent pages of a target; ``tokens`` is what all pages hold."""

    slots: int
    pages: int
    page_size: int
    placement: str
    tokens: int


@dataclass(frozen=True)
class TokenCosts:
    """What a token of each prefill padding costs when its call is full."""

    source: str  # ``measured``, or ``estimate``: the compiler's, without collectives
    seconds: dict[int, float]  # by padding, smallest first
    cheapest_paddings: tuple[int, ...]  # the paddings at which a token costs less than at every smaller one
    unseen: bool = False  # whether custom calls, whose time an estimate does not have, take part


@dataclass(frozen=True)
class PricedForm:
    """What weights in one form would hold and cost."""

    weights: int  # bytes on a device
    read: int  # bytes that a device reads and writes in a step of the smallest decode padding
    seconds: float | None  # the roofline bound of that step; None where no table knows the machine
    fits: bool | None  # whether they fit a device, or this machine, beside the planned state; None where it is unknown


@dataclass(frozen=True)
class PricedTarget:
    """What one target would hold and cost."""

    target: str  # the target as a user writes it
    tp: int  # its devices
    hosts: int  # its hosts
    notes: tuple[str, ...]  # what was chosen, and why
    pool: Pool  # slots and pages
    device: Held  # bytes on one device
    unknown: str | None  # why temporaries are not known; None where they are
    tokens_a_sequence: int  # cached tokens that loops over pages are counted for
    cells: dict[str, PricedCell]  # by name
    measured: str | None = None  # on which machine, or why a calibration that is there is not used
    prefill: TokenCosts | None = None  # None with one padding, or where nothing gives the times of all of them
    machine: OnMachine | None = None  # what one machine holds, and this one has; None for accelerators
    forms: dict[str, PricedForm] | None = None  # by what --weights calls them


@dataclass(frozen=True)
class BetterPaddings:
    """Paddings that pad less; ``exact`` if all sets were tried, ``options`` is how ``build`` takes them."""

    paddings: tuple[int, ...]
    exact: bool
    prefill: PrefillWaste
    options: str


@dataclass(frozen=True)
class Traffic:
    """What a histogram of requests would pad."""

    requests: int  # how many the context holds
    refused: int  # how many it does not
    prefill: PrefillWaste | None  # what prefill pads; None where the context holds no request, like the next two
    decode: DecodeWaste | None  # what decode pads
    better: BetterPaddings | None  # paddings that cost less, as many and no larger; None where none were found


@dataclass(frozen=True)
class Priced:
    """Everything that ``ling3export plan`` shows; ``lengths`` only if a histogram was given."""

    dtype: str
    paddings: tuple[int, ...]
    decode_paddings: tuple[int, ...]
    score_paddings: tuple[int, ...]
    context: int
    targets: dict[str, PricedTarget]
    lengths: Traffic | None = None


def priced(
    config: Config,
    options: Options,
    lengths: Sequence[Length] = (),
    artifact: Path | None = None,
    ignore: Sequence[str] = (),
) -> Priced:
    """Plans every target and prices it.

    Args:
        config: The model.
        options: The options of a build.
        lengths: A histogram of requests; empty for none.
        artifact: Compiled for the same plan: gives temporaries and times.
        ignore: Fields of config.json that were ignored, for the command that is recommended.

    Raises:
        PlanError: The plan cannot be built.
        ArtifactError: ``artifact`` is none.
    """
    plans = make_plans(config, options)
    manifest = None if artifact is None else read_manifest(artifact)
    measured = (None, None) if artifact is None or manifest is None else found_beside(artifact, manifest)
    first = plans[0]
    return Priced(
        options.dtype,
        first.paddings,
        first.decode_paddings,
        first.score_paddings,
        first.context,
        {plan.target.name: _target(config, plan, manifest, *measured) for plan in plans},
        _traffic(lengths, first, options, ignore) if lengths else None,
    )


def _target(
    config: Config, plan: Plan, manifest: Manifest | None, calibration: Calibration | None, note: str | None
) -> PricedTarget:
    target, geometry = plan.target, plan.geometry
    compiled: dict[str, Cell] = {}
    unknown = None
    if manifest is None:
        unknown = "unknown until compiled (--from ARTIFACT takes them from one that was built alike)"
    elif difference := layout_difference(config, plan, manifest):
        unknown = f"unknown: the artifact of --from has {difference}"
    else:
        compiled = {cell.name: manifest.targets[target.name].cells[cell.name] for cell in plan.cells}
    times: dict[str, CellTimes] = {}
    if compiled and calibration is not None and calibration.target == target.name:
        times, note = calibration.cells, f"measured on {calibration.machine}, {calibration.made}"
    context = min(TOKENS, plan.context)
    cells = {}
    for cell in plan.cells:
        bound = None
        if (chip := target.chip) is not None:
            found = roofline_bound(config, geometry, cell.phase, cell.padding, chip, context)
            both = found.moved / chip.bandwidth, found.flops / chip.flops
            bound = PricedBound(**vars(found), memory_seconds=both[0], compute_seconds=both[1])
        record = compiled.get(cell.name)
        passing, seconds = (None, None) if record is None else (record.memory.passing, record.estimated_seconds)
        unseen = 0 if record is None or record.estimate is None else record.estimate.unseen
        measured = times[cell.name].median if cell.name in times else None
        cells[cell.name] = PricedCell(bound, passing, seconds, measured, unseen)
    held_tokens = geometry.pages * geometry.page_size
    pool = Pool(geometry.slots, geometry.pages, geometry.page_size, geometry.placement, held_tokens)
    device = held(config, target, geometry, compiled)
    machine = on_machine(config, target, geometry, usable_memory()) if target.platform == "cpu" else None
    return PricedTarget(
        target.text,
        target.tp,
        target.processes,
        plan.notes,
        pool,
        device,
        unknown,
        context,
        cells,
        note,
        token_costs(cells, plan.paddings),
        machine,
        _priced_forms(config, plan, device, machine, context),
    )


def _priced_forms(
    config: Config, plan: Plan, device: Held, machine: OnMachine | None, tokens: int
) -> dict[str, PricedForm]:
    target, found = plan.target, dict[str, PricedForm]()
    chip = target.chip or next(iter(CHIPS.values()))  # bytes are the same on any
    if machine is None:
        most, fixed, devices = device.memory, device.total - device.weights, 1
    else:
        most, fixed, devices = machine.available or machine.memory, machine.state, target.tp // target.processes
    for name, size in by_form(config, plan.geometry).items():
        form = replace(plan.geometry, weights=name)
        bound = roofline_bound(config, form, "decode", plan.decode_paddings[0], chip, tokens)
        seconds = None if target.chip is None else bound.seconds
        found[name] = PricedForm(size, bound.moved, seconds, fixed + size * devices <= most if most else None)
    return found


def token_costs(cells: Mapping[str, PricedCell], paddings: Sequence[int]) -> TokenCosts | None:
    """What a token of each of the prefill ``paddings`` costs, by measured times or else by estimates.

    A padding is worth its program if a token costs less at it than at every smaller padding: several calls of a smaller
    one would else take no longer. None for a single padding, or where the times of some are unknown.
    """
    rows = {padding: cells[f"prefill@{padding}"] for padding in sorted(paddings)}
    for source in ("measured", "estimate"):
        times = {p: row.measured_seconds if source == "measured" else row.estimated_seconds for p, row in rows.items()}
        seconds = {padding: time / padding for padding, time in times.items() if time is not None}
        if len(seconds) == len(rows) > 1:
            least = list(accumulate(seconds.values(), min))
            cheapest_paddings = [p for i, (p, each) in enumerate(seconds.items()) if not i or each < least[i - 1]]
            unseen = source == "estimate" and any(row.unseen for row in rows.values())
            return TokenCosts(source, seconds, tuple(cheapest_paddings), unseen)
    return None


def _traffic(lengths: Sequence[Length], plan: Plan, options: Options, ignore: Sequence[str]) -> Traffic:
    fits, refused = split_by_context(lengths, plan.context)
    requests = sum(length.count for length in fits)
    if not fits:
        return Traffic(requests, refused, None, None, None)
    count, largest = len(plan.paddings), plan.paddings[-1]
    best, histogram, better = best_paddings(fits, count, largest), Histogram(fits, largest), None
    if best is not None and histogram.cost(best) < histogram.cost(plan.paddings):
        # Decode's paddings would follow prefill's: they are pinned to what they are.
        pinned = replace(options, paddings=best, decode_paddings=plan.decode_paddings)
        exact = grid(count, largest) == CHUNK
        better = BetterPaddings(best, exact, prefill_waste(fits, best), spelled(pinned, ignore))
    decode = decode_waste(fits, plan.decode_paddings, plan.geometry.slots)
    return Traffic(requests, refused, prefill_waste(fits, plan.paddings), decode, better)


def described(priced: Priced, *, wide: bool = False) -> str:
    """The text for a person; ``wide`` adds columns that 80 characters do not hold."""
    scored = f"score {_numbers(priced.score_paddings)}, " if priced.score_paddings else ""
    lines = [
        f"plan  prefill {_numbers(priced.paddings)}, decode {_numbers(priced.decode_paddings)}, {scored}"
        f"{priced.dtype}, context {priced.context}"
    ]
    for name, target in priced.targets.items():
        lines += ["", *_target_lines(name, target, wide)]
    if priced.lengths is not None:
        lines += ["", *_traffic_lines(priced.lengths, priced.context)]
    return "\n".join(lines)


def _numbers(values: Sequence[int]) -> str:
    return ",".join(map(str, values))


def _target_lines(name: str, target: PricedTarget, wide: bool) -> list[str]:
    device, hosts = target.device, target.hosts
    sizes = f"{readable(device.weights)} of weights + {readable(device.state)} of state"
    if target.unknown is None:
        sizes += f" + {readable(device.temporaries or 0)} of temporaries + {readable(device.programs or 0)} of programs"
    total = f"{readable(device.total)} a device"
    if device.memory is not None:
        total += f", {device.total / device.memory:.1%} of {readable(device.memory)}"
    lines = [
        f"target {name}: {target.tp} device{'s' * (target.tp > 1)} on {hosts} host{'s' * (hosts > 1)}",
        *(f"  {note}" for note in target.notes),
    ]
    machine = target.machine
    if machine is None or machine.total != device.total:  # else the device is the machine, and its sum is made once
        lines.append(f"  {sizes} = {total}")
    if machine is not None:
        lines.append(f"  one machine: {in_words(machine)}")
    if target.forms is not None:
        lines += _form_lines(target, target.forms)
    if target.unknown is not None:
        lines.append(f"  temporaries and programs: {target.unknown}")
    bounded = any(cell.bound is not None for cell in target.cells.values())
    if bounded:
        lines.append(f"  roofline bounds at {target.tokens_a_sequence} tokens a sequence, without collectives")
    else:
        lines.append("  roofline bounds: none, the bandwidth and FLOP/s of this machine's processor are in no table")
    wanted = BOUND_COLUMNS[: 6 if wide else 2] if bounded else ()
    if target.measured is not None:
        lines.append(f"  {target.measured}")
    if target.unknown is None or (wide and bounded):
        wanted += COMPILED_COLUMNS
    if any(cell.measured_seconds is not None for cell in target.cells.values()):
        wanted += (MEASURED,)
    rows = [_columns(name, cell) for name, cell in target.cells.items()]
    table = selected(rows, ("cell", *wanted)) if wanted else []
    return lines + table + ([] if target.prefill is None else token_lines(target.prefill))


def _form_lines(target: PricedTarget, forms: Mapping[str, PricedForm]) -> list[str]:
    """The bytes and the time of each form, and which of them fit a device, or this machine."""
    device, machine = target.device, target.machine
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
    fitting = [name for name, form in forms.items() if form.fits]
    if machine is not None:
        there = f"this machine ({readable(machine.available or machine.memory)}{' free' * bool(machine.available)})"
    else:
        there = f"a device ({readable(device.memory or 0)})"
    if any(form.fits is not None for form in forms.values()):
        which = listed(fitting, len(forms)) if fitting else "none"
        lines.append(f"  of these, {which} {'fit' if len(fitting) > 1 else 'fits'} {there}, state included")
    return lines


def token_lines(costs: TokenCosts) -> list[str]:
    """What a token of each prefill padding costs, and which paddings follow from that."""
    source = "as measured" if costs.source == "measured" else "by estimate, without collectives"
    source += ", at least" if costs.unseen else ""
    each = ", ".join(f"{1e6 * seconds:.2f} at {padding}" for padding, seconds in costs.seconds.items())
    lines = [f"  prefill, µs a token of a full call {source}: {each}"]
    largest = max(costs.seconds)
    if vain := [padding for padding in costs.seconds if padding not in costs.cheapest_paddings]:
        word = "pays" if len(vain) == 1 else "pay"
        lines.append(f"  {_numbers(vain)} {word} nothing: a token costs no less than at a smaller padding")
        lines.append(f"  ling3export build CHECKPOINT --paddings {_numbers(costs.cheapest_paddings)}")
    if largest in costs.cheapest_paddings:
        before = costs.cheapest_paddings[-2]
        saved = 1 - costs.seconds[largest] / costs.seconds[before]
        lines.append(
            f"  {largest} pays for prompts of {largest:,} tokens and more: {saved:.1%} less a token than {before}"
        )
    return lines


def _columns(name: str, cell: PricedCell) -> dict[str, str]:
    """A text for every column."""
    columns = {"cell": name} | dict.fromkeys((*BOUND_COLUMNS, *COMPILED_COLUMNS, MEASURED), "-")
    if (bound := cell.bound) is not None:
        memory, compute = bound.memory_seconds, bound.compute_seconds
        columns |= {
            "bound ms": f"{1e3 * bound.seconds:.3f}",
            "bound by": "memory" if memory >= compute else "compute",
            "by memory": f"{1e3 * memory:.3f}",
            "by compute": f"{1e3 * compute:.3f}",
            "MB moved": f"{bound.moved / 1e6:,.1f}",
            "Gflop": f"{bound.flops / 1e9:,.2f}",
        }
    if cell.temporaries is not None:
        columns["temporaries MB"] = f"{cell.temporaries / 1e6:,.1f}"
    if cell.estimated_seconds is not None:
        columns["estimate ms"] = f"{'at least ' if cell.unseen else ''}{1e3 * cell.estimated_seconds:.3f}"
    if cell.measured_seconds is not None:
        columns[MEASURED] = f"{1e3 * cell.measured_seconds:.3f}"
    return columns


def _traffic_lines(found: Traffic, context: int) -> list[str]:
    refused = f"; {found.refused:,} more do not fit the context of {context} and would be refused"
    lines = [f"lengths: {found.requests:,} requests{refused if found.refused else ''}"]
    prefill, decode, better = found.prefill, found.decode, found.better
    if prefill is None or decode is None:
        return lines
    rows: list[tuple[str, ...]] = [("padding", "calls", "padded tokens", "wasted", "share")]
    for padding, row in prefill.paddings.items():
        columns = (f"{number:,}" for number in (row.calls, row.padded, row.wasted))
        rows.append((f"prefill@{padding}", *columns, _share(row)))
    lines += [
        f"  prefill, {prefill.tokens:,} tokens: each request alone pads {_in_calls(prefill.alone)}; "
        f"all waiting at once {_in_calls(prefill.packed)}",
        *aligned(rows),
        f"  decode, {decode.rows:,} rows: one sequence at a time, in decode@{decode.alone_padding}, pads "
        f"{_of(decode.alone)}; {decode.running} at a time, in decode@{decode.full_padding}, {_of(decode.full)}",
    ]
    if better is None:
        return [*lines, f"  no better paddings found, as many and no larger: {COST}"]
    return [
        *lines,
        f"  better paddings, as many and no larger: {_numbers(better.paddings)}: each request alone pads "
        f"{_in_calls(better.prefill.alone)}",
        f"  ({'all sets' if better.exact else 'those of a coarse grid'} were tried; {COST})",
        f"  ling3export build CHECKPOINT {better.options}",
    ]


def _in_calls(row: Padded) -> str:
    return f"{row.wasted:,} of {row.padded:,} in {row.calls:,} calls ({_share(row)})"


def _of(row: Padded) -> str:
    return f"{row.wasted:,} of {row.padded:,} ({_share(row)})"


def _share(row: Padded) -> str:
    return f"{row.wasted / row.padded:.1%}" if row.padded else "-"
