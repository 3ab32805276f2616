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
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal, TypeVar

from ling3export.artifacts.files import open_own, refuse_links, remove, rename, replace_file, write_new, writing
from ling3export.artifacts.records import Digest, Rule, Text, WrongRecordError, from_json, sha256_of
from ling3export.foundation.errors import Ling3Error, listed
from ling3export.foundation.reading import opened
from ling3export.foundation.shards import FORM as SHARD
from ling3export.foundation.shards import WHOLE, Shard
from ling3export.foundation.strict_json import parse_json, read_json
from ling3export.runners.evals.tasks import Task, TaskRecord
from ling3export.runners.evals.trials import REFUSED, EvalError, InfraError, RunConfig, Transcript, Trial

PREDICTIONS, RUN, TASKS, REPORT = "predictions.jsonl", "run.json", "tasks.jsonl", "report.md"
PARTIAL = "predictions.jsonl.partial"
UNCHANGED = "nothing was changed: choose another folder, or begin anew with --force"
TRANSCRIPTS, TRANSCRIPT = "transcripts", re.compile(r"\d+-\d+\.json")
Pair = tuple[str, int]  # task id, trial
T = TypeVar("T")


@dataclass(frozen=True)
class Attempts:
    """What failed in a trial: whether it ended in an infrastructure error, and the errors of its attempts.

    The kind of an attempt is ``refused`` for a prompt that can never be served.
    """

    ended: bool
    attempts: list[InfraError]


