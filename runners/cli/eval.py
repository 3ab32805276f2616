"""The commands ``ling3-runner eval``. stdout carries data, and the completion line last; all else goes to stderr."""

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from ling3export.foundation.errors import Ling3Error, listed
from ling3export.foundation.shards import WHOLE, Shard
from ling3export.runners.cli.cluster import cluster_options
from ling3export.runners.cli.command import INVALID, NOT_DETERMINISTIC, REGRESSION, Decorator, Group, section
from ling3export.runners.cli.hosts import keep_stdout, leading
from ling3export.runners.cli.options import (
    PATH,
    check_option,
    engine_options,
    programs_option,
    shard_option,
    stop_option,
    target_option,
    temperature_option,
    trust_option,
)
from ling3export.runners.cli.references import ARTIFACT
from ling3export.runners.engine.config import EngineConfig
from ling3export.runners.evals.trials import RunConfig
from ling3export.runners.hosts.hosts import Hosts, find_hosts
from ling3export.runners.hosts.rendezvous import announced

if TYPE_CHECKING:
    from ling3export.runners.evals.backend import EngineBackend, EvalBackend
    from ling3export.runners.evals.statistics import Summary
    from ling3export.runners.evals.suites import Suite
    from ling3export.runners.fleet.cluster import Cluster

DEFAULTS = RunConfig()
QUIET = 10.0  # seconds without a word, where there is no bar


def finished_run(path: Path, artifact: str | None) -> tuple[str, float, list[str]]:
    """The suite and the success rate of a finished evaluation, and the files of its folder, run.json first.

    Args:
        path: The folder that ``eval run`` wrote.
        artifact: The sha256 of the manifest that must have been evaluated.

    Raises:
        EvalError: The run has not ended, is invalid, is one of several shards, or is one of another artifact.
    """
    from ling3export.runners.evals.folder import PREDICTIONS, REPORT, RUN, TASKS, read_run
    from ling3export.runners.evals.trials import EvalError

    run = read_run(path)
    totals = run.totals or {}
    rate, invalid = totals.get("success_rate"), totals.get("invalid")
    if run.status != "complete" or run.shard != str(WHOLE) or type(rate) is not float or invalid is not False:
        raise EvalError(f"run `{path.name}`: expected one that is finished, whole and valid, found another, in {path}")
    if run.environment.get("artifact") != artifact:
        found = str(run.environment.get("artifact"))[:64]
        raise EvalError(f"run `{path.name}`: expected one of artifact {artifact}, found {found}, in {path}")
    return run.suite.name, rate, [name for name in (RUN, TASKS, PREDICTIONS, REPORT) if (path / name).exists()]


def _suite_options(*more: Decorator) -> Decorator:
    """The options that say what is asked."""
    return section(
        "Suite",
        click.option("--suite", required=True, metavar="NAME|FILE", help="A ready suite, or a task file."),
        click.option("--data", type=PATH, help="Folder or file of the suite's data set."),
        click.option("--limit", type=click.IntRange(0), help="Keep only so many tasks, the first ones."),
        *more,
    )


max_tokens_option = click.option(
    "--max-tokens", type=click.IntRange(1), default=DEFAULTS.max_tokens, help="Most tokens of a trial."
)
batch_option = click.option(
    "--batch", type=click.IntRange(1), default=DEFAULTS.batch, help="Trials given to the engine together."
)


@click.group(
    "eval",
    cls=Group,
    sections={
        "Run": ("run", "merge", "determinism"),
        "Compare artifacts": ("compare-logits",),
        "Look at runs": ("diagnose", "diff"),
        "Write tasks": ("new", "check"),
    },
)
def evaluate() -> None:
    """Evaluate an artifact: run suites, compare runs, check tasks."""


@evaluate.command(common="suite data limit trials max_tokens temperature seed shard target transcripts".split())
@click.argument("artifact", type=ARTIFACT)
@click.argument("run_folder", metavar="RUN", type=PATH)
@_suite_options(
    click.option("--trials", type=click.IntRange(1), default=DEFAULTS.trials, help="Tries at each task."),
    click.option(
        "--threshold", type=click.FloatRange(0, 1, min_open=True), help="Share of a task's trials that must pass."
    ),
)
@section(
    "Answers",
    max_tokens_option,
    temperature_option,
    click.option("--seed", type=int, default=DEFAULTS.seed, help="Seed of the run."),
    stop_option,
    batch_option,
)
@section(
    "Record",
    click.option(
        "--max-infra",
        type=click.FloatRange(0, 1),
        default=DEFAULTS.max_infra,
        help="Share of trials that may end in infrastructure errors.",
    ),
    click.option("--transcripts", is_flag=True, help="Also write every transcript with its grades."),
    click.option("--force", is_flag=True, help="Begin anew, whatever run is in RUN."),
)
@section("Work", shard_option("Every N-th batch from batch I on"))
@engine_options("target", "programs", "step_timeout", "prefix_cache", prefix_cache="off")
@cluster_options
def run(
    artifact: Path,
    run_folder: Path,
    suite: str,
    data: Path | None,
    limit: int | None,
    force: bool,
    engine: EngineConfig,
    shard: Shard,
    cluster: "Cluster | None",
    **settings: Any,
) -> None:
    """Run a suite on ARTIFACT, or go on with it; write RUN.

    On several hosts, run the same command on each; host 0 alone reads the suite, writes RUN and prints.
    """
    from ling3export.runners.evals.backend import OVERLAP
    from ling3export.runners.evals.run import run_suite

    engine = replace(engine, overlap=OVERLAP)
    hosts = leading(artifact, engine) if cluster is None else None
    with announced(hosts):
        loaded, config = _suite_of(suite, data, limit), replace(DEFAULTS, **settings)
    opened: AbstractContextManager[EvalBackend] = (
        open_backend(artifact, engine, hosts) if cluster is None else _on(cluster, loaded, artifact.resolve(), engine)
    )
    with opened as backend, progress(f"eval {loaded.name}") as told:
        summary = run_suite(loaded, backend, run_folder, config, shard=shard, force=force, progress=told)
    if shard == WHOLE:
        _end(run_folder, summary, config.max_infra, loaded.notes)
    click.echo(f"{run_folder}: shard {shard}: {summary.passed} of {summary.total} trials passed", err=True)


