"""A run as one file of JSON lines, which only grows: a header, the suite's tasks, and a line for each finished trial.

A run that was killed is continued from its whole lines. The files of a run's shards, one after the other, are the file
of the run.
"""

import fcntl
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, Literal

from ling3export.artifacts.files import open_own, writing
from ling3export.artifacts.records import Digest, Record, canonical, expect, from_json, sha256_of, to_json
from ling3export.foundation.errors import Ling3Error, listed
from ling3export.foundation.reading import opened
from ling3export.foundation.shards import Shard
from ling3export.foundation.strict_json import parse_json
from ling3export.runners.evals.statistics import Summary
from ling3export.runners.evals.trials import INFRA_ERROR, EvalError, Pair, RunConfig, Trial

UNCHANGED = "nothing was changed: choose another file, or begin again with --force"
LINE = 1 << 30  # bytes
Prompt = str | list[int] | list[dict[str, str]]
PROMPTS = ("prompt", "messages", "prompt_ids", "message", "user_message")  # fields of a task's input


class TaskRecord(Record, frozen=True):
    """The line of a task: all that decides its result. Callables are there by name."""

    id: str
    suite: str
    input: dict[str, Any]
    target: str
    choices: list[str] | None
    threshold: float
    graders: list[dict[str, Any]]

    @property
    def prompt_sha256(self) -> str:
        """Digest of the prompt: of a text's UTF-8, else of its canonical JSON."""
        prompt = prompt_of(self.input)
        return hashlib.sha256(prompt.encode() if isinstance(prompt, str) else canonical(prompt)).hexdigest()


class SuiteRecord(Record, frozen=True):
    """A suite in the header of a run."""

    name: str
    tasks: int
    files: dict[str, Digest]  # sha256 of every file that the tasks came from
    notes: list[str]
    tasks_sha256: Digest


class Header(Record, frozen=True):
    """The first line of a run: all that decides its trials."""

    format: Literal[1]
    suite: SuiteRecord
    config: RunConfig
    environment: dict[str, Any]  # ``EvalBackend.environment``
    shard: str  # the share of the batches, as ``I/N``

    @property
    def decided(self) -> dict[str, dict[str, Any]]:
        """The parts that are equal in all shards of a run, as JSON."""
        return {"suite": to_json(self.suite), "config": asdict(self.config), "environment": self.environment}

    @property
    def sha256(self) -> str:
        """Digest of ``decided``."""
        return sha256_of(json.loads(json.dumps(self.decided)))

    def differing(self, other: "Header") -> list[str]:
        """Names of the settings that differ from another run's."""
        parts = [(part, before, other.decided[part]) for part, before in self.decided.items()]
        names = [(part, name, old, new) for part, old, new in parts for name in sorted({*old, *new})]
        return [f"{part}.{name}" for part, name, old, new in names if old.get(name) != new.get(name)]

    def pairs(self, tasks: Sequence[TaskRecord]) -> list[Pair]:
        """All trials in their order."""
        return [(task.id, trial) for task in tasks for trial in range(self.config.trials)]


@dataclass(frozen=True)
class Run:
    """A run that was read."""

    header: Header
    tasks: list[TaskRecord]
    trials: list[Trial]  # in the order of the suite

    @property
    def summary(self) -> Summary:
        """The totals."""
        everywhere = self.header.config.threshold
        thresholds = {task.id: task.threshold if everywhere is None else everywhere for task in self.tasks}
        return Summary(self.trials, thresholds)


class RunFile:
    """The file of a run that is being written, and the finished trials."""

    def __init__(self, file: BinaryIO, done: dict[Pair, Trial]) -> None:
        self._file, self.done = file, done

    def add(self, trial: Trial) -> None:
        """Writes the line of a trial. A kill of this process no longer loses it when this returns."""
        self._file.write(_line("trial", trial))
        self._file.flush()
        self.done[trial.pair] = trial


@contextmanager
def open_run(path: Path, header: Header, tasks: Sequence[TaskRecord], *, force: bool = False) -> Iterator[RunFile]:
    """Begins a run, or continues one with the same header and tasks; EvalError if the file is another one."""
    head = b"".join([_line("run", header), *(_line("task", task) for task in tasks)])
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    with writing(path), open_own(path, append=True) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            hint = "wait until it ends, or choose another file"
            raise EvalError(f"run `{path.name}`: another process writes it, in {path.parent}", hint) from error
        data = b"" if force else file.read()
        done: dict[Pair, Trial] = {}
        if not data.startswith(head):
            if not head.startswith(data):
                old = _parsed(path, data[: data.rfind(b"\n") + 1], whole=False).header
                other = old.differing(header) or [f"shard, {old.shard}"]
                raise EvalError(f"run `{path.name}`: it differs in {listed(other)}, in {path.parent}", UNCHANGED)
            file.truncate(0)
            file.write(head)
            file.flush()
        else:
            end = data.rfind(b"\n") + 1
            done = {trial.pair: trial for trial in _parsed(path, data[:end], whole=False).trials}
            file.truncate(end)  # cuts away a line that was broken off
        yield RunFile(file, done)
        os.fsync(file.fileno())


