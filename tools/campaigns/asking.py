"""Random requests to a server that asks others for the prefill of long prompts: every answer is one server's.

``python -m tools.campaigns.asking ARTIFACT COUNT [CARRIER]`` starts two servers that prefill, one that decodes
and asks them, and one alone, in fp32. COUNT requests go to the one that decodes, eight at a time: prompts of families
with shared beginnings, 1 to 180 tokens, greedy and sampled, lists, choices, streams; one client in eight leaves early.
It prints how many prompts were prefilled where, and fails for an answer that is another or for anything that is held at
the end.
"""

import json
import random
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench.pd import WAIT, asked, metric
from tests.support.serving import Server

LIMIT = 32  # tokens that are prefilled here
WHAT = ("taken", "failed", "refused", "expired", "late", "left", "short", "queue_full", "no_server")


def body_of(seed: int, model: str) -> dict[str, Any]:
    """A request."""
    rng = random.Random(seed)
    family = random.Random(rng.randrange(12))
    shared = [family.randrange(300) for _ in range(family.randint(0, 120))]

    def prompt() -> list[int]:
        return shared + [rng.randrange(300) for _ in range(rng.randint(1, 60))]

    body: dict[str, Any] = {
        "model": model,
        "prompt": prompt(),
        "max_tokens": rng.randint(1, 24),
        "ignore_eos": True,
        "seed": seed,
        "temperature": rng.choice((0, 0.8)),
        "return_token_ids": True,
        "stream": rng.random() < 0.3,
    }
    if rng.random() < 0.1:
        body["prompt"] = [prompt() for _ in range(3)]
    elif rng.random() < 0.1:
        body["n"] = 2
    return body


def tokens(url: str, body: dict[str, Any]) -> list[list[int]]:
    """The tokens of each choice."""
    found: dict[int, list[int]] = {}
    data = asked(url, "/v1/completions", body).decode()
    whole = [data] if not body["stream"] else [line[6:] for line in data.splitlines() if line.startswith("data: {")]
    for chunk in map(json.loads, whole):
        for choice in chunk["choices"]:
            found.setdefault(choice["index"], []).extend(choice.get("token_ids", ()))
    return [found[index] for index in sorted(found)]


def leave(url: str, body: dict[str, Any], rng: random.Random) -> None:
    """Asks, and closes the connection soon."""
    data = json.dumps(body | {"stream": True}).encode()
    request = urllib.request.Request(url + "/v1/completions", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=WAIT):
        time.sleep(rng.uniform(0, 0.1))


def campaign(url: str, alone: str, count: int, first: int = 0) -> tuple[int, int]:
    """Sends requests; how many answers were compared, and how many were others than those of the server alone."""
    model = json.loads(asked(url, "/v1/models"))["data"][0]["id"]

    def one(seed: int) -> bool | None:
        rng, body = random.Random(f"leaves {seed}"), body_of(seed, model)
        if rng.random() < 0.125:
            return leave(url, body, rng)
        return tokens(url, body) == tokens(alone, body)

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(one, range(first, first + count)))
    return len(found) - found.count(None), found.count(False)


def until(true: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + WAIT
    while not true():
        assert time.monotonic() < end, what
        time.sleep(0.05)


def idle(url: str) -> bool:
    """Whether a server has no request and holds no slot."""
    live, free, slots = (metric(url, f"ling3_{name}") for name in ("requests_live", "slots_free", "slots"))
    return not live and free == slots


def outcomes(url: str) -> Counter[str]:
    """What became of prompts."""
    return Counter({what: int(metric(url, f'ling3_remote_prefill_total{{what="{what}"}}')) for what in WHAT})


def main(artifact: str, count: str, carrier: str = "tcp") -> int:
    """Starts, sends, prints and stops; how many answers were wrong."""
    with ExitStack() as stack:
        how = ["--check", "programs", "--transfer", carrier]
        if carrier == "file":
            how += ["--transfer-folder", stack.enter_context(tempfile.TemporaryDirectory(prefix="asking-"))]
        path = Path(artifact)
        ps = [stack.enter_context(Server(path, *how, "--role", "prefill")) for _ in range(2)]
        asks = [word for p in ps for word in ("--prefill", p.url)]
        d = stack.enter_context(Server(path, *how, "--role", "decode", *asks, "--max-local-prefill", LIMIT))
        alone = stack.enter_context(Server(path, "--check", "programs", "--prefix-cache", "off"))
        compared, wrong = campaign(d.url, alone.url, int(count))
        for each in (*ps, d, alone):
            until(lambda each=each: idle(each.url), "a server still holds what nobody waits for")  # type: ignore[misc]
        counts = outcomes(d.url)
        prompts, said = sum(counts.values()), d.said().strip() or "empty"
        here, there = (sum(metric(each.url, "ling3_prompt_tokens_total") for each in which) for which in ((d,), ps))
        moved = [each.metrics() for each in (d, *ps)]
        waiting = [f"{metric(d.url, f'ling3_remote_prefills_{name}'):.0f}" for name in ("queued", "running")]
    print(f"{count} requests with {prompts} prompts over {carrier}: {compared} answers compared, {wrong} others")
    print(", ".join(f"{what} {number}" for what, number in counts.items()))
    print(f"{counts['taken'] / prompts:.0%} of the prompts came with a state")
    print(f"prompt tokens that D computed {here:.0f}, both P {there:.0f}")
    for name, found in zip(("D", "P", "P"), moved, strict=True):
        found = {what.split('"')[1]: int(number) for what, number in found.items() if "transfer_total" in what}
        print(f"states at {name}: {', '.join(f'{what} {number}' for what, number in found.items())}")
    print(f"queued and running at the end {', '.join(waiting)}; stderr of D: {said}")
    return wrong


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]) > 0)
