"""What ``ling3-runner bench prefixes`` prints."""

import json
from pathlib import Path
from typing import Any

import click

from ling3export.foundation.errors import RequestError

QUESTIONS = ("prompt", "question", "instruction", "text")  # the fields of plain records, in this order
TURNS = ("conversations", "conversation", "messages")
USERS = ("human", "user")


def show(
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
    """Prints the prefixes that repeat, and what a prefix cache could win."""
    from ling3export.runners.bench_serving.measure import open_tokenizer
    from ling3export.runners.bench_serving.prefixes import cached_blocks, repetition
    from ling3export.runners.bench_serving.workloads import read_records

    if unit == "token" and tokenizer is None:
        raise click.UsageError("expected --tokenizer with --unit token, found none.")
    if suite is not None:
        from ling3export.runners.evals.suites import load_suite

        texts = [task.prompt for task in load_suite(suite, data).tasks if isinstance(task.prompt, str)]
    else:
        texts = [
            _text(record, field, whole, f"data set `{data}` record {at}")
            for at, record in enumerate(read_records(data), 1)
        ]
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


def _text(record: dict[str, Any], field: str | None, whole: bool, where: str) -> str:
    """What counts of a record: a field, the first user turn, or all turns."""
    turns = next((record[name] for name in TURNS if _is_dialog(record.get(name))), None)
    if field is None and turns is not None:
        said = [(turn.get("from", turn.get("role")), turn.get("value", turn.get("content"))) for turn in turns]
        texts = [str(text) for role, text in said if whole or role in USERS]
        return "\n".join(texts if whole else texts[:1])
    value = record.get(field) if field else next((record[name] for name in QUESTIONS if name in record), None)
    if not isinstance(value, str):
        wanted = f"a text in `{field}`" if field else f"turns of text, or one of {', '.join(QUESTIONS)}"
        raise RequestError(f"{where}: expected {wanted}, found {'none' if value is None else type(value).__name__}")
    return value


def _is_dialog(turns: Any) -> bool:
    return isinstance(turns, list) and all(isinstance(turn, dict) for turn in turns)
