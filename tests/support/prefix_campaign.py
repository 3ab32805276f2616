"""Compares tokens with and without the prefix cache, over random families of prompts, and checks that nothing leaks.

    python -m tests.support.prefix_campaign ARTIFACT [REQUESTS] [SEED]

ARTIFACT has snapshots. Some requests are cancelled, some continue with a next turn, some are sampled. The families do
not fit into the cache, nor the answers into the pages, so that there are evictions and pre-emptions.
"""

import json
import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from ling3export.runners.engine.engine import Engine
from ling3export.runners.engine.request import Request, Sampling


@dataclass(frozen=True)
class Asked:
    """A request of a campaign, and the seconds after which it is cancelled; None for never."""

    request: Request
    cancelled: float | None


def requests(engine: Engine, count: int, seed: int) -> list[Asked]:
    """``count`` requests in families."""
    rng, context, vocab = random.Random(seed), engine.limits.context, engine.limits.vocab_size

    def some(length: int) -> list[int]:
        return [rng.randrange(vocab) for _ in range(length)]

    heads = [some(rng.randint(8, context // 2)) for _ in range(max(3, count // 60))]
    asked = []
    for _ in range(count):
        if asked and rng.random() < 0.2:  # a next turn: the prompt continues an earlier one
            last = rng.choice(asked[-20:]).request.prompt_ids
            ids = [*last[: rng.randint(1, len(last))], *some(rng.randint(1, 20))]
        else:
            head = rng.choice(heads)
            ids = [*head[: rng.choice([len(head), rng.randint(1, len(head))])], *some(rng.randint(1, 30))]
        ids = ids[: context - 2]
        how = Sampling(0.8, 0, 0.95, rng.randrange(99)) if rng.random() < 0.3 else Sampling()
        salt = rng.choice(["", "", "", "other"])
        request = Request(tuple(ids), rng.randint(1, 40), how, ignore_eos=True, cache_salt=salt)
        asked.append(Asked(request, rng.uniform(0, 0.05) if rng.random() < 0.1 else None))
    return asked


def answers(engine: Engine, asked: list[Asked], together: int = 12) -> list[list[int]]:
    """The tokens of every request; an empty list for cancelled ones, which are not compared."""
    found: list[list[int]] = []
    for first in range(0, len(asked), together):
        part = asked[first : first + together]
        handles = engine.submit(*(each.request for each in part))
        for each, handle in zip(part, handles, strict=True):
            if each.cancelled is not None:
                time.sleep(each.cancelled)
                handle.cancel()
        for each, handle in zip(part, handles, strict=True):
            done = handle.result()
            found.append(done.token_ids if each.cancelled is None else [])
    return found


def campaign(artifact: Path, count: int, seed: int) -> dict[str, object]:
    """Compares the tokens of ``count`` requests; returns the counters of the cache.

    Raises:
        AssertionError: A token differs, or a slot or page was not given back.
    """
    told = {"report": lambda text: None, "check": "programs"}
    with Engine(artifact, prefix_cache=False, **told) as engine:
        asked = requests(engine, count, seed)
        expected = answers(engine, asked)
        off = engine.stats()
    with Engine(artifact, prefix_cache=True, **told) as engine:
        found = answers(engine, asked)
        on = engine.stats()
    differing = [number for number, pair in enumerate(zip(expected, found, strict=True)) if pair[0] != pair[1]]
    assert not differing, f"requests {differing[:5]} of {len(differing)} have other tokens"
    cache = on["prefix_cache"]
    assert off["free"] == off["pools"]
    assert on["free"]["slots"] == on["pools"]["slots"] and on["live"] == 0
    assert on["free"]["pages"] + cache["pages"] == on["pools"]["pages"]
    assert on["free"]["snapshots"] + cache["snapshots"] == on["pools"]["snapshots"]
    computed = {"tokens_in": on["tokens_in"], "tokens_in_off": off["tokens_in"]}
    return {"requests": count, "preempted": [off["preempted"], on["preempted"]], **computed, **cache}


if __name__ == "__main__":
    folder, *numbers = sys.argv[1:]
    total, start = [*map(int, numbers), *(2000, 0)[len(numbers) :]]
    print(json.dumps(campaign(Path(folder), total, start)))
