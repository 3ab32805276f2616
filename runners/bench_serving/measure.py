"""One measurement, from settings to figures: a workload is made, an engine or a server is opened, requests are sent.

Requests are sent when they are due, at most so many at once, and what became of each is kept. They go to an engine in
this process, or to a server (``http_client``).
"""

import asyncio
import hashlib
import json
import math
import os
import platform
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from time import perf_counter as now
from typing import TYPE_CHECKING, Any

from ling3export.artifacts.manifest import read_manifest
from ling3export.artifacts.schema import Manifest
from ling3export.foundation.errors import Ling3Error, RequestError
from ling3export.foundation.reading import read_bytes
from ling3export.runners.bench_serving.metrics import Figures, RequestResult, figures, parse_goals
from ling3export.runners.bench_serving.table import render
from ling3export.runners.bench_serving.workloads import PromptLimits, SampleRequest, WorkloadSpec, arrivals, requests_of
from ling3export.runners.engine.config import EngineConfig
from ling3export.runners.engine.engine import Engine
from ling3export.runners.engine.handle import RequestFailed
from ling3export.runners.load.loader import say
from ling3export.runners.text.tokenizer import TokenizerFiles
from ling3export.runners.text.vocabulary import Tokenizer

if TYPE_CHECKING:
    from ling3export.runners.bench_serving.http_client import HttpClient

WARM_UP = 32  # most tokens of the request that is sent before the clock runs
LARGEST_TOKENIZER = 256 << 20  # bytes
UNBOUNDED = 1 << 31  # tokens: the context of a server that nobody knows

Told = Callable[[int, int], None]  # how many requests have ended, and how many there are


@dataclass(frozen=True, kw_only=True)
class Settings(WorkloadSpec):
    """What is measured, with what, and how it is shown.

    Attributes:
        artifact: The artifact that is run in this process, or whose tokenizer a server has.
        url: A server's address; None runs the artifact in this process.
        model: The model's name on the server; None takes the first that it lists.
        key: The server's key.
        tokenizer: A tokenizer.json, where no artifact is given.
        stop_at_eos: An end-of-text token ends an answer; otherwise each has its full length.
        request_rate: Requests a second; infinite sends all at once.
        burstiness: Shape of the gaps' gamma distribution; 1 is a Poisson process.
        max_concurrency: How many requests may run at once.
        goodput: Bounds, such as ``ttft:200,tpot:20``.
        engine: How the artifact runs in this process, and on servers that are started for it.
    """

    artifact: Path | None = None
    url: str | None = None
    model: str | None = None
    key: str | None = None
    tokenizer: Path | None = None
    stop_at_eos: bool = False
    request_rate: float = math.inf
    burstiness: float = 1.0
    max_concurrency: int | None = None
    goodput: str | None = None
    engine: EngineConfig = field(default_factory=EngineConfig)


class EngineClient:
    """An engine in this process. Token times are the engine's own, in which a token was read.

    Args:
        engine: The engine.
        ignore_eos: Go on behind an end-of-text token, so that every answer has its full length.
    """

    backend = "ling3"

    def __init__(self, engine: Engine, *, ignore_eos: bool) -> None:
        self._engine, self._ignore_eos = engine, ignore_eos

    def prepare(self, ask: SampleRequest) -> Any:
        """An engine's request, tokenized: what ``send`` takes, made before the clock runs.

        Raises:
            RequestError: It can never be served.
        """
        request = self._engine.request(ask.prompt, ask.output, ignore_eos=self._ignore_eos)
        self._engine.check(request)
        return request

    async def send(self, prepared: Any) -> RequestResult:
        """Submits a request."""
        result = RequestResult(now())
        try:
            (handle,) = self._engine.submit(prepared)
            done = await handle.wait()
        except (RequestFailed, RequestError) as error:
            result.error = error.message
            return result
        result.times = [result.start + at / 1e3 for at in done.token_ms]
        result.prompt_tokens, result.tokens = len(done.prompt_ids), len(done.token_ids)
        result.text, result.cached = done.text or "", done.cached_tokens
        result.take(done.times)
        return result

    async def compiles(self) -> int | None:
        """The engine's own counter."""
        return int(self._engine.stats()["compile_events"])