def _end(run_folder: Path, summary: "Summary", max_infra: float, notes: Sequence[str]) -> NoReturn:
    """Prints what came of a whole run, and exits."""
    from ling3export.runners.evals.report import invalid_line
    from ling3export.runners.evals.statistics import completion_line

    click.echo(f"report: {run_folder / 'report.md'}", err=True)
    for note in notes:
        click.echo(f"note: {note}", err=True)
    click.echo(f"solved: {len(summary.solved)} of {len(summary.by_task)} tasks", err=True)
    invalid = summary.invalid(max_infra)
    if invalid:
        click.echo(invalid_line(summary, max_infra))
    click.echo(completion_line(summary.passed, summary.total))
    sys.exit(INVALID if invalid else 0)


@evaluate.command()
@click.argument("shards", nargs=-1, required=True, metavar="RUN...", type=PATH)
@click.option("--to", "run_folder", required=True, type=PATH, help="Folder of the whole run.")
@click.option("--force", is_flag=True, help="Begin anew, whatever run is there.")
def merge(shards: tuple[Path, ...], run_folder: Path, force: bool) -> None:
    """Put the RUNs of all shards together: what one run gives."""
    from ling3export.runners.evals.merge import merge as merged

    summary, run = merged(shards, run_folder, force=force)
    _end(run_folder, summary, run.config.max_infra, run.suite.notes)


@evaluate.command(common="suite data limit runs alone max_tokens batch target programs".split())
@click.argument("artifact", type=ARTIFACT)
@_suite_options(
    click.option("--runs", type=click.IntRange(2), default=2, help="How often."),
    click.option(
        "--alone", type=click.IntRange(0), default=0, help="Also run so many prompts each alone, which is not judged."
    ),
)
@section("Answers", max_tokens_option, stop_option, batch_option)
@engine_options("target", "programs", "step_timeout")
def determinism(
    artifact: Path,
    suite: str,
    data: Path | None,
    limit: int | None,
    runs: int,
    alone: int,
    max_tokens: int,
    stop: tuple[str, ...],
    batch: int,
    engine: EngineConfig,
) -> None:
    """Run a suite again; exit with 3 if a token id differs.

    All runs are at temperature 0, in the same order and batches.
    """
    from ling3export.runners.evals import compare
    from ling3export.runners.evals.backend import OVERLAP, PromptRequest

    engine = replace(engine, overlap=OVERLAP, prefix_cache=False)
    hosts = leading(artifact, engine)
    with announced(hosts):
        loaded = _suite_of(suite, data, limit)
    max_tokens = loaded.settings.get("max_tokens", max_tokens)
    asks = [PromptRequest(task.id, task.prompt, max_tokens, stop=stop) for task in loaded.tasks]
    opened = open_backend(artifact, engine, hosts)
    with opened as backend, progress("determinism") as told:
        found = compare.determinism(backend, asks, runs=runs, batch=batch, alone=alone, progress=told)
    click.echo(json.dumps(asdict(found), ensure_ascii=False, indent=1))
    sys.exit(NOT_DETERMINISTIC if found.first_divergence else 0)


@evaluate.command("compare-logits", common="text tokens window target programs".split())
@click.argument("a", type=ARTIFACT)
@click.argument("b", type=ARTIFACT)
@click.option("--text", required=True, type=PATH, metavar="FILE", help="What is judged, in UTF-8.")
@click.option("--tokens", type=click.IntRange(1), default=4096, help="Most tokens that are judged.")
@click.option("--window", type=click.IntRange(2), default=512, help="Tokens that the model sees at once.")
@section("Artifacts", target_option, programs_option, check_option, trust_option)
def logits(a: Path, b: Path, text: Path, tokens: int, window: int, **how: Any) -> None:
    """How far B's distributions are from A's, over a text.

    Prints KL(A || B), how often both have the same best token, and perplexities, as JSON. A's logits lie in TMPDIR
    meanwhile: a row of the whole vocabulary for each token.
    """
    from ling3export.runners.evals.compare_logits import compare_logits

    hosts = find_hosts()
    if hosts is not None:
        keep_stdout()
    with progress("compare-logits") as told:
        found = compare_logits(a, b, text, tokens, window, hosts=hosts, progress=told, **how)
    if found is not None:
        click.echo(json.dumps(asdict(found), indent=1))