def read_run(*paths: Path, whole: bool = True) -> Run:
    """The run of a file, or of the files of its shards.

    Raises:
        EvalError: A file cannot be read, holds something else or lines of several runs, or ``whole`` and a trial is
            missing.
    """
    data = []
    for path in paths:
        try:
            with opened(path.parent, path.name, links=True) as file:
                data.append(file.read())
        except OSError as error:
            raise EvalError(f"run `{path.name}`: it cannot be read: {error.strerror}, in {path.parent}") from error
    return _parsed(paths[0], b"".join(data), whole=whole)


def _parsed(path: Path, data: bytes, *, whole: bool) -> Run:
    headers: list[Header] = []
    tasks: dict[str, TaskRecord] = {}
    trials: list[tuple[int, Trial]] = []
    *lines, rest = data.split(b"\n")
    for number, line in enumerate(lines, 1):
        try:
            record = _record(line)
            if isinstance(record, Header):
                if headers and record.sha256 != headers[0].sha256:
                    raise ValueError(f"another run, which differs in {listed(record.differing(headers[0]))}")
                headers.append(record)
            elif not headers:
                raise ValueError("no header stands before it")
            elif isinstance(record, TaskRecord):
                if tasks.setdefault(record.id, record) != record:
                    raise ValueError(f"another task `{record.id}`")
            else:
                trials.append((number, record))
        except (ValueError, Ling3Error) as error:
            raise EvalError(f"run `{path.name}`: line {number}: {error}, in {path.parent}") from error
    if not headers:
        raise EvalError(f"run `{path.name}`: it has no line of a run, in {path.parent}")
    header = headers[0]
    if tasks_digest(tasks.values()) != header.suite.tasks_sha256:
        raise EvalError(f"run `{path.name}`: its tasks are not those of its header, in {path.parent}")
    pairs, done = dict.fromkeys(header.pairs([*tasks.values()])), dict[Pair, Trial]()
    for number, trial in trials:
        if trial.pair in done or trial.pair not in pairs:
            problem = "a trial that is there already" if trial.pair in done else "a trial of another run"
            hint = None if whole else UNCHANGED
            raise EvalError(f"run `{path.name}`: line {number}: {problem}, in {path.parent}", hint)
        done[trial.pair] = trial
    if whole and (rest or len(done) < len(pairs)):
        hint = "finish it with the command that began it; for a run in shards, name the files of all shards"
        raise EvalError(f"run `{path.name}`: {len(done)} of {len(pairs)} trials are there, in {path.parent}", hint)
    return Run(header, [*tasks.values()], [done[pair] for pair in pairs if pair in done])


def prompt_of(task_input: dict[str, Any]) -> Prompt:
    """The model's input: a text, token ids, or messages. A context follows a text as JSON."""
    prompt = next((task_input[name] for name in PROMPTS if name in task_input), None)
    if not isinstance(prompt, (str, list)):
        raise EvalError(f"task: its input has none of {', '.join(PROMPTS)}")
    return f"{prompt}\n\n{canonical(task_input['context']).decode()}" if "context" in task_input else prompt


def tasks_digest(tasks: Iterable[TaskRecord]) -> str:
    return sha256_of(to_json(tuple(tasks)))


def _line(kind: str, record: Any) -> bytes:
    return (json.dumps({"kind": kind, **to_json(record)}, ensure_ascii=False, allow_nan=False) + "\n").encode()


def _record(line: bytes) -> Header | TaskRecord | Trial:
    fields = from_json(dict[str, Any], parse_json(line, LINE), free=True)
    kind = fields.pop("kind", None)
    if kind == "task":
        return from_json(TaskRecord, fields, free=True)
    if kind == "run":
        config = from_json(dict[str, Any], fields.get("config"), free=True)
        fields["config"] = {name: value for name, value in config.items() if value is not None}
        header = from_json(Header, fields, free=True)
        Shard.parse(header.shard, {})
        replace(header.config)  # checks its bounds
        return header
    if kind != "trial":
        raise ValueError(f"kind {kind!r}: it is none of run, task and trial")
    trial = from_json(Trial, fields, free=True)
    failed = trial.status == INFRA_ERROR
    expect((trial.passed is None) == failed, "null after an infrastructure error only", trial.passed, "passed")
    expect(trial.attempts or not failed, "an error of a trial without a verdict", trial.attempts, "attempts")
    return trial
