"""The commands ``ling3-runner eval``. stdout carries data, and the completion line last; all else goes to stderr."""

import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ling3export.foundation.errors import listed
from ling3export.foundation.extras import require
from ling3export.foundation.shards import WHOLE, Shard
from ling3export.runners.cli.cluster import cluster_options
from ling3export.runners.cli.command import INVALID, NOT_DETERMINISTIC, REGRESSION, Group, section
from ling3export.runners.cli.hosts import leading
from ling3export.runners.cli.options import (
    PATH,
    engine_options,
    shard_option,
    stop_option,
    target_option,
    temperature_option,
)
from ling3export.runners.cli.references import ARTIFACT
from ling3export.runners.engine.config import EngineConfig
from ling3export.runners.evals.trials import RunConfig
from ling3export.runners.hosts.hosts import Hosts
from ling3export.runners.hosts.rendezvous import announced

if TYPE_CHECKING:
    from ling3export.runners.evals.backend import EngineBackend, EvalBackend
    from ling3export.runners.evals.suites import Suite
    from ling3export.runners.fleet.cluster import Cluster

DEFAULTS = RunConfig()
SHOWN = 20  # divergences that are printed


def finished_run(path: Path, artifact: str | None) -> tuple[str, float]:
    """The suite and the success rate of a finished evaluation.

    Raises:
        EvalError: A trial is missing, the run is invalid, or it is one of another artifact.
    """
    from ling3export.runners.evals.run_file import read_run
    from ling3export.runners.evals.trials import EvalError

    run = read_run(path)
    rate, evaluated = run.summary.success_rate, str(run.header.environment.get("artifact"))[:64]
    if rate is None or run.summary.invalid(run.header.config.max_infra):
        raise EvalError(f"run `{path.name}`: too many infrastructure errors, its score does not count, in {path}")
    if evaluated != artifact:
        raise EvalError(f"run `{path.name}`: it evaluated artifact {evaluated}, not {artifact}, in {path}")
    return run.header.suite.name, rate


@click.group(
    "eval",
    cls=Group,
    sections={
        "Run": ("run",),
        "Compare artifacts": ("compare-logits",),
        "Look at runs": ("report", "diff"),
        "Write tasks": ("check",),
    },
)
def evaluate() -> None:
    """Evaluate an artifact: run suites, report and compare runs, check tasks."""


