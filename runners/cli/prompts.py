"""The prompts of the command line: a text, token ids, or a file of JSON lines, whose mistakes are named by line."""

import json
from pathlib import Path
from typing import Any

from ling3export.foundation.errors import RequestError
from ling3export.runners.engine.request import token_ids
from ling3export.runners.text.chat import check_messages

Prompt = str | tuple[int, ...] | list[dict[str, Any]]
FIELDS = ("prompt", "prompt_ids", "messages")


def read_prompts(path: Path) -> list[Prompt]:
    """The prompts of a file: a line is ``{"prompt": TEXT}``, ``{"prompt_ids": [ID, …]}`` or ``{"messages": […]}``.

    Raises:
        RequestError: The file cannot be read or is empty, or a line is something else.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise RequestError(f"prompt file `{path}`: expected a readable file, found {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise RequestError(f"prompt file `{path}`: expected UTF-8, found {error}") from error
    if lines[-1] == "":
        lines.pop()
    if not lines:
        raise RequestError(f"prompt file `{path}`: expected a prompt a line, found an empty file")
    return [_prompt(line, name) for line, name in zip(lines, line_names(path, len(lines)), strict=True)]


def line_names(path: Path, count: int) -> list[str]:
    """What messages call the lines of a prompt file, counted from 1."""
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
