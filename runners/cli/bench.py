"""The commands ``ling3-runner bench``. stdout carries tables and data; progress, warnings and hints go to stderr."""

import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ling3export.foundation.errors import Ling3Error
from ling3export.foundation.extras import require
from ling3export.runners.cli.command import INTERRUPTED, Decorator, Group, section
from ling3export.runners.cli.eval import progress
from ling3export.runners.cli.options import PATH, engine_options
from ling3export.runners.cli.references import ARTIFACT

if TYPE_CHECKING:
    from ling3export.runners.bench_serving.measure import Measurement, Settings

WORKLOADS = ("random", "shared-prefix", "jsonl", "suite")
POSITIVE = click.IntRange(1)
LISTED = 10  # prefixes that are listed


@click.group("bench", cls=Group, sections={"Measure": ("serve", "compare"), "Look": ("check", "prefixes")})
def bench() -> None:
    """Measure latencies and throughput of serving."""


def _workload(command: Any) -> Any:
    return section(
        "Workload",
        click.option("--workload", type=click.Choice(WORKLOADS), default="random", help="The kind of requests."),
        click.option("--data", type=PATH, help="The file of jsonl, or the folder of a suite."),
        click.option("--suite", metavar="NAME|FILE", help="Send its prompts, with --workload suite."),
        click.option("--num-prompts", type=POSITIVE, default=100, help="Requests; a data set may have fewer."),
        click.option("--input-len", type=POSITIVE, default=128, help="Most tokens of a random prompt."),
        click.option("--output-len", type=POSITIVE, help="Tokens of an answer.  [default: the data set's, or 64]"),
        click.option("--range-ratio", type=click.FloatRange(0, 1), default=0.0, help="Least random length."),
        click.option("--groups", type=POSITIVE, default=8, help="Groups of prompts that share a prefix."),
        click.option("--prefix-len", type=POSITIVE, default=64, help="Tokens of a group's prefix."),
        click.option("--suffix-len", type=POSITIVE, default=32, help="Tokens of a prompt after it."),
        click.option("--text", is_flag=True, help="Send what token ids spell, for servers that take no ids."),
        click.option("--stop-at-eos", is_flag=True, help="Let end-of-text tokens end answers."),
        click.option("--seed", type=click.IntRange(0), default=0, help="The same seed gives the same requests."),
    )(command)


def _sending(command: Any) -> Any:
    above = click.FloatRange(0, min_open=True)
    arrivals = section(
        "Arrivals",
        click.option("--request-rate", type=above, default=math.inf, help="Requests a second; inf sends all at once."),
        click.option("--max-concurrency", type=POSITIVE, help="Requests that run at once.  [default: any number]"),
    )
    server = section(
        "Server",
        click.option("--model", help="Name of the model there.  [default: the first that it lists]"),
        click.option("--api-key-file", type=PATH, help="File with its key.  [default: LING3_API_KEY]"),
        click.option("--tokenizer", type=PATH, help="Its tokenizer.json, where no ARTIFACT is given."),
    )
    return arrivals(server(command))


_written: Decorator = section(
    "Files",
    click.option("--output", type=PATH, metavar="FILE.jsonl", help="Add a line of JSON with all figures."),
    click.option("--save-raw", is_flag=True, help="With times of every request in it."),
)


@bench.command()
@click.argument("artifact", type=ARTIFACT, required=False)
@click.option("--url", help="Measure the server there.  [default: ARTIFACT in this process]")
@_workload
@_sending
@section("Output", click.option("--extended", is_flag=True, help="More rows."))
@_written
@engine_options("target", "programs")
def serve(
    artifact: Path | None,
    url: str | None,
    extended: bool,
    output: Path | None,
    save_raw: bool,
    suite: str | None,
    api_key_file: Path | None,
    **settings: Any,
) -> None:
    """Measure latencies of ARTIFACT in this process, or of any server of OpenAI's API.

    With --url, ARTIFACT is not run: it gives the tokenizer, and the bounds of prompts.
    """
    options = settings | {"url": url, "key": None if url is None else _key(api_key_file)}
    made = _settings(artifact, suite, options)
    from ling3export.runners.bench_serving.measure import measure

    with progress("bench serve") as shown:
        measurement = measure(made, shown)
    click.echo(measurement.table(extended))
    _write([measurement.record(measurement.backend, raw=save_raw)], output)
    _end(measurement)


