"""What an evaluation is made of, beside its tasks: transcripts, outcomes, grades, trials, infrastructure errors."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from ling3export.errors import Ling3Error

INFRA_KINDS = ("oom", "timeout", "device_lost", "tokenizer_error", "rank_divergence", "nan_logits", "unknown")
# What runtimes write into messages, in lower case; the first row that fits counts.
_SIGNS = (
    ("oom", ("resource_exhausted", "out of memory", "cannot allocate memory")),
    ("timeout", ("deadline_exceeded", "timed out", "timeout")),
    ("nan_logits", ("nan logits", "logits are nan", "non-finite logits")),
    ("device_lost", ("device lost", "device is lost", "data_loss", "unavailable:", "device halted")),
    ("tokenizer_error", ("tokenizer",)),
)


class EvalError(Ling3Error):
    """A suite, a task file, a run's folder or its settings cannot be used."""


class GraderError(Ling3Error):
    """A grader failed, or returned no verdict. It fails the run: a broken grader says nothing about a trial."""


class RankDivergence(Ling3Error):
    """Processes that take the same steps sampled different tokens."""


@dataclass(frozen=True)
class Step:
    """One step of a transcript.

    Attributes:
        t_ms: Milliseconds since the trial began.
        kind: ``prefill``, ``decode``, or ``tool``.
        bucket: Padding of the program that ran.
        n_tokens: Tokens that it took.
        name: Of a tool call.
    """

    t_ms: float
    kind: str
    bucket: int = 0
    n_tokens: int = 0
    name: str | None = None


@dataclass
class Transcript:
    """What was said. ``"Hi" in transcript`` looks into its text.

    Attributes:
        text: What the model wrote.
        prompt_token_ids: The prompt as it was run.
        output_token_ids: What was generated.
        stop_reason: ``eos``, ``length``, ``stop`` or ``error``.
        steps: In order, as far as the agent knows them.
        artifact: Digests of what ran.
        ttft_ms: Milliseconds to the first token.
        e2e_ms: Milliseconds to the last one.
        turns: How often the model was asked.
    """

    text: str = ""
    prompt_token_ids: list[int] = field(default_factory=list)
    output_token_ids: list[int] = field(default_factory=list)
    stop_reason: str = "eos"
    steps: list[Step] = field(default_factory=list)
    artifact: dict[str, Any] = field(default_factory=dict)
    ttft_ms: float = 0.0
    e2e_ms: float = 0.0
    turns: int = 1

    def __contains__(self, text: str) -> bool:
        return text in self.text


@dataclass
class Outcome:
    """The final state of the environment, not what the model said.

    Attributes:
        state: As JSON.
    """

    state: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class GraderResult:
    """What one grader found.

    Attributes:
        name: Of the grader.
        score: 0 … 1.
        passed: Its verdict.
        answer: What it took for the answer, if it looks for one.
        explanation: Why.
        required: Whether the trial can pass without it.
        weight: Of its score in the trial's.
    """

    name: str
    score: float
    passed: bool
    answer: str | None = None
    explanation: str = ""
    required: bool = True
    weight: float = 1.0


@dataclass(frozen=True)
class InfraError:
    """An attempt that failed outside grading.

    Attributes:
        kind: One of INFRA_KINDS.
        message: What was raised.
    """

    kind: str
    message: str

    @classmethod
    def of(cls, error: Exception) -> "InfraError":
        """Classifies an exception: by its type, else by what its message says."""
        message = f"{type(error).__name__}: {error}"
        by_type = (
            ("rank_divergence", RankDivergence), ("oom", MemoryError), ("timeout", TimeoutError),
            ("nan_logits", FloatingPointError),
        )  # fmt: skip
        for kind, exception in by_type:
            if isinstance(error, exception) or isinstance(error.__cause__, exception):
                return cls(kind, message)
        lower = message.lower()
        return cls(next((kind for kind, signs in _SIGNS if any(s in lower for s in signs)), "unknown"), message)

    def record(self) -> dict[str, str]:
        """As JSON."""
        return {"kind": self.kind, "message": self.message}


@dataclass
class Trial:
    """One try at a task.

    Attributes:
        task_id: Of the task.
        trial: 0 …
        seed: Of its sampling.
        status: ``ok`` or ``infra_error``.
        attempts: Errors of the attempts that failed; also those before one that worked.
        transcript: What was said; None after an infrastructure error.
        outcome: What came of it.
        grades: Of every grader, the most authoritative first.
        passed: None after an infrastructure error.
        score: Weighted mean of the grades.
    """

    task_id: str
    trial: int
    seed: int
    status: str = "ok"
    attempts: list[InfraError] = field(default_factory=list)
    transcript: Any = None
    outcome: Any = None
    grades: list[GraderResult] = field(default_factory=list)
    passed: bool | None = None
    score: float | None = None

    @property
    def infra(self) -> InfraError | None:
        """The error that the trial ended in."""
        return self.attempts[-1] if self.status == "infra_error" else None

    @property
    def answer(self) -> str | None:
        """What was taken for the answer by the first grader that looks for one."""
        return next((grade.answer for grade in self.grades if grade.answer is not None), None)


def text_of(transcript: object) -> str:
    """Text of a transcript, which may also be a plain string."""
    return transcript if isinstance(transcript, str) else str(getattr(transcript, "text", transcript))


def tokens_digest(ids: Iterable[int]) -> str:
    """sha256 of token ids as little-endian int32."""
    return hashlib.sha256(b"".join(i.to_bytes(4, "little", signed=True) for i in ids)).hexdigest()


def trial_seed(run_seed: int, task_id: str, trial: int) -> int:
    """Seed of a trial's sampling: it depends on nothing else, so not on the order of trials either."""
    return int.from_bytes(hashlib.sha256(f"{run_seed}|{task_id}|{trial}".encode()).digest()[:4], "big")
