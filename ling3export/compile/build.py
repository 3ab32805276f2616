"""Checkpoint to artifact: programs, weights, vectors and tokenizer files, checked, then named in one manifest.

Everything is written to a hidden folder beside the destination, which takes the artifact's name only when the manifest
stands; a kill at any moment leaves nothing that looks whole.
"""

import itertools
import platform
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, replace
from hashlib import sha256
from importlib import metadata
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

import ling3export
from ling3export.artifacts import schema
from ling3export.artifacts.files import write_new
from ling3export.artifacts.manifest import file_record, write_manifest
from ling3export.artifacts.receipts import PORTABLE
from ling3export.artifacts.records import sha256_of, to_json
from ling3export.artifacts.schema import Cell, FileRecord, Manifest, Mesh, PortableReceipts, Receipts, Requirements
from ling3export.artifacts.staging import staged
from ling3export.cache.cells import SUFFIXES, Built, Cells, opened, summary
from ling3export.cache.keys import fingerprint, toolchain
from ling3export.cache.use import DEFAULT_USE, CacheUse
from ling3export.checkpoint.convert import Progress, Weights, write_weights
from ling3export.checkpoint.dummy import DummyWeights
from ling3export.checkpoint.reader import Checkpoint
from ling3export.compile.pool import Compilers, Outcome, check
from ling3export.compile.replay import forget_failure, note_failure
from ling3export.compile.state import put_state_program
from ling3export.foundation.errors import ArtifactError, CheckpointError, PlanError
from ling3export.foundation.shards import WHOLE, Shard
from ling3export.model.config import Config, read_config
from ling3export.model.geometry import CHUNK
from ling3export.model.parameters import arguments
from ling3export.model.state import state_arrays
from ling3export.plan.kernels import level_of
from ling3export.plan.options import Options
from ling3export.plan.plan import Plan, make_plans
from ling3export.plan.recorded import config_of
from ling3export.plan.targets import check_toolchain
from ling3export.verify.measure import check_tokenizer, measure_apart, too_large
from ling3export.verify.vectors import write_vectors

DEMO = Path(ling3export.__file__).parent / "demo"


class Reporter(Progress, Protocol):
    """Where a build tells how far it is, and shows its cells."""

    def failed(self, outcomes: Sequence[Outcome]) -> None:
        """Cells did not build: what became of each."""
        ...


def build(
    checkpoint: Path,
    artifact: Path,
    options: Options,
    report: Reporter,
    *,
    force: bool = False,
    ignore: Sequence[str] = (),
    cache: CacheUse = DEFAULT_USE,
    prove: bool | None = None,
) -> Manifest:
    """Builds ``artifact`` from ``checkpoint``.

    Args:
        checkpoint: A folder in the published layout.
        artifact: The folder to make.
        options: What to build.
        report: Told of every stage.
        force: Replace an artifact that is there.
        ignore: Fields of config.json to ignore.
        cache: How compiled programs of earlier builds are used.
        prove: Whether portable programs of machines that are not here are run on the processor; None for small models.

    Returns:
        The manifest.

    Raises:
        Ling3Error: The checkpoint, the plan or the disk do not allow it; nothing is left behind.
    """
    source = Checkpoint.open(checkpoint, ignore=ignore)
    plans = announced(make_plans(source.config, options), report)
    with staged(artifact, force=force) as folder, opened(cache, report.note) as cells:
        tokenizer = copy_tokenizer(folder, source)
        with compiling(artifact, source.config, options, plans, folder, cells, report) as compiled:
            weights, vectors = weight_half(folder, source, options.dtype, longest(plans), report)
            outcomes = compiled()
        body = replace(
            described(source.config, named(source.path, source.digests()), options, plans[0]),
            weights=weights,
            vectors=vectors,
            tokenizer=tokenizer,
        )
        manifest = complete(folder, body, outcomes, report, cells, prove=prove)
        ended(artifact, manifest, report, cache)
        return manifest


