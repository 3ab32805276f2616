"""An artifact's vectors, run through every cell of a loaded target: its receipts."""

from typing import TYPE_CHECKING

from ling3export.artifacts.manifest import read_checked
from ling3export.artifacts.schema import MOVING, SEGMENTS, SPLIT, Cell, Receipts, Target
from ling3export.runners.calibrate.prober import Prober
from ling3export.runners.calibrate.receipts import (
    TOLERANCES,
    Logits,
    agreement,
    exact_receipt,
    logits_receipt,
    score_receipt,
)
from ling3export.runners.load.segments import SegmentedRunner, groups_of

if TYPE_CHECKING:
    from ling3export.runners.load.loader import Loaded


def measured(loaded: "Loaded") -> Receipts:
    """Runs every vector through each cell. On several hosts every process calls it; the first one's result counts.

    Raises:
        ArtifactError: The expectations are damaged, or hold nothing that a cell gives.
    """
    from safetensors.numpy import load

    manifest, target = loaded.manifest, loaded.record
    vectors, tolerance = manifest.vectors, TOLERANCES[manifest.plan.dtype]
    assert vectors.expected is not None  # where there are weights, as the loader found
    stored = load(read_checked(loaded.folder, vectors.expected))
    expected: Logits = {
        (index, position): stored[sequence.logits][row]
        for index, sequence in enumerate(vectors.sequences)
        for row, position in enumerate(sequence.positions)
    }
    prober = Prober(loaded.runner, target, vectors.sequences)
    found: dict[str, Logits] = {}
    cut: dict[tuple[int, int], Logits] = {}  # by the paddings of attend and dispatch
    segmented: dict[int, Logits] = {}  # by padding
    receipts = {}
    for cell in sorted(target.cells.values(), key=lambda cell: cell.padding):
        if cell.phase == "sample":
            receipts[cell.name] = exact_receipt(*prober.sample(cell.padding))
        elif cell.phase == "adjust":
            receipts[cell.name] = exact_receipt(*prober.adjust(cell.padding))
        elif cell.phase == "slice":
            receipts[cell.name] = exact_receipt(*prober.sliced(groups_of(manifest, target)))
        elif cell.phase in MOVING:
            receipts[cell.name] = exact_receipt(*prober.moved(cell.phase))
        elif cell.phase == "score":
            scored = [prober.score(cell.padding, number) for number in range(len(vectors.sequences))]
            receipts[cell.name] = score_receipt(scored, vectors.sequences, expected, tolerance)
        elif cell.phase in SPLIT:
            at = split_of(target, cell)
            if at not in cut:
                cut[at] = prober.split(manifest, *at)
            receipts[cell.name] = logits_receipt(cut[at], expected, tolerance)
        elif cell.phase in SEGMENTS:
            if cell.padding not in segmented:
                by = SegmentedRunner(loaded.runner, manifest, target)
                segmented[cell.padding] = prober.prompts(cell.padding, by)
            receipts[cell.name] = logits_receipt(segmented[cell.padding], expected, tolerance)
        else:
            logits = prober.prompts(cell.padding) if cell.phase == "prefill" else prober.decode(cell.padding)
            found[cell.name] = logits
            receipts[cell.name] = logits_receipt(logits, expected, tolerance)
    return Receipts(tolerance, receipts, agreement(found, cut, segmented))


def split_of(target: Target, cell: Cell) -> tuple[int, int]:
    """The paddings of attend and dispatch that a split cell is run with: its own, and the nearest other that fits."""
    sizes, pairs = target.paddings("attend"), target.paddings("dispatch")
    chosen = next(leaf.shape[1] for leaf in target.cells[f"attend@{sizes[0]}"].outputs if leaf.name == "expert_ids")
    if cell.phase in ("dispatch", "experts"):
        return max(size for size in sizes if size * chosen <= cell.padding), cell.padding
    return cell.padding, min(each for each in pairs if cell.padding * chosen <= each)
