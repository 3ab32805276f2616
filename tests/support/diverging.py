"""The runner, on a host whose tokens come out wrong once: ``diverging.py AT eval run …`` spoils the read number AT."""

import sys

import numpy as np

from ling3export.runners.cli.main import main
from ling3export.runners.load.model_runner import ModelRunner


def spoil(at: int) -> None:
    """From now on, the read number ``at`` of this process gives another token."""
    read, count = ModelRunner.read, 0

    def spoiled(self: ModelRunner, handle: object) -> np.ndarray:
        nonlocal count
        count += 1
        tokens = read(self, handle)  # type: ignore[arg-type]
        return tokens ^ (count == at)

    ModelRunner.read = spoiled  # type: ignore[method-assign, assignment]


if __name__ == "__main__":
    spoil(int(sys.argv.pop(1)))
    main()
