"""Starts a command line: Ctrl-C ends it without a traceback also while its modules are imported."""

import os
import signal
from importlib import import_module
from typing import Any


def start(module: str) -> None:
    """Runs ``main`` of ``module``. An interrupt before it has been imported ends the process with 130."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupted)
        main = import_module(module).main
        signal.signal(signal.SIGINT, signal.default_int_handler)
    else:
        main = import_module(module).main
    main()


def _interrupted(*_: Any) -> None:
    os.write(2, b"interrupted\n")
    os._exit(130)
