"""The command line of the runner. stdout carries data only, and nothing heavy is imported before it is needed."""

import json
import sys
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from ling3export.foundation.errors import RequestError
from ling3export.runners import flight
from ling3export.runners.cli.batch import batch
from ling3export.runners.cli.bench import bench
from ling3export.runners.cli.calibrate import calibrate
from ling3export.runners.cli.doctor import doctor
from ling3export.runners.cli.errors import require
from ling3export.runners.cli.eval import evaluate
from ling3export.runners.cli.ffn import ffn_options, ffn_worker
from ling3export.runners.cli.hosts import host_options, leading
from ling3export.runners.cli.options import (
    PATH,
    Group,
    Once,
    artifact_options,
    prefix_options,
    sampling_option,
    section,
    stop_option,
    temperature_option,
)
from ling3export.runners.cli.profile import profile
from ling3export.runners.cli.prompts import Prompt, line_names, read_prompts
from ling3export.runners.cli.pull import pull
from ling3export.runners.cli.references import ARTIFACT
from ling3export.runners.cli.route import route
from ling3export.runners.cli.serve import serve
from ling3export.runners.cli.transfer import transfer
from ling3export.runners.engine.request import Completion
from ling3export.runners.hosts.rendezvous import announced
from ling3export.runners.transfer.options import PrefixFolder

SAMPLING = ("temperature", "top_k", "top_p", "seed")
# Everything behind lm-eval's first word is lm-eval's, its --help included.
VERBATIM = {"ignore_unknown_options": True, "allow_interspersed_args": False}


class _Ids(click.ParamType):
    """``1,2,3``."""

    name = "ID,ID,..."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        """The token ids between the commas."""
        if isinstance(value, tuple):
            return value
        try:
            return tuple(int(part) for part in value.split(","))
        except ValueError:
            self.fail(f"expected whole numbers with commas between, found {value!r}.", param, ctx)


@click.group(
    cls=Group,
    sections={
        "Run": ("pull", "generate", "batch", "serve", "route", "ffn-worker"),
        "Evaluate": ("eval", "lm-eval"),
        "Measure": ("bench", "profile", "calibrate", "doctor"),
        "Look after": ("transfer",),
    },
    context_settings={"show_default": True},
)
@click.version_option(package_name="ling3export")
def main() -> None:
    """Run a prebuilt Ling3-Tiny artifact."""


main.add_command(batch)
main.add_command(calibrate)
main.add_command(pull)
main.add_command(serve)
main.add_command(route)
main.add_command(ffn_worker)
main.add_command(evaluate)
main.add_command(bench)
main.add_command(profile)
main.add_command(doctor)
main.add_command(transfer)


@main.command("lm-eval", cls=click.Command, context_settings=VERBATIM)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def lm_eval(arguments: tuple[str, ...]) -> None:
    """Run lm-eval's command line with the model ling3.

    ARGUMENTS are lm-eval's own: run --model ling3 --model_args artifact=ARTIFACT --tasks NAME; run --help shows them
    all.
    """
    require("lm-eval", "lm-eval", "lm_eval")
    from ling3export.runners.adapters import lm_eval as adapter

    sys.argv = ["ling3-runner lm-eval", *arguments]
    with flight.watched():
        adapter.main()


@main.command()
@click.argument("artifact", type=ARTIFACT)
@section(
    "Prompts (one of these)",
    click.option("--prompt", cls=Once, metavar="TEXT", help="Text to complete."),
    click.option("--prompt-ids", cls=Once, type=_Ids(), help="Token ids to complete."),
    click.option(
        "--prompt-file",
        cls=Once,
        type=PATH,
        metavar="FILE",
        help='JSON lines, {"prompt": TEXT}, {"prompt_ids": [ID, ...]} or {"messages": [...]}, run as one batch.',
    ),
    click.option(
        "--resume",
        cls=Once,
        type=PATH,
        metavar="FILE",
        help="Go on with the answer that --save wrote, with its settings; --max-tokens counts all of it.",
    ),
)
@section(
    "Answers",
    click.option("--max-tokens", type=click.IntRange(1), required=True, help="Generate at most this many tokens."),
    temperature_option,
    sampling_option("top_k", "Sample among the k most likely tokens; 0 for all."),
    sampling_option("top_p", "Then among the fewest that hold this probability."),
    sampling_option("seed", "Seed of the sampling."),
    stop_option,
    click.option("--ignore-eos", is_flag=True, help="Go on behind an end-of-text token."),
)
@section(
    "Output",
    click.option("--json", "as_json", is_flag=True, help="Print one JSON object for each prompt."),
    click.option(
        "--logits",
        type=PATH,
        metavar="OUT.npz",
        help="Write tokens [n] and the logits [n, vocab] that they were taken from.",
    ),
    click.option("--save", type=PATH, metavar="FILE", help="Write one answer and the state behind it, for --resume."),
    click.option("--force", is_flag=True, help="Replace OUT.npz or FILE if it is there."),
    click.option("--stats", is_flag=True, help="Print counters and the times of the start on stderr."),
)
@artifact_options
@ffn_options
@prefix_options
@host_options
def generate(
    artifact: Path, prompt: str | None, prompt_ids: tuple[int, ...] | None, prompt_file: Path | None,
    resume: Path | None, logits: Path | None, save: Path | None, force: bool, as_json: bool, stats: bool,
    target: str | None, programs: str, check: str, step_timeout: float | None, ffn: tuple[str, ...],
    ffn_timeout: float, prefix_cache: bool | None, evict: str, prefix_store: Path | None, prefix_store_bytes: int,
    place: dict[str, Any], **settings: Any,
) -> None:  # fmt: skip
    """Complete prompts with ARTIFACT.

    On several hosts, run the same command on each; host 0 reads the prompts and prints.
    """
    how: dict[str, Any] = {
        "target": target,
        "programs": programs,
        "check": check,
        "prefix_cache": prefix_cache,
        "evict": evict,
        "prefix_store": None if prefix_store is None else PrefixFolder(prefix_store, prefix_store_bytes),
    }
    hosts = leading(artifact, place, ffn=ffn, **how)
    with announced(hosts):
        prompts = _prompts(prompt, prompt_ids, prompt_file, resume)
        if save is not None and (resume is not None or len(prompts) != 1):
            found = "--resume" if resume is not None else f"{len(prompts)} prompts"
            raise click.UsageError(f"--save: expected one prompt with it, found {found}.")
        if logits is not None:
            _check_output("--logits", logits, force, "logits", ".npz files", zipfile.is_zipfile)
        if save is not None:
            _check_output("--save", save, force, "the state", "saved states", _is_state)
        if resume is not None:
            _check_settings(settings, logits)
    from ling3export.runners.engine.engine import Engine
    from ling3export.runners.engine.request import Sampling

    with Engine(artifact, hosts=hosts, step_timeout=step_timeout, ffn=ffn, ffn_timeout=ffn_timeout, **how) as engine:
        if resume is not None:
            completions = [engine.resume(resume, max_tokens=settings["max_tokens"]).result()]
        elif save is not None:
            chosen = {name: settings.pop(name) for name in SAMPLING}
            completions = [engine.save(engine.request(prompts[0], sampling=Sampling(**chosen), **settings), save)]
        else:
            names = ["prompt"] if prompt_file is None else line_names(prompt_file, len(prompts))
            completions = engine.generate(prompts, names=names, logits=logits is not None, **settings)
        if logits is not None:
            _write_logits(logits, completions, numbered=prompt_file is not None)
        for completion in completions:
            click.echo(_json_line(completion) if as_json else _text(completion))
        if stats:
            click.echo(f"stats: {json.dumps(engine.stats())}", err=True)


