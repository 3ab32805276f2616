"""The values of an evaluation: a run's settings, transcripts, outcomes, grades, trials and infrastructure errors.

A Trial is the one record of a try at a task: the harness returns it, a run's file keeps it, reports read it.
"""

import hashlib
from dataclasses import dataclass, field
from typing import Annotated, Any

from ling3export.artifacts.records import Record, one_of
from ling3export.foundation.errors import Ling3Error, RankDivergence
from ling3export.runners.engine.request import Completion, Sampling

MAX_INFRA = 0.01
INFRA_KINDS = ("oom", "timeout", "device_lost", "tokenizer_error", "rank_divergence", "nan_logits", "unknown")
OK, INFRA_ERROR = "ok", "infra_error"
REFUSED = "refused"  # a prompt that can never be served: no infrastructure error, and no answer
Pair = tuple[str, int]  # task id, number of the try
# Exceptions, and words of runtimes' messages in lower case, with the kind that they show. The first row counts.
_TYPES: tuple[tuple[str, type[Exception]], ...] = (
    ("rank_divergence", RankDivergence),
    ("oom", MemoryError),
    ("timeout", TimeoutError),
    ("nan_logits", FloatingPointError),
)
_SIGNS = (
    ("oom", ("resource_exhausted", "out of memory", "cannot allocate memory")),
    ("timeout", ("deadline_exceeded", "timed out", "timeout")),
    ("nan_logits", ("nan logits", "logits are nan", "non-finite logits")),
    ("device_lost", ("device lost", "device is lost", "data_loss", "unavailable:", "device halted")),
    ("tokenizer_error", ("tokenizer",)),
)


class EvalError(Ling3Error):
    """A suite, a task file, a run's file or its settings cannot be used."""


class GraderError(Ling3Error):
    """A grader failed, or returned no verdict. It ends the run, since a broken grader says nothing about a trial."""


@dataclass(frozen=True)
class RunConfig:
    """Settings of a run.

    Attributes:
        seed: The seeds of all trials follow from it.
        batch: Trials that are given to the backend together.
        retry: Further attempts at a trial after an infrastructure error.
        max_infra: The run is invalid if a larger share of its trials ends in infrastructure errors.
        threshold: Share of a task's trials that must pass, in place of each task's own threshold.
        transcripts: Also record the steps of each transcript, and outcomes.

    Raises:
        RequestError: A sampling setting is out of bounds.
        EvalError: A count is too small.
    """

    trials: int = 1
    max_tokens: int = 2000
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    stop: tuple[str, ...] = ()
    seed: int = 0
    batch: int = 256
    retry: int = 1
    max_infra: float = MAX_INFRA
    threshold: float | None = None
    transcripts: bool = False

    def __post_init__(self) -> None:
        self.sampling(0)
        for name, least in (("trials", 1), ("max_tokens", 1), ("batch", 1), ("retry", 0), ("seed", 0)):
            if getattr(self, name) < least:
                raise EvalError(f"`{name}`: expected {least} or more, found {getattr(self, name)}")

    def sampling(self, seed: int) -> Sampling:
        """The sampling of a trial with this seed."""
        return Sampling(self.temperature, self.top_k, self.top_p, seed)


class TranscriptStep(Record, frozen=True):
    """One step of a transcript."""

    t_ms: float  # milliseconds since the trial began
    kind: str  # ``prefill``, ``score``, ``decode`` or ``tool``
    bucket: int = 0  # padding of the program that ran
    n_tokens: int = 0  # number of the trial's tokens that the step took
    name: str | None = None  # of a tool call


