"""Runs an artifact's vectors through one cell, layer by layer, without a change of the program.

A layer whose two norm weights are zero adds zero to the residual stream: keys, values and gates of a zero input are
zero. So the same program with the norms of all later layers at zero gives the logits of the stream at that layer. No
intermediate value becomes an output, so fusion and numbers stay as they are. The state of every layer is an output
already. Norm weights have a few KB.

Each side of a comparison runs in a process of its own: the number of devices is fixed when jax starts.
"""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec.structs import replace

from ling3export.artifacts.schema import SequenceRecord, State, Target
from ling3export.artifacts.signing import read_trusted
from ling3export.foundation.errors import ArtifactError
from ling3export.foundation.processes import Child, answer, replied
from ling3export.machine.targets import platforms_here
from ling3export.verify.measure import on_processor, quick

if TYPE_CHECKING:
    from ling3export.runners.load.loader import Loaded

MODULE = "ling3export.verify.probe"
PHASES = ("prefill", "score", "decode")
NORMS = ("input_layernorm", "post_attention_layernorm")
Values = dict[str, np.ndarray]  # see `probe`


def probe(
    loaded: "Loaded", cell: str, sequences: Sequence[SequenceRecord], layers: int
) -> Iterator[tuple[str, np.ndarray]]:
    """Runs every sequence through a cell, once for each point between the steps of the layers.

    Args:
        loaded: A target; its state is overwritten, its parameters are as before at the end.
        cell: A cell of ``PHASES``. ``decode`` prefills each prompt at the smallest padding.
        sequences: Token ids, and how many of them are the prompt.

    Yields:
        ``out POINT SEQUENCE``: fp32 logits [positions, V] of the residual stream after that many steps: 0 is the
        embedding, 2 i + 1 the attention of layer i, 2 i + 2 its MLP. ``state NAME SEQUENCE``: [layers of its kind, …]
        after the sequence, in the order of the whole sequence.
    """
    target = loaded.record
    for point in reversed(range(2 * layers + 1)):
        with _cut(loaded, point):
            for number, sequence in enumerate(sequences):
                yield f"out {point} {number}", _logits(loaded, cell, sequence)
                if point == 2 * layers:
                    length = computed(target.cells[cell].phase, sequence)
                    for name, value in _state(loaded, target.state, length).items():
                        yield f"state {name} {number}", value


def computed(phase: str, sequence: SequenceRecord) -> int:
    """How many tokens of a sequence a cell of ``phase`` takes."""
    total = len(sequence.ids)
    return {"prefill": sequence.prompt, "score": total - 1, "decode": total}[phase]


