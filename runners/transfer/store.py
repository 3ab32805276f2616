"""The interface of stores of states: a state is written under a name, and read whole and checked, or not at all.

A reader never gets bytes that are damaged or of another artifact, and never waits longer than until its deadline.
Every failure is a miss with a reason, which is counted. What is *leased* is for one reader: it is there until it
was taken or given back, or until its lease is over.
"""

import re
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np

from ling3export.foundation.errors import Ling3Error
from ling3export.runners.state.sequence_state import SequenceState

NAME = re.compile("[0-9a-f]{32}")  # of a state
Fill = Callable[[SequenceState], object]  # writes into the arrays of a new state


class TransferError(Ling3Error):
    """A store cannot start."""


class StateAddress(NamedTuple):
    """The address of a state.

    Attributes:
        host: Name or address of the machine that has it; counts for nothing where states are found by their names.
        tokens: How many tokens its latents are of.
    """

    name: str
    host: str = "127.0.0.1"
    port: int = 0
    tokens: int = 0


class StateStore(Protocol):
    """Carries states from one process to another.

    Attributes:
        counts: How often each outcome happened, by name.
        address: Host and port where others ask for what this end has; port 0 where they find it by name.
    """

    counts: Counter[str]
    address: tuple[str, int]

    def put(self, name: str, descriptor: Mapping[str, Any], tokens: np.ndarray, fill: Fill, first: int = 0) -> bool:
        """Writes a state, whose arrays ``fill`` gets empty; whether others can have it now.

        It is not written where it is there already (counted as ``exists``) or finds no room (``full``). An error of
        ``fill`` passes, and leaves nothing.
        """

    def get(self, address: StateAddress, until: float) -> SequenceState | None:
        """A whole state, or None for a miss, by ``until`` on the monotonic clock at the latest. A leased state can be
        got once."""

    def release(self, address: StateAddress, until: float) -> None:
        """Frees a leased state at once: no reader wants it."""

    def expire(self) -> None:
        """Frees the states of this process whose lease is over."""

    def close(self) -> None:
        """Frees the states that this process has leased."""
