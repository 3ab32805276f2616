"""``ling3export inspect``: an artifact's manifest as a page of text."""

from typing import Any

from ling3export.cost.estimates import peak_bytes
from ling3export.tables import aligned


def _megabytes(count: float) -> str:
    return f"{count / 1e6:,.2f} MB"


def _cells(target: dict[str, Any], receipts: dict[str, Any]) -> list[str]:
    rows: list[tuple[str, ...]] = [
        ("cell", "status", "stablehlo", "executable", "temporaries", "Gflop", "compile s", "worst error")
    ]
    for name, cell in target["cells"].items():
        error = receipts.get(name, {}).get("relative")
        rows.append(
            (
                name,
                cell["status"],
                _megabytes(cell["stablehlo"]["bytes"]),
                _megabytes(cell["exec"]["bytes"]),
                _megabytes(cell["memory"]["temporaries"]),
                "-" if cell["flops"] is None else f"{cell['flops'] / 1e9:.3f}",
                f"{cell['compile_seconds']:.1f}",
                "not run" if error is None else f"{error:.1e}",
            )
        )
    return aligned(rows)


def _estimates(target: dict[str, Any]) -> list[str]:
    """What the compiler estimates for a machine that is not here; nothing for a target without estimates."""
    cells = {name: cell for name, cell in target["cells"].items() if cell.get("estimate")}
    if not cells:
        return []
    rows: list[tuple[str, ...]] = [
        (
            "estimates",
            "ms",
            "floor ms",
            "MB moved",
            "floor MB",
            "without estimate ms",
            "peak a device",
            "copies > 1 MB",
            "experts ms: FLOPs, reading",
            "collectives",
        )
    ]
    for name, cell in cells.items():
        estimate = cell["estimate"]
        kinds = [f"{row['count']} {kind}" for kind, row in cell["collectives"].items()]
        rows.append(
            (
                name,
                f"{estimate['seconds'] * 1e3:.3f}",
                f"{cell['floor']['seconds'] * 1e3:.3f}",
                f"{estimate['memory_bytes'] / 1e6:,.0f}",
                f"{sum(cell['floor']['bytes'].values()) / 1e6:,.0f}",
                f"{sum(estimate['bounded'].values()) * 1e3:.3f}",
                _megabytes(peak_bytes(cell["memory"])),
                str(len(estimate["copies"])),
                _experts(cell),
                ", ".join(kinds) or "none",
            )
        )
    first = next(iter(cells.values()))["estimate"]
    note = (
        f"  estimates are the compiler's cycles at {first['clock_hz'] / 1e9:g} GHz, {first['tokens_a_sequence']} "
        "tokens a sequence, without collectives: nothing was executed"
    )
    layers = max(cell["floor"]["collectives"] for cell in cells.values())
    if layers:
        apart = max(cell["floor"]["collective_seconds"] for cell in cells.values()) * 1e3
        note += f"\n  besides the floor: {layers} collectives, about {apart:.2f} ms at their latency alone (assumed)"
    return [*aligned(rows), note]


def _experts(cell: dict[str, Any]) -> str:
    """Time to compute what is computed of a device's experts, and to read them; ``all`` where none is left out."""
    times = cell.get("experts")
    if times is None:
        return "-"
    shown = f"{times['flop_seconds'] * 1e3:.2f}, {times['weight_seconds'] * 1e3:.2f}"
    return f"all: {shown}" if times["all_local"] else shown


def _state(state: dict[str, Any]) -> list[str]:
    rows: list[tuple[str, ...]] = [("state", "shape", "dtype", "split")]
    for array in state["arrays"]:
        split = [axis for axis, spec in zip(array["axes"], array["spec"], strict=False) if spec]
        rows.append((array["name"], "x".join(map(str, array["shape"])), array["dtype"], ",".join(split) or "whole"))
    return aligned(rows)


def describe(manifest: dict[str, Any], *, wide: bool = False) -> str:
    """The plan, cells, sizes, costs and state schema of every target, for a person."""
    producer, plan, weights = manifest["producer"], manifest["plan"], manifest["weights"]
    versions = ", ".join(f"{name} {version}" for name, version in producer.items())
    scored = f"score {plan['score_paddings']}, " if plan.get("score_paddings") else ""
    lines = [
        f"checkpoint  {manifest['source']['name']}",
        f"made by     {versions}",
        f"plan        prefill {plan['paddings']}, decode {plan['decode_paddings']}, {scored}{plan['dtype']}, "
        f"context {plan['context']}, {plan['max_running']} running",
        f"weights     {_megabytes(weights['bytes'])} in {len(weights['files'])} files, {len(weights['index'])} tensors",
        f"vectors     {manifest['vectors']['source']}",
        f"tokenizer   {'yes' if manifest['tokenizer'] else 'none: token ids only'}",
    ]
    for name, target in manifest["targets"].items():
        receipts = manifest["vectors"].get("receipts", {}).get(name, {}).get("cells", {})
        state = target["state"]
        lines += [
            "",
            f"target {name}: {target['tp']} devices, {state['pages']} pages of {state['page_size']} tokens "
            f"({state['placement']}), state abi {target['state_abi'][:12]}",
            *_cells(target, receipts),
            *_estimates(target),
            *_state(state),
        ]
    if manifest["notes"]:
        lines += ["", *manifest["notes"]]
    return "\n".join(lines)