class _cut:
    """Sets the norms of all steps from ``point`` on to zero within the block."""

    def __init__(self, loaded: "Loaded", point: int) -> None:
        self._loaded, self._point = loaded, point
        self._before: list[tuple[list[Any], int, Any]] = []

    def __enter__(self) -> None:
        from ling3export.runners.load.model_runner import device_array

        cells = self._loaded.record.cells
        masked: dict[str, Any] = {}
        for name, cell in self._loaded.runner.cells.items():
            names = [leaf.name for leaf in cells[name].inputs if leaf.group == "params"]
            for half, norm in enumerate(NORMS):
                if f"layers.{norm}" not in names:
                    continue
                at = names.index(f"layers.{norm}")
                weight = cell.params[at]
                if norm not in masked:
                    values = np.array(weight)
                    values[max(0, (self._point + 1 - half) // 2) :] = 0
                    masked[norm] = device_array(values, weight.sharding)
                self._before.append((cell.params, at, weight))
                cell.params[at] = masked[norm]

    def __exit__(self, *exception: object) -> None:
        for params, at, weight in self._before:
            params[at] = weight


def _logits(loaded: "Loaded", cell: str, sequence: SequenceRecord) -> np.ndarray:
    """The logits that a cell gives of one sequence, in the order of positions."""
    from ling3export.runners.calibrate.vectors import VectorRunner

    record = loaded.record.cells[cell]
    runner = VectorRunner(loaded, loaded.record, (sequence,))
    if record.phase == "prefill":
        rows = runner.prompts(record.padding)
    elif record.phase == "decode":
        rows = runner.decode(record.padding)
    else:
        rows = {(0, at): row for at, row in runner.score(record.padding, 0).logits.items()}
    return np.stack([rows[key] for key in sorted(rows)]).astype(np.float32)


def _state(loaded: "Loaded", state: State, tokens: int) -> Values:
    """The state of slot 1 and of the first pages, which ``VectorRunner`` gives a sequence of ``tokens`` tokens."""
    values = {}
    pages = np.arange(1, -(-tokens // state.page_size) + 1)
    if state.placement == "striped":  # see model/mla/paged.py
        devices = loaded.record.tp
        held = state.pages // devices + 1
        pages = (pages - 1) % devices * held + (pages - 1) // devices + 1
    for name, array in loaded.runner.state.items():
        if name.startswith("kda"):
            values[name] = np.asarray(array[:, 1], np.float32)
        elif name == "mla_latent":
            latent = np.asarray(array[:, pages], np.float32)
            values[name] = latent.reshape(len(latent), -1, latent.shape[-1])[:, :tokens]
    return values


def runs_here(target: Target) -> bool:
    """Whether a target's executables may run in one process on this machine."""
    return target.platform in platforms_here() and target.processes == 1


def probe_apart(
    artifact: Path, target: str, cell: str, sequences: Sequence[SequenceRecord], layers: int, *, portable: bool
) -> tuple[tempfile.TemporaryDirectory[str], Mapping[str, np.ndarray]]:
    """:func:`probe` in a fresh process.

    ``portable`` compiles the portable programs for the processor's virtual devices, instead of loading executables.

    Returns:
        The folder that holds the values, and the values by name, each read when it is taken.

    Raises:
        MisfitError: The programs do not fit this machine.
        ArtifactError: They did not run.
    """
    folder = tempfile.TemporaryDirectory(prefix="ling3-bisect-")
    file = Path(folder.name, "values.npz")
    job = {
        "artifact": str(artifact),
        "target": target,
        "cell": cell,
        "sequences": [(sequence.ids, sequence.prompt) for sequence in sequences],
        "layers": layers,
        "portable": portable,
        "file": str(file),
    }
    with Child(MODULE, quick() if portable else {}) as child:
        child.send(job)
        try:
            replied(child, f"{artifact.name}: {target} {cell} did not run")
        except ArtifactError:
            folder.cleanup()
            raise
    return folder, np.load(file)


def loaded_for(artifact: Path, name: str, cell: str, *, portable: bool) -> "Loaded":
    """Loads one cell, and the prefill that it needs."""
    manifest = read_trusted(artifact, lambda _: None)
    record = manifest.targets[name]
    cells = {cell, f"prefill@{record.paddings('prefill')[0]}"}
    record = replace(record, cells={other: record.cells[other] for other in sorted(cells)})
    if portable:
        record, left = on_processor(artifact, record)
        for other, calls in left.items():
            raise ArtifactError(f"{other}: only an accelerator has {', '.join(calls)}")
    from ling3export.runners.load.loader import load

    return load(
        artifact,
        target=name,
        programs="allow-compile" if portable else "prebuilt-only",
        check="programs",
        report=lambda _: None,
        manifest=replace(manifest, targets={name: record}),
    )


def probe_job(job: Mapping[str, Any]) -> dict[str, Any]:
    """Probes one target for the process that started this one."""
    loaded = loaded_for(Path(job["artifact"]), job["target"], job["cell"], portable=job["portable"])
    sequences = [SequenceRecord(tuple(ids), prompt, (), "") for ids, prompt in job["sequences"]]
    values = dict(probe(loaded, job["cell"], sequences, job["layers"]))
    np.savez(job["file"], **values)  # type: ignore[arg-type]  # no value is named allow_pickle
    return {}


if __name__ == "__main__":
    answer(probe_job)
