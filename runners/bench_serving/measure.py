"""One measurement, from settings to figures: make a workload, open an engine or a server, send the requests.

A request is sent when it is due and fewer than the limit run, to an engine in this process or to a server
(``http_client``).
"""

import asyncio
import hashlib
import json
import math
import os
import platform
from collections.abc import Callable, Coroutine, Sequence
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
from ling3export.runners.bench_serving.metrics import Figures, RequestResult, figures
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
UNBOUNDED = 1 << 31  # tokens: the context of a server without an artifact

Progress = Callable[[int, int], None]  # receives how many requests have ended, and how many there are


@dataclass(frozen=True, kw_only=True)
class Settings(WorkloadSpec):
    """The settings of a measurement.

    Attributes:
        artifact: Runs in this process, or gives the tokenizer of a server.
        url: A server's address; None runs the artifact in this process.
        stop_at_eos: An end-of-text token ends an answer; otherwise each has its full length.
        request_rate: Requests a second; infinite sends all at once.
        max_concurrency: Most requests that run at once; None for any number.
    """

    artifact: Path | None = None
    url: str | None = None
    model: str | None = None
    key: str | None = None
    tokenizer: Path | None = None
    stop_at_eos: bool = False
    request_rate: float = math.inf
    max_concurrency: int | None = None
    engine: EngineConfig = field(default_factory=EngineConfig)


class EngineClient:
    """An engine in this process. Token times are those at which the engine read the tokens."""

    backend = "ling3"

    def __init__(self, engine: Engine, *, ignore_eos: bool) -> None:
        self._engine, self._ignore_eos = engine, ignore_eos

    def prepare(self, sample: SampleRequest) -> Any:
        """A tokenized request for ``send``; RequestError if it can never be served."""
        request = self._engine.request(sample.prompt, sample.output, ignore_eos=self._ignore_eos)
        self._engine.check(request)
        return request

    async def send(self, prepared: Any) -> RequestResult:
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
        return result

    async def compiles(self) -> int | None:
        return int(self._engine.stats()["compile_events"])


@dataclass(frozen=True)
class Run:
    """The results of a run."""

    results: list[RequestResult]  # requests that ended, in the order of their end
    duration: float  # seconds from the first submission to the last completion, or to the interruption
    unfinished: int  # requests that had not ended when the run was interrupted
    compiles: int | None  # programs that were compiled meanwhile; None if the server does not report it


async def run(
    client: "EngineClient | HttpClient",
    requests: Sequence[SampleRequest],
    times: Sequence[float],
    *,
    limit: int | None = None,
    tokenizer: Tokenizer | None = None,
    progress: Progress | None = None,
) -> Run:
    """Sends a workload and waits for all answers. If it is cancelled, it returns the results so far.

    Args:
        times: When each request is due, in seconds after the start.
        limit: Most requests that run at once; the clock of a further one starts when it is sent.

    Raises:
        RequestError: A request can never be served.
        Ling3Error: The request before the run, which is not measured, failed.
    """
    prepared = [client.prepare(request) for request in requests]
    first = await client.send(client.prepare(replace(requests[0], output=min(requests[0].output, WARM_UP))))
    if first.error is not None:
        raise Ling3Error(f"warm-up: expected an answer to the first request, found {first.error}")
    before, results = await client.compiles(), list[RequestResult]()
    gate = asyncio.Semaphore(limit or len(requests))

    async def one(request: Any) -> None:
        async with gate:
            results.append(await client.send(request))
        if progress is not None:
            progress(len(results), len(requests))

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
    after = await client.compiles()
    for result in results:
        result.retokenized = result.tokens
        if tokenizer is not None:
            result.retokenized = len(tokenizer.encode(result.text, special=False))
    compiled = None if before is None or after is None else after - before
    return Run(results, duration, len(requests) - len(results), compiled)