@evaluate.command()
@click.argument("artifact", type=ARTIFACT)
@click.argument("run_file", metavar="RUN", type=PATH)
@section(
    "Suite",
    click.option("--suite", required=True, metavar="NAME|FILE", help="A ready suite, or a task file."),
    click.option("--data", type=PATH, help="Folder or file of the suite's data set."),
    click.option("--limit", type=click.IntRange(0), help="Keep only the first N tasks.", metavar="N"),
    click.option("--trials", type=click.IntRange(1), default=DEFAULTS.trials, help="Tries at each task."),
    click.option(
        "--threshold", type=click.FloatRange(0, 1, min_open=True), help="Share of a task's trials that must pass."
    ),
)
@section(
    "Answers",
    click.option("--max-tokens", type=click.IntRange(1), default=DEFAULTS.max_tokens, help="Most tokens of a trial."),
    temperature_option,
    click.option("--seed", type=int, default=DEFAULTS.seed, help="Seed of the run."),
    stop_option,
    click.option(
        "--batch", type=click.IntRange(1), default=DEFAULTS.batch, help="Trials given to the engine together."
    ),
)
@section(
    "Record",
    click.option(
        "--max-infra",
        type=click.FloatRange(0, 1),
        default=DEFAULTS.max_infra,
        help="Share of trials that may end in infrastructure errors.",
    ),
    click.option("--transcripts", is_flag=True, help="Also record every transcript with its grades."),
    click.option("--force", is_flag=True, help="Begin again, and replace RUN."),
)
@section("Work", shard_option("Every N-th batch from batch I on"))
@engine_options("target", "programs", "prefix_cache", prefix_cache="off")
@cluster_options
def run(
    artifact: Path,
    run_file: Path,
    suite: str,
    data: Path | None,
    limit: int | None,
    force: bool,
    engine: EngineConfig,
    shard: Shard,
    cluster: "Cluster | None",
    **settings: Any,
) -> None:
    """Run a suite on ARTIFACT, or continue an interrupted run; write RUN, a file of JSON lines.

    On several hosts, run the same command on each; only host 0 reads the suite, writes RUN and prints. RUNs of all
    shards, one after the other, are the whole run.
    """
    engine = replace(engine, overlap=False)
    hosts = leading(artifact, engine) if cluster is None else None
    with announced(hosts):
        _require()
        from ling3export.runners.evals.run import run_suite

        loaded, config = _suite_of(suite, data, limit), replace(DEFAULTS, **settings)
    opened: AbstractContextManager[EvalBackend] = (
        open_backend(artifact, engine, hosts) if cluster is None else _on(cluster, artifact.resolve(), engine)
    )
    with opened as backend, progress(f"eval {loaded.name}") as report_progress:
        done = run_suite(loaded, backend, run_file, config, shard=shard, force=force, progress=report_progress)
    summary = done.summary
    if shard != WHOLE:
        click.echo(f"{run_file}: shard {shard}: {summary.passed} of {summary.total} trials passed", err=True)
        return
    click.echo(f"report: ling3-runner eval report {run_file}", err=True)
    for note in loaded.notes:
        click.echo(f"note: {note}", err=True)
    click.echo(f"solved: {len(summary.solved)} of {len(summary.by_task)} tasks", err=True)
    from ling3export.runners.evals.report import invalid_line
    from ling3export.runners.evals.statistics import completion_line

    if invalid := summary.invalid(config.max_infra):
        click.echo(invalid_line(summary, config.max_infra))
    click.echo(completion_line(summary.passed, summary.total))
    sys.exit(INVALID if invalid else 0)


@evaluate.command()
@click.argument("runs", nargs=-1, required=True, metavar="RUN...", type=PATH)
def report(runs: tuple[Path, ...]) -> None:
    """Report a run in Markdown: scores, failures by cause, settings. Exit with 4 if it is invalid.

    Several RUNs are the shards of one run.
    """
    _require()
    from ling3export.runners.evals.report import report as markdown
    from ling3export.runners.evals.run_file import read_run

    run = read_run(*runs)
    click.echo(markdown(run), nl=False)
    sys.exit(INVALID if run.summary.invalid(run.header.config.max_infra) else 0)


@evaluate.command("compare-logits")
@click.argument("a", type=ARTIFACT)
@click.argument("b", type=ARTIFACT)
@click.option("--text", required=True, type=PATH, metavar="FILE", help="A text in UTF-8.")
@click.option("--tokens", type=click.IntRange(1), default=4096, help="Most tokens that are judged.")
@click.option("--window", type=click.IntRange(2), default=512, help="Tokens that the model sees at once.")
@section("Artifacts", target_option)
def logits(a: Path, b: Path, text: Path, tokens: int, window: int, **options: Any) -> None:
    """Compare the distributions of A and B over a text.

    Prints KL(A || B), the share of tokens with the same best token, and perplexities, as JSON. A's logits lie in TMPDIR
    meanwhile: a row of the whole vocabulary for each token.
    """
    from ling3export.runners.evals.compare_logits import compare_logits

    with progress("compare-logits") as report_progress:
        comparison = compare_logits(a, b, text, tokens, window, progress=report_progress, **options)
    click.echo(json.dumps(asdict(comparison), indent=1))


