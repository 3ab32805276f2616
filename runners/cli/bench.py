"""The commands ``ling3-runner bench``. stdout carries tables and data; progress, warnings and hints go to stderr."""

import json
import math
import signal
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
from ling3export.runners.transfer.options import CARRIERS

if TYPE_CHECKING:
    from ling3export.runners.bench_serving.measure import Measurement, Settings

WORKLOADS = ("random", "sharegpt", "generated-shared-prefix", "prefix-repetition", "jsonl", "suite")
POSITIVE = click.IntRange(1)
COMMON = "workload data num_prompts input_len output_len request_rate max_concurrency output".split()


@click.group("bench", cls=Group, sections={"Measure": ("serve", "compare"), "Look": ("check", "prefixes")})
def bench() -> None:
    """Measure latencies and throughput of serving."""


def _workload(command: Any) -> Any:
    """The options that say what is sent."""
    return section(
        "Workload",
        click.option("--workload", type=click.Choice(WORKLOADS), default="random", help="What is sent."),
        click.option("--data", type=PATH, help="The data set of sharegpt, jsonl or suite."),
        click.option("--suite", metavar="NAME|FILE", help="Whose prompts are sent, with --workload suite."),
        click.option("--num-prompts", type=POSITIVE, default=100, help="Requests; of a data set at most so many."),
        click.option("--input-len", type=POSITIVE, default=128, help="Most tokens of a random prompt."),
        click.option("--output-len", type=POSITIVE, help="Tokens of an answer.  [default: the data set's, or 64]"),
        click.option("--range-ratio", type=click.FloatRange(0, 1), default=0.0, help="Least random length."),
        click.option("--groups", type=POSITIVE, default=8, help="Groups of prompts that begin alike."),
        click.option("--prefix-len", type=POSITIVE, default=64, help="Tokens that a group's prompts share."),
        click.option("--suffix-len", type=POSITIVE, default=32, help="Tokens of a prompt behind them."),
        click.option("--readable", is_flag=True, help="Generated texts are words."),
        click.option("--text", is_flag=True, help="Send what token ids spell, for servers that take no ids."),
        click.option("--stop-at-eos", is_flag=True, help="Let end-of-text tokens end answers."),
        click.option("--seed", type=click.IntRange(0), default=0, help="The same gives the same requests."),
    )(command)


def _sending(command: Any) -> Any:
    """The options that say when it is sent, and to whom, and what is shown of it."""
    above = click.FloatRange(0, min_open=True)
    arrivals = section(
        "Arrivals",
        click.option("--request-rate", type=above, default=math.inf, help="Requests a second; inf sends all at once."),
        click.option("--burstiness", type=above, default=1.0, help="Below 1 they come in bursts; 1 is Poisson's."),
        click.option("--max-concurrency", type=POSITIVE, help="Requests that run at once.  [default: any number]"),
    )
    server = section(
        "Server",
        click.option("--model", help="Name of the model there.  [default: the first that it lists]"),
        click.option("--api-key-file", type=PATH, help="File with its key.  [default: LING3_API_KEY]"),
        click.option("--tokenizer", type=PATH, help="Its tokenizer.json, where no ARTIFACT is given."),
    )
    return arrivals(server(command))


_shown: Decorator = section(
    "Output",
    click.option("--goodput", metavar="NAME:MS,...", help="Count requests within bounds: ttft:200,tpot:20,e2el:2000."),
    click.option("--extended", is_flag=True, help="More rows."),
    click.option("--table-compat", type=click.Choice(["2025"]), help="Name one row as tables of that year do."),
)
_written: Decorator = section(
    "Files",
    click.option("--output", type=PATH, metavar="FILE.jsonl", help="Add a line of JSON with all figures."),
    click.option("--save-raw", is_flag=True, help="With times of every request in it."),
)


