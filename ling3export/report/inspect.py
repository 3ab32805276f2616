"""``ling3export inspect``: an artifact's manifest as a page of text."""

from collections.abc import Iterable

from ling3export.artifacts.calibration import Calibration
from ling3export.artifacts.program_records import Estimate, RooflineBound
from ling3export.artifacts.receipts import ERROR_COLUMNS, error_columns, times_table, told
from ling3export.artifacts.schema import Cell, Manifest, Receipts, State, Target
from ling3export.foundation.tables import aligned, footnotes, selected

# The columns for a terminal of 80 characters; a wide table has all.
CELL_COLUMNS = ("cell", "size MB", "peak MB", *ERROR_COLUMNS)
ESTIMATE_COLUMNS = ("estimates", "ms", "bound ms", "moved MB", "bound MB", "collectives")


def estimated(cells: Iterable[Cell]) -> list[tuple[Cell, Estimate, RooflineBound]]:
    """The cells whose compiler estimates their time, each with its estimate and its roofline bound."""
    return [(cell, cell.estimate, cell.floor) for cell in cells if cell.estimate is not None and cell.floor is not None]


def _megabytes(count: float) -> str:
    return f"{count / 1e6:,.2f}"


def _cells(target: Target, receipts: Receipts | None, wide: bool) -> list[str]:
    rows = []
    for name, cell in target.cells.items():
        sizes = cell.stablehlo.bytes, 0 if cell.exec is None else cell.exec.bytes
        row = {
            "cell": name,
            "status": cell.status,
            "stablehlo MB": _megabytes(sizes[0]),
            "executable MB": _megabytes(sizes[1]),
            "size MB": _megabytes(sum(sizes)),
            "peak MB": _megabytes(cell.memory.peak),
            "temporaries MB": _megabytes(cell.memory.temporaries),
            "Gflop": "-" if cell.flops is None else f"{cell.flops / 1e9:.3f}",
            "compile s": f"{cell.compile_seconds:.1f}",
        }
        rows.append(row | dict(zip(ERROR_COLUMNS, error_columns(name, receipts), strict=True)))
    shown = selected(rows, list(rows[0]) if wide and rows else CELL_COLUMNS)
    return shown if receipts is None else [*shown, *footnotes(told(receipts))]


def _estimates(target: Target, wide: bool) -> list[str]:
    """The compiler's estimates; nothing for a target without them."""
    cells = estimated(target.cells.values())
    if not cells:
        return []
    rows = []
    for cell, estimate, bound in cells:
        counts = {kind: row.count for kind, row in cell.collectives.items()}
        rows.append(
            {
                "estimates": cell.name,
                "ms": f"{estimate.at_least}{estimate.seconds * 1e3:.3f}",
                "bound ms": f"{bound.seconds * 1e3:.3f}",
                "moved MB": "-" if cell.bytes_accessed is None else _megabytes(cell.bytes_accessed),
                "bound MB": _megabytes(bound.moved),
                "collectives": str(sum(counts.values())),
                "of them": ", ".join(f"{count} {kind}" for kind, count in counts.items()) or "none",
            }
        )
    _, first, _ = cells[0]
    notes = [
        f"ms are the compiler's cycles at {first.clock_hz / 1e9:g} GHz, {first.tokens_a_sequence} tokens a sequence, "
        "without collectives: nothing was executed; moved MB is what the program moves, bound the roofline bound"
    ]
    if layers := max(bound.collectives for _, _, bound in cells):
        apart = max(bound.collective_seconds for _, _, bound in cells) * 1e3
        notes.append(
            f"not in ms: collectives. The column has all of a program; the {layers} that the layers of a step cannot "
            f"do without take about {apart:.2f} ms at their latency alone (assumed)"
        )
    if unseen := max(estimate.unseen for _, estimate, _ in cells):
        notes.append(f"at least: up to {unseen} custom calls a call, whose time the compiler does not estimate")
    return [*selected(rows, list(rows[0]) if wide else ESTIMATE_COLUMNS), *footnotes(notes)]


def _state(state: State) -> list[str]:
    rows: list[tuple[str, ...]] = [("state", "shape", "dtype", "split")]
    for array in state.arrays:
        split = [axis for axis, spec in zip(array.axes, array.spec, strict=False) if spec]
        rows.append((array.name, "x".join(map(str, array.shape)), array.dtype, ",".join(split) or "whole"))
    return aligned(rows)


def describe(manifest: Manifest, *, wide: bool = False, calibration: Calibration | None = None, note: str = "") -> str:
    """The plan, cells, sizes, costs and state schema of every target, for a person.

    Args:
        wide: Whether tables may be wider than 80 characters; they then have all columns.
        calibration: Measurements of one target by a machine.
        note: Why there is none, where that has to be said.
    """
    plan, weights = manifest.plan, manifest.weights
    versions = ", ".join(f"{name} {version}" for name, version in manifest.producer.items())
    score = next((target.paddings("score") for target in manifest.targets.values()), ())
    scored = f"score {list(score)}, " if score else ""
    tokenizer = {file.path for file in manifest.tokenizer}
    lines = [
        f"checkpoint  {manifest.source.name}{f', {manifest.source.form}' if manifest.source.form else ''}",
        f"made by     {versions}",
        f"plan        prefill {list(plan.paddings)}, decode {list(plan.decode_paddings)}, {scored}{plan.dtype}, "
        f"context {plan.context}, {plan.max_running} running",
        f"weights     {plan.forms}: {_megabytes(weights.nbytes)} MB in {len(weights.files)} files, "
        f"{len(weights.index)} tensors"
        if weights.index
        else f"weights     none: ling3export attach writes those of a checkpoint, as {plan.forms}",
        f"vectors     {manifest.vectors.source}",
        f"tokenizer   {'yes' if 'tokenizer/tokenizer.json' in tokenizer else 'none: token ids only'}",
    ]
    for name, target in manifest.targets.items():
        receipts, state = manifest.measured(name), target.state
        statuses = sorted({cell.status for cell in target.cells.values()})
        lines += [
            "",
            f"target {name}: {target.tp} device{'s' * (target.tp > 1)}, {' and '.join(statuses)}, "
            f"state abi {target.state_abi[:12]}",
            *footnotes([f"portable programs: StableHLO {target.portable}"]),
            f"  {state.pages} pages of {state.page_size} tokens ({state.placement})",
            *_cells(target, receipts, wide),
            *_estimates(target, wide),
            *(times_table(calibration, target) if calibration is not None and calibration.target == name else ()),
            *_state(state),
        ]
    if notes := [*manifest.notes, *([note] if note else [])]:
        lines += ["", *(line.removeprefix("  ") for line in footnotes(notes))]
    return "\n".join(lines)