@dataclass(frozen=True)
class Run:
    """What a run gave.

    Attributes:
        results: Of the requests that ended, in the order of their end.
        duration: Seconds from the first submission to the last completion, or to the interruption.
        unfinished: Requests that had not ended when the run was interrupted; 0 where it was not.
        compiles: Programs that were compiled meanwhile; None where nobody says it.
    """

    results: list[RequestResult]
    duration: float
    unfinished: int
    compiles: int | None


async def run(
    measured: "EngineClient | HttpClient",
    asks: Sequence[SampleRequest],
    times: Sequence[float],
    *,
    limit: int | None = None,
    tokenizer: Tokenizer | None = None,
    told: Told | None = None,
) -> Run:
    """Sends a workload and waits for all answers. If it is cancelled, it returns what there is by then.

    Args:
        measured: What is measured.
        asks: The requests.
        times: When each is due, in seconds after the start.
        limit: How many may run at once; one more waits before its clock starts.
        tokenizer: Counts the answers' tokens again.
        told: Told how many requests have ended, and how many there are.

    Raises:
        RequestError: A request can never be served.
        Ling3Error: The request before the run, which is not measured, failed.
    """
    prepared = [measured.prepare(ask) for ask in asks]
    first = await measured.send(measured.prepare(replace(asks[0], output=min(asks[0].output, WARM_UP))))
    if first.error is not None:
        raise Ling3Error(f"warm-up: expected an answer to the first request, found {first.error}")
    before, results = await measured.compiles(), list[RequestResult]()
    gate = asyncio.Semaphore(limit or len(asks))

    async def one(request: Any) -> None:
        async with gate:
            results.append(await measured.send(request))
        if told is not None:
            told(len(results), len(asks))

    sending, started = list[asyncio.Task[None]](), now()
    try:
        for request, due in zip(prepared, times, strict=True):
            if (wait := started + due - now()) > 0:
                await asyncio.sleep(wait)
            sending.append(asyncio.create_task(one(request)))
        await asyncio.gather(*sending)
    except asyncio.CancelledError:
        for task in sending:
            task.cancel()
        await asyncio.gather(*sending, return_exceptions=True)
    duration = now() - started
    after = await measured.compiles()
    for result in results:
        result.retokenized = result.tokens
        if tokenizer is not None:
            result.retokenized = len(tokenizer.encode(result.text, special=False))
    compiled = None if before is None or after is None else after - before
    return Run(results, duration, len(asks) - len(results), compiled)


@dataclass(frozen=True)
class Measurement:
    """What a measurement gave.

    Attributes:
        settings: What was measured.
        backend: What the table calls it.
        found: The figures.
        done: The run.
        asks: The workload.
        manifest: The artifact's, if there is one.
        servers: What was started for it: role, TP, target and artifact of each server.
    """

    settings: Settings
    backend: str
    found: Figures
    done: Run
    asks: list[SampleRequest]
    manifest: Manifest | None
    servers: tuple[Mapping[str, Any], ...] = ()

    def table(self, compat: str | None = None, extended: bool = False) -> str:
        """The table of SGLang's form."""
        rate, limit = self.settings.request_rate, self.settings.max_concurrency
        return render(self.found, backend=self.backend, rate=rate, limit=limit, compat=compat, extended=extended)

    def record(self, name: str, *, raw: bool = False) -> dict[str, Any]:
        """What is known of it, as one line of JSON.

        Args:
            name: What was measured, for people.
            raw: Also times, lengths and errors of every request.
        """
        source = None if self.manifest is None else self.manifest.source.name
        given = vars(self.settings) | vars(self.settings.engine)
        arguments = {name: _plain(value) for name, value in given.items() if name not in ("key", "asks", "engine")}
        line: dict[str, Any] = {
            "name": name,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": {"cores": os.cpu_count(), "load_average": os.getloadavg()[0], "system": platform.platform()},
            "versions": {each: version(each) for each in ("ling3export", "jax")},
            "artifact": self.manifest and {"checkpoint": source, "sha256": self.manifest.sha256},
            "workload_sha256": workload_digest(self.asks),
            "arguments": arguments,
            "interrupted": bool(self.done.unfinished),
            "unfinished": self.done.unfinished,
            "compiles": self.done.compiles,
            "figures": asdict(self.found),
        }
        if raw:
            line["requests"] = [asdict(result) | {"phases": result.phases} for result in self.done.results]
        return line | ({"servers": [*self.servers]} if self.servers else {})


