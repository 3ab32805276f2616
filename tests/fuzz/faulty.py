"""Targets that fail in every possible way; the harness has to detect each."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from random import Random

from ling3export.foundation.errors import ArtifactError
from tests.fuzz.harness import MEMORY, Case, Target, WrongResultError


def refuse(rng: Random) -> None:
    raise ArtifactError("file `\x1b[31mred`: expected another name, found this one")


def reveal(rng: Random) -> None:
    raise WrongResultError(f"{rng.random()} and {rng.random()}")


def each_third(rng: Random, harm: Callable[[], object]) -> None:
    if rng.random() < 1 / 3:
        harm()


@contextmanager
def _of(case: Case, folder: Path) -> Iterator[Case]:
    yield case


CASES: dict[str, Case] = {
    "fine": lambda rng: rng.random(),
    "refuses": refuse,
    "reveals": reveal,
    "raises": lambda rng: [][0],
    "exits": lambda rng: os._exit(0),
    "aborts": lambda rng: each_third(rng, os.abort),
    "hangs": lambda rng: each_third(rng, lambda: time.sleep(60)),
    "grows": lambda rng: bytearray(2 * MEMORY),
}
TARGETS: dict[str, tuple[Target, int]] = {name: (partial(_of, case), 1) for name, case in CASES.items()}