@bench.command(common=("url", "goodput", *COMMON))
@click.argument("artifact", type=ARTIFACT, required=False)
@click.option("--url", help="Measure the server there.  [default: ARTIFACT in this process]")
@_workload
@_sending
@_shown
@_written
@engine_options("target", "programs", "check", "step_timeout")
def serve(
    artifact: Path | None,
    url: str | None,
    extended: bool,
    table_compat: str | None,
    output: Path | None,
    save_raw: bool,
    suite: str | None,
    api_key_file: Path | None,
    **settings: Any,
) -> None:
    """Measure latencies of ARTIFACT or of a server.

    ARTIFACT runs in this process; any server of OpenAI's API will do.

    With --url, ARTIFACT is not run: it gives the tokenizer, and the bounds of prompts.
    """
    how = _settings(artifact, suite, settings | {"url": url, "key": None if url is None else _key(api_key_file)})
    from ling3export.runners.bench_serving.measure import measure

    with progress("bench serve") as told:
        found = measure(how, told)
    click.echo(found.table(table_compat, extended))
    _write([found.record(found.backend, raw=save_raw)], output)
    _end(found)


@bench.command(common=("configs", "transfer", *COMMON))
@click.argument("artifacts", type=ARTIFACT, nargs=-1, required=True)
@click.option(
    "--configs",
    required=True,
    metavar="CONFIG,...",
    help="NxT: N engines of T devices. nPmD: n devices prefill, m decode. NAME=URL: a server.",
)
@click.option("--transfer", type=click.Choice(CARRIERS), default="shm", help="How states go from P to D.")
@_workload
@_sending
@_written
@engine_options("programs", "check", "step_timeout")
def compare(
    artifacts: tuple[Path, ...],
    configs: str,
    transfer: str,
    output: Path | None,
    save_raw: bool,
    suite: str | None,
    api_key_file: Path | None,
    **settings: Any,
) -> None:
    """Measure several configurations, side by side.

    Of ARTIFACTS each server runs the one that has a target of as many devices. Servers, and a router before several,
    are started on loopback and stopped one configuration after the other; all are sent the same requests over HTTP.
    Ratios are to the first.
    """
    key = _key(api_key_file)
    names = configs.split(",")
    how = _settings(artifacts[0], suite, settings | {"key": key})
    from ling3export.runners.bench_serving.compare import compared
    from ling3export.runners.bench_serving.table import side_by_side

    found: list[Measurement] = []
    stopped: BaseException | None = None
    # What was started ends with this process, also when somebody else ends it.
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        for each in compared(how, names, artifacts, transfer, progress):
            found.append(each)
            if each.done.unfinished:
                break
    except (Ling3Error, KeyboardInterrupt) as error:
        if not found:
            raise
        stopped = error
    finally:
        signal.signal(signal.SIGTERM, before)
    records = [each.record(name.partition("=")[0], raw=save_raw) for each, name in zip(found, names, strict=False)]
    click.echo(side_by_side(records))
    _write(records, output)
    if len(found) < len(names):
        click.echo(f"not measured: {', '.join(names[len(found) :])}", err=True)
    for each in found:
        _end(each)
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
@click.option("--whole", is_flag=True, help="Whole dialogs, one turn a line, instead of the first user turn.")
@click.option("--least", type=POSITIVE, default=2, help="Texts that share a prefix.")
@click.option("--longer", type=click.IntRange(0), default=120, help="Units that a prefix is longer than.")
@click.option("--unit", type=click.Choice(["character", "token"]), default="character", help="What is counted.")
@click.option("--tokenizer", type=ARTIFACT, help="A tokenizer.json, or an artifact, that counts tokens.")
@click.option("--block", type=POSITIVE, default=256, help="Tokens a block of a prefix cache.")
@click.option("--top", type=click.IntRange(0), default=10, help="Prefixes to list.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object with all of them.")
def prefixes(
    data: Path,
    suite: str | None,
    field: str | None,
    whole: bool,
    least: int,
    longer: int,
    unit: str,
    tokenizer: Path | None,
    block: int,
    top: int,
    as_json: bool,
) -> None:
    """Measure how often the prompts of DATA begin alike.

    DATA is a list of JSON objects or JSON lines. A prefix counts that --least texts share and that no longer one
    replaces. With --tokenizer also what a prefix cache could win at best.
    """
    if unit == "token" and tokenizer is None:
        raise click.UsageError("expected --tokenizer with --unit token, found none.")
    from ling3export.runners.bench_serving.measure import open_tokenizer
    from ling3export.runners.bench_serving.prefixes import cached_blocks, repetition, text_of
    from ling3export.runners.bench_serving.workloads import read_records

    if suite is not None:
        from ling3export.runners.evals.suites import load_suite

        texts = [task.prompt for task in load_suite(suite, data).tasks if isinstance(task.prompt, str)]
    else:
        records = enumerate(read_records(data), 1)
        texts = [text_of(record, field, whole, f"data set `{data}` record {at}") for at, record in records]
    opened = None if tokenizer is None else open_tokenizer(tokenizer)
    ids = [] if opened is None else [tuple(opened.encode(text)) for text in texts]
    found = repetition(ids if unit == "token" else texts, least, longer)
    summary: dict[str, Any] = {
        "dialogs": found.texts,
        "unit": unit,
        "least": least,
        "longer": longer,
        "prefixes": len(found.prefixes),
        "ratio": found.ratio,
        "coverage": found.coverage,
        "mean_length": found.mean_length,
    }
    if opened is not None:
        hit, every = cached_blocks(ids, block)
        summary |= {"block": block, "prompt_tokens": every, "cached_tokens": hit, "cached_share": hit / max(every, 1)}
    if as_json:
        click.echo(json.dumps(summary | {"list": found.prefixes}, ensure_ascii=False))
        return
    for name, value in summary.items():
        click.echo(f"{name + ':':15} {f'{value:.4f}' if isinstance(value, float) else value}")
    for prefix, count in found.prefixes[:top]:
        click.echo(f"{count:6}  {json.dumps(prefix, ensure_ascii=False)}")


