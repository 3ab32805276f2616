"""Whether the same artifact gives the same tokens again, bit for bit; and, beside that, whatever the batch around."""

from collections.abc import Callable, Sequence
from typing import Any

from ling3export.runners.evals.backend import Ask, Backend
from ling3export.runners.evals.objects import EvalError

SHOWN = 20  # divergences that are reported in detail


def determinism(
    backend: Backend, asks: Sequence[Ask], *, runs: int = 2, batch: int = 256, alone: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Runs the same prompts several times in the same order and batches.

    Args:
        backend: Answers prompts.
        asks: At temperature 0.
        runs: 2 or more.
        batch: Prompts that are given to the backend together.
        alone: So many prompts are also run each alone: batch invariance, reported but not judged, since another
            padding sums in another order.
        progress: Told finished and all prompts.

    Returns:
        ``identical``: "k/total"; ``first_divergence``: task, pos, both ids and the gap of their logits, of the tasks
        that differ from the first run; ``batch_invariance``: the same for prompts run alone, or None.

    Raises:
        EvalError: There is nothing to compare.
    """
    if runs < 2 or not asks:
        raise EvalError(f"determinism: expected 2 runs and a prompt or more, found {runs} and {len(asks)}")
    total = runs * len(asks) + min(alone, len(asks))
    tokens: list[list[list[int]]] = []
    for number in range(runs):
        tokens.append([])
        for start in range(0, len(asks), batch):
            tokens[-1] += [list(done.token_ids) for done in backend.generate(asks[start : start + batch])]
            if progress:
                progress(number * len(asks) + len(tokens[-1]), total)
    first = tokens[0]
    differing: dict[int, list[int]] = {}  # by prompt: the first of the later runs that differs
    for later in tokens[1:]:
        for place, ids in enumerate(later):
            if ids != first[place]:
                differing.setdefault(place, ids)
    singles = [list(backend.generate([ask])[0].token_ids) for ask in asks[:alone]]
    if progress:
        progress(total, total)
    return {
        "identical": f"{len(asks) - len(differing)}/{len(asks)}",
        "first_divergence": [
            divergence(backend, asks[place], first[place], ids) for place, ids in list(differing.items())[:SHOWN]
        ],
        "batch_invariance": _invariance(backend, asks, first, singles) if singles else None,
    }


def divergence(backend: Backend, ask: Ask, a: list[int], b: list[int]) -> dict[str, Any]:
    """Where two answers part: the position, both ids (None behind an end), and how close the model was there.

    ``logit_gap`` is the logit of A's token less that of B's, from a prompt that holds all tokens before; None where
    the backend gives no logits, or one of the answers ended.
    """
    place = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    ids = tuple(run[place] if place < len(run) else None for run in (a, b))
    gap = None
    if ids[0] is not None and ids[1] is not None:
        prompt = [*backend.generate([Ask(ask.name, ask.prompt, 1)])[0].prompt_ids, *a[:place]]
        logits = backend.generate([Ask(ask.name, prompt, 1, logits=True)])[0].logits
        gap = None if logits is None else float(logits[0][ids[0]]) - float(logits[0][ids[1]])
    return {"task": ask.name, "pos": place, "id_a": ids[0], "id_b": ids[1], "logit_gap": gap}


def _invariance(
    backend: Backend, asks: Sequence[Ask], batched: Sequence[list[int]], singles: Sequence[list[int]]
) -> dict[str, Any]:
    parted = [place for place, ids in enumerate(singles) if ids != batched[place]]
    return {
        "identical": f"{len(singles) - len(parted)}/{len(singles)}",
        "first_divergence": [
            divergence(backend, asks[place], batched[place], singles[place]) for place in parted[:SHOWN]
        ],
    }
