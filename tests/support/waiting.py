"""Waiting for what threads and processes do."""

import subprocess
import time
from collections.abc import Callable
from typing import Any, TypeVar

Value = TypeVar("Value")


def until(
    wanted: Callable[[], Value], *, of: "subprocess.Popen[Any] | None" = None, seconds: float = 120, pause: float = 0.01
) -> Value:
    """What ``wanted`` gives as soon as that is true.

    Args:
        wanted: Asked again and again.
        of: A process that must not end before.
        seconds: After which the test fails: a machine may stand still for a while.
        pause: Seconds between two questions.
    """
    end = time.monotonic() + seconds
    while not (found := wanted()):
        assert of is None or of.poll() is None, of.communicate()
        assert time.monotonic() < end
        time.sleep(pause)
    return found