@dataclass(frozen=True)
class Prediction:
    """The record of a trial: one line of predictions.jsonl, its keys in this order."""

    idx: int  # the task's place in the suite
    task_id: Text  # which task
    trial: int  # number of the try, from 0
    prompt_sha256: Digest  # digest of the prompt
    text: Text  # what the model wrote; empty if it wrote nothing
    output_token_ids: list[int]  # the generated tokens
    # ``eos``, ``length``, ``stop``; ``error`` after an infrastructure error, ``refused`` for a prompt that can never be
    # served.
    stop_reason: Text
    answer: Text | None  # what a grader took for the answer
    target: Text  # the right answer
    passed: bool | None  # whether all required graders pass; None after an infrastructure error
    infra: Attempts | None  # None if nothing failed
    ttft_ms: float | None  # milliseconds to the first token
    e2e_ms: float | None  # milliseconds to the last token
    n_prompt: int | None  # number of prompt tokens
    n_output: int  # number of generated tokens

    @classmethod
    def of(cls, idx: int, task: Task, trial: Trial) -> "Prediction":
        """The record of a trial at the task with the place ``idx``."""
        ran, reason = trial.transcript is not None, REFUSED if trial.status == REFUSED else "error"
        said = trial.transcript or Transcript(stop_reason=reason)
        return cls(
            idx,
            task.id,
            trial.trial,
            task.record().prompt_sha256,
            said.text,
            said.output_token_ids,
            said.stop_reason,
            trial.answer,
            task.target,
            trial.passed,
            Attempts(trial.infra is not None, trial.attempts) if trial.attempts else None,
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


@dataclass(frozen=True)
class SuiteRecord:
    """A suite in the record of a run."""

    name: Text
    tasks: int
    files: dict[Text, Digest]  # sha256 of every file that the tasks came from
    notes: list[Text]
    reference: float | None  # score of the reference evaluation
    tasks_sha256: Digest


@dataclass(frozen=True)
class RunRecord:
    """The record of a run, which run.json holds."""

    format: Literal[1]
    suite: SuiteRecord
    config: RunConfig
    environment: dict[Text, Any]  # what decides the tokens beside the prompts (``EvalBackend.environment``)
    sha256: Digest  # digest of suite, settings and environment: of all that decides the predictions
    totals: dict[Text, Any] | None = (
        None  # the totals (Summary), and whether the run is ``invalid``; None while it runs
    )
    status: Text = "running"  # ``running`` or ``complete``
    # Which share of the batches, as ``I/N``.
    shard: Annotated[Text, Rule("a shard I/N", SHARD.fullmatch)] = str(WHOLE)

    @classmethod
    def of(cls, suite: SuiteRecord, config: RunConfig, environment: dict[str, Any], shard: Shard) -> "RunRecord":
        """The record of a run that begins."""
        run = cls(1, suite, config, environment, "", shard=str(shard))
        return replace(run, sha256=sha256_of(json.loads(json.dumps(run.decided))))

    @property
    def decided(self) -> dict[str, dict[str, Any]]:
        """What decides the predictions, as JSON."""
        return {"suite": asdict(self.suite), "config": asdict(self.config), "environment": self.environment}

    def differing(self, other: "RunRecord") -> list[str]:
        """Names of what decides the predictions and is not the same in another run."""
        parts = ((part, before, other.decided[part]) for part, before in self.decided.items())
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
        shard = Shard.parse(self.shard)
        places = [(task.id, (place, task.prompt_sha256)) for place, task in enumerate(tasks)]
        pairs = [((task, trial), place) for task, place in places for trial in range(self.config.trials)]
        return {pair: place for number, (pair, place) in enumerate(pairs) if shard.has(number // self.config.batch)}


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
        self._file.write(json_line(record))
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
        replace_file(self.path / RUN, json_line(run, indent=1))
        os.fsync(self._file.fileno())
        rename(self.path / PARTIAL, self.path / PREDICTIONS)


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
        for name, data in ((RUN, json_line(run, indent=1)), (TASKS, listed_tasks)):  # RUN says whose the rest is
            if not (path / name).exists():
                replace_file(path / name, data)
        with writing(path / PARTIAL), open_own(path / PARTIAL, append=True) as file:
            yield RunFolder(path, file, _whole_lines(file, path, run.trials(tasks)))
    finally:
        os.close(descriptor)


def tasks_digest(tasks: Sequence[TaskRecord]) -> str:
    """The sha256 of the records of a suite's tasks."""
    return sha256_of([asdict(task) for task in tasks])


def read_run(path: Path) -> RunRecord:
    """The record of a run, from its run.json.

    Raises:
        EvalError: There is no such file, or it holds something else.
    """
    try:
        given = from_json(dict[Text, Any], read_json(path / RUN))
        present = {name: value for name, value in given.items() if value is not None}
        config = given.get("config")
        if isinstance(config, dict):
            present["config"] = {name: value for name, value in config.items() if value is not None}
        run = from_json(RunRecord, present)
        replace(run.config)  # checks its bounds
    except (OSError, ValueError, Ling3Error) as error:
        found = f"expected {RUN}, found {error.strerror}" if isinstance(error, OSError) else f"{RUN}: {error}"
        raise EvalError(f"run `{path.name}`: {found}, in {path.parent}") from error
    if (found := sha256_of({name: given[name] for name in run.decided})) != run.sha256:
        raise EvalError(f"run `{path.name}`: expected settings of sha256 {run.sha256}, found {found}, in {path / RUN}")
    return run


def read_tasks(path: Path) -> list[TaskRecord]:
    """The tasks of a run.

    Raises:
        EvalError: There is no such file, or a line is something else.
    """
    return _read_lines(TaskRecord, path / TASKS)


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
    return _read_lines(Prediction, path / PREDICTIONS)


def json_line(record: Any, indent: int | None = None) -> bytes:
    """The line of JSON that a record is written as; with ``indent``, a member a line."""
    return (json.dumps(asdict(record), ensure_ascii=False, allow_nan=False, indent=indent) + "\n").encode()


def _read_lines(kind: type[T], path: Path) -> list[T]:
    """The records of a file of JSON lines that a run wrote."""
    try:
        with opened(path.parent, path.name) as file:
            return _records(kind, file.read(), path)
    except OSError as error:
        found = error.strerror
        raise EvalError(f"file `{path.name}`: expected a readable file, found {found}, in {path.parent}") from error


def _records(kind: type[T], data: bytes, path: Path) -> list[T]:
    """The record of each line of ``data``."""
    found = []
    for number, line in enumerate(data.split(b"\n")[:-1], 1):
        try:
            record = from_json(kind, parse_json(line))
            if isinstance(record, Prediction) and record.passed is None and record.infra is None:
                raise WrongRecordError("an error of a trial without a verdict", "none", ("infra",))
            found.append(record)
        except ValueError as error:
            name = "task" if kind is TaskRecord else "trial"
            raise EvalError(
                f"line {number}: expected the record of a {name}, found another: {error}, in {path}"
            ) from error
    return found


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
    names = [item.name for item in path.iterdir() if not item.name.startswith(".")]
    if names and not there and not (names == [TASKS] and _are_of_a_run(path, tasks, force)):
        raise EvalError(f"run `{path.name}`: expected a new or empty folder, found other files, in {path.parent}")
    if force:
        refuse_links(path, [TRANSCRIPTS])
        transcripts = (path / TRANSCRIPTS).iterdir() if (path / TRANSCRIPTS).is_dir() else ()
        for file in [each for each in transcripts if TRANSCRIPT.fullmatch(each.name)]:
            remove(file, path)
        for name in (PREDICTIONS, PARTIAL, TASKS, REPORT, RUN):  # last the name that says whose the rest is
            remove(path / name)
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


def _are_of_a_run(path: Path, tasks: bytes, force: bool) -> bool:
    """Whether a folder's tasks are those of this run; with ``force``, whether they are those of any run."""
    if not force:
        return (path / TASKS).read_bytes() == tasks
    try:
        read_tasks(path)
    except EvalError:
        return False
    return True


def _whole_lines(file: BinaryIO, path: Path, trials: Mapping[Pair, tuple[int, str]]) -> dict[Pair, Prediction]:
    """The records of the finished trials. A line that a kill cut short is removed."""
    file.seek(0)
    data = file.read()
    whole = data.rfind(b"\n") + 1
    done: dict[Pair, Prediction] = {}
    for number, record in enumerate(_records(Prediction, data[:whole], path / PARTIAL), 1):
        if record.pair in done or trials.get(record.pair) != (record.idx, record.prompt_sha256):
            found = "it again" if record.pair in done else "a record of another run"
            raise EvalError(
                f"line {number}: expected each trial of this run once, found {found}, in {path / PARTIAL}", UNCHANGED
            )
        done[record.pair] = record
    if whole != len(data):
        file.truncate(whole)
    return done
