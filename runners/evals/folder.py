"""A run's folder: run.json, tasks.jsonl, predictions.jsonl and report.md. A kill at any moment leaves it usable.

The folder of a shard has no report.

``predictions.jsonl.partial`` grows by one line for each trial. Renaming it to ``predictions.jsonl`` ends the run: a
folder with that file is finished, and a folder without it can be resumed under the same record.
"""

import fcntl
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import UnionType
from typing import Any, BinaryIO, get_args, get_origin, get_type_hints

from ling3export.artifacts.files import open_own, refuse_links, replace_file, write_new, writing
from ling3export.artifacts.records import sha256_of
from ling3export.foundation.errors import listed
from ling3export.foundation.reading import opened
from ling3export.foundation.shards import FORM as SHARD
from ling3export.foundation.shards import WHOLE, Shard
from ling3export.foundation.strict_json import parse_json, read_json
from ling3export.runners.evals.tasks import RECORDED, Task, prompt_sha256
from ling3export.runners.evals.trials import REFUSED, EvalError, RunConfig, Transcript, Trial

PREDICTIONS, RUN, TASKS, REPORT = "predictions.jsonl", "run.json", "tasks.jsonl", "report.md"
PARTIAL = "predictions.jsonl.partial"
FORMAT = 1
UNCHANGED = "nothing was changed: choose another folder, or begin anew with --force"
TRANSCRIPTS, TRANSCRIPT = "transcripts", re.compile(r"\d+-\d+\.json")
Pair = tuple[str, int]  # task id, trial
TaskRecord = Mapping[str, Any]  # ``Task.record()``


@dataclass(frozen=True)
class Prediction:
    """The record of a trial: one line of predictions.jsonl, its keys in this order."""

    idx: int  # the task's place in the suite
    task_id: str  # which task
    trial: int  # number of the try, from 0
    prompt_sha256: str  # digest of the prompt
    text: str  # what the model wrote; empty if it wrote nothing
    output_token_ids: list[int]  # the generated tokens
    # ``eos``, ``length``, ``stop``; ``error`` after an infrastructure error, ``refused`` for a prompt that can never be
    # served.
    stop_reason: str
    answer: str | None  # what a grader took for the answer
    target: str  # the right answer
    passed: bool | None  # whether all required graders pass; None after an infrastructure error
    # None if nothing failed; else ``ended``, whether the trial ended in an infrastructure error, and ``attempts``, each
    # with ``kind`` (``refused`` for a prompt that can never be served) and ``message``.
    infra: dict[str, Any] | None
    ttft_ms: float | None  # milliseconds to the first token
    e2e_ms: float | None  # milliseconds to the last token
    n_prompt: int | None  # number of prompt tokens
    n_output: int  # number of generated tokens

    @classmethod
    def of(cls, idx: int, task: Task, trial: Trial) -> "Prediction":
        """The record of a trial at the task with the place ``idx``."""
        ran, reason = trial.transcript is not None, REFUSED if trial.status == REFUSED else "error"
        said = trial.transcript or Transcript(stop_reason=reason)
        attempts = [vars(attempt) for attempt in trial.attempts]
        return cls(
            idx,
            task.id,
            trial.trial,
            task.prompt_sha256,
            said.text,
            said.output_token_ids,
            said.stop_reason,
            trial.answer,
            task.target,
            trial.passed,
            {"ended": trial.infra is not None, "attempts": attempts} if attempts else None,
            round(said.ttft_ms, 3) if ran else None,
            round(said.e2e_ms, 3) if ran else None,
            len(said.prompt_token_ids) if ran else None,
            len(said.output_token_ids),
        )

    @property
    def pair(self) -> Pair:
        """Which trial this is: the task's id and the try's number."""
        return self.task_id, self.trial

    @property
    def label(self) -> str:
        """What reports call the trial: its task, with ``#trial`` for a repeated try."""
        return f"{self.task_id}#{self.trial}" if self.trial else self.task_id


KEYS = tuple(field.name for field in fields(Prediction))
TYPES = get_type_hints(Prediction)


