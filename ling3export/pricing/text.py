"""The record of ``ling3export plan`` as a page of text."""

from typing import Any

from ling3export.runners.engine.inputs import CALL
from ling3export.tables import aligned, readable

COST = f"a call counted as its slots and {CALL} more"


def described(record: dict[str, Any]) -> str:
    """The record of :func:`planned` for a person."""
    scored = f"score {record['score_paddings']}, " if record["score_paddings"] else ""
    lines = [
        f"plan  prefill {record['paddings']}, decode {record['decode_paddings']}, {scored}{record['dtype']}, "
        f"context {record['context']}"
    ]
    for name, target in record["targets"].items():
        lines += ["", *_described_target(name, target)]
    if "lengths" in record:
        lines += ["", *_described_lengths(record["lengths"], record["context"])]
    return "\n".join(lines)


def _described_target(name: str, target: dict[str, Any]) -> list[str]:
    device, hosts = target["device"], target["hosts"]
    sizes = f"{readable(device['weights'])} of weights + {readable(device['state'])} of state"
    if target["unknown"] is None:
        sizes += f" + {readable(device['temporaries'])} of temporaries + {readable(device['programs'])} of programs"
    total = f"{readable(device['total'])} a device"
    if device["memory"] is not None:
        total += f", {device['total'] / device['memory']:.1%} of {readable(device['memory'])}"
    lines = [
        f"target {name}: {target['tp']} device{'s' * (target['tp'] > 1)} on {hosts} host{'s' * (hosts > 1)}",
        *(f"  {note}" for note in target["notes"]),
        f"  {sizes} = {total}",
    ]
    if target["unknown"] is not None:
        lines.append(f"  temporaries and programs: {target['unknown']}")
    rows: list[tuple[str, ...]] = [
        ("cell", "floor ms", "by memory", "by compute", "MB moved", "Gflop", "temporaries MB", "estimate ms")
    ]
    rows += [(cell, *_cell_columns(row)) for cell, row in target["cells"].items()]
    if all(row["floor"] is None for row in target["cells"].values()):
        lines.append("  floor times: none, the bandwidth and FLOP/s of this machine's processor are in no table")
        rows = [(row[0], *row[6:]) for row in rows] if target["unknown"] is None else []
    else:
        lines.append(f"  floors at {target['tokens_a_sequence']} tokens a sequence, without collectives")
    return lines + aligned(rows)


def _cell_columns(row: dict[str, Any]) -> tuple[str, ...]:
    low, seconds = row["floor"], row["estimated_seconds"]
    columns: tuple[str, ...] = ("-",) * 5
    if low is not None:
        times = (low["seconds"], low["memory_seconds"], low["compute_seconds"])
        columns = (
            *(f"{1e3 * value:.3f}" for value in times),
            f"{sum(low['bytes'].values()) / 1e6:,.1f}",
            f"{low['flops'] / 1e9:,.2f}",
        )
    temporaries = "-" if row["temporaries"] is None else f"{row['temporaries'] / 1e6:,.1f}"
    return (*columns, temporaries, "-" if seconds is None else f"{1e3 * seconds:.3f}")


def _described_lengths(record: dict[str, Any], context: int) -> list[str]:
    refused = f"; {record['refused']:,} more do not fit the context of {context} and would be refused"
    lines = [f"lengths: {record['requests']:,} requests{refused if record['refused'] else ''}"]
    if "prefill" not in record:
        return lines
    prefill, decode, better = record["prefill"], record["decode"], record["better"]
    rows: list[tuple[str, ...]] = [("padding", "calls", "slots", "padded", "of its slots")]
    for padding, row in prefill["alone"]["paddings"].items():
        columns = (f"{row[name]:,}" for name in ("calls", "slots", "wasted"))
        rows.append((f"prefill@{padding}", *columns, _share(row["wasted"], row["slots"])))
    alone, packed = prefill["alone"], prefill["packed"]
    steps, full = decode["alone"], decode["full"]
    lines += [
        f"  prefill, {prefill['tokens']:,} tokens: each request alone pads {_of(alone)}; "
        f"all waiting at once {_of(packed)}",
        *aligned(rows),
        f"  decode, {decode['rows']:,} rows: one sequence at a time, in decode@{steps['padding']}, pads {_of(steps)}; "
        f"{full['running']} at a time, in decode@{full['padding']}, {_of(full)}",
    ]
    if better is None:
        return [*lines, f"  no better paddings found, as many and no larger: {COST}"]
    return [
        *lines,
        f"  better paddings, as many and no larger: {','.join(map(str, better['paddings']))}: each request alone pads "
        f"{_of(better['prefill']['alone'])}",
        f"  ({'all sets' if better['exact'] else 'those of a coarse grid'} were tried; {COST})",
        f"  ling3export build CHECKPOINT {better['options']}",
    ]


def _of(row: dict[str, Any]) -> str:
    share = _share(row["wasted"], row["slots"])
    calls = f" in {row['calls']:,} calls" if "calls" in row else ""
    return f"{row['wasted']:,} of {row['slots']:,}{calls} ({share})"


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "-"
