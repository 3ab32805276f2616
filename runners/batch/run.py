"""A shard of a batch: it can be killed at any moment and begun again, and shards are merged into what one run gives.

Answers are written in the order of the input, so that a file that was broken off is a beginning of the whole one.
``OUTPUT.batch.json`` says what the run was asked; ``OUTPUT.partial`` grows by a line for each answer, then becomes
OUTPUT.
"""

import fcntl
import hashlib
import json
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from ling3export.artifacts.files import open_own, remove, rename, replace_file, replacing, writing
from ling3export.artifacts.records import WrongRecordError, from_json
from ling3export.foundation.errors import Ling3Error, RequestError
from ling3export.foundation.reading import opened
from ling3export.foundation.shards import WHOLE, Shard, in_order
from ling3export.foundation.strict_json import read_json
from ling3export.runners.batch.lines import LONGEST, Line, is_answer
from ling3export.runners.engine.config import EngineConfig
from ling3export.runners.engine.engine import Engine
from ling3export.runners.engine.handle import EngineStopped, RequestFailed
from ling3export.runners.engine.request import Completion
from ling3export.runners.engine.worker import EngineWorker
from ling3export.runners.fleet.pool import WorkerPool, versions
from ling3export.runners.serve.answers import stopped

FORMAT = 1
WINDOW = 16  # requests in flight for each slot: short answers go on behind a long one
PIECE = 32  # lines that a worker of a cluster gets together
ANEW = "nothing was changed: choose another output, or begin anew with --force"
Numbered = tuple[int, bytes]  # a line of the input, and its place there
BatchAnswer = tuple[bytes, bool]  # a line of the output, and whether it is a refusal


class BatchError(Ling3Error):
    """Shards or outputs that do not belong together."""


@dataclass(frozen=True)
class BatchRecord:
    """What a run was asked.

    Attributes:
        format: Version of this record.
        artifact: The sha256 of the artifact's manifest.
        model: The model's name in answers.
        input_sha256: The input's digest.
        lines: Lines of the input.
        settings: Fields of requests that lines do not say, as JSON.
        shard: Which share, as ``I/N``.
    """

    format: int
    artifact: str
    model: str
    input_sha256: str
    lines: int
    settings: str
    shard: str


Answered = Callable[[BatchRecord, Iterator[Numbered]], Iterator[BatchAnswer]]  # gives the answers to lines, in order


@dataclass(frozen=True)
class BatchSummary:
    """How a run ended: lines that were answered, of these refused, and how many an earlier run had done already."""

    answered: int
    refused: int
    earlier: int


def run_batch(engine: Engine, source: Path, output: Path, **options: Any) -> BatchSummary:
    """Answers the lines of ``source`` by an engine of this process; ``answer_file`` says the rest.

    Raises:
        EngineStopped: The engine ended; the same call goes on with what is there.
    """
    return answer_file(engine.manifest.sha256 or "", partial(answers, engine), source, output, **options)


def answer_file(
    artifact: str,
    answered: Answered,
    source: Path,
    output: Path,
    *,
    model: str,
    settings: dict[str, Any],
    shard: Shard = WHOLE,
    force: bool = False,
    progress: Callable[[int], None] = lambda done: None,
) -> BatchSummary:
    """Answers the lines of ``source`` that are in ``shard``, or goes on with what an earlier run left.

    Args:
        artifact: The sha256 of its manifest.
        answered: Who answers.
        source: JSON lines.
        output: Gets one line for each.
        model: The model's name in answers.
        settings: Fields of a request that lines do not say; ``seed`` is that of line 0.
        shard: Which share of the lines.
        force: Begin anew, whatever was there.
        progress: Told how many lines are done.

    Raises:
        BatchError: Another run's output is there, or another process writes it.
        RequestError: The input cannot be read.
    """
    digest, count = _scanned(source)
    asked = BatchRecord(FORMAT, artifact, model, digest, count, json.dumps(dict(settings), sort_keys=True), str(shard))
    record, partial = record_path(output), output.with_name(f"{output.name}.partial")
    mine = range(shard.index, count, shard.count)
    with _opened(partial) as file:
        if force:
            remove(output)
            file.truncate(0)
        elif record.exists() or output.exists():
            _same(asked, read_record(output), output)
            if output.exists():
                with _readable(output) as whole:
                    if (count := _answered(whole, asked, mine, output)[0]) != len(mine):
                        found = f"expected {len(mine)} answers, found {count}"
                        raise BatchError(f"batch output `{output}`: {found}", ANEW)
                remove(partial)
                return BatchSummary(len(mine), 0, len(mine))
        else:
            file.truncate(0)
        replace_file(record, json.dumps(asdict(asked), indent=1).encode() + b"\n")
        earlier = _earlier(file, asked, mine, partial)
        todo = mine[earlier:]
        refused = 0
        for number, (answer, wrong) in enumerate(answered(asked, _lines(source, todo)), earlier + 1):
            refused += wrong
            file.write(answer)
            file.flush()
            progress(number)
        os.fsync(file.fileno())
        rename(partial, output)
    return BatchSummary(len(mine), refused, earlier)