@dataclass(frozen=True)
class RunRecord:
    """The record of a run, which run.json holds."""

    format: int  # FORMAT
    suite: dict[str, Any]  # name, notes, reference score and digests of the suite
    config: dict[str, Any]  # the settings (RunConfig)
    environment: dict[str, Any]  # what decides the tokens beside the prompts (``LocalBackend.environment``)
    sha256: str  # digest of suite, settings and environment: of all that decides the predictions
    totals: dict[str, Any] | None = None  # the totals (Summary), and whether the run is ``invalid``; None while it runs
    status: str = "running"  # ``running`` or ``complete``
    shard: str = str(WHOLE)  # which share of the batches, as ``I/N``

    @classmethod
    def of(cls, suite: dict[str, Any], config: RunConfig, environment: dict[str, Any], shard: Shard) -> "RunRecord":
        """The record of a run that begins."""
        settings = json.loads(json.dumps(asdict(config)))
        decided = {"suite": suite, "config": settings, "environment": environment}
        return cls(FORMAT, suite, settings, environment, sha256_of(decided), shard=str(shard))

    def differing(self, other: "RunRecord") -> list[str]:
        """Names of what decides the predictions and is not the same in another run."""
        parts = ((name, getattr(self, name), getattr(other, name)) for name in ("suite", "config", "environment"))
        return [
            f"{part}.{name}"
            for part, before, now in parts
            for name in sorted({*before, *now})
            if before.get(name) != now.get(name)
        ]

    def trials(self, tasks: Sequence[TaskRecord]) -> dict[Pair, tuple[int, str]]:
        """The trials of this shard in the order in which they run, each with its task's place and its prompt's digest.

        A shard is every N-th batch of the whole run's. Batches stay whole because a trial's company can decide the
        last bits of its logits.

        Args:
            tasks: The suite's tasks.
        """
        shard, batch = Shard.parse(self.shard), self.config["batch"]
        places = [(task["id"], (place, prompt_sha256(task["input"]))) for place, task in enumerate(tasks)]
        pairs = [((task, trial), place) for task, place in places for trial in range(self.config["trials"])]
        return {pair: place for number, (pair, place) in enumerate(pairs) if shard.has(number // batch)}


class RunFolder:
    """The folder of a run that is being written.

    Attributes:
        path: The folder.
        done: Records of the finished trials.
    """

    def __init__(self, path: Path, file: BinaryIO, done: dict[Pair, Prediction]) -> None:
        self.path = path
        self.done = done
        self._file = file

    def add(self, record: Prediction) -> None:
        """Writes the record of a trial; a kill of this process no longer loses it when this returns."""
        self._file.write(json_line(vars(record)))
        self._file.flush()
        self.done[record.pair] = record

    def keep_transcript(self, idx: int, trial: int, data: bytes) -> None:
        """Writes the transcript of a trial at the task with the place ``idx``."""
        refuse_links(self.path, [TRANSCRIPTS])
        (self.path / TRANSCRIPTS).mkdir(exist_ok=True)
        write_new(self.path / TRANSCRIPTS / f"{idx}-{trial}.json", data)

    def finish(self, run: RunRecord, report: str | None) -> None:
        """Writes the run's record with its totals, and the report; then gives the predictions their final name."""
        if report is not None:
            replace_file(self.path / REPORT, report.encode())
        replace_file(self.path / RUN, json_line(vars(run), indent=1))
        os.fsync(self._file.fileno())
        os.replace(self.path / PARTIAL, self.path / PREDICTIONS)


@contextmanager
def open_folder(path: Path, run: RunRecord, tasks: Sequence[TaskRecord], *, force: bool = False) -> Iterator[RunFolder]:
    """Begins a run, or resumes one.

    Args:
        path: The folder, which is made if it does not exist.
        run: The run's record. A resumed run must have the same ``sha256``.
        tasks: The records of the suite's tasks.
        force: Begin anew, whatever run is there.

    Raises:
        EvalError: The folder holds a finished run, another run, or something else; or another process writes it.
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
    listed_tasks = b"".join(json_line(task) for task in tasks)
    try:
        _prepare(path, descriptor, run, listed_tasks, force)
        for name, data in ((RUN, json_line(vars(run), indent=1)), (TASKS, listed_tasks)):  # RUN says whose the rest is
            if not (path / name).exists():
                replace_file(path / name, data)
        with writing(path / PARTIAL), open_own(path / PARTIAL, append=True) as file:
            yield RunFolder(path, file, _whole_lines(file, path, run.trials(tasks)))
    finally:
        os.close(descriptor)


def read_run(path: Path) -> RunRecord:
    """The record of a run, from its run.json.

    Raises:
        EvalError: There is no such file, or it holds something else.
    """
    try:
        run = read_json(path / RUN)
    except (OSError, ValueError) as error:
        found = error.strerror if isinstance(error, OSError) else error
        raise EvalError(f"run `{path.name}`: expected {RUN}, found {found}, in {path.parent}") from error
    given = run if isinstance(run, dict) else {"format": type(run).__name__}
    if given.get("format") != FORMAT:
        raise EvalError(f"run `{path.name}`: expected format {FORMAT}, found {given.get('format')}, in {path / RUN}")
    if {"shard", *given} != {field.name for field in fields(RunRecord)}:  # earlier versions wrote none
        raise EvalError(f"run `{path.name}`: expected the record of a run, found {listed([*given])}, in {path / RUN}")
    decided: dict[str, Any] = {name: given[name] for name in ("suite", "config", "environment")}
    parts = all(isinstance(part, dict) for part in decided.values()) and isinstance(decided["suite"].get("name"), str)
    if not parts or {*decided["config"]} != {field.name for field in fields(RunConfig)}:
        raise EvalError(f"run `{path.name}`: expected suite, config and environment, found others, in {path / RUN}")
    if not SHARD.fullmatch(str(given.get("shard", WHOLE))):
        raise EvalError(f"run `{path.name}`: expected a shard I/N, found {given['shard']!r}, in {path / RUN}")
    for name in ("trials", "batch"):
        if type(number := decided["config"][name]) is not int or number < 1:
            raise EvalError(f"run `{path.name}`: expected a number as config.{name}, found {number!r}, in {path / RUN}")
    if (found := sha256_of(decided)) != given["sha256"]:
        wanted = str(given["sha256"])[:64]
        raise EvalError(f"run `{path.name}`: expected settings of sha256 {wanted}, found {found}, in {path / RUN}")
    return RunRecord(**given)


def read_tasks(path: Path) -> dict[str, dict[str, Any]]:
    """The tasks of a run by id, as far as others look at them: ``threshold`` is a number.

    Raises:
        EvalError: There is no such file, or a line is something else.
    """
    tasks = {}
    for number, task in enumerate(read_lines(path / TASKS), 1):
        wrong = [name for name, kind in (("id", str), ("threshold", float)) if not _is(task.get(name), kind)]
        if wrong:
            raise EvalError(f"line {number}: expected a task, found another `{wrong[0]}`, in {path / TASKS}")
        tasks[task["id"]] = task
    return tasks


def read_predictions(path: Path, shard: str = str(WHOLE)) -> list[Prediction]:
    """The records of a finished run's trials.

    Args:
        path: The run's folder.
        shard: Which share of a run it has to be.

    Raises:
        EvalError: The run is not finished, or damaged, or is another shard.
    """
    if (found := read_run(path).shard) != shard:
        raise EvalError(
            f"run `{path.name}`: expected a whole run, found shard {found} of one, in {path.parent}",
            "put its shards together: ling3-runner eval merge",
        )
    if not (path / PREDICTIONS).is_file():
        hint = "resume it with the command that began it" if (path / PARTIAL).exists() else None
        raise EvalError(f"run `{path.name}`: expected {PREDICTIONS}, found none, in {path.parent}", hint)
    return _predictions(read_lines(path / PREDICTIONS), path / PREDICTIONS)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a file of JSON lines that a run wrote.

    Raises:
        EvalError: The file cannot be read, or a line is something else.
    """
    try:
        with opened(path.parent, path.name) as file:
            return _objects(file.read(), path)
    except OSError as error:
        found = error.strerror
        raise EvalError(f"file `{path.name}`: expected a readable file, found {found}, in {path.parent}") from error


def json_line(value: object, indent: int | None = None) -> bytes:
    """The line of JSON that a value is written as; with ``indent``, a member a line."""
    return (json.dumps(value, ensure_ascii=False, allow_nan=False, indent=indent) + "\n").encode()


def _prepare(path: Path, descriptor: int, run: RunRecord, tasks: bytes, force: bool) -> None:
    """Locks a folder, and refuses one that must not be overwritten; with ``force``, removes the run in it.

    A folder that holds ``tasks`` and nothing else is a run's that was killed at its begin, before run.json was written.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise EvalError(
            f"run `{path.name}`: expected no other process, found one writing it, in {path.parent}",
            "wait until it ends, or choose another folder",
        ) from error
    there = (path / RUN).exists()
    begun = [item for item in path.iterdir() if not item.name.startswith(".")] == [path / TASKS] and (
        _of_a_run(path / TASKS) if force else (path / TASKS).read_bytes() == tasks
    )
    if not there and not begun and any(not item.name.startswith(".") for item in path.iterdir()):
        raise EvalError(f"run `{path.name}`: expected a new or empty folder, found other files, in {path.parent}")
    if force:
        refuse_links(path, [TRANSCRIPTS])
        transcripts = (path / TRANSCRIPTS).iterdir() if (path / TRANSCRIPTS).is_dir() else ()
        for file in [each for each in transcripts if TRANSCRIPT.fullmatch(each.name)]:
            file.unlink(missing_ok=True)
        for name in (PREDICTIONS, PARTIAL, TASKS, REPORT, RUN):  # last the name that says whose the rest is
            (path / name).unlink(missing_ok=True)
    elif (path / PREDICTIONS).exists():
        raise EvalError(
            f"run `{path.name}`: expected a run to resume, found a finished one, in {path.parent}",
            "choose another folder, or replace it with --force",
        )
    elif there and ((old := read_run(path)).sha256, old.shard) != (run.sha256, run.shard):
        differing = old.differing(run) or [f"shard, {old.shard}"]
        raise EvalError(
            f"run `{path.name}`: expected the same run to resume, found another {listed(differing)}, in {path.parent}",
            UNCHANGED,
        )


def _of_a_run(path: Path) -> bool:
    """Whether a file of tasks is one that a run wrote."""
    try:
        return all(tuple(record) == RECORDED for record in read_lines(path))
    except EvalError:
        return False


def _whole_lines(file: BinaryIO, path: Path, trials: Mapping[Pair, tuple[int, str]]) -> dict[Pair, Prediction]:
    """The records of the finished trials. A line that a kill cut short is removed."""
    file.seek(0)
    data = file.read()
    whole = data.rfind(b"\n") + 1
    partial = path / PARTIAL
    done: dict[Pair, Prediction] = {}
    for number, record in enumerate(_predictions(_objects(data[:whole], partial), partial), 1):
        if record.pair in done or trials.get(record.pair) != (record.idx, record.prompt_sha256):
            found = "it again" if record.pair in done else "a record of another run"
            raise EvalError(
                f"line {number}: expected each trial of this run once, found {found}, in {partial}", UNCHANGED
            )
        done[record.pair] = record
    if whole != len(data):
        file.truncate(whole)
    return done


def _predictions(records: Sequence[dict[str, Any]], path: Path) -> list[Prediction]:
    for number, record in enumerate(records, 1):
        if tuple(record) != KEYS:
            raise EvalError(f"line {number}: expected the record of a trial, found {listed(list(record))}, in {path}")
        wrong = [name for name, kind in TYPES.items() if not _is(record[name], kind)]
        if record["passed"] is None and record["infra"] is None:  # what has no verdict has an error
            wrong.append("passed")
        if wrong or not _is_infra(record["infra"]):
            name = wrong[0] if wrong else "infra"
            raise EvalError(f"line {number}: expected the record of a trial, found another `{name}`, in {path}")
    return [Prediction(**record) for record in records]


def _is(value: object, kind: Any) -> bool:
    """Whether a value of JSON is one of the types that fields of a record have."""
    origin, parts = get_origin(kind), get_args(kind)
    if origin is UnionType:
        return any(_is(value, part) for part in parts)
    if origin is list:
        return type(value) is list and all(_is(each, parts[0]) for each in value)
    return type(value) in (int, float) if kind is float else type(value) is (origin or kind)


def _is_infra(value: dict[str, Any] | None) -> bool:
    return value is None or (
        value.keys() == {"ended", "attempts"}
        and type(value["ended"]) is bool
        and _is(value["attempts"], list[dict[str, Any]])
        and len(value["attempts"]) > 0
        and all(_is(attempt.get(name), str) for attempt in value["attempts"] for name in ("kind", "message"))
    )


def _objects(data: bytes, path: Path) -> list[dict[str, Any]]:
    """The object of each line of ``data``."""
    found = []
    for number, line in enumerate(data.split(b"\n")[:-1], 1):
        try:
            record = parse_json(line)
        except ValueError as error:
            raise EvalError(f"line {number}: expected JSON, found {error}, in {path}") from error
        if not isinstance(record, dict):
            raise EvalError(f"line {number}: expected an object, found {line[:60]!r}, in {path}")
        found.append(record)
    return found
