"""Checkpoint to artifact: programs, weights, vectors and tokenizer files, checked, then named in one manifest.

Everything is written to a hidden folder beside the destination, which takes the artifact's name only when the manifest
stands; a kill at any moment leaves nothing that looks whole.
"""

import json
import platform
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import ling3export
from ling3export.artifacts.files import writing
from ling3export.artifacts.manifest import file_record, write_manifest
from ling3export.artifacts.staging import staged
from ling3export.cache.cells import Cells, opened, summary
from ling3export.cache.keys import fingerprint, state_abi, toolchain
from ling3export.cache.use import DEFAULT_USE, CacheUse
from ling3export.checkpoint.convert import Progress, write_weights
from ling3export.checkpoint.reader import Checkpoint
from ling3export.compile.pool import Compilers, Outcome, check, compile_all
from ling3export.compile.replay import Request, forget_failure, note_failure
from ling3export.errors import ArtifactError, CheckpointError
from ling3export.model.config import Config
from ling3export.model.geometry import AXIS, CHUNK
from ling3export.model.parameters import Argument, arguments
from ling3export.model.state import state_arrays
from ling3export.plan.options import Options
from ling3export.plan.plan import Plan, make_plans
from ling3export.plan.targets import Target
from ling3export.plan.toolchain import check_toolchain
from ling3export.pricing.recorded import score_paddings
from ling3export.runners.text.tokenizer import TokenizerFiles
from ling3export.verify.measure import measure_apart
from ling3export.verify.vectors import PATH as VECTORS_PATH
from ling3export.verify.vectors import write_vectors

# Of a cell: its receipts are in the manifest, or there is no machine here that could run it.
COMPILED, NOT_EXECUTED = "compiled", "compiled, not executed"
# What sized the pools, so that a target that is added later is sized alike.
SIZING = ("memory_fraction", "state_memory")
DEMO = Path(ling3export.__file__).parent / "demo"


class Reporter(Progress, Protocol):
    """Where a build tells how far it is, and shows its cells."""

    def failed(self, outcomes: Sequence[Outcome]) -> None:
        """Cells did not build: what became of each."""
        ...


def build(
    checkpoint: Path, artifact: Path, options: Options, report: Reporter, *, force: bool = False,
    ignore: Sequence[str] = (), cache: CacheUse = DEFAULT_USE,
) -> dict[str, Any]:  # fmt: skip
    """Builds ``artifact`` from ``checkpoint``.

    Args:
        checkpoint: A folder in the published layout.
        artifact: The folder to make.
        options: What to build.
        report: Told of every stage.
        force: Replace an artifact that is there.
        ignore: Fields of config.json to ignore.
        cache: How compiled programs of earlier builds are used.

    Returns:
        The manifest.

    Raises:
        Ling3Error: The checkpoint, the plan or the disk do not allow it; nothing is left behind.
    """
    source = Checkpoint.open(checkpoint, ignore=ignore)
    _check_tokenizer(source)
    plans = announced(make_plans(source.config, options), report)
    request = Request(json.loads((source.path / "config.json").read_bytes()), tuple(ignore), options)
    with staged(artifact, force=force) as folder, opened(cache, report.note) as cells:
        tokenizer = _copy_tokenizer(folder, source)
        with compiling(artifact, request, plans, folder, cells, report) as compiled:
            weights = write_weights(folder, source, options.dtype, report)
            context = min(min(plan.context, plan.geometry.pages * plan.geometry.page_size) for plan in plans)
            report.start("vectors", 1)
            vectors = write_vectors(source.config, source.tensor, folder, context, options.dtype)
            report.advance("vectors", 1)
            outcomes = compiled()
        knobs = {name: getattr(options, name) for name in SIZING}
        body: dict[str, Any] = {
            "producer": {"ling3export": metadata.version("ling3export"), "python": platform.python_version()},
            "source": {"name": source.path.resolve().name, "digests": source.digests()},
            "config": source.config.semantic() | {"eos_token_id": list(source.config.eos_token_ids)},
            "plan": plans[0].record() | knobs,
            "targets": {},
            "weights": weights,
            "vectors": vectors | {"expected": file_record(folder, VECTORS_PATH), "receipts": {}},
            "tokenizer": tokenizer,
            "notes": [],
        }
        manifest = complete(folder, body, source.config, outcomes, report)
        report.note(summary(manifest["targets"], cache))
        forget_failure(artifact)
        return manifest