@dataclass(frozen=True)
class Measurement:
    """A measurement: its settings, its workload, the artifact's manifest if there is one, and the figures."""

    settings: Settings
    backend: str
    figures: Figures
    run: Run
    requests: list[SampleRequest]
    manifest: Manifest | None

    def table(self, extended: bool = False) -> str:
        """The table in the form of SGLang's."""
        rate, limit = self.settings.request_rate, self.settings.max_concurrency
        return render(self.figures, backend=self.backend, rate=rate, limit=limit, extended=extended)

    def record(self, name: str, *, raw: bool = False) -> dict[str, Any]:
        """One line of JSON; ``raw``: also with times, lengths and errors of every request."""
        source = None if self.manifest is None else self.manifest.source.name
        settings = vars(self.settings) | vars(self.settings.engine)
        arguments = {
            name: _plain(value) for name, value in settings.items() if name not in ("key", "requests", "engine")
        }
        line: dict[str, Any] = {
            "name": name,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": {"cores": os.cpu_count(), "load_average": os.getloadavg()[0], "system": platform.platform()},
            "versions": {package: version(package) for package in ("ling3export", "jax")},
            "artifact": self.manifest and {"checkpoint": source, "sha256": self.manifest.sha256},
            "workload_sha256": workload_digest(self.requests),
            "arguments": arguments,
            "interrupted": bool(self.run.unfinished),
            "unfinished": self.run.unfinished,
            "compiles": self.run.compiles,
            "figures": asdict(self.figures),
        }
        if raw:
            line["requests"] = [asdict(result) for result in self.run.results]
        return line


def workload_digest(requests: Sequence[SampleRequest]) -> str:
    return hashlib.sha256(json.dumps([asdict(request) for request in requests]).encode()).hexdigest()


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) or value == math.inf else value


def measure(settings: Settings, progress: Progress | None = None, report: Callable[[str], None] = say) -> Measurement:
    """Measures; ``report`` receives what the engine chose and why.

    Raises:
        Ling3Error: The settings do not fit together, the workload cannot be made, or the engine or server cannot be
            opened.
    """
    manifest, limits = _limits(settings)
    requests = requests_of(settings, limits)
    times = arrivals(len(requests), settings.request_rate, settings.seed)
    ignore_eos = not settings.stop_at_eos

    def sent(client: "EngineClient | HttpClient") -> Coroutine[Any, Any, Run]:
        limit = settings.max_concurrency
        return run(client, requests, times, limit=limit, tokenizer=limits.tokenizer, progress=progress)

    if settings.url is not None:
        from ling3export.runners.bench_serving.http_client import HttpClient  # with h11, of the extra `serve`

        server = HttpClient(settings.url, settings.model, settings.key, ignore_eos=ignore_eos)

        async def opened() -> Run:
            await server.open()
            return await sent(server)

        backend, done = server.backend, asyncio.run(opened())
    elif settings.artifact is not None:
        with Engine(settings.artifact, settings.engine, report=report) as engine:
            engine.settle()  # a program that loads during the run would be part of its figures
            client = EngineClient(engine, ignore_eos=ignore_eos)
            backend, done = client.backend, asyncio.run(sent(client))
    else:
        raise RequestError("bench: expected an artifact to run or a server's address, found neither", "add --url URL")
    return Measurement(settings, backend, figures(done.results, done.duration), done, requests, manifest)


def open_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of an artifact, of a folder with a tokenizer.json, or of such a file.

    Raises:
        RequestError: There is none.
        ArtifactError: The file is no tokenizer.
    """
    if (path / "manifest.json").exists():
        tokenizer = _tokenizer_of(path, read_manifest(path))
        if tokenizer is None:
            raise RequestError(f"tokenizer `{path}`: the artifact has none")
        return tokenizer
    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        return Tokenizer(read_bytes(file.parent, file.name, LARGEST_TOKENIZER, links=True), str(file))
    except OSError as error:
        raise RequestError(f"tokenizer `{file}`: expected a readable file, found {error.strerror}") from error


def _tokenizer_of(artifact: Path, manifest: Manifest) -> Tokenizer | None:
    files = TokenizerFiles(artifact, manifest.tokenizer, manifest.eos_token_ids)
    return files.tokenizer("bench") if files.exist else None


def _limits(settings: Settings) -> tuple[Manifest | None, PromptLimits]:
    """The artifact's manifest, and what the model takes."""
    if settings.artifact is not None:
        manifest = read_manifest(settings.artifact)
        tokenizer = _tokenizer_of(settings.artifact, manifest)
        return manifest, PromptLimits(manifest.plan.context, manifest.vocab_size, tokenizer)
    if settings.tokenizer is not None:
        opened = open_tokenizer(settings.tokenizer)
        return None, PromptLimits(UNBOUNDED, opened.size, opened)
    return None, PromptLimits(UNBOUNDED, 0)
