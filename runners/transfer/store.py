"""The interface of stores of states: a state is written under a name, and read whole and checked, or not at all.

A reader never gets bytes that are damaged or of another artifact, and never waits longer than until its deadline.
Whatever goes wrong is a miss with a reason, which is counted. What is *leased* is for one reader: it is there until it
was taken or given back, or until its lease is over.
"""

import re
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np

from ling3export.foundation.errors import Ling3Error
from ling3export.runners.state.sequence_state import SequenceState, StateBytes

NAME = re.compile("[0-9a-f]{32}")  # of a state


class TransferError(Ling3Error):
    """A store cannot start."""


class StateAddress(NamedTuple):
    """The address of a state.

    Attributes:
        name: Its name: 32 hexadecimal digits.
        host: Name or address of the machine that has it; counts for nothing where states are found by their names.
        tokens: How many tokens it is of.
    """

    name: str
    host: str = ""
    port: int = 0
    tokens: int = 0


class PendingWrite:
    """A state that is being written.

    Args:
        data: Its bytes, whose arrays are to be filled.
        done: Called once, with whether it is whole; says whether others can have it.
    """

    def __init__(self, data: StateBytes, done: Callable[[bool], bool]) -> None:
        self._data, self._done = data, done

    @property
    def state(self) -> SequenceState:
        """The state, whose arrays are to be filled."""
        return self._data.state

    def finish(self) -> bool:
        """Makes the state ready; whether others can have it."""
        self._data.seal()
        return self._done(True)

    def abandon(self) -> None:
        """Gives the state up."""
        self._done(False)


class StateStore(Protocol):
    """Carries states from one process to another.

    Attributes:
        address: Host and port where others ask for what this end has; port 0 where they find it by name.
    """

    counts: Counter[str]
    address: tuple[str, int]

    def create(
        self, name: str, descriptor: Mapping[str, Any], tokens: np.ndarray, first: int = 0
    ) -> PendingWrite | None:
        """Begins a state; None where it is there already, or finds no room (``exists``, ``full``)."""

    def get(self, address: StateAddress, until: float) -> SequenceState | None:
        """A whole state, or None for a miss, by ``until`` on the monotonic clock at the latest. A leased state can be
        got once."""

    def release(self, address: StateAddress, until: float) -> None:
        """Frees a leased state at once: no reader wants it."""

    def ended(self) -> set[str]:
        """Names of leased states that were taken or given back, or whose lease is over, since the last call."""

    def close(self) -> None:
        """Frees the states that this process has leased."""


def put(store: StateStore, name: str, state: SequenceState) -> bool:
    """Writes a state; whether others can have it now."""
    write = store.create(name, state.descriptor, state.tokens, state.first)
    if write is None:
        return False
    try:
        for array_name, array in state.arrays.items():
            write.state.arrays[array_name][...] = array
    except BaseException:
        write.abandon()
        raise
    return write.finish()
