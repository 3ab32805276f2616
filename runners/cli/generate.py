"""``ling3-runner generate``: prompts in, completions out; and the files that prompts come from."""

import json
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from ling3export.foundation.errors import RequestError
from ling3export.runners.cli.command import Command, section
from ling3export.runners.cli.hosts import leading
from ling3export.runners.cli.options import PATH, engine_options, sampling_options, stop_option
from ling3export.runners.cli.references import ARTIFACT
from ling3export.runners.engine.config import EngineConfig
from ling3export.runners.engine.request import Completion
from ling3export.runners.engine.validation import TOP_LOGPROBS, token_ids
from ling3export.runners.hosts.rendezvous import announced
from ling3export.runners.text.grammar import Grammar
from ling3export.runners.text.tokenizer import check_messages

Prompt = str | tuple[int, ...] | list[dict[str, Any]]
FIELDS = ("prompt", "prompt_ids", "messages")


def _ids(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise click.BadParameter(f"expected whole numbers with commas between, found {text!r}.") from None


@click.command(cls=Command)
@click.argument("artifact", type=ARTIFACT)
@section(
    "Prompts (one of these)",
    click.option("--prompt", metavar="TEXT", help="Text to complete."),
    click.option("--prompt-ids", type=_ids, metavar="ID,ID,...", help="Token ids to complete."),
    click.option(
        "--prompt-file",
        type=PATH,
        metavar="FILE",
        help='JSON lines, {"prompt": TEXT}, {"prompt_ids": [ID, ...]} or {"messages": [...]}, run as one batch.',
    ),
)
@section(
    "Answers",
    click.option(
        "--max-tokens",
        type=click.IntRange(1),
        default=256,
        help="Generate at most this many tokens; the end of the context ends an answer, too.",
    ),
    *sampling_options(),
    stop_option,
    click.option("--ignore-eos", is_flag=True, help="Go on after an end-of-text token."),
)
@section(
    "Form of the answer (one of these)",
    click.option("--json-schema", type=PATH, metavar="FILE", help="JSON of this schema."),
    click.option("--regex", metavar="REGEX", help="Text that this matches, all of it."),
    click.option("--grammar", type=PATH, metavar="FILE", help="Text of this grammar, Lark's."),
)
@section(
    "Output",
    click.option("--json", "as_json", is_flag=True, help="Print one JSON object for each prompt."),
    click.option(
        "--logprobs",
        type=click.IntRange(0, int(TOP_LOGPROBS.high)),
        help="With --json: the log-probability of each token and of this number of the likeliest.",
    ),
    click.option(
        "--logits",
        type=PATH,
        metavar="OUT.npz",
        help="Write tokens [n] and the logits [n, vocab] that they were taken from.",
    ),
    click.option("--force", is_flag=True, help="Replace OUT.npz if it is there."),
    click.option("--stats", is_flag=True, help="Print counters and the times of the start on stderr."),
)
@engine_options("target", "programs", "check", "ffn", "prefix_cache", "prefix_store")
def generate(
    artifact: Path,
    engine: EngineConfig,
    prompt: str | None,
    prompt_ids: tuple[int, ...] | None,
    prompt_file: Path | None,
    logits: Path | None,
    force: bool,
    as_json: bool,
    stats: bool,
    json_schema: Path | None,
    regex: str | None,
    grammar: Path | None,
    **settings: Any,
) -> None:
    """Complete prompts with ARTIFACT.

    On several hosts, run the same command on each; host 0 reads the prompts and prints.
    """
    hosts = leading(artifact, engine)
    with announced(hosts):
        prompts = _prompts(prompt, prompt_ids, prompt_file)
        if logits is not None:
            _check_output(logits, force)
        if settings["logprobs"] is not None and not as_json:
            raise click.UsageError("--logprobs needs --json.")
        settings["grammar"] = _grammar(json_schema, regex, grammar)
    from ling3export.runners.engine.engine import Engine

    with Engine(artifact, engine, hosts=hosts) as running:
        names = ["prompt"] if prompt_file is None else line_names(prompt_file, len(prompts))
        completions = running.generate(prompts, names=names, logits=logits is not None, **settings)
        if logits is not None:
            _write_logits(logits, completions, numbered=prompt_file is not None)
        for completion in completions:
            click.echo(_json_line(completion) if as_json else _text(completion))
        if stats:
            click.echo(f"stats: {json.dumps(running.stats())}", err=True)


def _prompts(prompt: str | None, prompt_ids: tuple[int, ...] | None, prompt_file: Path | None) -> Sequence[Prompt]:
    named = [value for value in (prompt, prompt_ids) if value is not None]
    count = len(named) + (prompt_file is not None)
    if count != 1:
        raise click.UsageError(f"expected one of --prompt, --prompt-ids and --prompt-file, found {count or 'none'}.")
    return named if prompt_file is None else read_prompts(prompt_file)


def _grammar(json_schema: Path | None, regex: str | None, grammar: Path | None) -> Grammar | None:
    texts = {"json": json_schema, "regex": regex, "lark": grammar}
    kinds = [(kind, text) for kind, text in texts.items() if text is not None]
    if len(kinds) > 1:
        raise click.UsageError(f"expected one of --json-schema, --regex and --grammar, found {len(kinds)}.")
    for kind, text in kinds:
        return Grammar(kind, text if isinstance(text, str) else _read(text, f"form of the answer `{text}`"))
    return None


def _text(completion: Completion) -> str:
    return ",".join(map(str, completion.token_ids)) if completion.text is None else completion.text


def _json_line(completion: Completion) -> str:
    names = ("prompt_ids", "token_ids", "text", "stop_reason", "cached_tokens")
    times = {name: round(getattr(completion, name), 3) for name in ("ttft_ms", "e2e_ms")}
    logprobs = {} if completion.logprobs is None else {"logprobs": [token._asdict() for token in completion.logprobs]}
    return json.dumps({name: getattr(completion, name) for name in names} | times | logprobs, ensure_ascii=False)


def _check_output(path: Path, force: bool) -> None:
    """Refuses a file of logits that cannot be written or is there already, before anything is loaded."""
    if not path.parent.is_dir():
        raise RequestError(f"--logits `{path}`: the folder does not exist: {path.parent}")
    if path.exists() and not path.is_file():  # renaming over /dev/null would remove the device
        raise RequestError(f"--logits `{path}`: expected a file, found a folder or a device")
    if path.exists() and not force:
        raise RequestError(f"--logits `{path}`: expected no such file, found one", "replace it with --force")
    if path.exists() and not zipfile.is_zipfile(path):
        raise RequestError(
            f"--logits `{path}`: the file exists and does not hold logits of an earlier run",
            "--force replaces only .npz files: choose another name",
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


def read_prompts(path: Path) -> list[Prompt]:
    """The prompts of a file: a line is ``{"prompt": TEXT}``, ``{"prompt_ids": [ID, …]}`` or ``{"messages": […]}``.

    Raises:
        RequestError: The file cannot be read or is empty, or a line is something else.
    """
    lines = _read(path, f"prompt file `{path}`").split("\n")
    if lines[-1] == "":
        lines.pop()
    if not lines:
        raise RequestError(f"prompt file `{path}`: expected a prompt a line, found an empty file")
    return [_prompt(line, name) for line, name in zip(lines, line_names(path, len(lines)), strict=True)]


def _read(path: Path, what: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise RequestError(f"{what}: expected a readable file, found {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise RequestError(f"{what}: expected UTF-8, found {error}") from error


def line_names(path: Path, count: int) -> list[str]:
    """The names of a prompt file's lines in errors, counted from 1."""
    return [f"prompt file `{path}` line {number}" for number in range(1, count + 1)]


def _prompt(line: str, where: str) -> Prompt:
    wanted = 'expected {"prompt": TEXT}, {"prompt_ids": [ID, ...]} or {"messages": [...]}'
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{where}: {wanted}, found no JSON: {error}") from error
    if not isinstance(value, dict):
        raise RequestError(f"{where}: {wanted}, found {line.strip()[:60]}")
    if len(value) != 1 or next(iter(value)) not in FIELDS:
        raise RequestError(f"{where}: {wanted}, found the fields {', '.join(value) or 'none'}")
    field, prompt = next(iter(value.items()))
    if field == "prompt" and isinstance(prompt, str):
        return prompt
    if field == "prompt_ids" and isinstance(prompt, list):
        return token_ids(prompt, where)
    if field == "messages" and isinstance(prompt, list):
        check_messages(prompt, where)
        return prompt
    raise RequestError(f"{where}: {wanted}, found {json.dumps(prompt)[:60]} for {field}")
