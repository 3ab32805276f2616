"""The report of a run in Markdown: scores with their intervals, failures by cause, and all settings."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from ling3export.foundation.errors import listed
from ling3export.runners.evals.run_file import Header, Run
from ling3export.runners.evals.statistics import Summary, completion_line, wilson
from ling3export.runners.evals.trials import REFUSED, Trial

SHOWN = 10  # names in a list
# Causes of failures; a trial belongs to the first one that fits.
GROUPS = {
    "infra": "ended in an infrastructure error",
    "refused": "the prompt was refused: it can never be served",
    "loop": "repeated itself: 3 times the same 20 tokens or more",
    "truncated": "ended at max_tokens or at the context's end",
    "early_eos": "ended by itself within 16 tokens, without an answer",
    "no_answer": "no answer found in the text",
    "wrong_answer": "an answer, but not the right one",
}
SHORTEST = 20  # tokens of a repeated piece
REPEATS = 3
EARLY = 16  # tokens


def report(run: Run) -> str:
    """The report of a run as Markdown. It depends on the run's file only: no clock, no path."""
    header, summary = run.header, run.summary
    rates = [
        (rate.k, rate.tasks, _number(rate.at_k), _number(rate.hat_k)) for rate in summary.rates(header.config.trials)
    ]
    failures = [(GROUPS[name], len(labels), listed(labels, 5)) for name, labels in diagnose(run.trials).items()]
    suite = {name: getattr(header.suite, name) for name in ("tasks", "files", "tasks_sha256", "notes")}
    sections = {
        "pass@k and pass^k": _table(("k", "tasks", "pass@k", "pass^k"), rates),
        "Tasks": _solved(summary),
        "Failures": _table(("group", "trials", "which"), failures) or ["None."],
        "Suite": _settings(suite),
        "Settings": _settings(asdict(header.config)),
        "Environment": _settings(header.environment),
    }
    lines = [f"# {header.suite.name}", *_score(header, summary)]
    for title, content in sections.items():
        lines += ["", f"## {title}", "", *content] if content else []
    return "\n".join([*lines, "", f"Record of the run: {header.sha256}"]) + "\n"


def invalid_line(summary: Summary, max_infra: float) -> str:
    """The reason why a run with too many infrastructure errors does not count."""
    return f"INVALID: infra rate {summary.infra_rate:.4f} > {max_infra:.4f}"


def _score(header: Header, summary: Summary) -> list[str]:
    lines = ["", completion_line(summary.passed, summary.total), ""]
    if summary.invalid(header.config.max_infra):
        lines[1:1] = [f"**{invalid_line(summary, header.config.max_infra)}**", ""]
    rows = [
        ("success rate (C / N)", f"{_number(summary.success_rate)} {_interval(summary.passed, summary.total)}"),
        (
            "adjusted (C / (N - I))",
            f"{_number(summary.adjusted_success_rate)} {_interval(summary.passed, summary.total - summary.infra)}",
        ),
        ("infra rate (I / N)", f"{summary.infra}/{summary.total} = {summary.infra_rate:.4f}"),
    ]
    return [*lines, *_table(("rate", "value, Wilson 95 %"), rows)]


def _solved(summary: Summary) -> list[str]:
    solved = set(summary.solved)
    unsolved = [name for name in summary.by_task if name not in solved]
    lines = [f"{len(solved)} of {len(summary.by_task)} tasks reach their threshold."]
    return [*lines, f"Not: {listed(unsolved, SHOWN)}."] if unsolved else lines


def _settings(part: dict[str, Any]) -> list[str]:
    return _table(("name", "value"), [(name, _json(value)) for name, value in part.items()])


def _table(head: Sequence[str], rows: Sequence[Iterable[object]]) -> list[str]:
    """The lines of a table in Markdown; none if it has no rows."""
    cells = [[str(cell).replace("|", "\\|").replace("\n", " ") for cell in row] for row in rows]
    return ["| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *cells)] if cells else []


def _json(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _number(value: float | None) -> str:
    return "undefined" if value is None else f"{value:.4f}"


def _interval(passed: int, total: int) -> str:
    interval = wilson(passed, total)
    return "" if interval is None else f"[{interval[0]:.4f}, {interval[1]:.4f}]"


def diagnose(trials: Sequence[Trial]) -> dict[str, list[str]]:
    """The labels of the trials that failed, by group; groups without any are left out."""
    groups: dict[str, list[str]] = {name: [] for name in GROUPS}
    for trial in trials:
        if not trial.passed:
            groups[_group(trial)].append(trial.label)
    return {name: labels for name, labels in groups.items() if labels}


def loops(ids: Sequence[int]) -> bool:
    """Whether a piece of SHORTEST tokens or more stands REPEATS times in a row."""
    import numpy as np  # on demand: the command line loads without it

    tokens = np.asarray(ids)
    for period in range(SHORTEST, len(ids) // REPEATS + 1):
        same = np.cumsum(tokens[period:] == tokens[:-period], dtype=np.int64)
        length = (REPEATS - 1) * period
        if (same[length - 1 :] - np.concatenate(([0], same[:-length])) == length).any():
            return True
    return False


def _group(trial: Trial) -> str:
    if trial.passed is None:
        return "infra"
    if trial.status == REFUSED:
        return REFUSED
    if loops(trial.output_token_ids):
        return "loop"
    if trial.stop_reason == "length":
        return "truncated"
    if trial.answer is None:
        return "early_eos" if trial.stop_reason == "eos" and len(trial.output_token_ids) <= EARLY else "no_answer"
    return "wrong_answer"
