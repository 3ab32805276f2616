"""``ling3-runner eval run`` and ``determinism``: those that load an artifact, on one host or several."""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ling3export.runners.cli.errors import INVALID, NOT_DETERMINISTIC
from ling3export.runners.cli.hosts import HOST_NAMES, announced, host_options, leading
from ling3export.runners.cli.loading_options import programs_option
from ling3export.runners.cli.sampling_options import sampling_option
from ling3export.runners.evals.trials import RunConfig
from ling3export.runners.hosts.hosts import Hosts

if TYPE_CHECKING:
    from ling3export.runners.evals.backend import EngineBackend
    from ling3export.runners.evals.suites import Suite

DEFAULTS = RunConfig()
FOLDER = click.Path(path_type=Path)


def open_backend(artifact: Path, target: str | None, programs: str, hosts: Hosts | None) -> "EngineBackend":
    """The engine as a backend; loads jax."""
    from ling3export.runners.evals.backend import EngineBackend

    return EngineBackend(artifact, target=target, programs=programs, hosts=hosts)


def tasks_of(suite: str, data: Path | None, limit: int | None) -> "Suite":
    """A suite with at least one task; ends the command where there is none."""
    from ling3export.runners.evals.suites import load_suite

    loaded = load_suite(suite, data, limit)
    if not loaded.tasks:
        raise click.UsageError(f"suite `{loaded.name}`: expected at least one task, found none.")
    return loaded


def options(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Adds options that several commands have."""
    table = {
        "suite": click.option("--suite", required=True, metavar="NAME|FILE", help="A ready suite, or a task file."),
        "data": click.option("--data", type=FOLDER, help="Folder or file of the suite's data set."),
        "limit": click.option("--limit", type=click.IntRange(0), help="Only the first so many tasks."),
        "max_tokens": click.option(
            "--max-tokens",
            type=click.IntRange(1),
            default=DEFAULTS.max_tokens,
            show_default=True,
            help="At most this many tokens a trial.",
        ),
        "batch": click.option(
            "--batch",
            type=click.IntRange(1),
            default=DEFAULTS.batch,
            show_default=True,
            help="Trials given to the engine together.",
        ),
        "stop": click.option("--stop", multiple=True, metavar="TEXT", help="Ends an answer; may be repeated."),
        "target": click.option("--target", help="Which of the artifact's targets.  [default: the only one that fits]"),
        "programs": programs_option,
    }

    def add(command: Callable[..., Any]) -> Callable[..., Any]:
        for name in reversed(names):
            command = table[name](command)
        return command

    return add


@click.command()
@click.argument("artifact", type=FOLDER)
@click.argument("run_folder", metavar="RUN", type=FOLDER)
@options("suite", "data", "limit")
@click.option(
    "--trials", type=click.IntRange(1), default=DEFAULTS.trials, show_default=True, help="Tries at each task."
)
@click.option(
    "--threshold", type=click.FloatRange(0, 1, min_open=True), help="Share of a task's trials that must pass."
)
@options("max_tokens")
@sampling_option("temperature", "0 takes the best token; at most 2.")
@click.option("--seed", type=int, default=DEFAULTS.seed, show_default=True, help="Of the run.")
@options("stop", "batch")
@click.option(
    "--max-infra",
    type=click.FloatRange(0, 1),
    default=DEFAULTS.max_infra,
    show_default=True,
    help="Share of trials that may end in infrastructure errors.",
)
@click.option("--transcripts", is_flag=True, help="Also write every transcript with its grades.")
@click.option("--force", is_flag=True, help="Begin anew whatever run is in RUN.")
@options("target", "programs")
@host_options
def run(
    artifact: Path, run_folder: Path, suite: str, data: Path | None, limit: int | None, force: bool,
    target: str | None, programs: str, **settings: Any,
) -> None:  # fmt: skip
    """Run a suite on ARTIFACT, or go on with it; write RUN.

    On several hosts, run the same command on each; host 0 alone reads the suite, writes RUN and prints.
    """
    from ling3export.runners.evals.backend import OVERLAP
    from ling3export.runners.evals.report import invalid_line
    from ling3export.runners.evals.run import run_suite
    from ling3export.runners.evals.statistics import completion_line

    host = {name: settings.pop(name) for name in HOST_NAMES}
    hosts = leading(artifact, host, target=target, programs=programs, overlap=OVERLAP)
    with announced(hosts):
        loaded, config = tasks_of(suite, data, limit), replace(DEFAULTS, **settings)
    with open_backend(artifact, target, programs, hosts) as backend, progress(f"eval {loaded.name}") as told:
        summary = run_suite(loaded, backend, run_folder, config, force=force, progress=told)
    click.echo(f"report: {run_folder / 'report.md'}", err=True)
    click.echo(f"solved: {len(summary.solved)} of {len(summary.by_task)} tasks", err=True)
    invalid = summary.invalid(config.max_infra)
    if invalid:
        click.echo(invalid_line(summary, config.max_infra))
    click.echo(completion_line(summary.passed, summary.total))
    sys.exit(INVALID if invalid else 0)


@click.command()
@click.argument("artifact", type=FOLDER)
@options("suite", "data", "limit")
@click.option("--runs", type=click.IntRange(2), default=2, show_default=True, help="How often.")
@click.option("--alone", type=click.IntRange(0), default=0, help="Also run so many prompts each alone; not judged.")
@options("max_tokens", "stop", "batch", "target", "programs")
@host_options
def determinism(
    artifact: Path, suite: str, data: Path | None, limit: int | None, runs: int, alone: int, max_tokens: int,
    stop: tuple[str, ...], batch: int, target: str | None, programs: str, **host: Any,
) -> None:  # fmt: skip
    """Run a suite again; exit with 3 if a token id differs.

    All runs are at temperature 0, in the same order and batches.
    """
    from ling3export.runners.evals import compare
    from ling3export.runners.evals.backend import OVERLAP, Ask

    hosts = leading(artifact, host, target=target, programs=programs, overlap=OVERLAP)
    with announced(hosts):
        loaded = tasks_of(suite, data, limit)
    max_tokens = loaded.settings.get("max_tokens", max_tokens)
    asks = [Ask(task.id, task.prompt, max_tokens, stop=stop) for task in loaded.tasks]
    with open_backend(artifact, target, programs, hosts) as backend, progress("determinism") as told:
        found = compare.determinism(backend, asks, runs=runs, batch=batch, alone=alone, progress=told)
    click.echo(json.dumps(asdict(found), ensure_ascii=False, indent=1))
    sys.exit(NOT_DETERMINISTIC if found.first_divergence else 0)


@contextmanager
def progress(title: str) -> Iterator[Callable[[int, int], None] | None]:
    """A bar on stderr; None where that is no terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    with click.progressbar(length=1, label=title, file=sys.stderr) as bar:

        def told(done: int, total: int) -> None:
            bar.length = total
            bar.update(done - bar.pos)

        yield told
