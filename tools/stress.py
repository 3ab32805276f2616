"""Random requests over HTTP and through the Python engine at once, each compared with the same request by itself.

    python -m tools.stress ARTIFACT COUNT [SEED]

In fp32 every answer must have the same tokens. In other forms answers may part where two tokens are close: there the
numpy reference computes logits in float64 on the weights that the artifact stores. A parting is explained if the gap of
both tokens, as they were sampled, is at most twice the largest error of the engine's logits. That error is measured
before, on requests that run by themselves. Such forms get no top-k, top-p and min-p, whose borders have no gap.
"""

import asyncio
import json
import random
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from ling3export.foundation.errors import Ling3Error
from ling3export.plan.recorded import config_of
from ling3export.runners.endpoint import Endpoint
from ling3export.runners.engine.engine import Engine
from ling3export.runners.engine.request import Request
from ling3export.runners.serve.app import GENERATING, Policy, application
from ling3export.verify.reference import Reference
from ling3export.verify.stored import stored_reference
from tests.support.choosing import changed
from tests.support.serving import serving

BATCH = 500  # requests between two comparisons
CLIENTS = 24
MEASURED = 64  # single requests on which the error of logits is measured
LONGEST = 90  # tokens of a prompt: some are prefilled in parts
GRAMMARS = ({"regex": "[a-z ]{3,20}"}, {"json": '{"type": "object"}'}, {"choice": ["yes", "no", "maybe"]})
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"properties": {"a": {"type": "integer"}}}}}


class Case(NamedTuple):
    """A call, and how it is sent."""

    path: str
    body: dict[str, Any]
    over_http: bool
    leaves: bool  # the client leaves before the answer is complete
    requests: tuple[Request, ...]


class Parting(NamedTuple):
    """The first tokens in which two answers differ."""

    request: Request
    before: list[int]
    alone: int
    together: int