@bench.command()
@click.argument("artifact", type=ARTIFACT, required=False)
@click.option("--url", "urls", multiple=True, metavar="NAME=URL", help="A server, and what to call it; two or more.")
@_workload
@_sending
@_written
def compare(
    artifact: Path | None,
    urls: tuple[str, ...],
    output: Path | None,
    save_raw: bool,
    suite: str | None,
    api_key_file: Path | None,
    **settings: Any,
) -> None:
    """Measure several servers one after the other, side by side.

    All are sent the same requests. Ratios are to the first. ARTIFACT gives the tokenizer, and the bounds of prompts.
    """
    servers = [(name, url) for name, equal, url in (text.partition("=") for text in urls) if name and equal and url]
    if len(servers) < max(len(urls), 2):
        raise click.UsageError("expected --url NAME=URL twice or more.")
    shared = _settings(artifact, suite, settings | {"url": servers[0][1], "key": _key(api_key_file)})
    from ling3export.runners.bench_serving.measure import measure
    from ling3export.runners.bench_serving.table import side_by_side

    measurements: list[Measurement] = []
    stopped: BaseException | None = None
    try:
        for name, url in servers:
            with progress(name) as shown:
                measurements.append(measure(replace(shared, url=url), shown))
            if measurements[-1].run.unfinished:
                break
    except (Ling3Error, KeyboardInterrupt) as error:
        if not measurements:
            raise
        stopped = error
    pairs = zip(measurements, servers, strict=False)
    records = [measurement.record(name, raw=save_raw) for measurement, (name, _) in pairs]
    click.echo(side_by_side(records))
    _write(records, output)
    if len(records) < len(servers):
        click.echo(f"not measured: {', '.join(name for name, _ in servers[len(records) :])}", err=True)
    for measurement in measurements:
        _end(measurement)
    if stopped is not None:
        raise stopped


@bench.command()
@click.argument("file", type=click.File())
def check(file: Any) -> None:
    """Say whether the figures of a table in FILE agree.

    Takes tables of SGLang, vLLM and this program; - reads stdin. Exits with 1 if figures contradict each other.
    """
    from ling3export.runners.bench_serving.table import check as checked

    wrong = checked(file.read())
    for text in wrong:
        click.echo(text, err=True)
    if wrong:
        raise Ling3Error(f"table `{file.name}`: expected figures that agree, found {len(wrong)} that do not")
    click.echo("the figures agree within their rounding")