def workload_digest(asks: Sequence[SampleRequest]) -> str:
    """sha256 of a workload: the same for the same requests."""
    return hashlib.sha256(json.dumps([asdict(ask) for ask in asks]).encode()).hexdigest()


def _plain(value: Any) -> Any:
    """An argument as JSON has it: infinity and paths become texts."""
    return str(value) if isinstance(value, Path) or value == math.inf else value


def measure(
    how: Settings, told: Told | None = None, report: Callable[[str], None] = say, behind: Sequence[str] = ()
) -> Measurement:
    """Measures.

    Args:
        how: What, and with what.
        told: Told how many requests have ended, and how many there are.
        report: Told what the engine chose and why.
        behind: Addresses of the servers behind the one that is called, which say what they compiled.

    Raises:
        Ling3Error: The settings do not fit together, the workload cannot be made, or what is to be measured cannot be
            opened.
    """
    goals = None if how.goodput is None else parse_goals(how.goodput)
    manifest, limits = _limits(how)
    asks = requests_of(how, limits)
    times = arrivals(asks, how.request_rate, how.burstiness, how.seed)

    def sent(client: "EngineClient | HttpClient") -> Coroutine[Any, Any, Run]:
        return run(client, asks, times, limit=how.max_concurrency, tokenizer=limits.tokenizer, told=told)

    if how.url is not None:
        from ling3export.runners.bench_serving.http_client import HttpClient  # with h11, of the extra `serve`

        server = HttpClient(how.url, model=how.model, key=how.key, ignore_eos=not how.stop_at_eos, behind=behind)

        async def opened() -> Run:
            await server.open()
            return await sent(server)

        backend, done = server.backend, asyncio.run(opened())
    elif how.artifact is not None:
        with Engine(how.artifact, how.engine, report=report) as engine:
            engine.settle()  # a program that loads during the run would be part of its figures
            inside = EngineClient(engine, ignore_eos=not how.stop_at_eos)
            backend, done = inside.backend, asyncio.run(sent(inside))
    else:
        raise RequestError("bench: expected an artifact to run or a server's address, found neither", "add --url URL")
    return Measurement(how, backend, figures(done.results, done.duration, goals), done, asks, manifest)


def open_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of an artifact, of a folder with a tokenizer.json, or of such a file.

    Raises:
        RequestError: There is none.
        ArtifactError: The file is no tokenizer.
    """
    if (path / "manifest.json").exists():
        found = _tokenizer_of(path, read_manifest(path))
        if found is None:
            raise RequestError(f"tokenizer `{path}`: expected an artifact with a tokenizer, found none")
        return found
    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        return Tokenizer(read_bytes(file.parent, file.name, LARGEST_TOKENIZER, links=True), str(file))
    except OSError as error:
        raise RequestError(f"tokenizer `{file}`: expected a readable file, found {error.strerror}") from error


def _tokenizer_of(artifact: Path, manifest: Manifest) -> Tokenizer | None:
    files = TokenizerFiles(artifact, manifest.tokenizer, manifest.eos_token_ids)
    return files.tokenizer("bench") if files.there else None


def _limits(how: Settings) -> tuple[Manifest | None, PromptLimits]:
    """The artifact's manifest, and what the model takes."""
    if how.artifact is not None:
        manifest = read_manifest(how.artifact)
        tokenizer = _tokenizer_of(how.artifact, manifest)
        return manifest, PromptLimits(manifest.plan.context, manifest.vocab_size, tokenizer)
    if how.tokenizer is not None:
        found = open_tokenizer(how.tokenizer)
        return None, PromptLimits(UNBOUNDED, found.size, found)
    return None, PromptLimits(UNBOUNDED, 0)