def _prompts(
    prompt: str | None, prompt_ids: tuple[int, ...] | None, prompt_file: Path | None, resume: Path | None
) -> Sequence[Prompt]:
    given = [value for value in (prompt, prompt_ids, prompt_file, resume) if value is not None]
    if len(given) != 1:
        found = len(given) or "none"
        raise click.UsageError(f"expected one of --prompt, --prompt-ids, --prompt-file and --resume, found {found}.")
    if prompt_file is not None:
        return read_prompts(prompt_file)
    return [given[0]] if isinstance(given[0], (str, tuple)) else []


def _check_settings(settings: dict[str, Any], logits: Path | None) -> None:
    """Refuses what a resumed answer cannot have: its settings are those of its file."""
    context = click.get_current_context()
    given = [name for name in settings if context.get_parameter_source(name) is ParameterSource.COMMANDLINE]
    found = [f"--{name.replace('_', '-')}" for name in given if name != "max_tokens"]
    if found or logits is not None:
        raise click.UsageError(f"--resume: expected --max-tokens alone with it, found {(found or ['--logits'])[0]}.")


def _text(completion: Completion) -> str:
    return ",".join(map(str, completion.token_ids)) if completion.text is None else completion.text


def _json_line(completion: Completion) -> str:
    names = ("prompt_ids", "token_ids", "text", "stop_reason", "cached_tokens")
    times = {name: round(getattr(completion, name), 3) for name in ("ttft_ms", "e2e_ms")}
    return json.dumps({name: getattr(completion, name) for name in names} | times, ensure_ascii=False)


def _is_state(path: Path) -> bool:
    with path.open("rb") as file:
        return b'"ling3.state"' in file.read(64)


def _check_output(option: str, path: Path, force: bool, what: str, kind: str, is_kind: Callable[[Path], bool]) -> None:
    """Refuses a file that cannot be written or is there already, before anything is loaded."""
    if not path.parent.is_dir():
        raise RequestError(f"{option} `{path}`: expected an existing folder, found none, at {path.parent}")
    if path.exists() and not path.is_file():  # renaming over /dev/null would remove the device
        raise RequestError(f"{option} `{path}`: expected a file, found a folder or a device")
    if path.exists() and not force:
        raise RequestError(f"{option} `{path}`: expected no such file, found one", "replace it with --force")
    if path.exists() and not is_kind(path):
        raise RequestError(
            f"{option} `{path}`: expected {what} of an earlier run, found another kind of file",
            f"--force replaces only {kind}: choose another name",
        )
    from ling3export.artifacts.files import try_writing, writing

    with writing(path):
        try_writing(path.parent)


def _write_logits(path: Path, completions: list[Completion], *, numbered: bool) -> None:
    """Writes ``tokens`` and ``logits``, or ``tokens.I`` and ``logits.I``; the file appears whole, by rename."""
    import numpy as np

    from ling3export.artifacts.files import replacing

    arrays = {}
    for number, completion in enumerate(completions):
        suffix = f".{number}" if numbered else ""
        arrays[f"tokens{suffix}"] = np.asarray(completion.token_ids, np.int32)
        arrays[f"logits{suffix}"] = np.asarray(completion.logits, np.float32)
    with replacing(path, sum(array.nbytes for array in arrays.values())) as file:
        np.savez(file, allow_pickle=False, **arrays)
