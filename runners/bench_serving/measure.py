"""One measurement, from settings to figures: a workload is made, an engine or a server is opened, requests are sent."""

import asyncio
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ling3export.artifacts.manifest import read_manifest
from ling3export.artifacts.schema import Manifest
from ling3export.foundation.errors import RequestError
from ling3export.foundation.reading import read_bytes
from ling3export.runners.bench_serving import workloads
from ling3export.runners.bench_serving.metrics import Figures, figures, parse_goals
from ling3export.runners.bench_serving.record import record
from ling3export.runners.bench_serving.run import EngineClient, Run, Told, run
from ling3export.runners.bench_serving.table import render
from ling3export.runners.bench_serving.workloads import SampleRequest, WorkloadSpec, arrivals
from ling3export.runners.engine.engine import Engine
from ling3export.runners.load.loader import say
from ling3export.runners.text.tokenizer import Tokenizer, TokenizerFiles

WORKLOADS = ("random", "sharegpt", "generated-shared-prefix", "prefix-repetition", "jsonl")
FROM_FILES = ("sharegpt", "jsonl")
LARGEST_TOKENIZER = 256 << 20  # bytes
UNBOUNDED = 1 << 31  # tokens: the context of a server that nobody knows


@dataclass(frozen=True)
class Settings:
    """What is measured, with what, and how it is shown. Lengths are in tokens.

    Attributes:
        artifact: The artifact that is run in this process, or whose tokenizer a server has.
        url: A server's address; None runs the artifact in this process.
        model: The model's name on the server; None takes the first that it lists.
        key: The server's key.
        tokenizer: A tokenizer.json, where no artifact is given.
        text: Prompts of token ids are sent as the text that they spell.
        stop_at_eos: An end-of-text token ends an answer; otherwise each has its full length.
        workload: One of WORKLOADS.
        data: The data set of sharegpt or jsonl.
        asks: The requests themselves, from elsewhere; then ``workload`` is their name.
        num_prompts: How many requests.
        input_len: Most tokens of a random prompt.
        output_len: Tokens of an answer (of random ones: at most); None takes the data set's, or DEFAULT_OUTPUT.
        range_ratio: Least length of random prompts and answers, as a share of the most.
        groups: How many groups of prompts begin alike.
        prefix_len: Tokens with which all of a group begin.
        suffix_len: Tokens of a prompt behind them.
        readable: Texts are words.
        seed: Where the randomness comes from.
        request_rate: Requests a second; infinite sends all at once.
        burstiness: Shape of the gaps' gamma distribution; 1 is a Poisson process.
        max_concurrency: How many requests may run at once.
        goodput: Bounds, such as ``ttft:200,tpot:20``.
        steady: Also figures of the time in which max_concurrency requests ran.
        target, programs, check, step_timeout: As the engine has them.
    """

    artifact: Path | None = None
    url: str | None = None
    model: str | None = None
    key: str | None = None
    tokenizer: Path | None = None
    text: bool = False
    stop_at_eos: bool = False
    workload: str = "random"
    data: Path | None = None
    asks: tuple[SampleRequest, ...] | None = None
    num_prompts: int = 100
    input_len: int = 128
    output_len: int | None = None
    range_ratio: float = 0.0
    groups: int = 8
    prefix_len: int = 64
    suffix_len: int = 32
    readable: bool = False
    seed: int = 0
    request_rate: float = math.inf
    burstiness: float = 1.0
    max_concurrency: int | None = None
    goodput: str | None = None
    steady: bool = False
    target: str | None = None
    programs: str = "prebuilt-only"
    check: str = "all"
    step_timeout: float | None = None

    def arguments(self) -> dict[str, Any]:
        """What a record says of them: no key, and no requests, which have a digest."""
        return {name: value for name, value in asdict(self).items() if name not in ("key", "asks")}