def build_programs(
    config: Path,
    artifact: Path,
    options: Options,
    report: Reporter,
    *,
    dummy: int | None = None,
    force: bool = False,
    ignore: Sequence[str] = (),
    cache: CacheUse = DEFAULT_USE,
    prove: bool | None = None,
) -> Manifest:
    """Builds the programs alone, as :func:`build` does, for weights that are attached later.

    Args:
        config: A config.json, or a folder that holds one; nothing else is read.
        artifact: The folder to make.
        options: What to build.
        report: Told of every stage.
        dummy: Seed of weights that the programs are run with, and that are not kept; None runs nothing.
        force: Replace an artifact that is there.
        ignore: Fields of config.json to ignore.
        cache: How compiled programs of earlier builds are used.
        prove: As in :func:`build`.

    Returns:
        The manifest.

    Raises:
        Ling3Error: The config, the plan or the disk do not allow it; nothing is left behind.
    """
    file = config / "config.json" if config.is_dir() else config
    data = read_config(file)
    model = Config.from_json(data, ignore, str(file))
    plans = announced(make_plans(model, options), report)
    with staged(artifact, force=force) as folder, opened(cache, report.note) as cells:
        body = described(
            model, named(config, {"config.json": schema.SourceFile(sha256=sha256(data).hexdigest())}), options, plans[0]
        )
        with compiling(artifact, model, options, plans, folder, cells, report) as compiled:
            if dummy is not None:
                weights = DummyWeights(model, dummy)
                stored, vectors = weight_half(folder, weights, options.dtype, longest(plans), report)
                body = replace(body, weights=stored, vectors=vectors)
            outcomes = compiled()
        manifest = complete(folder, body, outcomes, report, cells, prove=prove)
        if dummy is not None:
            said = f"{manifest.vectors.source}; dummy weights of seed {dummy}, not kept"
            for half in ("weights", "vectors"):
                shutil.rmtree(folder / half)
            kept = replace(manifest.vectors, expected=None, source=said)
            manifest = write_manifest(folder, replace(manifest, weights=schema.Weights({}, {}), vectors=kept))
        ended(artifact, manifest, report, cache)
        return manifest


def longest(plans: Sequence[Plan]) -> int:
    """Tokens of the longest sequence that every plan's pools hold."""
    return min(min(plan.context, plan.geometry.pages * plan.geometry.page_size) for plan in plans)


def weight_half(
    folder: Path, source: Weights, dtype: str, context: int, report: Reporter
) -> tuple[schema.Weights, schema.Vectors]:
    """Writes ``weights/`` and ``vectors/`` below ``folder``; returns what the manifest says of them.

    Args:
        folder: An artifact that is not whole yet.
        source: A checkpoint.
        dtype: The artifact's.
        context: Tokens of the longest sequence.
        report: Told of both.
    """
    weights = write_weights(folder, source, dtype, report)
    report.start("vectors", 1)
    vectors = write_vectors(source.config, source.tensor, folder, context, dtype)
    report.advance("vectors", 1)
    return weights, vectors


def named(path: Path, digests: dict[str, schema.SourceFile]) -> schema.Source:
    """What the manifest says of a checkpoint, or of the config alone."""
    name = path.resolve().name
    return schema.Source("".join(each if each.isprintable() else "?" for each in name), digests)


def described(config: Config, source: schema.Source, options: Options, plan: Plan) -> Manifest:
    """A manifest without targets, weights and vectors; ``plan`` is any target's."""
    geometry = plan.geometry
    return Manifest(
        producer={"ling3export": metadata.version("ling3export"), "python": platform.python_version()},
        source=source,
        config=config.semantic() | {"eos_token_id": config.eos_token_ids},
        plan=schema.Plan(
            plan.paddings,
            plan.decode_paddings,
            geometry.slots,
            geometry.page_size,
            plan.context,
            geometry.dtype,
            options.memory_fraction,
            options.state_memory,
        ),
        targets={},
        weights=schema.Weights({}, {}),
        vectors=schema.Vectors("none: there are no weights", 0, schema.Margins(), ()),
        tokenizer=(),
        notes=(),
    )


def ended(artifact: Path, manifest: Manifest, report: Reporter, cache: CacheUse) -> None:
    """Says where the cells came from; no earlier failure of this build needs to be remembered."""
    report.note(summary((cell for target in manifest.targets.values() for cell in target.cells.values()), cache))
    forget_failure(artifact)


def announced(plans: list[Plan], report: Reporter) -> list[Plan]:
    """``plans``, whose compilers were found installed and whose notes were told."""
    for plan in plans:
        check_toolchain(plan.target)
        for note in plan.named_notes:
            report.note(note)
    return plans


