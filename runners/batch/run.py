"""Answers a file of requests, or a shard of it. The same call continues a run that was interrupted.

Answers have the order of the input. Each has an id that names the run and the line, so an output shows which lines are
left. ``OUTPUT.partial`` grows by a line for each answer, then becomes OUTPUT.
"""

import fcntl
import hashlib
import json
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from ling3export.artifacts.files import open_own, remove, rename, writing
from ling3export.artifacts.manifest import read_manifest
from ling3export.foundation.errors import Ling3Error, RequestError
from ling3export.foundation.reading import opened
from ling3export.foundation.shards import WHOLE, Shard
from ling3export.runners.batch.lines import LONGEST, Line, is_answer
from ling3export.runners.engine.config import EngineConfig
from ling3export.runners.engine.engine import Engine
from ling3export.runners.engine.handle import EngineStopped, RequestFailed
from ling3export.runners.engine.request import Completion
from ling3export.runners.fleet.cluster import Cluster, ClusterError, Work
from ling3export.runners.serve.answers import stopped

WINDOW = 16  # requests in flight for each slot: short answers go on while a long one runs
PIECE = 64  # lines that an engine of a cluster gets together
ANEW = "nothing was changed: choose another output, or begin again with --force"
NumberedLine = tuple[int, bytes]  # a line of the input, and its place there
BatchAnswer = tuple[bytes, bool]  # a line of the output, and whether it is a refusal


class BatchError(Ling3Error):
    """The output belongs to another run."""


class BatchRun(NamedTuple):
    """All that decides the answers except the lines."""

    id: str  # digest of artifact, input, model and settings
    model: str
    settings: Mapping[str, Any]  # fields of requests that lines do not set; ``seed`` is that of line 0


Answered = Callable[[BatchRun, Iterator[NumberedLine]], Iterator[BatchAnswer]]  # gives the answers to lines, in order


@dataclass(frozen=True)
class BatchSummary:
    """Numbers of lines: all, those that this run refused, and those that an earlier run had finished."""

    answered: int
    refused: int
    earlier: int


def run_batch(engine: Engine, source: Path, output: Path, **options: Any) -> BatchSummary:
    """Answers the lines of ``source`` by an engine of this process. The options are those of ``answer_file``.

    Raises:
        EngineStopped: The engine ended; the same call continues from the answers so far.
    """
    return answer_file(engine.manifest.sha256 or "", partial(answers, engine), source, output, **options)