def answers(engine: Engine, asked: BatchRecord, lines: Iterable[Numbered]) -> Iterator[BatchAnswer]:
    """The answers to lines of a run, in order; at most WINDOW requests for each slot run at a time."""
    most = WINDOW * engine.manifest.targets[engine.target].state.slots
    running: deque[tuple[Line, list[Any]]] = deque()
    settings, run = json.loads(asked.settings), asked.input_sha256[:12]

    def ended() -> tuple[bytes, bool]:
        line, handles = running.popleft()
        completions: list[Completion] = []
        try:
            completions = [handle.result() for handle in handles]
        except EngineStopped:
            raise
        except RequestFailed as error:  # of this line alone: the others go on
            line.refused = stopped(error, log=False)
            for handle in handles:
                handle.cancel()
        return line.answer(completions, run), line.refused is not None

    with ExitStack() as stack:
        stack.callback(lambda: [handle.cancel() for _, handles in running for handle in handles])
        for number, text in lines:
            line = Line(number, text, engine, asked.model, settings)
            running.append((line, engine.submit(*line.call.requests) if line.call else []))
            while sum(len(handles) for _, handles in running) >= most or (running and not running[0][1]):
                yield ended()
        while running:
            yield ended()


def batch_worker(artifact: Path, config: EngineConfig) -> Callable[[], EngineWorker]:
    """Makes workers of a cluster that answer pieces of a few lines."""
    return partial(EngineWorker, artifact, config, _answered_piece, _about)


def _answered_piece(engine: Engine, piece: tuple[BatchRecord, list[Numbered]]) -> list[BatchAnswer]:
    return [*answers(engine, *piece)]


def _about(engine: Engine) -> dict[str, Any]:
    return {"artifact": engine.manifest.sha256, "target": engine.target, "versions": versions()}


def answered_by(pool: WorkerPool) -> Answered:
    """What ``answer_file`` asks for, by a pool of what ``batch_worker`` makes."""

    def answered(asked: BatchRecord, lines: Iterator[Numbered]) -> Iterator[BatchAnswer]:
        pieces = iter(lambda: [*islice(lines, PIECE)], [])
        for some in pool.map((asked, piece) for piece in pieces):
            yield from some

    return answered


def merge(outputs: Sequence[Path], output: Path, *, force: bool = False) -> int:
    """Puts the outputs of all shards of one run together, in the order of the input; returns the number of lines.

    Raises:
        BatchError: They are not of one run, one is missing, unfinished or there twice, or ``output`` is there.
    """
    records = [read_record(path) for path in outputs]
    for record, path in zip(records, outputs, strict=True):
        _same(replace(records[0], shard=record.shard), record, path)
    places = [(Shard.parse(record.shard), path) for record, path in zip(records, outputs, strict=True)]
    parts, first = in_order(places, "batch merge", BatchError), records[0]
    if output.exists() and not force:
        raise BatchError(f"batch merge: expected no such file, found one, at {output}", "replace it with --force")
    with ExitStack() as stack:
        files = [stack.enter_context(_readable(path)) for path in parts]
        target = stack.enter_context(replacing(output))
        for number in range(first.lines):
            line = files[number % len(parts)].readline()
            found = "another one" if line.endswith(b"\n") else "the end"
            if found == "the end" or not is_answer(line, number, first.input_sha256[:12]):
                path = parts[number % len(parts)]
                raise BatchError(f"batch merge: expected an answer to line {number}, found {found}, in {path}")
            target.write(line)
        for file in files:
            if file.read(1):
                raise BatchError(f"batch merge: expected the end, found more lines, in {file.name}")
    replace_file(record_path(output), json.dumps(asdict(replace(first, shard=str(WHOLE))), indent=1).encode() + b"\n")
    return first.lines


