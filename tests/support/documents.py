"""Reads the commands of a documentation page and the output that the page shows for them."""

import re
import subprocess
from dataclasses import dataclass, field

BLOCK = re.compile(r"^```(console|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass
class Command:
    """A ``$`` line of a console block with its continuation lines, or a whole Python block.

    Attributes:
        text: The command, or the source.
        shown: The expected output: the lines below the command in its block.
        python: Whether it is Python.
    """

    text: str
    shown: list[str] = field(default_factory=list)
    python: bool = False


def commands(page: str) -> list[Command]:
    """Every command of a page in order. A command continues on the next line while bash finds it incomplete."""
    found: list[Command] = []
    for kind, block in BLOCK.findall(page):
        if kind == "python":
            found.append(Command(block, python=True))
            continue
        unfinished = False
        for line in block.splitlines():
            if unfinished:
                found[-1].text += "\n" + line
            elif line.startswith("$ "):
                found.append(Command(line[2:]))
            else:
                found[-1].shown.append(line)
                continue
            unfinished = line.endswith("\\") or not is_whole(found[-1].text)
    return found


def is_whole(command: str) -> bool:
    return subprocess.run(["bash", "-n", "-c", command], capture_output=True).returncode == 0


def matches(shown: list[str], printed: str) -> bool:
    """Whether ``printed`` matches ``shown``. ``…`` is any text in a line; as a whole line, any number of lines."""
    pattern = "".join(
        "(?:.*\n)*" if line == "…" else ".*".join(map(re.escape, line.split("…"))) + "\n" for line in shown
    )
    return re.fullmatch(pattern, printed + "\n" * (printed[-1:] not in ("", "\n"))) is not None
