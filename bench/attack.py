"""The latency of plain calls while another client sends hostile ones, in turns on one server."""

import asyncio
import json
import statistics
import urllib.error
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, aclosing, suppress
from pathlib import Path
from time import perf_counter as now
from typing import NamedTuple

import numpy as np

from bench.report import machine, say, show, table
from bench.server_process import RUNNER, ServerProcess
from bench.servers import asked, metric, served
from ling3export.foundation.errors import Ling3Error
from ling3export.foundation.strict_json import OBJECTS
from ling3export.runners.endpoint import Endpoint

Body = Callable[[int], bytes]  # the body of the attacker's call of this number
PLAIN = {"model": "m", "prompt": [5, 9, 7, 11, 13, 17, 19, 23], "max_tokens": 8, "temperature": 0, "ignore_eos": True}
PATH, CHAT = "/v1/completions", "/v1/chat/completions"
ANSWERS = 40  # answers to a call with a grammar
LEVELS = 20  # levels of the ambiguous grammar
MARKS = 400  # marks in a call of a tool

IDLE = 30.0  # seconds until the server has ended the attacker's requests
SHARES = (50, 99)  # percentiles
CALM = 0.3  # seconds between an attack and the calls after it


class Attack(NamedTuple):
    """Hostile calls and their harmless twins."""

    path: str
    hostile: Body
    harmless: Body
    callers: int = 1
    routed: bool = False


def fixed(body: Mapping[str, object]) -> Body:
    """The same body for every call, written once: the attacker shares its processor with the plain clients."""
    data = json.dumps(body).encode()
    return lambda number: data


def restricted(kind: str, text: str) -> Body:
    """Many answers in a form."""
    return fixed(PLAIN | {"max_tokens": 12, "n": ANSWERS, "temperature": 1, "structured_outputs": {kind: text}})


def ambiguous() -> str:
    """A grammar that can read a text in very many ways, close to the limit of llguidance's items for a token."""
    rules = [f'x{level}: x{level + 1} x{level + 1} | x{level + 1} | "a" | "b"' for level in range(LEVELS)]
    return "\n".join(["start:" + " x0" * 8, *rules, f'x{LEVELS}: "a" | "b"', ""])


def called(text: str) -> Body:
    """A streamed chat with a tool, whose answer is a call with this regex in it."""
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    chat = {"model": "m", "messages": [{"role": "user", "content": "a"}], "tools": [tool], "stream": True}
    return fixed(chat | {"max_tokens": MARKS, "structured_outputs": {"regex": f'<tool_call>\\{{"{text}'}})


def schema(body: Mapping[str, object]) -> bytes:
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": body}}
    return json.dumps(PLAIN | {"response_format": form}).encode()


def multiples(number: int) -> bytes:
    """A schema that needs all the time that a grammar may take to compile; each is different."""
    steps = [{"multipleOf": 9973 - 2 * number}, {"multipleOf": 9967 - 2 * number}]
    return schema({"type": "integer", "allOf": steps})


ATTACKS = {
    "ambiguous grammar": Attack(PATH, restricted("grammar", ambiguous()), restricted("regex", "[ab]{12}")),
    "marks in a call": Attack(CHAT, called(f"(</tool_call>){{{MARKS}}}"), called(f"(a){{{MARKS}}}")),
    "objects in a body": Attack(
        PATH,
        fixed(PLAIN | {"metadata": [{"a": 1}] * (OBJECTS - 4)}),
        fixed(PLAIN | {"metadata": " " * 8 * OBJECTS}),
        routed=True,
    ),
    "schemas that take hours": Attack(PATH, multiples, lambda number: schema({"const": number}), callers=4),
}


async def _attack(url: str, attack: Attack, body: Body, first: int, counts: dict[int, int]) -> None:
    """Sends calls one after the other until it is cancelled; counts their statuses."""
    server = Endpoint(url, key=None, timeout=IDLE)
    number = first
    while True:
        status = 0
        with suppress(OSError, TimeoutError):
            async with aclosing(server.replies("POST", attack.path, body(number))) as replies:
                async for reply in replies:
                    status = reply.status
        counts[status] = counts.get(status, 0) + 1
        number += attack.callers
        await asyncio.sleep(0.01)  # pause, even if the server refuses at once