DEFAULT_OUTPUT = 64  # tokens


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
        how = self.settings
        return render(
            self.found,
            backend=self.backend,
            rate=how.request_rate,
            limit=how.max_concurrency,
            compat=compat,
            extended=extended,
        )

    def record(self, name: str, *, raw: bool = False) -> dict[str, Any]:
        """The line of JSON."""
        line = record(name, self.settings.arguments(), self.found, self.done, self.asks, self.manifest, raw=raw)
        return line | ({"servers": [*self.servers]} if self.servers else {})


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
    if how.steady and how.max_concurrency is None:
        raise RequestError("steady: expected a bound of requests at once, found none", "add --max-concurrency")
    manifest, tokenizer, asks, times = _workload(how)
    if how.url is not None:
        from ling3export.runners.bench_serving.http_client import HttpClient  # with h11, of the extra `serve`

        server = HttpClient(how.url, model=how.model, key=how.key, ignore_eos=not how.stop_at_eos, behind=behind)
        backend = server.backend

        async def opened() -> Run:
            await server.open()
            return await run(server, asks, times, limit=how.max_concurrency, tokenizer=tokenizer, told=told)

        done = asyncio.run(opened())
    else:
        with _engine(how, report) as engine:
            inside = EngineClient(engine, ignore_eos=not how.stop_at_eos)
            backend = inside.backend
            done = asyncio.run(run(inside, asks, times, limit=how.max_concurrency, tokenizer=tokenizer, told=told))
    found = figures(done.results, done.duration, goals=goals, limit=how.max_concurrency if how.steady else None)
    return Measurement(how, backend, found, done, asks, manifest)


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


@contextmanager
def _engine(how: Settings, report: Callable[[str], None]) -> Iterator[Engine]:
    if how.artifact is None:
        raise RequestError("bench: expected an artifact to run or a server's address, found neither", "add --url URL")
    with Engine(
        how.artifact,
        target=how.target,
        programs=how.programs,
        check=how.check,
        step_timeout=how.step_timeout,
        report=report,
    ) as engine:
        engine.settle()  # a program that loads during the run would be part of its figures
        yield engine


def _workload(how: Settings) -> tuple[Manifest | None, Tokenizer | None, list[SampleRequest], list[float]]:
    """The artifact's manifest, the tokenizer, the requests, and when each is due."""
    manifest, tokenizer, context, vocabulary = None, None, UNBOUNDED, 0
    if how.artifact is not None:
        manifest = read_manifest(how.artifact)
        tokenizer = _tokenizer_of(how.artifact, manifest)
        context, vocabulary = manifest.plan.context, manifest.vocab_size
    elif how.tokenizer is not None:
        tokenizer = open_tokenizer(how.tokenizer)
        vocabulary = tokenizer.size
    source = WorkloadSpec(how.num_prompts, context, vocabulary, how.seed, tokenizer, how.output_len)
    asks = _asks(how, source)
    if how.text:
        spell = source.need(how.workload).decode
        asks = [ask if isinstance(ask.prompt, str) else replace(ask, prompt=spell(ask.prompt)) for ask in asks]
    return manifest, tokenizer, asks, arrivals(asks, how.request_rate, how.burstiness, how.seed)


def _asks(how: Settings, source: WorkloadSpec) -> list[SampleRequest]:
    output = how.output_len or DEFAULT_OUTPUT
    if how.asks is not None:
        return list(how.asks[: how.num_prompts])
    if how.workload in FROM_FILES:
        if how.data is None:
            raise RequestError(f"workload `{how.workload}`: expected a data set, found none", "name it: --data FILE")
        return (workloads.sharegpt if how.workload == "sharegpt" else workloads.jsonl)(source, how.data)
    if how.workload == "random":
        return workloads.random_ids(source, how.input_len, output, how.range_ratio)
    if how.workload == "prefix-repetition":
        return workloads.prefix_repetition(source, how.groups, how.prefix_len, how.suffix_len, output)
    return workloads.shared_prefix(source, how.groups, how.prefix_len, how.suffix_len, output, readable=how.readable)
