"""``attach ARTIFACT CHECKPOINT``: other weights for programs that are there. Nothing is compiled.

The whole folder is written anew next to the old one and takes its name at once, so at any moment there is the old
artifact or the new one.
"""

from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import replace

from ling3export.artifacts.files import write_new
from ling3export.artifacts.manifest import read_checked, write_manifest
from ling3export.artifacts.schema import Manifest, Vectors, WeightsRecord
from ling3export.artifacts.signing import read_trusted
from ling3export.artifacts.staging import staged
from ling3export.checkpoint.convert import write_weights
from ling3export.checkpoint.reader import Checkpoint
from ling3export.compile.build import Reporter, copy_tokenizer, named, receipts
from ling3export.foundation.errors import ArtifactError, CheckpointError, listed, shown
from ling3export.plan.recorded import config_of, plan_of
from ling3export.verify.vectors import write_vectors


def attach(
    artifact: Path,
    checkpoint: Path,
    out: Path | None,
    report: Reporter,
    *,
    force: bool = False,
    ignore: Sequence[str] = (),
    run: bool = True,
    allow_rounding: bool = False,
) -> Manifest:
    """Gives the programs of ``artifact`` the weights, the tokenizer and the receipts of ``checkpoint``.

    Args:
        artifact: Programs alone, or a whole artifact.
        out: The folder to make; None replaces ``artifact``.
        force: Replace ``out`` if it is there, or the weights that ``artifact`` has.
        run: Whether the programs are run for receipts; otherwise nothing of ``artifact`` is executed. Receipts of the
            same weights stay, also those of programs that this machine cannot run.
        allow_rounding: Whether weights may be rounded that the programs' dtype does not hold.

    Raises:
        Ling3Error: Another configuration, a damaged program, programs that no trusted key has signed, a cell outside
            of its tolerance, a full disk. Both folders are then as before.
    """
    source, signed = Checkpoint.open(checkpoint, ignore=ignore), list[str]()
    with staged(out or artifact, force=force or out is None) as folder:
        manifest = read_trusted(artifact, signed.append)
        if out is None and manifest.has_weights and not force:
            raise ArtifactError(
                f"artifact `{artifact.name}`: expected programs alone, found weights of {manifest.source.name} with "
                f"them, in {artifact}",
                "name a folder for the new artifact, or replace the weights with --force",
            )
        check_config(source, manifest, artifact)
        source.check_rounding(manifest.plan.dtype, allow_rounding, manifest.plan.forms)
        report.note(signed[0])
        for record in (record for target in manifest.targets.values() for record in target.files):
            (folder / record.path).parent.mkdir(parents=True, exist_ok=True)
            write_new(folder / record.path, read_checked(artifact, record))
        tokenizer = copy_tokenizer(folder, source)
        pools = [target.state.pages * target.state.page_size for target in manifest.targets.values()]
        form = manifest.plan.forms
        weights = write_weights(folder, source, manifest.plan.dtype, report, form)
        context = min(manifest.plan.context, *pools)
        vectors = write_vectors(source, folder, context, manifest.plan.dtype, report, form)
        runnable = [name for name in manifest.targets if run and plan_of(manifest, name).target.runs_here]
        vectors = still_measured(manifest, weights, vectors, runnable, report)
        manifest = replace(
            manifest,
            source=named(source.path, source.digests(), source),
            weights=weights,
            vectors=vectors,
            tokenizer=tokenizer,
            config=manifest.config | {"eos_token_id": source.config.eos_token_ids},
        )
        report.start("receipts", len(runnable))
        for name in runnable:
            vectors.receipts[name] = receipts(folder, manifest, name)
            report.advance("receipts", 1)
        return write_manifest(folder, manifest)


def still_measured(
    manifest: Manifest, weights: WeightsRecord, vectors: Vectors, again: Sequence[str], report: Reporter
) -> Vectors:
    """The vectors with the receipts of ``manifest``, if weights and expectations are the same.

    Else ``report`` gets a note for each dropped receipt that is not measured ``again`` now.
    """
    old = manifest.vectors
    if manifest.weights == weights and replace(old, receipts={}, portable=None) == vectors:
        return replace(vectors, receipts=dict(old.receipts), portable=old.portable)
    for name in sorted({*old.receipts, *(old.portable or {})} - {*again}):
        option = " --portable" * (name not in old.receipts)
        report.note(
            f"{name}: its receipts were those of other weights and are dropped; measure it again with: "
            f"ling3export verify ARTIFACT --target {name}{option}"
        )
    return vectors


def check_config(source: Checkpoint, manifest: Manifest, artifact: Path) -> None:
    """Passes where the programs were compiled for the checkpoint's configuration.

    Raises:
        CheckpointError: Fields differ; it names them, with both values.
    """
    wanted, actual = config_of(manifest).semantic(), source.config.semantic()
    if other := [name for name in wanted if wanted[name] != actual[name]]:
        fields = [f"{name} {shown(actual[name])} instead of {shown(wanted[name])}" for name in other]
        raise CheckpointError(
            f"checkpoint `{source.path.name}`: expected the config that `{artifact.name}` was built from, "
            f"found {listed(fields)}, in {source.path}",
            "build programs for it: ling3export build CONFIG.json ARTIFACT --no-weights",
        )
