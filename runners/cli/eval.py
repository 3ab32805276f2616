"""The commands ``ling3-runner eval``. stdout carries data, and the completion line last; all else goes to stderr."""

import sys
from pathlib import Path

import click

from ling3export.errors import Ling3Error, listed
from ling3export.runners.cli.commands import Group
from ling3export.runners.cli.errors import REGRESSION
from ling3export.runners.cli.eval_run import determinism, run

FOLDER = click.Path(path_type=Path)


@click.group("eval", cls=Group)
def evaluate() -> None:
    """Evaluate an artifact: run suites, compare runs, check tasks."""


evaluate.add_command(run)
evaluate.add_command(determinism)


@evaluate.command()
@click.argument("task", type=FOLDER)
@click.option("--force", is_flag=True, help="Replace the file if it is there.")
def new(task: Path, force: bool) -> None:
    """Write a task to fill in: TASK.yaml or TASK.json."""
    from ling3export.runners.evals.task_files import new_task

    new_task(task, force=force)
    click.echo(f"next: change {task}, then ling3-runner eval check {task}", err=True)


@evaluate.command()
@click.argument("task", type=FOLDER)
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


@evaluate.command()
@click.argument("run_folder", metavar="RUN", type=FOLDER)
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
@click.argument("a", type=FOLDER)
@click.argument("b", type=FOLDER)
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
@click.argument("run_folder", metavar="RUN", type=FOLDER)
@click.argument("file", type=FOLDER)
@click.option("--format", "kind", type=click.Choice(["inspect"]), default="inspect", show_default=True, help="Of FILE.")
@click.option("--force", is_flag=True, help="Replace FILE if it is there.")
def export(run_folder: Path, file: Path, kind: str, force: bool) -> None:
    """Write a finished RUN as a log that other tools read."""
    from ling3export.runners.evals import folder as eval_folder
    from ling3export.runners.evals.export import inspect_log

    if file.exists() and not force:
        raise Ling3Error(f"file `{file}`: expected no such file, found one", "replace it with --force")
    eval_folder.replace(file, eval_folder.json_line(inspect_log(run_folder)))
