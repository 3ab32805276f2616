"""The folder of a run: run.json, tasks.jsonl, predictions.jsonl, report.md; whole after a kill at any moment.

``predictions.jsonl.partial`` grows by a line a trial. Its last rename ends the run: a folder with predictions.jsonl is
finished, one without can be resumed under the same record.
"""

import fcntl
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from ling3export.artifacts.manifest import sha256_of
from ling3export.errors import listed
from ling3export.runners.evals.objects import EvalError, Trial
from ling3export.runners.evals.smoke import PARTIAL
from ling3export.runners.evals.tasks import Task

PREDICTIONS, RUN, TASKS, REPORT = "predictions.jsonl", "run.json", "tasks.jsonl", "report.md"
FORMAT = 1
KEYS = (
    "idx", "task_id", "trial", "prompt_sha256", "text", "output_token_ids", "stop_reason", "answer", "target",
    "passed", "infra", "ttft_ms", "e2e_ms", "n_prompt", "n_output",
)  # fmt: skip
Pair = tuple[str, int]  # task id, trial


def prediction(place: int, task: Task, trial: Trial) -> dict[str, Any]:
    """The record of a trial, its keys in the order of KEYS.

    ``infra`` is null, or the attempts that failed and whether the trial ended so.
    """
    said = trial.transcript
    attempts = [attempt.record() for attempt in trial.attempts]
    values = (
        place, task.id, trial.trial, task.prompt_sha256, said.text if said else "",
        said.output_token_ids if said else [], said.stop_reason if said else "error", trial.answer, task.target,
        trial.passed, {"ended": trial.infra is not None, "attempts": attempts} if attempts else None,
        round(said.ttft_ms, 3) if said else None, round(said.e2e_ms, 3) if said else None,
        len(said.prompt_token_ids) if said else None, len(said.output_token_ids) if said else 0,
    )  # fmt: skip
    return dict(zip(KEYS, values, strict=True))


class RunFolder:
    """The folder of a run that is being written.

    Attributes:
        path: The folder.
        done: Records of finished trials.
    """

    def __init__(self, path: Path, file: BinaryIO, done: dict[Pair, dict[str, Any]]) -> None:
        self.path = path
        self.done = done
        self._file = file

    def add(self, record: dict[str, Any]) -> None:
        """Writes the record of a trial; it is on its way to the disk when this returns."""
        self._file.write(json_line(record).encode())
        self._file.flush()
        self.done[record["task_id"], record["trial"]] = record

    def finish(self, run: dict[str, Any], report: str) -> None:
        """Writes the totals and the report, then gives the predictions their name."""
        replace(self.path / REPORT, report)
        replace(self.path / RUN, _pretty({**run, "status": "complete"}))
        os.fsync(self._file.fileno())
        os.replace(self.path / PARTIAL, self.path / PREDICTIONS)


@contextmanager
def open_folder(path: Path, run: dict[str, Any], tasks: Sequence[Task], *, force: bool = False) -> Iterator[RunFolder]:
    """Begins a run, or resumes one.

    Args:
        path: The folder; made if it is not there.
        run: The run's record; ``sha256`` is what a resumed run must agree in.
        tasks: Of the suite.
        force: Begin anew whatever is there.

    Raises:
        EvalError: The folder holds a finished run, another run, or something else, or another process writes it.
    """
    if path.exists() and not path.is_dir():
        raise EvalError(f"run `{path.name}`: expected a folder, found a file, in {path.parent}")
    try:
        path.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDONLY)
    except OSError as error:
        raise EvalError(
            f"run `{path.name}`: expected a folder that can be written, found {error.strerror}, in {path.parent}"
        ) from error
    try:
        _lock(descriptor, path)
        _prepare(path, run, force)
        if not (path / RUN).exists():
            replace(path / TASKS, "".join(json_line(task.record()) for task in tasks))
            replace(path / RUN, _pretty({**run, "status": "running", "totals": None}))
        with open(path / PARTIAL, "a+b") as file:
            yield RunFolder(path, file, _whole_lines(file, path, {task.id: task.prompt_sha256 for task in tasks}))
    finally:
        os.close(descriptor)


def run_record(suite: dict[str, Any], config: dict[str, Any], environment: dict[str, Any]) -> dict[str, Any]:
    """The record of a run; ``sha256`` is the digest of what decides its predictions."""
    decided = {"suite": suite, "config": config, "environment": environment}
    return {"format": FORMAT, **decided, "sha256": sha256_of(decided)}