@evaluate.command()
@click.argument("a", type=PATH)
@click.argument("b", type=PATH)
@click.option("--tokens", is_flag=True, help="Exit with 3 if a token differs: the runs must be deterministic.")
def diff(a: Path, b: Path, tokens: bool) -> None:
    """Compare runs A and B; exit with 6 if B breaks a task."""
    _require()
    from ling3export.runners.evals import compare

    changes = compare.diff(a, b)
    for name in changes.broken:
        click.echo(f"broken  {name}")
    for name in changes.fixed:
        click.echo(f"fixed   {name}")
    if changes.apart:
        click.echo(f"not compared: {listed(changes.apart)}", err=True)
    click.echo(
        f"{len(changes.broken)} broken, {len(changes.fixed)} fixed, {changes.both} solved by both, {changes.neither} "
        "by neither"
    )
    for place in changes.divergences[:SHOWN]:
        click.echo(f"differs {place.trial} at token {place.pos}: {place.id_a}, {place.id_b}")
    same = changes.trials - len(changes.divergences)
    click.echo(f"{same} of {changes.trials} trials have the same tokens")
    if tokens and changes.divergences:
        sys.exit(NOT_DETERMINISTIC)
    sys.exit(REGRESSION if changes.broken else 0)


@evaluate.command()
@click.argument("task", type=PATH)
def check(task: Path) -> None:
    """Prove that the tasks of a file can be solved, and failed."""
    _require()
    from ling3export.runners.evals.task_files import check_tasks, load_tasks
    from ling3export.runners.evals.trials import EvalError

    tasks = load_tasks(task)
    mistakes = check_tasks(tasks)
    for text in mistakes:
        click.echo(text, err=True)
    if mistakes:
        raise EvalError(f"check `{task.name}`: {len(tasks)} tasks have {len(mistakes)} mistakes")
    click.echo(f"{len(tasks)} tasks: the reference solution passes, an empty answer fails")


def _require() -> None:
    require("eval", "eval", "pydantic", "yaml")


def open_backend(artifact: Path, config: EngineConfig, hosts: Hosts | None) -> "EngineBackend":
    """An engine for an evaluation's prompts; loads jax."""
    from ling3export.runners.engine.engine import Engine
    from ling3export.runners.evals.backend import EngineBackend

    return EngineBackend(Engine(artifact, config, hosts=hosts))


@contextmanager
def _on(cluster: "Cluster", artifact: Path, config: EngineConfig) -> Iterator["EvalBackend"]:
    """Engines of a cluster for an evaluation's prompts."""
    from ling3export.runners.evals.backend import ClusterBackend

    with cluster.connected():
        yield ClusterBackend(cluster, artifact, config)


def _suite_of(suite: str, data: Path | None, limit: int | None) -> "Suite":
    """A suite with at least one task; a usage error where there is none."""
    from ling3export.runners.evals.suites import load_suite

    loaded = load_suite(suite, data, limit)
    if not loaded.tasks:
        raise click.UsageError(f"suite `{loaded.name}`: it has no task.")
    return loaded


def duration(seconds: float) -> str:
    """``1:02:03``, or ``2:03`` below an hour."""
    minutes, rest = divmod(math.ceil(seconds), 60)
    return f"{minutes}:{rest:02}" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


@contextmanager
def progress(title: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr, as a function of the finished and of all units; none where stderr is no terminal.

    The remaining time follows from the mean over all units since the begin, because units end in bursts.
    """
    words = {"label": title, "show_eta": False, "show_percent": False, "item_show_func": lambda text: text}
    bar: Any = click.progressbar(length=1, file=sys.stderr, hidden=not sys.stderr.isatty(), **words)  # type: ignore[call-overload]
    begin: tuple[float, int] | None = None
    opened = time.monotonic()

    def report(done: int, total: int) -> None:
        nonlocal begin
        start, before = begin = begin or (opened, max(done - 1, 0))
        seconds = (time.monotonic() - start) / (done - before) * (total - done) if done > before else None
        left = "" if seconds is None or done == total else f", {duration(seconds)} left"
        bar.length = total
        bar.update(done - bar.pos, f"{done:,} of {total:,}{left}")

    with bar:
        yield report
