"""Writes the table of API fields into docs/serving.md, from the server's own checks: ``python -m tools.api_fields``."""

import json
import re
from pathlib import Path

from ling3export.runners.serve.schema import LABELS, NEUTRAL, ChatBody, CompletionsBody, StreamOptions

PAGE = Path(__file__).parents[1] / "docs" / "serving.md"
BETWEEN = re.compile(r"(?<=<!-- fields -->\n).*?(?=\n## )", re.DOTALL)
BODIES = (CompletionsBody, ChatBody)


def rows() -> list[tuple[str, ...]]:
    """(field, completions, chat) of each: ``taken``, ``neutral: VALUES`` or ``refused``."""
    names = sorted({name for body in BODIES for name in body.model_fields} | NEUTRAL.keys() | LABELS)
    found = [(f"`{name}`", *(_said(name, name in body.model_fields) for body in BODIES)) for name in names]
    options = (f"`stream_options.{name}`" for name in StreamOptions.model_fields)
    return sorted([*found, *((name, "taken", "taken") for name in options)])


def _said(name: str, known: bool) -> str:
    if known:
        return "taken"
    if name in LABELS:
        return "neutral: any"
    if name not in NEUTRAL:
        return "refused"
    shown = dict.fromkeys(json.dumps(value) for value in NEUTRAL[name])
    return f"neutral: {', '.join(f'`{value}`' for value in shown)}"


def table() -> str:
    """The table as Markdown."""
    lines = ["| field | /v1/completions | /v1/chat/completions |", "|---|---|---|"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows())]) + "\n"


def main() -> None:
    """Writes the table into the page."""
    PAGE.write_text(BETWEEN.sub(lambda _: table(), PAGE.read_text()))


if __name__ == "__main__":
    main()
