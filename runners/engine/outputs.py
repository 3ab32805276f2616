"""Records between the scheduler, the executor and the output processor."""

from collections.abc import Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ling3export.runners.engine.inputs import Span
from ling3export.runners.engine.request import Sampling
from ling3export.runners.engine.sequence import DispatchedCall, Sequence

DeviceArray = Any  # may still be being computed


@dataclass(slots=True, eq=False)
class HostCopy:
    """The state of a sequence in host memory, while it has no slot.

    Attributes:
        home: The device that its first page has to be on again; None for any.
        state: A ``ShardedState`` of this engine, or a ``SequenceState`` of another; None until it is offloaded.
    """

    home: int | None
    state: Any = None


class CopyStates(NamedTuple):
    """Copies the recurrent and conv state of slots over that of others, pair by pair."""

    sources: list[int]
    targets: list[int]


class OffloadState(NamedTuple):
    """Copies the state of a slot and of pages to the host."""

    slot: int
    pages: list[int]
    copy: HostCopy


class OnloadState(NamedTuple):
    """Writes a state into a slot and pages."""

    slot: int
    pages: list[int]
    copy: HostCopy


StateMove = CopyStates | OffloadState | OnloadState


class ScheduledSpan(NamedTuple):
    """One sequence's tokens in a prefill or score call: ``span``, in the chunks of the call from ``row`` on."""

    sequence: Sequence
    span: Span
    row: int


class ScheduledRow(NamedTuple):
    """A row of a call that a token is sampled from.

    Attributes:
        call: The sequence's record of the call.
        token: Input of a decode call; -1 for the token that the devices sampled last.
    """

    sequence: Sequence
    row: int
    slot: int
    position: int
    call: DispatchedCall
    token: int = -1


@dataclass(slots=True, eq=False)
class SchedulerOutput:
    """One scheduled call of the devices.

    Attributes:
        at: Time of the decision, on the clock of ``sequence.now``.
        phase: ``prefill``, ``score`` or ``decode``; empty where nothing is to be computed.
        spans: Inputs of a prefill or score call, one after the other.
        rows: Rows that sample a token, ascending; all rows of a decode call.
        processed: The rows of them that need the logits processor.
        admitted: State slots that sequences got, with their sampling.
        before: Moves of states before the call, in order.
        after: Moves of states after the call and before the sampling.
    """

    at: float
    cell: str = ""
    phase: str = ""
    padding: int = 0
    spans: Many[ScheduledSpan] = ()
    rows: Many[ScheduledRow] = ()
    processed: Many[ScheduledRow] = ()
    admitted: Many[tuple[int, Sampling]] = ()
    before: Many[StateMove] = ()
    after: Many[StateMove] = ()


class InFlightSample(NamedTuple):
    """A prefill or decode call in flight. One in the middle of prompts samples no row, and has no tokens."""

    output: SchedulerOutput
    logits: DeviceArray
    tokens: DeviceArray = None
    logprobs: Mapping[str, DeviceArray] | None = None  # where a row asks for them


class InFlightScore(NamedTuple):
    """A score call in flight: ``logprob``, ``best`` and ``best_logprob`` of each padded token."""

    output: SchedulerOutput
    scores: Mapping[str, DeviceArray]


class ModelRunnerOutput(NamedTuple):
    """Results of a call, on the host.

    Attributes:
        at: Time at which the tokens were read.
        logits: fp32 ``[rows, vocab]``, where a sequence asks for them.
        logprobs: ``logprob``, ``top_token`` and ``top_logprob`` by row, where a sequence asks for them.
        scores: ``logprob``, ``best`` and ``best_logprob`` of each padded token of a score call.
    """

    at: float
    tokens: Many[int] = ()
    logits: np.ndarray | None = None
    logprobs: Mapping[str, list[Any]] | None = None
    scores: Mapping[str, np.ndarray] | None = None


class NewToken(NamedTuple):
    """A token that was read."""

    sequence: Sequence
    token: int
