"""Checkpoint to artifact: programs, weights, vectors and tokenizer files, checked, then named in one manifest.

Everything is written to a hidden folder next to the destination, which takes the artifact's name only when the manifest
stands; a kill at any moment leaves nothing that looks whole.
"""

import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from hashlib import sha256
from importlib import metadata
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

from msgspec.structs import replace

import ling3export
from ling3export.artifacts import schema
from ling3export.artifacts.files import remove_tree, write_new
from ling3export.artifacts.manifest import file_record, write_manifest
from ling3export.artifacts.parameters import PLAIN
from ling3export.artifacts.receipts import PORTABLE
from ling3export.artifacts.records import to_json
from ling3export.artifacts.schema import FileRecord, Manifest, PortableReceipts, Receipts
from ling3export.artifacts.staging import staged
from ling3export.cache.cells import Cells, opened, summary
from ling3export.cache.keys import toolchain
from ling3export.cache.store import DEFAULT_USE, CacheUse
from ling3export.checkpoint.convert import Progress, WeightSource, write_weights
from ling3export.checkpoint.reader import Checkpoint
from ling3export.checkpoint.synth_weights import DummyWeights
from ling3export.compile.pool import BuildOutcome, Compilers, check, put_state_program
from ling3export.compile.target_record import target_record
from ling3export.foundation.errors import ArtifactError, CheckpointError
from ling3export.model.config import Config, read_config
from ling3export.model.parameters import weight_table
from ling3export.plan.options import Options
from ling3export.plan.plan import Plan, as_stored, make_plans, weight_forms
from ling3export.plan.targets import check_toolchain
from ling3export.verify.measure import check_tokenizer, measure_apart, too_large
from ling3export.verify.vectors import write_vectors

DEMO = Path(ling3export.__file__).parent / "demo"


class Reporter(Progress, Protocol):
    """Gets a build's progress."""

    def failed(self, outcomes: Sequence[BuildOutcome]) -> None:
        """Shows the cells of a build in which some did not build."""
        ...


def build(
    checkpoint: Path,
    artifact: Path,
    options: Options,
    report: Reporter,
    *,
    no_weights: bool = False,
    dummy: int | None = None,
    force: bool = False,
    ignore: Sequence[str] = (),
    cache: CacheUse = DEFAULT_USE,
    allow_rounding: bool = False,
) -> Manifest:
    """Builds ``artifact`` from ``checkpoint``.

    Args:
        checkpoint: A folder in the published layout; without weights a config.json, or a folder with one; nothing else
            is read.
        no_weights: Build only programs, for weights that are attached later.
        dummy: With ``no_weights`` the seed of weights to run the programs with, which are not kept; None runs nothing.
        allow_rounding: Whether weights may be rounded that ``options.dtype`` does not hold.

    Raises:
        Ling3Error: The checkpoint, the plan or the disk do not allow it; nothing is left.
    """
    weights: WeightSource | None
    options = as_stored(options, checkpoint)
    if no_weights:
        source, file = None, checkpoint / "config.json" if checkpoint.is_dir() else checkpoint
        data = read_config(file)
        config = Config.from_json(data, ignore, str(file))
        origin = named(checkpoint, {"config.json": schema.SourceFile(sha256=sha256(data).hexdigest())})
        weights = None if dummy is None else DummyWeights(config, dummy)
    else:
        weights = source = Checkpoint.open(checkpoint, ignore=ignore)
        source.check_rounding(options.dtype, allow_rounding, weight_forms(options))
        config, origin = source.config, named(source.path, source.digests(), source)
    plans = announced(make_plans(config, options), report)
    cells = opened(cache, report.note)
    with staged(artifact, force=force) as folder:
        body = described(config, origin, options, plans[0])
        if source is not None:
            body = replace(body, tokenizer=copy_tokenizer(folder, source))
        with compiling(config, options, plans, folder, cells, report) as compiled:
            if weights is not None:
                context = min(min(plan.context, plan.geometry.pages * plan.geometry.page_size) for plan in plans)
                form = plans[0].geometry.weights
                stored = write_weights(folder, weights, options.dtype, report, form)
                vectors = write_vectors(weights, folder, context, options.dtype, report, form)
                body = replace(body, weights=stored, vectors=vectors)
            outcomes = compiled()
        manifest = complete(folder, body, outcomes, report, cells)
        if no_weights and dummy is not None:
            for name in ("weights", "vectors"):
                remove_tree(folder / name)
            origin_text = f"{manifest.vectors.source}; dummy weights of seed {dummy}, not kept"
            kept = replace(manifest.vectors, expected=None, source=origin_text)
            manifest = write_manifest(folder, replace(manifest, weights=schema.WeightsRecord({}, {}), vectors=kept))
        programs = (cell for target in manifest.targets.values() for cell in target.cells.values())
        report.note(summary(programs, cache))
        return manifest