def announced(plans: list[Plan], report: Reporter) -> list[Plan]:
    """``plans``, whose compilers are installed; what was chosen for them is told.

    Raises:
        PlanError: A compiler is missing, or is not the one that belongs to the jax that is installed.
    """
    for plan in plans:
        check_toolchain(plan.target)
        for note in plan.named_notes:
            report.note(note)
    return plans


@contextmanager
def compiling(
    artifact: Path, request: Request, plans: Sequence[Plan], folder: Path, cells: Cells, report: Reporter,
    taken: Mapping[str, Mapping[str, dict[str, Any]]] = MappingProxyType({}),
) -> Iterator[Callable[[], list[Outcome]]]:  # fmt: skip
    """Compiles the cells of every plan while the block does other work; an exception in the block ends the compilers.

    Args:
        artifact: What is being built; a failure is noted beside it.
        request: What was asked for.
        plans: One a target.
        folder: Gets ``programs/TARGET/`` for every target that has no such folder yet.
        cells: The cache.
        report: Told of every cell; shown the table of a build in which one failed.
        taken: By target the records of cells whose files are in the folder already.

    Yields:
        A function that waits for the outcomes. It raises a PlanError where a cell failed or does not fit a device, and
        an ArtifactError where the disk is full.
    """
    compilers = []
    for plan in plans:
        programs = folder / "programs" / plan.target.name
        programs.mkdir(parents=True, exist_ok=True)
        there = taken.get(plan.target.name, {})
        job = (plan, request.config, request.ignore, programs, request.options.jobs, cells)
        compilers.append(Compilers(*job, taken=there))
    report.start("programs", sum(len(plan.cells) for plan in plans))
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(compile_all, compilers, lambda: report.advance("programs", 1))

        def finished() -> list[Outcome]:
            outcomes, config = future.result(), Config.from_dict(request.config, ignore=request.ignore)
            if any(outcome.failures for outcome in outcomes):
                report.failed(outcomes)
            check(config, outcomes, cells.use.writes, lambda: note_failure(artifact, request, outcomes))
            return outcomes

        try:
            yield finished
        except BaseException:  # so that the compilers' thread can be joined
            for each in compilers:
                each.stop()
            future.cancel()
            raise


def complete(
    folder: Path, body: dict[str, Any], config: Config, outcomes: Sequence[Outcome], report: Reporter,
    programs: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, Any]:  # fmt: skip
    """Adds compiled targets to a manifest, runs the vectors through what runs here, and writes it.

    Args:
        folder: The artifact's folder, every other file in place.
        body: The manifest's fields; a target of the same name is replaced.
        config: The model.
        outcomes: The targets.
        report: Told of the receipts.
        programs: By target the name of its folder in ``programs/``, where that is not the target's.

    Returns:
        The manifest as written.

    Raises:
        ArtifactError: A cell differs from its expectation by more than its tolerance, does not run, or the disk is
            full.
    """
    for outcome in outcomes:
        name, plan = outcome.plan.target.name, outcome.plan
        path = f"programs/{programs.get(name, name)}"
        body["targets"][name] = target_record(folder, config, plan, outcome.records, path)
        body["vectors"]["receipts"].pop(name, None)
        body["producer"] = {**toolchain(plan.target), **body["producer"]}
        body["notes"] = [*(note for note in body["notes"] if not note.startswith(f"{name}: ")), *plan.named_notes]
    body["plan"]["targets"] = list(body["targets"])
    body["plan"]["score_paddings"] = list(score_paddings(next(iter(body["targets"].values()))))
    body["vectors"]["receipts"] |= receipts(folder, body, [outcome.plan for outcome in outcomes], report)
    return write_manifest(folder, body)


def _check_tokenizer(source: Checkpoint) -> None:
    """Reads the tokenizer's files as the runner will.

    Raises:
        CheckpointError: One is no JSON, or no tokenizer.
    """
    records = [file_record(source.path, file.name) for file in source.tokenizer_files]
    files = TokenizerFiles(source.path, {"tokenizer": records, "config": source.config.semantic()})
    try:
        files.eos_token_ids()
        if files.there:
            files.tokenizer("text")
    except ArtifactError as error:
        raise CheckpointError(error.message, "repair the file, or remove it: token ids work without") from error