@evaluate.command()
@click.argument("run_folder", metavar="RUN", type=PATH)
def diagnose(run_folder: Path) -> None:
    """Group the failures of RUN by cause."""
    from ling3export.runners.evals import report
    from ling3export.runners.evals.folder import read_predictions

    records = read_predictions(run_folder)
    groups = report.diagnose(records)
    for name, found in groups.items():
        click.echo(f"{name:13}{len(found):6}  {report.GROUPS[name]}: {listed(found)}")
    click.echo(f"{sum(map(len, groups.values()))} of {len(records)} trials failed")


@evaluate.command()
@click.argument("a", type=PATH)
@click.argument("b", type=PATH)
def diff(a: Path, b: Path) -> None:
    """Compare runs A and B; exit with 6 if B breaks a task."""
    from ling3export.runners.evals import compare

    found = compare.diff(a, b)
    for name in found.broken:
        click.echo(f"broken  {name}")
    for name in found.fixed:
        click.echo(f"fixed   {name}")
    if found.apart:
        click.echo(f"not compared: {listed(found.apart)}", err=True)
    click.echo(
        f"{len(found.broken)} broken, {len(found.fixed)} fixed, {found.both} solved by both, {found.neither} by "
        f"neither; McNemar's exact p = {found.p:.4f}"
    )
    sys.exit(REGRESSION if found.broken else 0)


@evaluate.command()
@click.argument("task", type=PATH)
@click.option("--force", is_flag=True, help="Replace the file if it is there.")
def new(task: Path, force: bool) -> None:
    """Write a task to fill in: TASK.yaml or TASK.json."""
    from ling3export.runners.evals.task_files import new_task

    new_task(task, force=force)
    click.echo(f"next: change {task}, then ling3-runner eval check {task}", err=True)


@evaluate.command()
@click.argument("task", type=PATH)
def check(task: Path) -> None:
    """Prove that the tasks of a file can be solved, and failed."""
    from ling3export.runners.evals.task_files import check_tasks, load_tasks
    from ling3export.runners.evals.trials import EvalError

    tasks = load_tasks(task)
    wrong = check_tasks(tasks)
    for text in wrong:
        click.echo(text, err=True)
    if wrong:
        raise EvalError(f"check `{task.name}`: expected {len(tasks)} sound tasks, found {len(wrong)} mistakes")
    click.echo(f"{len(tasks)} tasks: the reference solution passes, an empty answer fails")


def open_backend(artifact: Path, config: EngineConfig, hosts: Hosts | None) -> "EngineBackend":
    """The engine that answers an evaluation's prompts; loads jax."""
    from ling3export.runners.engine.engine import Engine
    from ling3export.runners.evals.backend import EngineBackend

    return EngineBackend(Engine(artifact, config, hosts=hosts))


@contextmanager
def _on(cluster: "Cluster", suite: "Suite", artifact: Path, config: EngineConfig) -> Iterator["EvalBackend"]:
    """What answers an evaluation's prompts on a cluster."""
    from ling3export.runners.evals.backend import ClusterBackend

    if suite.product:
        hint = "run it on one engine, without --ray"
        raise Ling3Error(f"--ray: suite `{suite.name}` reads the counters of one engine", hint)
    with cluster.connected():
        yield ClusterBackend(cluster, artifact, config)


def _suite_of(suite: str, data: Path | None, limit: int | None) -> "Suite":
    """A suite with at least one task; a usage error where there is none."""
    from ling3export.runners.evals.suites import load_suite

    loaded = load_suite(suite, data, limit)
    if not loaded.tasks:
        raise click.UsageError(f"suite `{loaded.name}`: expected at least one task, found none.")
    return loaded


def lines(title: str, clock: Callable[[], float] = time.monotonic) -> Callable[[int, int], None]:
    """Says on stderr how far something is, at most every QUIET seconds: shorter work says nothing."""
    last = clock()

    def told(done: int, total: int) -> None:
        nonlocal last
        if clock() - last >= QUIET:
            last = clock()
            click.echo(f"{title}: {done:,} of {total:,}", err=True)

    return told


@contextmanager
def progress(title: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr, as a function of the finished and of all units; a line now and then where it is no terminal."""
    if not sys.stderr.isatty():
        yield lines(title)
        return
    with click.progressbar(length=1, label=title, file=sys.stderr) as bar:

        def told(done: int, total: int) -> None:
            bar.length = total
            bar.update(done - bar.pos)

        yield told
