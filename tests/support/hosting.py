"""Runs ``ling3-runner`` on several hosts: one process for each host, all on this machine."""

import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

from ling3export.foundation.processes import free_port
from tests.support.builds import environment

FAULTS = {"PYTHONFAULTHANDLER": "1"}  # prints the stacks after a crash in C++
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
    """Runs a command of the runner on every host, and kills the processes at the end of the block.

    Args:
        commands: Arguments of each host.
        programs: For each host, a program that replaces the runner.
        folders: Working directory of each host; by default the directory in which the tests run.
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
    """Waits until a host other than host 0 has loaded its part."""
    assert process.stderr is not None
    for line in process.stderr:
        if "following host 0" in line:
            return
    raise AssertionError("it ended before it followed")


class NoService:
    """Replaces jax's distributed service, for tests of the connections between hosts."""

    def __init__(self, host: str, port: int, count: int) -> None:
        pass

    def end(self) -> None:
        pass
