"""One share of a work that several processes do without talking to each other."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from ling3export.errors import RequestError

FORM = re.compile(r"(\d{1,9})/(\d{1,9})")
HINT = "write I/N with I from 0 to N - 1, or auto in a Slurm array, or auto/N in an indexed job of Kubernetes"


@dataclass(frozen=True)
class Shard:
    """Every ``count``-th item, from number ``index`` on.

    Attributes:
        index: Which share, from 0.
        count: How many there are.
    """

    index: int = 0
    count: int = 1

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"

    def has(self, number: int) -> bool:
        """Whether the item with this number, from 0, is in this share."""
        return number % self.count == self.index

    @classmethod
    def parse(cls, text: str, environment: Mapping[str, str] = os.environ) -> Self:
        """``I/N``; or ``auto``, which takes both from SLURM_ARRAY_TASK_ID, _MIN, _STEP and _COUNT; or ``auto/N``, which
        takes the index from JOB_COMPLETION_INDEX or from Slurm.

        Raises:
            RequestError: It is something else, or the environment does not say it.
        """
        index, _, count = text.partition("/")
        if index == "auto":
            index, found = _from_environment(environment)
            count = count or found
        match = FORM.fullmatch(f"{index}/{count}")
        if match is None or not int(match[1]) < int(match[2]):
            said = (
                f", which stands for {index or 'nothing'}/{count or 'nothing'} here" if text.startswith("auto") else ""
            )
            raise RequestError(f"--shard: expected a share I/N, found `{text[:40]}`{said}", HINT)
        return cls(int(match[1]), int(match[2]))


def _from_environment(environment: Mapping[str, str]) -> tuple[str, str]:
    """Index and count as text, empty where nothing says them."""
    if "SLURM_ARRAY_TASK_ID" not in environment:
        return environment.get("JOB_COMPLETION_INDEX", ""), environment.get("JOB_COMPLETIONS", "")
    numbers = [environment.get(f"SLURM_ARRAY_TASK_{name}", default)
               for name, default in (("ID", ""), ("MIN", "0"), ("STEP", "1"))]  # fmt: skip
    if not all(number.isdecimal() for number in numbers) or int(numbers[2]) < 1:
        return "", ""
    task, first, step = map(int, numbers)
    return str((task - first) // step), environment.get("SLURM_ARRAY_TASK_COUNT", "")