def drawn(dice: random.Random, engine: Engine, vocab: int, *, cuts: bool) -> Case:
    """A random call; ``cuts`` allows top-k, top-p and min-p."""
    path = "/v1/chat/completions" if dice.random() < 0.2 else "/v1/completions"
    body: dict[str, Any] = {"model": "m", "return_token_ids": True, "max_tokens": dice.randint(4, 16)}
    body |= {"temperature": dice.choice((0, 0, 0.7, 1.0, 1.5)), "seed": dice.randrange(1 << 32)}
    if path.endswith("chat/completions"):
        text = " ".join(dice.choices(("one", "two", "three", "four"), k=dice.randint(1, 9)))
        body["messages"] = [{"role": "user", "content": text}]
        if dice.random() < 0.4:
            body |= {"tools": [TOOL], "tool_choice": dice.choice(("auto", "required"))}
    else:
        shared = random.Random(dice.randrange(4)).choices(range(vocab), k=LONGEST)  # prompts that begin alike
        own = dice.choices(range(vocab), k=dice.randint(1, LONGEST // 2))
        body["prompt"] = shared[: dice.choice((0, 0, 32, 45))] + own
    if "tools" not in body and dice.random() < 0.15:
        body["structured_outputs"] = dice.choice(GRAMMARS)
    if dice.random() < 0.3:
        body |= {"presence_penalty": 0.7, "frequency_penalty": 0.3, "repetition_penalty": dice.choice((0.8, 1.3))}
    if dice.random() < 0.2:
        body["logit_bias"] = {str(dice.randrange(vocab)): dice.uniform(-5, 5) for _ in range(8)}
    if dice.random() < 0.2:
        body["stop"] = dice.choice((["a"], [" ", "th"]))
    if dice.random() < 0.2:
        body |= {"min_tokens": 2, "ignore_eos": dice.random() < 0.5}
    if dice.random() < 0.15:
        body["n"] = dice.randint(2, 4)
    if cuts and dice.random() < 0.5:
        body |= {"top_k": dice.choice((0, 5, 40)), "top_p": dice.choice((1.0, 0.8)), "min_p": dice.choice((0.0, 0.05))}
    over_http = dice.random() < 0.6
    body["stream"] = over_http and dice.random() < 0.5
    requests = GENERATING[path][0](dict(body), engine, "m", 64).requests
    return Case(path, body, over_http, dice.random() < 0.08, tuple(requests))


async def over_http(server: Endpoint, case: Case) -> list[list[int]] | None:
    """The tokens of each choice; None if the server had no room."""
    data, answers = json.dumps(case.body).encode(), [list[int]() for _ in case.requests]
    if not case.body["stream"]:
        if case.leaves:
            with suppress(TimeoutError):
                await asyncio.wait_for(server.whole("POST", case.path, data), 0.02)
            return answers
        status, answer = await server.whole("POST", case.path, data)
        if status != 200:
            raise Ling3Error(f"status {status}: {answer[:300]!r} to {case.body}")
        return [list(choice["token_ids"]) for choice in json.loads(answer)["choices"]]
    text = b""
    async for reply in (replies := server.replies("POST", case.path, data)):
        text += reply.data
        if case.leaves and text:
            await replies.aclose()
            text = text[: text.rfind(b"\n") + 1]
            break
    for line in text.split(b"\n"):
        if line.startswith(b"data: {"):
            event = json.loads(line[6:])
            if "error" in event:
                raise Ling3Error(f"{event} to {case.body}")
            for choice in event.get("choices", ()):
                answers[choice["index"]] += choice.get("token_ids") or []
    return answers


def in_process(engine: Engine, case: Case) -> list[list[int]]:
    """The tokens of each request of a call, submitted together."""
    handles = engine.submit(*case.requests)
    if case.leaves:
        handles[0].cancel()
    return [list(handle.result(600).token_ids) for handle in handles]


async def together(engine: Engine, server: Endpoint, cases: list[Case]) -> list[list[list[int]]]:
    """The answers of all calls, CLIENTS at a time."""
    turns, loop = asyncio.Semaphore(CLIENTS), asyncio.get_running_loop()
    with ThreadPoolExecutor(CLIENTS) as pool:

        async def one(case: Case) -> list[list[int]]:
            async with turns:
                if case.over_http:
                    return await over_http(server, case) or []
                return await loop.run_in_executor(pool, in_process, engine, case)

        return await asyncio.gather(*map(one, cases))


def parting(request: Request, alone: list[int], other: list[int], *, leaves: bool) -> Parting | None:
    """The position at which two answers part; an answer may be shorter if its client left."""
    for place, pair in enumerate(zip(alone, other, strict=False)):
        if pair[0] != pair[1]:
            return Parting(request, alone[:place], *pair)
    if len(alone) != len(other) and not (leaves and len(other) < len(alone)):
        raise Ling3Error(f"{request}: {len(other)} tokens together, {len(alone)} by itself, all equal so far")
    return None


def score(row: np.ndarray, request: Request, before: list[int]) -> np.ndarray:
    """Logits as they are compared in sampling: after penalties, and with the noise of the request's seed."""
    how = request.sampling
    penalties = {"presence": how.presence_penalty, "frequency": how.frequency_penalty}
    bias: Mapping[int, float] = dict(how.logit_bias)
    row = changed(row, request.prompt_ids, before, **penalties, repetition=how.repetition_penalty, bias=bias)
    if how.temperature == 0:
        return row
    key = jax.random.fold_in(jax.random.key(np.uint32(how.seed)), len(request.prompt_ids) + len(before))
    return row + how.temperature * np.asarray(jax.random.gumbel(key, (1, len(row)), np.float32))[0]


def error_of(engine: Engine, reference: Reference, requests: list[Request]) -> np.ndarray:
    """The largest error among the logits of each token, for single requests: these are not repeated."""
    errors = list[float]()
    for request in requests:
        (done,) = engine.complete([Request(request.prompt_ids, 16, logits=True, ignore_eos=True)])
        ids = [*done.prompt_ids, *done.token_ids[:-1]]
        rows = reference.logits_many([ids], [range(len(done.prompt_ids) - 1, len(ids))])[0]
        errors += np.abs(np.asarray(done.logits) - rows).max(axis=1).tolist()
    return np.sort(errors)


def spread(values: Sequence[float] | np.ndarray) -> dict[str, float]:
    """Median, 99 % and largest."""
    return {
        name: float(np.quantile(values, share)) for name, share in (("median", 0.5), ("99 %", 0.99), ("largest", 1))
    }


def main() -> None:
    """Prints how many answers part, and the gaps at which they do.

    Raises:
        SystemExit: An answer is wrong.
    """
    artifact, count, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]) if sys.argv[3:] else 0
    kinds, partings, tokens, answers = Counter[str](), list[Parting](), 0, 0
    with Engine(artifact, report=lambda text: None, max_requests=4096) as engine:
        exact, vocab = engine.manifest.plan.dtype == "float32", engine.manifest.vocab_size
        reference = stored_reference(
            artifact, engine.manifest.weights, config_of(engine.manifest), engine.manifest.plan
        )
        with serving(application(engine, Policy("m", None, 4096, 1 << 22))) as (host, port):
            server = Endpoint(f"http://{host}:{port}", key=None, timeout=600)
            for batch in range(-(-count // BATCH)):
                dice = random.Random(f"{seed} {batch}")
                size = min(BATCH, count - batch * BATCH)
                cases = [drawn(dice, engine, vocab, cuts=exact) for _ in range(size)]
                for case, found in zip(cases, asyncio.run(together(engine, server, cases)), strict=True):
                    kinds.update(["HTTP" if case.over_http else "Python", *["left"] * case.leaves, *case.body])
                    for request, other in zip(case.requests, found, strict=True):
                        alone = list(engine.complete([request])[0].token_ids)
                        part = parting(request, alone, other, leaves=case.leaves)
                        partings += [] if part is None else [part]
                        answers, tokens = answers + 1, tokens + len(other)
                print(f"{(batch + 1) * BATCH:6} requests, {len(partings)} part", file=sys.stderr, flush=True)
        result: dict[str, Any] = {"requests": count, "answers": answers, "tokens": tokens, "part": len(partings)}
        if not exact:
            errors = error_of(engine, reference, [case.requests[0] for case in cases[:MEASURED]])
            gaps = list[float]()
            for part in partings:
                ids = [*part.request.prompt_ids, *part.before]
                row = score(reference.logits_many([ids], [[len(ids) - 1]])[0][0], part.request, part.before)
                gaps.append(abs(float(row[part.alone] - row[part.together])))
            result |= {"error": spread(errors), "gap": spread(gaps or [0.0])}
            result["unexplained"] = sum(gap > 2 * float(errors[-1]) for gap in gaps)
    print(json.dumps(result | {"kinds": kinds}), flush=True)
    if result["part"] if exact else result["unexplained"]:
        raise SystemExit(f"wrong answers: {[part for part in partings if exact][:3]}")


if __name__ == "__main__":
    main()