async def _plain(url: str, seconds: float, rate: float) -> list[float]:
    """Milliseconds of plain calls, sent at a steady rate whether or not earlier ones have ended."""
    server, data = Endpoint(url, key=None, timeout=IDLE), json.dumps(PLAIN).encode()

    async def one(after: float) -> float:
        await asyncio.sleep(after)
        begun = now()
        status, answer = await server.whole("POST", PATH, data)
        if status != 200:
            raise Ling3Error(f"plain call: status {status}: {answer[:200]!r}")
        return 1e3 * (now() - begun)

    return list(await asyncio.gather(*(one(number / rate) for number in range(int(seconds * rate)))))


async def _turn(
    url: str, attack: Attack, body: Body | None, first: int, seconds: float, rate: float
) -> tuple[list[float], dict[int, int]]:
    counts = dict[int, int]()
    callers = range(attack.callers if body is not None else 0)
    tasks = [asyncio.create_task(_attack(url, attack, body, first + caller, counts)) for caller in callers]  # type: ignore[arg-type]
    await asyncio.sleep(CALM)
    times = await _plain(url, seconds, rate)
    for task in tasks:
        task.cancel()
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        if not isinstance(result, asyncio.CancelledError):
            raise Ling3Error(f"attacker: {result!r}")
    return times, counts


def _idle(url: str) -> None:
    end = now() + IDLE
    while metric(url, "ling3_requests_live"):
        if now() > end:
            raise Ling3Error(f"server: requests that their client left have not ended after {IDLE:g} s")
        asyncio.run(asyncio.sleep(0.05))


def main(artifact: Path, names: Sequence[str], turns: int, seconds: float, rate: float) -> None:
    """Prints a table: plain calls without an attack, with its harmless twin, and with it."""
    rows, result = [], {}
    for name in names:
        attack = ATTACKS[name]
        with ExitStack() as stack:
            server = url = stack.enter_context(served(artifact, "--max-requests", 256))
            if attack.routed:
                route = [*RUNNER, "route", "--decode", server, "--port", 0]
                url = stack.enter_context(ServerProcess("router", route, shown=True)).address()
            asked(url, PATH, PLAIN)
            for known in (attack.harmless, attack.hostile):  # the trial of a new grammar is not measured
                with suppress(urllib.error.HTTPError):
                    asked(url, attack.path, json.loads(known(0)))
            arms: dict[str, Body | None] = {"none": None, "harmless": attack.harmless, "hostile": attack.hostile}
            times: dict[str, list[float]] = {arm: [] for arm in arms}
            for turn in range(turns):
                for arm, body in arms.items():
                    new, counts = asyncio.run(_turn(url, attack, body, 1 + 100 * turn, seconds, rate))
                    times[arm] += new
                    say(f"{name}, {arm}, turn {turn + 1}: {statistics.median(new):.1f} ms; attacker's answers {counts}")
                    _idle(server)
        figures = {
            arm: dict(zip(SHARES, np.percentile(new, SHARES, method="higher").tolist(), strict=True))
            for arm, new in times.items()
        }
        worst = {arm: row[99] for arm, row in figures.items()}
        ratios = [worst["hostile"] / worst[arm] for arm in ("none", "harmless")]
        rows.append([name, *(value for row in figures.values() for value in row.values()), *ratios])
        result[name] = figures | {
            "calls": len(times["none"]),
            "p99_over_none": ratios[0],
            "p99_over_harmless": ratios[1],
        }
    head = ["plain calls, ms", *(f"{arm} p{share}" for arm in arms for share in SHARES), "p99 / none", "/ harmless"]
    show("Plain calls while another client attacks", [table(head, rows)], {"attacks": result, "machine": machine()})