def _settings(artifact: Path | None, suite: str | None, given: dict[str, Any]) -> "Settings":
    """The settings, with the prompts of a suite where one was asked for."""
    if (given["workload"] == "suite") != (suite is not None):
        raise click.UsageError("expected --suite with --workload suite, and with it alone.")
    if given.get("url") is None and artifact is None:
        raise click.UsageError("expected ARTIFACT or --url, found neither.")
    from ling3export.runners.bench_serving.measure import Settings
    from ling3export.runners.bench_serving.workloads import SampleRequest

    how = Settings(artifact=artifact, **given)
    if suite is None:
        return how
    from ling3export.runners.evals.suites import load_suite

    loaded = load_suite(suite, how.data, how.num_prompts)
    texts = [task.prompt for task in loaded.tasks if isinstance(task.prompt, (str, tuple))]
    if not texts or len(texts) != len(loaded.tasks):
        raise Ling3Error(f"suite `{suite}`: expected prompts of text, found {'messages' if loaded.tasks else 'none'}")
    return replace(how, workload=loaded.name, asks=tuple(SampleRequest(text, how.output) for text in texts))


def _key(path: Path | None) -> str | None:
    """The key for a server; whoever calls servers needs the extra."""
    require("bench over HTTP", "serve", "h11", "starlette", "uvicorn", "prometheus_client", "pydantic")
    from ling3export.runners.serve.run import api_key

    return api_key(path)


def _write(records: list[dict[str, Any]], output: Path | None) -> None:
    """Adds a line of JSON for each record to a file, which is made if it is missing."""
    if output is None:
        return
    from ling3export.artifacts.files import open_own, writing

    lines = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    with writing(output), open_own(output, append=True) as file:
        file.write(lines.encode())


def _end(found: "Measurement") -> None:
    """Says what a reader of the table must know, and ends with the exit code that follows."""
    done, figures = found.done, found.found
    if done.unfinished:
        click.echo(
            f"interrupted: {done.unfinished} of {len(found.asks)} requests had not ended and do not count", err=True
        )
    if figures.failed:
        first = next(result.error for result in done.results if result.error is not None)
        click.echo(f"warning: {figures.failed} requests failed and do not count; the first: {first}", err=True)
    if done.compiles:
        raise Ling3Error(
            f"bench: expected no program to be compiled during the run, found {done.compiles}",
            "the figures hold compile time: build for this machine, or measure again",
        )
    if done.unfinished:
        sys.exit(INTERRUPTED)
    if not figures.completed:
        raise Ling3Error("bench: expected answers, found none")
