"""``build --format savedmodel``: the TP=1 steps as signatures of one TensorFlow SavedModel, through orbax-export.

The weights are in it once, shared by all signatures. State goes in and comes out of every call: a caller keeps it.
TensorFlow runs in a process of its own (``ling3export/savedmodel/worker.py``).
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from ling3export.artifacts.files import remove_tree, rename, write_new
from ling3export.artifacts.records import to_json
from ling3export.artifacts.schema import WeightsRecord
from ling3export.artifacts.staging import staged
from ling3export.checkpoint.convert import Progress, write_weights
from ling3export.checkpoint.reader import Checkpoint
from ling3export.foundation.errors import ArtifactError, Ling3Error, PlanError
from ling3export.foundation.extras import install, installed
from ling3export.foundation.processes import Child
from ling3export.model.config import Config
from ling3export.model.geometry import Geometry
from ling3export.plan.options import Options
from ling3export.plan.plan import PlannedCell, as_stored, make_plan, weight_forms

RECORD = "ling3.json"  # next to saved_model.pb: inputs and outputs of the signatures
WORKER = "ling3export.savedmodel.worker"
EXTRA = ("orbax-export", "tensorflow-cpu")


@dataclass(frozen=True)
class ExportJob:
    """The work of the exporting process."""

    config: Config
    geometry: Geometry  # pools and dtype of the one device
    cells: tuple[PlannedCell, ...]  # each becomes a signature
    folder: Path  # the weight store's paths start from it
    weights: WeightsRecord
    model: Path  # the folder to write


def check_packages() -> None:
    """Raises Ling3Error, which names the missing packages, if the extra is not installed."""
    if missing := [package for package in EXTRA if installed(package) is None]:
        raise Ling3Error(
            f"--format savedmodel: expected the packages of the extra `savedmodel`, found no {', '.join(missing)}",
            install("savedmodel"),
        )


def one_device(options: Options) -> Options:
    """``options`` for the one target that a SavedModel has.

    Raises:
        PlanError: They name another target or TP.
    """
    if any(target not in ("cpu", "cpu@1", "cpu@tp1") for target in options.targets) or options.tp not in (None, 1):
        target = ", ".join(options.targets) + ("" if options.tp is None else f" at TP={options.tp}")
        raise PlanError(
            f"--format savedmodel: expected target cpu at TP=1, found {target}", "leave out --target and --tp"
        )
    return replace(options, tp=1, targets=("cpu",), kernels="off")


def build_savedmodel(
    checkpoint: Path,
    destination: Path,
    options: Options,
    report: Progress,
    *,
    force: bool = False,
    ignore: Sequence[str] = (),
    allow_rounding: bool = False,
) -> dict[str, Any]:
    """Writes ``destination``, a SavedModel with a signature for every cell of the plan.

    Args:
        allow_rounding: Whether weights may be rounded that ``options.dtype`` does not hold.

    Returns:
        The content of ``ling3.json`` in the folder.

    Raises:
        Ling3Error: The packages, the checkpoint, the plan or the disk do not allow it; nothing is left.
    """
    if options.afd:
        raise PlanError("--afd: expected none with --format savedmodel, found it", "build an artifact")
    check_packages()
    source = Checkpoint.open(checkpoint, ignore=ignore)
    options = as_stored(options, checkpoint)
    source.check_rounding(options.dtype, allow_rounding, weight_forms(options))
    plan = make_plan(source.config, one_device(options), "cpu")
    for note in plan.notes:
        report.note(note)
    with staged(destination, force=force, mark=RECORD) as folder:
        weights = write_weights(folder, source, options.dtype, report, plan.geometry.weights)
        cells = tuple(cell for cell in plan.cells if cell.phase != "logits_processor")  # clients have the logits
        job = ExportJob(source.config, plan.geometry, cells, folder, weights, folder / "model")
        report.start("signatures", len(cells))
        described = run_worker(job, report)
        remove_tree(folder / "weights")
        for path in job.model.iterdir():
            rename(path, folder / path.name)
        remove_tree(job.model)
        record = {
            "producer": {name: metadata.version(name) for name in ("ling3export", "jax", "jaxlib", *EXTRA)},
            "source": {"name": source.path.resolve().name, "digests": to_json(source.digests())},
            "config": source.config.semantic() | {"eos_token_id": list(source.config.eos_token_ids)},
            "plan": plan.record(),
            **described,
        }
        write_new(folder / RECORD, (json.dumps(record, indent=2, ensure_ascii=False) + "\n").encode())
    return record


def run_worker(job: ExportJob, report: Progress) -> dict[str, Any]:
    """The worker's description of the SavedModel.

    Raises:
        ArtifactError: It failed; the message has the end of its output.
    """
    with Child(WORKER, {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}) as child:
        child.send(to_json(job))
        while (message := child.receive()) is not None:
            if "record" in message:
                return dict(message["record"])
            report.advance("signatures", 1)
        ending = child.ended()[1]
    raise ArtifactError(f"savedmodel: expected the exporting process to end well, found it {ending}")
