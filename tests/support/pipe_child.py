"""A child process for the tests of ``processes.py`` that sends each message back."""

import os
import sys

from ling3export.foundation.processes import Parent


def main() -> None:
    """Echoes messages. ``noise`` is first printed to stdout; ``die`` ends the process with this exit code."""
    parent = Parent()
    while True:
        message = parent.receive()
        if "noise" in message:
            print(message["noise"], flush=True)
            os.write(1, b"written to descriptor 1\n")
        if "die" in message:
            print("last words", file=sys.stderr, flush=True)
            os._exit(message["die"])
        parent.send(message | {"pid": os.getpid()})


if __name__ == "__main__":
    main()