def _copy_tokenizer(folder: Path, source: Checkpoint) -> list[dict[str, Any]]:
    (folder / "tokenizer").mkdir()
    records = []
    for file in source.tokenizer_files:
        copy = folder / "tokenizer" / file.name
        with writing(copy, file.stat().st_size):
            shutil.copyfile(file, copy)
        records.append(file_record(folder, f"tokenizer/{file.name}"))
    return records


def target_record(
    folder: Path, config: Config, plan: Plan, cells: dict[str, dict[str, Any]], programs: str
) -> dict[str, Any]:
    """What the manifest says of one target, whose programs lie in ``programs`` of the artifact's folder."""
    geometry, target = plan.geometry, plan.target
    named = {}
    for cell in sorted(plan.cells, key=lambda cell: (cell.phase, cell.padding)):
        files = {
            "stablehlo": file_record(folder, f"{programs}/{cell.name}.stablehlo"),
            "exec": file_record(folder, f"{programs}/{cell.name}.exec"),
        }
        named[cell.name] = {"status": COMPILED if target.runs_here else NOT_EXECUTED, **files, **cells[cell.name]}
    requires = next(iter(named.values()))["call"]["requires"]
    return {
        "target": target.text,
        "platform": target.platform,
        "kind": target.kind,
        "topology": target.topology,
        "tp": target.tp,
        "processes": target.processes,
        **(_slice(named) or _blocks(requires["devices"], target)),
        "fingerprint": fingerprint(config, plan),
        "state_abi": state_abi(config, plan),
        "toolchain": toolchain(target),
        "geometry": asdict(geometry),
        "mesh": {"axis": AXIS, "devices": requires["devices"]},
        "requires": requires,
        "parameters": [
            {"argument": ".".join(argument.path), "tensor": row.name, "shape": list(row.shape), **layer_of(argument),
             "dtype": row.stored_dtype(geometry.dtype), "spec": list(argument.spec)}
            for argument in arguments(config, geometry) for row in (argument.parameter,)
        ],
        "state": {
            "placement": geometry.placement,
            "slots": geometry.slots,
            "pages": geometry.pages,
            "page_size": geometry.page_size,
            "max_pages": geometry.max_pages,
            "chunk": CHUNK,
            "arrays": [asdict(row) | {"spec": list(row.spec)} for row in state_arrays(config, geometry)],
        },
        "cells": named,
    }  # fmt: skip


def layer_of(argument: Argument) -> dict[str, Any]:
    """Which index of which axis of the tensor an argument is; nothing for a whole tensor."""
    return {} if argument.layer is None else {"index": argument.layer, "axis": argument.parameter.stack_axis}


def _slice(cells: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Device ids of each host, which every cell of an accelerator's target was compiled for alike."""
    found = [cell.pop("hosts") for cell in cells.values() if "hosts" in cell]
    assert all(hosts == found[0] for hosts in found)
    return {"hosts": found[0]} if found else {}


def _blocks(devices: list[int], target: Target) -> dict[str, Any]:
    """Device ids of each host of a cpu target: they lie in order."""
    each = target.tp // target.processes
    return {"hosts": [devices[at : at + each] for at in range(0, target.tp, each)]} if target.processes > 1 else {}


def receipts(folder: Path, body: dict[str, Any], plans: list[Plan], report: Reporter) -> dict[str, Any]:
    """Runs the vectors through every cell in a fresh process, and refuses a build whose programs are wrong.

    A fresh process, because an executable can work in the one that compiled it and fail in any other.

    Raises:
        ArtifactError: A cell differs from its expectation by more than its tolerance, or does not run.
    """
    found = {}
    runnable = [plan for plan in plans if plan.target.runs_here]
    report.start("receipts", len(runnable))
    for plan in runnable:
        found[plan.target.name] = measured = measure_apart(folder, plan.target.name, body)
        if not measured["passed"]:
            worst = max(measured["cells"].items(), key=lambda item: item[1]["relative"])
            raise ArtifactError(
                f"receipts of `{plan.target.name}`: expected a {measured['tolerance']['measure']} relative error "
                f"of at most {measured['tolerance']['bound']:g}, found {worst[1]}, in {worst[0]}",
                "the programs do not compute what the model computes: do not use them, and report this",
            )
        report.advance("receipts", 1)
    return found
