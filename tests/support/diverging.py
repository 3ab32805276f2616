"""The runner, on a host whose tokens come out wrong once: ``diverging.py AT eval run …`` spoils the read number AT."""

import sys

import numpy as np

from ling3export.runners.cli.main import main
from ling3export.runners.load.model_runner import Device


def spoil(at: int) -> None:
    """From now on, the read number ``at`` of this process gives another token."""
    read, count = Device.read, 0

    def spoiled(self: Device, handle: object) -> np.ndarray:
        nonlocal count
        count += 1
        tokens = read(self, handle)  # type: ignore[arg-type]
        return tokens ^ (count == at)

    Device.read = spoiled  # type: ignore[method-assign, assignment]


if __name__ == "__main__":
    spoil(int(sys.argv.pop(1)))
    main()