@contextmanager
def compiling(
    artifact: Path,
    config: Config,
    options: Options,
    plans: Sequence[Plan],
    folder: Path,
    cells: Cells,
    report: Reporter,
    taken: Mapping[str, Mapping[str, Built]] = MappingProxyType({}),
    shard: Shard = WHOLE,
) -> Iterator[Callable[[], list[Outcome]]]:
    """Compiles the cells of every plan while the block does other work; an exception in the block ends the compilers.

    Args:
        artifact: What is being built; a failure is noted beside it.
        config: The model.
        options: What was asked for.
        plans: One a target.
        folder: Gets ``programs/TARGET/`` for every target that has no such folder yet.
        cells: The cache.
        report: Told of every cell; shown the table of a build in which one failed.
        taken: By target the cells whose files are in the folder already.
        shard: Which share of the cells.

    Yields:
        A function that waits for the outcomes. It raises a PlanError where a cell failed or does not fit a device, and
        an ArtifactError where the disk is full.
    """
    compilers = []
    for plan in plans:
        programs, there = folder / "programs" / plan.target.name, taken.get(plan.target.name, {})
        programs.mkdir(parents=True, exist_ok=True)
        compilers.append(Compilers(plan, config, programs, options.jobs, cells, taken=there))
    number = itertools.count()
    shares = [[cell for cell in plan.cells if shard.has(next(number))] for plan in plans]
    report.start("programs", sum(map(len, shares)))

    def run() -> list[Outcome]:
        work = zip(compilers, shares, strict=True)
        return [each.run(share, lambda cell, built: report.advance("programs", 1)) for each, share in work]

    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(run)

        def finished() -> list[Outcome]:
            outcomes = future.result()
            if any(outcome.failures for outcome in outcomes):
                report.failed(outcomes)
            check(config, outcomes, cells.use.writes, lambda: note_failure(artifact, config, options, outcomes))
            for plan in plans:
                put_state_program(folder / "programs" / plan.target.name, config, plan, cells)
            return outcomes

        try:
            yield finished
        except BaseException:  # so that the compilers' thread can be joined
            for each in compilers:
                each.stop()
            raise


def complete(
    folder: Path,
    manifest: Manifest,
    outcomes: Sequence[Outcome],
    report: Reporter,
    cells: Cells,
    programs: Mapping[str, str] = MappingProxyType({}),
    *,
    prove: bool | None = None,
) -> Manifest:
    """Adds compiled targets to a manifest, runs the vectors through what runs here, and writes it.

    Args:
        folder: The artifact's folder, every other file in place.
        manifest: What is to be written; a target of the same name is replaced.
        outcomes: The targets.
        report: Told of the receipts.
        cells: The cache, which forgets the programs of a target whose receipts are refused.
        programs: By target the name of its folder in ``programs/``, where that is not the target's.
        prove: As in :func:`build`.

    Returns:
        The manifest as written.

    Raises:
        ArtifactError: A cell differs from its expectation by more than its tolerance, does not run, or the disk is
            full.
    """
    for outcome in outcomes:
        name, plan = outcome.plan.target.name, outcome.plan
        path = f"programs/{programs.get(name, name)}"
        kept = {each: found for each, found in manifest.vectors.receipts.items() if each != name}
        proven = {each: found for each, found in (manifest.vectors.portable or {}).items() if each != name}
        manifest = replace(
            manifest,
            targets=manifest.targets | {name: target_record(folder, manifest, plan, outcome.built, path)},
            vectors=replace(manifest.vectors, receipts=kept, portable=proven or None),
            producer={**toolchain(plan.target), **manifest.producer},
            notes=(*(note for note in manifest.notes if not note.startswith(f"{name}: ")), *plan.named_notes),
        )
    run = [each for each in outcomes if manifest.has_weights and _is_run(manifest, each.plan, prove, report)]
    vectors = manifest.vectors
    report.start("receipts", len(run))
    for outcome in run:
        name = outcome.plan.target.name
        try:
            found = receipts(folder, manifest, name, portable=not outcome.plan.target.runs_here)
        except ArtifactError:
            cells.forget(built.program for built in outcome.built.values())
            raise
        if isinstance(found, PortableReceipts):
            vectors = replace(vectors, portable=(vectors.portable or {}) | {name: found})
        else:
            vectors = replace(vectors, receipts=vectors.receipts | {name: found})
        report.advance("receipts", 1)
    return write_manifest(folder, replace(manifest, vectors=vectors))


