"""What ``ling3export plan`` found as a page of text."""

from collections.abc import Sequence

from ling3export.artifacts.paddings import CALL
from ling3export.foundation.tables import aligned, readable, selected
from ling3export.plan.paddings import Padded
from ling3export.pricing.pricing import Priced, PricedCell, PricedTarget, TokenCosts, Traffic

COST = f"a call counted as its padded tokens and {CALL} more"
BOUND_COLUMNS = ("bound ms", "bound by", "by memory", "by compute", "MB moved", "Gflop")
COMPILED_COLUMNS = ("temporaries MB", "estimate ms")
MEASURED = "measured ms"


def described(priced: Priced, *, wide: bool = False) -> str:
    """The text for a person; ``wide`` adds columns that 80 characters do not hold."""
    scored = f"score {_numbers(priced.score_paddings)}, " if priced.score_paddings else ""
    lines = [
        f"plan  prefill {_numbers(priced.paddings)}, decode {_numbers(priced.decode_paddings)}, {scored}"
        f"{priced.dtype}, context {priced.context}"
    ]
    for name, target in priced.targets.items():
        lines += ["", *_target(name, target, wide)]
    if priced.lengths is not None:
        lines += ["", *_traffic(priced.lengths, priced.context)]
    return "\n".join(lines)


def _numbers(values: Sequence[int]) -> str:
    return ",".join(map(str, values))


def _target(name: str, target: PricedTarget, wide: bool) -> list[str]:
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
        f"  {sizes} = {total}",
    ]
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
    return lines + table + ([] if target.prefill is None else _tokens(target.prefill))


def _tokens(costs: TokenCosts) -> list[str]:
    """What a token of each prefill padding costs, and which paddings follow from that."""
    source = "as measured" if costs.source == "measured" else "by estimate, without collectives"
    source += ", at least" if costs.unseen else ""
    each = ", ".join(f"{1e6 * seconds:.2f} at {padding}" for padding, seconds in costs.seconds.items())
    lines = [f"  prefill, µs a token of a full call {source}: {each}"]
    largest = max(costs.seconds)
    if vain := [padding for padding in costs.seconds if padding not in costs.paying]:
        word = "pays" if len(vain) == 1 else "pay"
        lines.append(f"  {_numbers(vain)} {word} nothing: a token costs no less than at a smaller padding")
        lines.append(f"  ling3export build CHECKPOINT --paddings {_numbers(costs.paying)}")
    if largest in costs.paying:
        before = costs.paying[-2]
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


def _traffic(found: Traffic, context: int) -> list[str]:
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