def named(path: Path, digests: dict[str, schema.SourceFile], source: Checkpoint | None = None) -> schema.SourceRecord:
    """The manifest's record of a checkpoint; without ``source`` of a config alone."""
    name = "".join(char if char.isprintable() else "?" for char in path.resolve().name)
    if source is None or source.form is None:
        return schema.SourceRecord(name, digests)
    counts = {row.name: sum(key in source.forms for key in row.keys) for row in weight_table(source.config)}
    return schema.SourceRecord(name, digests, source.form, {row: count for row, count in counts.items() if count})


def described(config: Config, source: schema.SourceRecord, options: Options, plan: Plan) -> Manifest:
    """A manifest without targets, weights and vectors; ``plan`` is any target's."""
    geometry = plan.geometry
    return Manifest(
        producer={"ling3export": metadata.version("ling3export"), "python": platform.python_version()},
        source=source,
        config=config.semantic() | {"eos_token_id": config.eos_token_ids},
        plan=schema.PlanRecord(
            *(plan.paddings, plan.decode_paddings, geometry.slots, geometry.page_size, plan.context, geometry.dtype),
            *(options.memory_fraction, options.state_memory, None if geometry.weights == PLAIN else geometry.weights),
        ),
        targets={},
        weights=schema.WeightsRecord({}, {}),
        vectors=schema.Vectors("none: there are no weights", 0, schema.MarginsRecord(), ()),
        tokenizer=(),
        notes=(),
    )


def announced(plans: list[Plan], report: Reporter) -> list[Plan]:
    """``plans``, after a check that their compilers are installed; ``report`` gets their notes."""
    for plan in plans:
        check_toolchain(plan.target)
        for note in plan.named_notes:
            report.note(note)
        report.note(f"{plan.target.name}: {len(plan.cells)} programs; fewer paddings and --max-running 1 make fewer")
    return plans


@contextmanager
def compiling(
    config: Config, options: Options, plans: Sequence[Plan], folder: Path, cells: Cells, report: Reporter
) -> Iterator[Callable[[], list[BuildOutcome]]]:
    """Compiles the cells of every plan while the block does other work; an exception in the block ends the compilers.

    Args:
        options: The number of jobs is read.
        plans: One a target.
        folder: Gets ``programs/TARGET/`` for every target.
        report: Gets each cell, and the outcomes if a cell fails.

    Yields:
        A function that waits for the outcomes. It raises a PlanError where a cell failed or does not fit a device, and
        an ArtifactError where the disk is full.
    """
    compilers = []
    for plan in plans:
        programs = folder / "programs" / plan.target.name
        programs.mkdir(parents=True)
        compilers.append(Compilers(plan, config, programs, options.jobs, cells, report.note))
    report.start("programs", sum(len(plan.cells) for plan in plans))

    def run() -> list[BuildOutcome]:
        return [group.run(group.plan.cells, lambda: report.advance("programs", 1)) for group in compilers]

    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(run)

        def finished() -> list[BuildOutcome]:
            outcomes = future.result()
            if any(outcome.failures for outcome in outcomes):
                report.failed(outcomes)
            check(config, outcomes, cells.use.writes)
            for plan in plans:
                put_state_program(folder / "programs" / plan.target.name, config, plan, cells)
            return outcomes

        try:
            yield finished
        except BaseException:  # so that the compilers' thread can be joined
            for group in compilers:
                group.stop()
            raise