def _is_run(manifest: Manifest, plan: Plan, prove: bool | None, report: Reporter) -> bool:
    """Whether the vectors are run through a target: its executables, or its portable programs on the processor."""
    if plan.target.runs_here or prove is not None:
        return plan.target.runs_here or bool(prove)
    if reason := too_large(manifest, plan.target.name):
        report.note(f"{plan.target.name}: portable programs not run: {reason}; --prove-portable runs them all the same")
    return reason is None


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


def target_record(
    folder: Path, manifest: Manifest, plan: Plan, built: Mapping[str, Built], programs: str
) -> schema.Target:
    """What ``manifest`` is to say of one target, whose programs lie in ``programs`` of the artifact's folder."""
    geometry, target, config = plan.geometry, plan.target, config_of(manifest)
    named = {}
    for cell in sorted(plan.cells, key=lambda cell: (cell.phase, cell.padding)):
        files = {suffix: file_record(folder, f"{programs}/{cell.name}.{suffix}") for suffix in SUFFIXES}
        status = "compiled" if target.runs_here else "compiled, not executed"
        named[cell.name] = Cell(**vars(built[cell.name].program) | files | {"status": status})
    parameters = tuple(
        schema.Parameter(
            ".".join(argument.path),
            row.name,
            row.shape,
            row.stored_dtype(geometry.dtype),
            tuple(argument.spec),
            argument.layer,
            None if argument.layer is None else argument.parameter.stack_axis,
        )
        for argument in arguments(config, geometry)
        for row in (argument.parameter,)
    )
    arrays = tuple(
        schema.StateArray(row.name, row.shape, row.dtype, tuple(row.spec), row.axes)
        for row in state_arrays(config, geometry)
    )
    requires, mesh = _needs([built[name] for name in named])
    kernels = file_record(folder, f"{programs}/{schema.KERNELS}") if geometry.kernels else None
    if kernels is not None:
        features = {*(requires.cpu_features or ()), *level_of(geometry.kernels).features}
        requires = replace(requires, cpu_features=tuple(sorted(features)))
    return schema.Target(
        platform=target.platform,
        kind=target.kind,
        topology=target.topology,
        mesh=mesh,
        requires=requires,
        toolchain=toolchain(target),
        fingerprint=fingerprint(config, plan),
        state_abi=state_abi(config, geometry.dtype),
        geometry=asdict(geometry),
        parameters=parameters,
        state=schema.State(
            geometry.placement,
            geometry.slots,
            geometry.pages,
            geometry.page_size,
            geometry.max_pages,
            CHUNK,
            arrays,
            geometry.snapshots or None,
        ),
        cells=named,
        kernels=kernels,
        state_program=file_record(folder, f"{programs}/{schema.STATE}") if target.platform == "cpu" else None,
    )


def state_abi(config: Config, dtype: str) -> str:
    """The sha256 of what one sequence's state is, whatever the weights (`Manifest.state_of` adds them).

    The model, the dtypes and the order of the arrays count; pools, paddings, sharding and TP do not.
    """
    return sha256_of(
        {
            "format": 2,
            "config": config.semantic(),
            "mla.latent": {"dtype": dtype, "axes": ["layers", "tokens", "latent then roped key"]},
            "kda.recurrent": {"dtype": "float32", "axes": ["layers", "heads", "key", "value"]},
            "kda.conv": {"dtype": dtype, "axes": ["layers", "q k v", "heads", "channels", "taps, oldest first"]},
        }
    )


def _needs(built: Sequence[Built]) -> tuple[Requirements, Mesh]:
    """What all of a target's executables need: one kind of machine and the same devices, every feature that one uses.

    Raises:
        PlanError: They were compiled for different machines.
    """
    features = {feature for each in built for feature in each.requires.cpu_features or ()}
    needs = {(str(replace(each.requires, cpu_features=None)), each.mesh): each.requires for each in built}
    if len(needs) != 1:
        raise PlanError(
            f"programs: expected all compiled for the same machine and devices, found {len(needs)} kinds",
            "build again without what the cache has: --cache redo",
        )
    ((_, mesh), requires), *_ = needs.items()
    return replace(requires, cpu_features=tuple(sorted(features)) or None), mesh


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
        raise ArtifactError(
            f"receipts of `{name}`{f', {PORTABLE}' * portable}: expected a {measured.tolerance.measure} relative error "
            f"of at most {measured.tolerance.bound:g}, found {to_json(worst)}, in {cell}",
            "the programs do not compute what the model computes: do not use them, and report this",
        )
    return measured