def read_run(path: Path) -> dict[str, Any]:
    """run.json of a run.

    Raises:
        EvalError: There is none, or it is something else.
    """
    try:
        run = json.loads((path / RUN).read_bytes())
    except (OSError, ValueError) as error:
        found = error.strerror if isinstance(error, OSError) else error
        raise EvalError(f"run `{path.name}`: expected {RUN}, found {found}, in {path.parent}") from error
    if not isinstance(run, dict) or run.get("format") != FORMAT:
        found = run.get("format") if isinstance(run, dict) else type(run).__name__
        raise EvalError(f"run `{path.name}`: expected format {FORMAT}, found {found}, in {path / RUN}")
    return run


def read_predictions(path: Path) -> list[dict[str, Any]]:
    """The records of a finished run.

    Raises:
        EvalError: It is not finished, or damaged.
    """
    read_run(path)
    if not (path / PREDICTIONS).is_file():
        hint = "resume it with the command that began it" if (path / PARTIAL).exists() else None
        raise EvalError(f"run `{path.name}`: expected {PREDICTIONS}, found none, in {path.parent}", hint)
    records = read_lines(path / PREDICTIONS)
    _check_records(records, path / PREDICTIONS)
    return records


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a file of JSON lines that a run wrote.

    Raises:
        EvalError: A line is something else.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise EvalError(
            f"file `{path.name}`: expected a readable file, found {error.strerror}, in {path.parent}"
        ) from error
    return [_record(line, number, path) for number, line in enumerate(data.split(b"\n")[:-1], 1)]


def json_line(value: object) -> str:
    """A value as a line of JSON."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False) + "\n"


def replace(path: Path, text: str) -> None:
    """Writes a file that appears whole."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _lock(descriptor: int, path: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise EvalError(
            f"run `{path.name}`: expected no other process, found one writing it, in {path.parent}",
            "wait until it ends, or choose another folder",
        ) from error


def _prepare(path: Path, run: dict[str, Any], force: bool) -> None:
    """Refuses what must not be overwritten; with ``force`` removes an earlier run."""
    there = (path / RUN).exists()
    if not there and any(not item.name.startswith(".") for item in path.iterdir()):
        raise EvalError(f"run `{path.name}`: expected a new or empty folder, found other files, in {path.parent}")
    if force:
        for name in (RUN, PREDICTIONS, PARTIAL, TASKS, REPORT):  # first the name without which the rest is nothing
            (path / name).unlink(missing_ok=True)
    elif (path / PREDICTIONS).exists():
        raise EvalError(
            f"run `{path.name}`: expected a run to resume, found a finished one, in {path.parent}",
            "choose another folder, or replace it with --force",
        )
    elif there:
        _compare(read_run(path), run, path)


def _compare(old: dict[str, Any], new: dict[str, Any], path: Path) -> None:
    if old.get("sha256") == new["sha256"]:
        return
    differing = []
    for part in ("suite", "config", "environment"):
        before, now = old.get(part) or {}, new[part]
        differing += [f"{part}.{name}" for name in sorted({*before, *now}) if before.get(name) != now.get(name)]
    raise EvalError(
        f"run `{path.name}`: expected the same run to resume, found another {listed(differing)}, in {path.parent}",
        "nothing was changed: choose another folder, or begin anew with --force",
    )


def _whole_lines(file: BinaryIO, path: Path, prompts: dict[str, str]) -> dict[Pair, dict[str, Any]]:
    """Records of the finished trials; a line that a kill cut short is removed."""
    file.seek(0)
    data = file.read()
    whole = data.rfind(b"\n") + 1
    records = [_record(line, n, path / PARTIAL) for n, line in enumerate(data[:whole].split(b"\n")[:-1], 1)]
    _check_records(records, path / PARTIAL)
    done = {}
    for number, record in enumerate(records, 1):
        pair = record["task_id"], record["trial"]
        if pair in done or prompts.get(pair[0]) != record["prompt_sha256"]:
            found = "it again" if pair in done else "a record of another run"
            raise EvalError(
                f"line {number}: expected each trial of this run once, found {found}, in {path / PARTIAL}",
                "nothing was changed: choose another folder, or begin anew with --force",
            )
        done[pair] = record
    if whole != len(data):
        file.truncate(whole)
    return done


def _check_records(records: Sequence[dict[str, Any]], path: Path) -> None:
    for number, record in enumerate(records, 1):
        if tuple(record) != KEYS:
            raise EvalError(f"line {number}: expected the record of a trial, found {listed(list(record))}, in {path}")


def _record(line: bytes, number: int, path: Path) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise EvalError(f"line {number}: expected JSON, found {error}, in {path}") from error
    if not isinstance(record, dict):
        raise EvalError(f"line {number}: expected an object, found {line[:60]!r}, in {path}")
    return record


def _pretty(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, indent=1) + "\n"