def run_batch_on(
    cluster: Cluster, artifact: Path, config: EngineConfig, source: Path, output: Path, **options: Any
) -> BatchSummary:
    """Answers the lines of ``source`` by engines of a cluster. The options are those of ``answer_file``."""
    work = Work(artifact, config, _piece_answers)

    def answered(run: BatchRun, lines: Iterator[NumberedLine]) -> Iterator[BatchAnswer]:
        pieces = iter(lambda: [*islice(lines, PIECE)], [])
        for digest, piece in cluster.results(work, ((run, piece) for piece in pieces)):
            if digest != manifest.sha256:
                raise ClusterError("ray: a node has another artifact", "all nodes need the same artifact")
            yield from piece

    manifest = read_manifest(artifact)
    with cluster.connected():
        return answer_file(manifest.sha256 or "", answered, source, output, **options)


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
    """Answers the lines of ``source`` that are in ``shard``, or continues an earlier run.

    Args:
        source: JSON lines; ``output`` gets a line for each line of the shard.
        settings: Fields of a request that lines do not set; ``seed`` is that of line 0.
        shard: A shard is a range of lines, so the outputs of all shards, one after the other, are the whole output.

    Raises:
        BatchError: The output is that of another run, or another process writes it.
        RequestError: The input cannot be read.
    """
    digest, count = _scanned(source)
    identity = json.dumps([artifact, model, digest, settings], sort_keys=True).encode()
    run = BatchRun(f"batch_req_{hashlib.sha256(identity).hexdigest()[:12]}", model, settings)
    mine = range(count * shard.index // shard.count, count * (shard.index + 1) // shard.count)
    growing = output.with_name(f"{output.name}.partial")
    with _opened(growing) as file:
        if force:
            remove(output)
            file.truncate(0)
        elif output.exists():
            with _readable(output) as whole:
                if (finished := _finished(whole, run.id, mine, output)[0]) != len(mine):
                    raise BatchError(f"batch output `{output}`: it has {finished} answers of {len(mine)}", ANEW)
            remove(growing)
            return BatchSummary(len(mine), 0, len(mine))
        earlier, end = _finished(file, run.id, mine, growing)
        file.truncate(end)  # cuts away a line that was broken off
        file.seek(end)
        refused = 0
        for number, (answer, is_refusal) in enumerate(answered(run, _lines(source, mine[earlier:])), earlier + 1):
            refused += is_refusal
            file.write(answer)
            file.flush()
            progress(number)
        os.fsync(file.fileno())
        rename(growing, output)
    return BatchSummary(len(mine), refused, earlier)


def answers(engine: Engine, run: BatchRun, lines: Iterable[NumberedLine]) -> Iterator[BatchAnswer]:
    """The answers to lines of a run, in order; at most WINDOW requests for each slot run at a time."""
    most = WINDOW * engine.manifest.targets[engine.target].state.slots
    running: deque[tuple[Line, list[Any]]] = deque()

    def first_answer() -> BatchAnswer:
        line, handles = running.popleft()
        completions: list[Completion] = []
        try:
            completions = [handle.result() for handle in handles]
        except EngineStopped:
            raise
        except RequestFailed as error:  # of this line only: the others go on
            line.refusal = stopped(error, log=False)
            for handle in handles:
                handle.cancel()
        return line.answer(completions, run.id), line.refusal is not None

    with ExitStack() as stack:
        stack.callback(lambda: [handle.cancel() for _, handles in running for handle in handles])
        for number, text in lines:
            line = Line(number, text, engine, run.model, run.settings)
            running.append((line, engine.submit(*line.call.requests) if line.call else []))
            while sum(len(handles) for _, handles in running) >= most or (running and not running[0][1]):
                yield first_answer()
        while running:
            yield first_answer()


def _piece_answers(
    engine: Engine, piece: tuple[BatchRun, Sequence[NumberedLine]]
) -> tuple[str | None, list[BatchAnswer]]:
    return engine.manifest.sha256, [*answers(engine, *piece)]


def _scanned(source: Path) -> tuple[str, int]:
    """The input's sha256 and its number of lines."""
    digest, count, last = hashlib.sha256(), 0, b"\n"
    with _readable(source) as file:
        while block := file.read(1 << 20):
            digest.update(block)
            count += block.count(b"\n")
            last = block
    return digest.hexdigest(), count + (not last.endswith(b"\n"))


def _lines(source: Path, wanted: range) -> Iterator[NumberedLine]:
    """A range of the input's lines; of a line that is too long, its beginning."""
    with _readable(source) as file:
        for number in range(wanted.stop):
            line = rest = file.readline(LONGEST + 2)
            while not rest.endswith(b"\n") and (rest := file.readline(1 << 20)):
                pass
            if number >= wanted.start:
                yield number, line.rstrip(b"\r\n") if line.endswith(b"\n") or len(line) <= LONGEST else line


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
def _opened(path: Path) -> Iterator[BinaryIO]:
    """The growing output, which one process at a time may write."""
    with writing(path), open_own(path) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BatchError(f"batch output `{path}`: another process writes it", "wait until it ends") from None
        yield file


def _finished(file: BinaryIO, run: str, mine: Sequence[int], path: Path) -> tuple[int, int]:
    """The number of whole lines of a run's output, and where they end.

    Raises:
        BatchError: They are not the answers to the first of the lines ``mine``, in their order.
    """
    count = end = 0
    for text in file:
        if not text.endswith(b"\n"):
            break
        if count == len(mine) or not is_answer(text, mine[count], run):
            place = f"line {count + 1} answers another line, or the run of another input, artifact or setting"
            raise BatchError(f"batch output `{path}`: {place}", ANEW)
        count, end = count + 1, end + len(text)
    return count, end
