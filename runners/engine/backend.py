"""What runs a scheduler's calls, and what a call is until it is waited for. Knows no jax."""

from collections.abc import Mapping
from collections.abc import Sequence as Many
from typing import Any, NamedTuple, Protocol

import numpy as np

from ling3export.runners.engine.score_inputs import ScoredPart
from ling3export.runners.engine.sequence import CallNote, Sequence

Handle = Any  # an array that may still be being computed


class Backend(Protocol):
    """What runs the programs. Calls return at once; only ``read`` waits."""

    def step(self, phase: str, padding: int, fields: Mapping[str, np.ndarray]) -> Handle:
        """``prefill`` or ``decode`` at ``padding``: logits ``[rows, vocab]``."""

    def score(self, padding: int, fields: Mapping[str, np.ndarray]) -> Mapping[str, Handle]:
        """``score`` at ``padding``: ``logprob`` and ``best`` of each token slot."""

    def sample(self, logits: Handle, rows: int, fields: Mapping[str, np.ndarray]) -> Handle:
        """Tokens ``[rows]``, also left in the state for the next decode."""

    def read(self, handle: Handle) -> np.ndarray:
        """Waits for an array, and fetches it."""

    def wait(self, handle: Handle) -> None:
        """Waits until an array is computed."""


class Row(NamedTuple):
    """A row of a call that samples a token: whose, and what the call did for it."""

    place: int
    sequence: Sequence
    note: CallNote


class Call(NamedTuple):
    """A call that was not waited for yet. One in the middle of a prompt samples no row, and has no tokens.

    One that scores has parts, and in place of tokens and logits log-probabilities and best tokens.
    """

    rows: list[Row]
    tokens: Handle
    logits: Handle
    parts: Many[ScoredPart] = ()
