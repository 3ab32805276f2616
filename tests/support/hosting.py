"""``ling3-runner`` on several hosts: a process each, on this machine."""

import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

from ling3export.foundation.processes import free_port
from tests.support.builds import environment

FAULTS = {"PYTHONFAULTHANDLER": "1"}  # a crash in C++ says where
ENDED = (
    "error: host {}: expected its process to run, found that it ended\n"
    "hint: hosts live and die together: start the command on all of them again\n"
)
RUNNER = (sys.executable, "-m", "ling3export.runners.cli")


@contextmanager
def hosting(
    commands: Sequence[Sequence[object]],
    *,
    programs: Sequence[Sequence[object]] | None = None,
    folders: Sequence[Path] | None = None,
    more: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[list[subprocess.Popen[str]]]:
    """A command of the runner on every host; killed at the end of the block.

    Args:
        commands: Of each host.
        programs: What stands in for the runner, of each host.
        folders: Where each runs; where the tests run, by default.
        more: Environment variables of all hosts.
    """
    address, processes = f"127.0.0.1:{free_port()}", []
    for number, command in enumerate(commands):
        place = {"DIST_INIT_ADDR": address, "NNODES": str(len(commands)), "NODE_RANK": str(number)}
        place["LING3_START_TIMEOUT"] = "60"
        program = RUNNER if programs is None else programs[number]
        processes.append(
            subprocess.Popen(
                [str(part) for part in (*program, *command)],
                text=True,
                env=environment(FAULTS | place | dict(more)),
                cwd=None if folders is None else folders[number],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
        )
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def wait_until_following(process: subprocess.Popen[str]) -> None:
    """Until a host that does not lead has loaded its part."""
    assert process.stderr is not None
    for line in process.stderr:
        if "following host 0" in line:
            return
    raise AssertionError("it ended before it followed")


class NoService:
    """Stands in the place of jax's service, for tests of the connections between hosts."""

    def __init__(self, host: str, port: int, count: int) -> None:
        pass

    def end(self) -> None:
        pass
