"""The commands that a page of documentation shows, and what they are shown to print."""

import re

BLOCK = re.compile(r"^<!-- test -->\n+```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def commands(text: str) -> list[tuple[str, list[str]]]:
    """Every command in the marked blocks, with the lines that it is shown to print; ``\\`` at the end continues."""
    found: list[tuple[str, list[str]]] = []
    for block in BLOCK.findall(text):
        for line in block.replace("\\\n", "").splitlines():
            if line.startswith("$ "):
                found.append((line[2:], []))
            else:
                found[-1][1].append(line)
    return found


def matches(shown: list[str], printed: str) -> bool:
    """Whether ``printed`` is what the lines ``shown`` say."""
    pattern = "".join(
        "(?:.*\n)*" if line == "…" else ".*".join(map(re.escape, line.split("…"))) + "\n" for line in shown
    )
    return re.fullmatch(pattern, printed) is not None
