"""A child process for the tests of ``processes.py``: answers each message with itself, until it is told otherwise."""

import os
import sys

from ling3export.foundation.processes import Parent


def main() -> None:
    """Echoes; ``noise`` is printed to stdout first, ``die`` ends the process with that code."""
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