@dataclass
class Transcript:
    """A trial's course. ``"Hi" in transcript`` looks into its text.

    Attributes:
        stop_reason: ``eos``, ``length`` or ``stop``.
        steps: In order; empty if the agent does not record them.
        ttft_ms: Milliseconds to the first token.
        e2e_ms: Milliseconds to the last token.
        turns: Number of answers of the model.
    """

    text: str = ""
    prompt_token_ids: list[int] = field(default_factory=list)
    output_token_ids: list[int] = field(default_factory=list)
    stop_reason: str = "eos"
    steps: list[TranscriptStep] = field(default_factory=list)
    ttft_ms: float = 0.0
    e2e_ms: float = 0.0
    turns: int = 1

    @classmethod
    def of(cls, completion: Completion) -> "Transcript":
        """The transcript of an engine's completion."""
        steps = [TranscriptStep(step.t_ms, step.kind, step.padding, step.tokens) for step in completion.steps]
        return cls(
            completion.text or "",
            list(completion.prompt_ids),
            list(completion.token_ids),
            completion.stop_reason,
            steps,
            round(completion.ttft_ms, 3),
            round(completion.e2e_ms, 3),
        )

    def __contains__(self, text: str) -> bool:
        return text in self.text


@dataclass
class Outcome:
    """The final state of the environment, as a JSON object. It is not the model's text."""

    state: dict[str, Any] = field(default_factory=dict)


class GraderResult(Record, frozen=True):
    """The verdict of one grader on one trial."""

    name: str
    score: float  # from 0 to 1
    passed: bool
    answer: str | None  # as the grader read it
    explanation: str
    required: bool  # a trial passes only if all required graders pass


class InfraError(Record, frozen=True):
    """An attempt that failed outside grading."""

    kind: str  # one of INFRA_KINDS; REFUSED for a prompt that was not tried
    message: str  # the exception's type and message

    @classmethod
    def of(cls, error: Exception) -> "InfraError":
        """Classifies an exception by its type, else by its message."""
        message = f"{type(error).__name__}: {error}"
        lower = message.lower()
        kinds = [kind for kind, type_ in _TYPES if isinstance(error, type_) or isinstance(error.__cause__, type_)]
        kinds += [kind for kind, signs in _SIGNS if any(sign in lower for sign in signs)]
        return cls(kinds[0] if kinds else "unknown", message)


class Trial(Record, frozen=True, omit_defaults=False):
    """One try at a task: the line of a run's file."""

    task_id: str
    trial: int  # number of the try, from 0
    status: Annotated[str, one_of(OK, INFRA_ERROR, REFUSED)]
    passed: bool | None = None  # whether all required graders pass; None after an infrastructure error
    answer: str | None = None  # as the first grader that looks for one read it
    text: str = ""
    output_token_ids: tuple[int, ...] = ()
    stop_reason: str = "error"  # ``eos``, ``length`` or ``stop``; ``error`` without an answer
    n_prompt: int = 0  # number of prompt tokens
    ttft_ms: float = 0.0  # milliseconds to the first token
    e2e_ms: float = 0.0  # milliseconds to the last token
    attempts: tuple[InfraError, ...] = ()  # those that failed, or the refusal
    grades: tuple[GraderResult, ...] = ()
    details: dict[str, Any] | None = None  # prompt tokens, steps and outcome, with ``--transcripts``

    @property
    def pair(self) -> Pair:
        """The task's id and the number of the try."""
        return self.task_id, self.trial

    @property
    def label(self) -> str:
        """The trial's name in reports: its task, with ``#trial`` for a repeated try."""
        return f"{self.task_id}#{self.trial}" if self.trial else self.task_id

    @property
    def infra(self) -> InfraError | None:
        """The error that the trial ended in."""
        return self.attempts[-1] if self.status == INFRA_ERROR else None


def text_of(transcript: object) -> str:
    """The text of a transcript, which may also be a plain string."""
    return transcript if isinstance(transcript, str) else str(getattr(transcript, "text", transcript))


def trial_seed(run_seed: int, task_id: str, trial: int) -> int:
    """The seed of a trial's sampling. It does not depend on the order in which trials run."""
    return int.from_bytes(hashlib.sha256(f"{run_seed}|{task_id}|{trial}".encode()).digest()[:4], "big")
