"""The steps of a worked problem of the demo."""

import re

STEP = re.compile(r"(\d+)([+-])(\d+)=(\d+)")


def pairs(of: str) -> list[tuple[int, int]]:
    """The numbers of every step in a text, each of which has to be right."""
    found = []
    for left, sign, right, result in STEP.findall(of):
        assert int(left) + int(right) * (1 if sign == "+" else -1) == int(result)
        found.append((int(left), int(right)))
    return found
