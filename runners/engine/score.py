"""Scoring: how likely given tokens are after a context, and whether greedy decoding would have taken them."""

import math
from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass

from ling3export.artifacts.schema import Target
from ling3export.foundation.errors import ArtifactError, Ling3Error, RequestError
from ling3export.runners.engine.request import Completion, Request
from ling3export.runners.engine.validation import token_ids

Text = str | Many[int]


@dataclass(frozen=True)
class Score:
    """How likely a continuation is after its context.

    Attributes:
        context_ids: The context as it was run.
        token_ids: The continuation.
        logprobs: Natural logarithm of the probability of each of its tokens after all tokens before it.
        best_ids: The token with the largest logit in the place of each; among equals the lowest id.
    """

    context_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]
    best_ids: list[int]

    @property
    def logprob(self) -> float:
        """Log-probability of the whole continuation: the sum."""
        return math.fsum(self.logprobs)

    @property
    def is_greedy(self) -> bool:
        """Whether greedy decoding after the context gives the continuation."""
        return self.best_ids == self.token_ids


def pair_ids(
    context: Text, continuation: Text, encode: Callable[[str], tuple[int, ...]], name: str
) -> tuple[tuple[int, ...], int]:
    """Token ids of both, the context's first; and how many are the context's.

    Two texts are encoded as one, and cut after the context's own number of tokens: so a word that begins the
    continuation keeps its space. This is how lm-evaluation-harness does it.

    Raises:
        RequestError: One is a text and the other is not, or they are no token ids.
    """
    if isinstance(context, str) != isinstance(continuation, str):
        raise RequestError(f"{name}: expected two texts or two lists of token ids, found one of each")
    if isinstance(context, str) and isinstance(continuation, str):
        blank = len(context) - len(context.rstrip())
        if blank:
            context, continuation = context[:-blank], context[-blank:] + continuation
        first = encode(context)
        return (*first, *encode(context + continuation)[len(first) :]), len(first)
    return (*token_ids(context, name), *token_ids(continuation, name)), len(context)


def scored(completion: Completion, request: Request) -> Score:
    """The score of a request that ended. Raises Ling3Error: the request was cancelled."""
    first = request.score_from
    if first is None or completion.logprobs is None:
        raise Ling3Error(f"{request.name}: expected it scored, found it {completion.stop_reason}")
    ids = list(request.prompt_ids)
    logprobs, best = (
        [token.logprob for token in completion.logprobs],
        [token.top[0][0] for token in completion.logprobs],
    )
    return Score(ids[:first], ids[first:], logprobs, best)


def check_cells(target: Target, name: str, artifact: object) -> None:
    """Refuses to score where the target has no program for it.

    Raises:
        ArtifactError: There is none; the hint is the command that adds one.
    """
    if target.paddings("score"):
        return
    text = target.text if target.topology else f"{target.text}@{target.tp}"
    snapshots = f" --snapshots {target.state.snapshots}" if target.state.snapshots else ""
    options = f"--target {text} --score-paddings {target.paddings('prefill')[-1]}{snapshots} --force"
    raise ArtifactError(
        f"scoring: target `{name}` has no score programs", f"add them: ling3export build --into {artifact} {options}"
    )