@bench.command()
@click.argument("data", type=PATH)
@click.option("--suite", metavar="NAME", help="DATA is this suite's data set; its prompts count.")
@click.option("--field", metavar="NAME", help="Field of the records that counts.  [default: the first user turn]")
@click.option("--least", type=POSITIVE, default=2, help="Texts that share a prefix.")
@click.option("--longer", type=click.IntRange(0), default=120, help="Characters that a prefix is longer than.")
@click.option("--tokenizer", type=ARTIFACT, help="A tokenizer.json, or an artifact, that counts tokens.")
@click.option("--block", type=POSITIVE, default=256, help="Tokens a block of a prefix cache.")
def prefixes(
    data: Path, suite: str | None, field: str | None, least: int, longer: int, tokenizer: Path | None, block: int
) -> None:
    """Measure how many prompts of DATA share a prefix.

    DATA is a list of JSON objects or JSON lines. A prefix counts if --least texts share it and no longer one. With
    --tokenizer also the most that a prefix cache could win.
    """
    from ling3export.runners.bench_serving.measure import open_tokenizer
    from ling3export.runners.bench_serving.prefixes import cached_blocks, repetition, text_of
    from ling3export.runners.bench_serving.workloads import read_records

    if suite is not None:
        from ling3export.runners.evals.suites import load_suite

        texts = [task.prompt for task in load_suite(suite, data).tasks if isinstance(task.prompt, str)]
    else:
        records = enumerate(read_records(data), 1)
        texts = [text_of(record, field, f"data set `{data}` record {at}") for at, record in records]
    result = repetition(texts, least, longer)
    summary: dict[str, Any] = {"dialogs": result.texts, "least": least, "longer": longer}
    summary |= {"prefixes": len(result.prefixes), "ratio": result.ratio}
    summary |= {"coverage": result.coverage, "mean_length": result.mean_length}
    if tokenizer is not None:
        opened = open_tokenizer(tokenizer)
        hit, total = cached_blocks([tuple(opened.encode(text)) for text in texts], block)
        summary |= {"block": block, "prompt_tokens": total, "cached_tokens": hit, "cached_share": hit / max(total, 1)}
    for name, value in summary.items():
        click.echo(f"{name + ':':15} {f'{value:.4f}' if isinstance(value, float) else value}")
    for prefix, count in result.prefixes[:LISTED]:
        click.echo(f"{count:6}  {json.dumps(prefix, ensure_ascii=False)}")


def _settings(artifact: Path | None, suite: str | None, options: dict[str, Any]) -> "Settings":
    """The settings, with the prompts of a suite if one is named."""
    if (options["workload"] == "suite") != (suite is not None):
        raise click.UsageError("--suite and --workload suite belong together.")
    if options.get("url") is None and artifact is None:
        raise click.UsageError("expected ARTIFACT or --url, found neither.")
    from ling3export.runners.bench_serving.measure import Settings
    from ling3export.runners.bench_serving.workloads import SampleRequest

    settings = Settings(artifact=artifact, **options)
    if suite is None:
        return settings
    from ling3export.runners.evals.suites import load_suite

    loaded = load_suite(suite, settings.data, settings.num_prompts)
    texts = [task.prompt for task in loaded.tasks if isinstance(task.prompt, (str, tuple))]
    if not texts or len(texts) != len(loaded.tasks):
        raise Ling3Error(f"suite `{suite}`: expected prompts of text, found {'messages' if loaded.tasks else 'none'}")
    requests = tuple(SampleRequest(text, settings.output) for text in texts)
    return replace(settings, workload=loaded.name, requests=requests)


def _key(path: Path | None) -> str | None:
    """The key for a server; calling servers needs the extra."""
    require("bench over HTTP", "serve", "h11", "starlette", "uvicorn", "prometheus_client", "pydantic")
    from ling3export.runners.serve.run import api_key

    return api_key(path)


def _write(records: list[dict[str, Any]], output: Path | None) -> None:
    """Appends a line of JSON for each record to a file."""
    if output is None:
        return
    from ling3export.artifacts.files import open_own, writing

    lines = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    with writing(output), open_own(output, append=True) as file:
        file.write(lines.encode())


def _end(measurement: "Measurement") -> None:
    """Warns of failed and unfinished requests, and ends with their exit code."""
    run, figures = measurement.run, measurement.figures
    if run.unfinished:
        total = len(measurement.requests)
        click.echo(f"interrupted: {run.unfinished} of {total} requests had not ended and do not count", err=True)
    if figures.failed:
        first = next(result.error for result in run.results if result.error is not None)
        click.echo(f"warning: {figures.failed} requests failed and do not count; the first: {first}", err=True)
    if run.compiles:
        raise Ling3Error(
            f"bench: expected no program to be compiled during the run, found {run.compiles}",
            "the figures hold compile time: build for this machine, or measure again",
        )
    if run.unfinished:
        sys.exit(INTERRUPTED)
    if not figures.completed:
        raise Ling3Error("bench: no request was answered")
