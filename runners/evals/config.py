"""Settings of an evaluation's run. Light: the command line takes its defaults from here."""

from dataclasses import dataclass

from ling3export.runners.engine.request import Sampling
from ling3export.runners.evals.objects import EvalError

MAX_INFRA = 0.01


@dataclass(frozen=True)
class RunConfig:
    """Settings of a run; the defaults are those of the reference evaluation.

    Attributes:
        trials: Tries at each task.
        max_tokens: At most this many tokens a trial.
        temperature: 0 takes the best token.
        top_k: Keep only the best k tokens; 0 keeps all.
        top_p: Then keep the fewest tokens that hold this probability.
        stop: Strings that end the text; none by default, as the reference evaluation names only the end-of-text token.
        seed: Of the run.
        batch: Trials that are given to the backend together.
        retry: How often a trial is tried again after an infrastructure error.
        max_infra: The run is invalid if a larger share of trials ends in infrastructure errors.
        threshold: Share of a task's trials that must pass, in place of the tasks' own.
        transcripts: Also write transcripts/IDX-TRIAL.json with outcome and grades.
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
        Sampling(self.temperature, self.top_k, self.top_p)
        for name, least in (("trials", 1), ("max_tokens", 1), ("batch", 1), ("retry", 0)):
            if getattr(self, name) < least:
                raise EvalError(f"`{name}`: expected {least} or more, found {getattr(self, name)}")
