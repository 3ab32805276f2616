"""Our servers on loopback, started for a measurement and always stopped after it."""

import os
import select
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from ling3export.foundation.errors import Ling3Error
from ling3export.foundation.processes import command, ending, environment

WAIT = 600.0  # seconds until a server prints its address: it loads an artifact, and the machine may be busy
LAST = 60.0  # seconds that it may take to end
LINES = 5  # lines of its last output in an error
RUNNER = tuple(command("ling3export.runners.cli"))


class ServerProcess:
    """A process that prints a line for each address that clients may call; leaving the ``with`` statement ends it.

    The process has a session of its own: a terminal's Ctrl-C reaches only the process that started it.

    Args:
        name: Name in errors.
        words: The command.
        variables: Environment variables in addition to ours.
        shown: Its stderr is ours; otherwise the end of it is kept for errors.
        tells: It prints its addresses on stdout; otherwise stdout is treated as stderr.
    """

    def __init__(
        self,
        name: str,
        words: Sequence[object],
        variables: Mapping[str, str] = MappingProxyType({}),
        *,
        shown: bool = False,
        tells: bool = True,
    ) -> None:
        self._name = name
        self._errors = tempfile.TemporaryFile("ab+")  # noqa: SIM115  (closed on leaving)
        stderr = 2 if shown else self._errors.fileno()
        self.process = subprocess.Popen(
            [str(word) for word in words],
            env=environment() | dict(variables),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if tells else stderr,
            stderr=stderr,
            start_new_session=True,
            bufsize=0,  # without a buffer, select sees all data
        )

    def address(self) -> str:
        """The next address: the last word of the next line that it prints.

        Raises:
            Ling3Error: It ended, or printed nothing for WAIT seconds; with the last lines of its stderr.
        """
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], WAIT)
        line = self.process.stdout.readline() if ready else b""
        if not line.endswith(b"\n"):
            raise self.missing(ended=bool(ready))
        return line.decode().split()[-1]

    def __enter__(self) -> "ServerProcess":
        return self

    def __exit__(self, *exception: object) -> None:
        try:
            if self.process.poll() is None:
                self.process.terminate()
                self.process.wait(LAST)
        except subprocess.TimeoutExpired:
            self._kill()
        except BaseException:  # a second Ctrl-C must not leave the process running
            self._kill()
            raise
        finally:
            if self.process.stdout is not None:
                self.process.stdout.close()
            self._errors.close()

    def _kill(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)  # only its session
        self.process.wait()

    def missing(self, *, ended: bool = True) -> Ling3Error:
        """The error that the server does not listen, with the last lines of its stderr."""
        reason = f"none within {WAIT:g} s"
        if ended:
            try:
                reason = f"that it {ending(self.process.wait(LAST))}"
            except subprocess.TimeoutExpired:
                reason = "that it prints nothing any more"
        size = os.fstat(self._errors.fileno()).st_size
        text = os.pread(self._errors.fileno(), 1 << 12, max(0, size - (1 << 12))).decode(errors="replace")
        lines = "\n".join(text.strip().splitlines()[-LINES:])
        return Ling3Error(
            f"{self._name}: expected the address at which it listens, found {reason}: {lines or 'silent'}"
        )