def complete(
    folder: Path,
    manifest: Manifest,
    outcomes: Sequence[BuildOutcome],
    report: Reporter,
    cells: Cells,
    programs: Mapping[str, str] = MappingProxyType({}),
) -> Manifest:
    """Adds compiled targets to a manifest, runs the vectors through what runs here, and writes it.

    Args:
        folder: The artifact's folder, every other file in place.
        manifest: A target of the same name is replaced.
        outcomes: One a target.
        cells: The cache, which forgets the programs of a target whose receipts are refused.
        programs: By target the name of its folder in ``programs/``, where that is not the target's.

    Raises:
        ArtifactError: A cell differs from its expectation by more than its tolerance, does not run, or the disk is
            full.
    """
    for outcome in outcomes:
        name, plan = outcome.plan.target.name, outcome.plan
        path = f"programs/{programs.get(name, name)}"
        kept = {other: row for other, row in manifest.vectors.receipts.items() if other != name}
        proven = {other: row for other, row in (manifest.vectors.portable or {}).items() if other != name}
        manifest = replace(
            manifest,
            targets=manifest.targets | {name: target_record(folder, manifest, plan, outcome.built, path)},
            vectors=replace(manifest.vectors, receipts=kept, portable=proven or None),
            producer={**toolchain(plan.target), **manifest.producer},
            notes=(*(note for note in manifest.notes if not note.startswith(f"{name}: ")), *plan.named_notes),
        )
    run = [outcome for outcome in outcomes if manifest.has_weights and _is_run(manifest, outcome.plan, report)]
    vectors = manifest.vectors
    report.start("receipts", len(run))
    for outcome in run:
        name = outcome.plan.target.name
        try:
            measured = receipts(folder, manifest, name, portable=not outcome.plan.target.runs_here)
        except ArtifactError:
            cells.forget(built.program for built in outcome.built.values())
            raise
        if isinstance(measured, PortableReceipts):
            vectors = replace(vectors, portable=(vectors.portable or {}) | {name: measured})
        else:
            vectors = replace(vectors, receipts=vectors.receipts | {name: measured})
        report.advance("receipts", 1)
    return write_manifest(folder, replace(manifest, vectors=vectors))


def _is_run(manifest: Manifest, plan: Plan, report: Reporter) -> bool:
    """Whether the vectors are run through a target: its executables, or its portable programs on the processor."""
    name = plan.target.name
    if plan.target.runs_here or not (reason := too_large(manifest, name)):
        return True
    report.note(f"{name}: portable programs not run: {reason}; run them with: ling3export verify ARTIFACT --portable")
    return False


def copy_tokenizer(folder: Path, source: Checkpoint) -> tuple[FileRecord, ...]:
    """Copies the tokenizer's files and reads them as the runner will.

    Raises:
        CheckpointError: One is no JSON, or no tokenizer.
    """
    (folder / "tokenizer").mkdir()
    copied = source.tokenizer_files()
    for name, data in copied.items():
        write_new(folder / "tokenizer" / name, data)
    records = tuple(file_record(folder, f"tokenizer/{name}") for name in copied)
    try:
        check_tokenizer(folder, records)
    except ArtifactError as error:
        raise CheckpointError(error.message, "repair the file, or remove it: token ids work without") from error
    return records


def receipts(folder: Path, manifest: Manifest, name: str, *, portable: bool = False) -> Receipts:
    """Runs the vectors through every cell of a target, and refuses a build whose programs are wrong.

    They run in a fresh process, because an executable can work in the one that compiled it and fail in any other.
    ``portable`` runs the portable programs on the processor.

    Raises:
        ArtifactError: A cell differs from its expectation by more than its tolerance, or does not run.
    """
    measured = measure_apart(folder, name, manifest, portable=portable)
    if not measured.passed:
        failed = {name: receipt for name, receipt in measured.cells.items() if receipt.status != "passed"}
        cell, worst = max(failed.items(), key=lambda item: item[1].relative)
        rounds = manifest.targets[name].geometry.get("activations") == "int8"
        raise ArtifactError(
            f"receipts of `{name}`{f', {PORTABLE}' * portable}: expected a {measured.tolerance.measure} relative error "
            f"of at most {measured.tolerance.bound:g}, found {to_json(worst)}, in {cell}",
            "native kernels round activations to 8 bits, which may be too much here: `--kernels off` does not"
            if rounds
            else "the programs do not compute what the model computes: do not use them, and report this",
        )
    return measured
