"""The runner on a host that computes one wrong token: ``diverging.py AT eval run …`` changes the read number AT."""

import sys

from ling3export.runners.cli.main import main
from ling3export.runners.engine.executor import HostsExecutor


def spoil(at: int) -> None:
    """Replaces a token in the read number ``at`` of this process."""
    read, count = HostsExecutor.read, 0

    def spoiled(self, call):
        nonlocal count
        count += 1
        output = read(self, call)
        return output._replace(tokens=[token ^ (count == at) for token in output.tokens])

    HostsExecutor.read = spoiled  # type: ignore[method-assign]


if __name__ == "__main__":
    spoil(int(sys.argv.pop(1)))
    main()
