"""Tables and sizes as plain text."""

import textwrap
from collections.abc import Iterable, Mapping, Sequence

from ling3export.foundation.errors import printable


def aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Columns of equal width, indented by two spaces: the first flush left, the others flush right."""
    if not rows:
        return []
    rows = [tuple(map(printable, row)) for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  "
        + "  ".join(text.rjust(w) if i else text.ljust(w) for i, (text, w) in enumerate(zip(row, widths, strict=True)))
        for row in rows
    ]


def selected(rows: Sequence[Mapping[str, str]], columns: Sequence[str]) -> list[str]:
    """The ``columns`` of the rows, aligned, under their names."""
    return aligned([tuple(columns), *(tuple(row[name] for name in columns) for row in rows)])


def footnotes(texts: Iterable[str]) -> list[str]:
    """Lines below a table, indented, of at most 80 characters; no word is broken."""
    wrapper = textwrap.TextWrapper(
        80, initial_indent="  ", subsequent_indent="    ", break_long_words=False, break_on_hyphens=False
    )
    return [line for text in texts for line in wrapper.wrap(printable(text))]


def readable(count: float) -> str:
    """Bytes with a unit: ``1.50 GiB``."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= scale:
            return f"{count / scale:.2f} {unit}"
    return f"{count:.0f} B"