def record_path(output: Path) -> Path:
    """Where the record of the run that wrote ``output`` is."""
    return output.with_name(f"{output.name}.batch.json")


def read_record(output: Path) -> BatchRecord:
    """The record of the run that wrote ``output``.

    Raises:
        BatchError: There is none, or it is no such record.
    """
    path = record_path(output)
    try:
        return from_json(BatchRecord, read_json(path))
    except OSError as error:
        found = f"found {error.strerror}, at {path}"
        raise BatchError(f"batch output `{output}`: expected its record beside it, {found}", ANEW) from error
    except (WrongRecordError, ValueError) as error:
        raise BatchError(f"batch record `{path}`: expected what a run writes, found {error}", ANEW) from error


def _same(asked: BatchRecord, found: BatchRecord, output: Path) -> None:
    for name, value in vars(asked).items():
        other = getattr(found, name)
        if other != value:
            raise BatchError(f"batch output `{output}`: expected {name} {value}, found {other} in its record", ANEW)


def _scanned(source: Path) -> tuple[str, int]:
    """The input's sha256 and its number of lines."""
    digest, count, last = hashlib.sha256(), 0, b"\n"
    with _readable(source) as file:
        while block := file.read(1 << 20):
            digest.update(block)
            count += block.count(b"\n")
            last = block
    return digest.hexdigest(), count + (not last.endswith(b"\n"))


def _lines(source: Path, wanted: Sequence[int]) -> Iterator[Numbered]:
    """The wanted lines of the input, which are in ascending order; of a line that is too long, its beginning."""
    numbers = iter(wanted)
    next_one = next(numbers, None)
    with _readable(source) as file:
        number = 0
        while next_one is not None and (line := file.readline(LONGEST + 2)):
            rest = line
            while not rest.endswith(b"\n") and (rest := file.readline(1 << 20)):
                pass
            if number == next_one:
                yield number, line.rstrip(b"\r\n") if line.endswith(b"\n") or len(line) <= LONGEST else line
                next_one = next(numbers, None)
            number += 1


@contextmanager
def _readable(path: Path) -> Iterator[BinaryIO]:
    """A regular file that a user named, perhaps by a link."""
    real = path.resolve()
    try:
        with opened(real.parent, real.name) as file:
            yield file
    except OSError as error:
        raise RequestError(f"batch input `{path}`: expected a readable file, found {error.strerror}") from error


@contextmanager
def _opened(partial: Path) -> Iterator[BinaryIO]:
    """The growing output, which one process at a time may write."""
    with writing(partial), open_own(partial) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BatchError(f"batch output `{partial}`: expected no other run, found one that writes it") from None
        yield file


def _earlier(file: BinaryIO, asked: BatchRecord, mine: Sequence[int], partial: Path) -> int:
    """How many answers an earlier run has left in ``partial``; a line that was broken off is cut away."""
    file.seek(0)
    count, end = _answered(file, asked, mine, partial)
    file.truncate(end)
    file.seek(end)
    return count


def _answered(file: BinaryIO, asked: BatchRecord, mine: Sequence[int], path: Path) -> tuple[int, int]:
    """The number of whole lines of a run's output, and where they end.

    Raises:
        BatchError: They are not the answers to the first of the lines ``mine``, in their order.
    """
    count = end = 0
    for text in file:
        if not text.endswith(b"\n"):
            break
        if count == len(mine) or not is_answer(text, mine[count], asked.input_sha256[:12]):
            found = f"found another one as line {count + 1}, in {path}"
            raise BatchError(f"batch output: expected the answers to the first of {len(mine)} lines, {found}", ANEW)
        count, end = count + 1, end + len(text)
    return count, end
