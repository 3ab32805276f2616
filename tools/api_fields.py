"""Writes the table of API fields into its page, from the server's own checks: ``python -m tools.api_fields``."""

import json
import re
from pathlib import Path

from ling3export.runners.serve.generation import ChatBody, CompletionsBody
from ling3export.runners.serve.responses import STORED, ResponsesBody
from ling3export.runners.serve.schema import LABELS, GenerationBody, StreamOptions

PAGE = Path(__file__).parents[1] / "docs" / "api-fields.md"
BETWEEN = re.compile(r"(?<=<!-- fields -->\n).*", re.DOTALL)
BODIES = (CompletionsBody, ChatBody, ResponsesBody)


def rows() -> list[tuple[str, ...]]:
    """(field, completions, chat, responses) of each: ``taken``, ``neutral: VALUES`` or ``refused``."""
    names = {name for body in BODIES for name in (*body.model_fields, *body.passed, *body.neutral)} | LABELS | STORED
    fields = [(f"`{name}`", *(_said(name, body) for body in BODIES)) for name in names]
    options = (f"`stream_options.{name}`" for name in StreamOptions.model_fields)
    return sorted([*fields, *((name, "taken", "taken", "refused") for name in options)])


def _said(name: str, body: type[GenerationBody | ResponsesBody]) -> str:
    if name in body.model_fields or name in body.passed:
        return "taken"
    if name in LABELS:
        return "neutral: any"
    if name not in body.neutral:
        return "refused"
    shown = dict.fromkeys(json.dumps(value) for value in body.neutral[name])
    return f"neutral: {', '.join(f'`{value}`' for value in shown)}"


def table() -> str:
    """The table as Markdown."""
    lines = ["| field | /v1/completions | /v1/chat/completions | /v1/responses |", "|---|---|---|---|"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows())]) + "\n"


def main() -> None:
    """Writes the table into the page."""
    PAGE.write_text(BETWEEN.sub(lambda _: table(), PAGE.read_text()))


if __name__ == "__main__":
    main()
