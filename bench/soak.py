"""2,000 requests of random lengths on a built artifact, and faults among them: how each ended, and what is held then.

Faults: requests that are cancelled or left, prompts that are too long or no prompts, a token whose embedding is NaN
(written behind the digests), and restarts of the engine in the middle of each wave.
"""

import asyncio
import gc
import random
import shutil
import sys
import threading
import time
from contextlib import aclosing
from pathlib import Path
from typing import Any

from bench.engine import DEMO
from bench.faults import put_nan
from bench.inputs import CACHE, artifact, fresh, last_line, run
from bench.report import anonymous, machine, show, table
from ling3export.foundation.errors import RequestError
from ling3export.runners.engine.engine import Engine
from ling3export.runners.engine.handle import EngineStopped, LogitsError

AT_ONCE = 100
WAVES = 4
TRIES = 20
GIVEN_UP = "given up"  # after so many tries
BAD = 5  # the token whose embedding is NaN
WRONG: tuple[Any, ...] = ([1] * 100_000, [], [1.5], [-1], "\ud83d", None, b"abc")


async def client(engine: Engine, rng: random.Random, places: asyncio.Semaphore, ends: dict[str, int]) -> None:
    """Sends a request, and another in its place where the engine was restarted meanwhile; notes how each ended."""
    async with places:
        for _ in range(TRIES):
            try:
                end = await ending(engine, rng)
            except (RequestError, LogitsError, EngineStopped) as error:
                end = type(error).__name__
            ends[end] = ends.get(end, 0) + 1
            if end != EngineStopped.__name__:
                return
            await asyncio.sleep(rng.uniform(0.2, 1))  # a restart takes as long
        ends[GIVEN_UP] = ends.get(GIVEN_UP, 0) + 1


async def ending(engine: Engine, rng: random.Random) -> str:
    """Sends a request; reads it to the end, leaves, is cut off, or cancels. How it ended."""
    prompt: Any = [rng.randrange(BAD + 1, engine.manifest.vocab_size) for _ in range(int(rng.lognormvariate(3.5, 1.0)))]
    prompt = [7, *prompt[:1499]]
    way = rng.random()
    if way > 0.95:
        prompt = rng.choice(WRONG)
    elif way > 0.9:
        prompt.insert(rng.randrange(len(prompt)), BAD)
    (handle,) = engine.submit(engine.request(prompt, rng.randint(1, 48)))
    if way < 0.15:  # a disconnect
        task = asyncio.create_task(handle.wait())
        await asyncio.sleep(rng.expovariate(5))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    elif way < 0.3:
        async with aclosing(handle.pieces()) as pieces:
            async for _ in pieces:
                if rng.random() < 0.2:
                    break
    elif way < 0.4:
        handle.cancel()
    return (await handle.wait()).stop_reason


def soak(folder: Path, requests: int) -> dict[str, Any]:
    """Runs the requests in waves in this process. Fails where one of them has no end."""
    rng, ends, failed = random.Random(0), dict[str, int](), list[int]()

    async def restart(engine: Engine) -> None:
        await asyncio.sleep(1)
        failed.append(await asyncio.to_thread(engine.restart))

    async def wave(engine: Engine, count: int) -> None:
        places = asyncio.Semaphore(AT_ONCE)
        await asyncio.gather(restart(engine), *(client(engine, rng, places, ends) for _ in range(count)))

    rows = []
    with Engine(folder, check="programs", report=lambda text: None) as engine:
        asyncio.run(wave(engine, AT_ONCE))
        for number in range(WAVES + 1):
            if number:
                asyncio.run(wave(engine, requests // WAVES))
            gc.collect()
            stats = engine.stats()
            rows.append(
                {
                    "requests": number * (requests // WAVES),
                    "live": stats["live"],
                    **stats["free"],
                    "threads": threading.active_count(),
                    "anonymous MiB": anonymous() / 2**20,
                }
            )
        final = engine.stats()
    lost = AT_ONCE + WAVES * (requests // WAVES) - sum(ends.values()) + ends.get(EngineStopped.__name__, 0)
    held = [row for row in rows if row["live"] or any(row[pool] != size for pool, size in final["pools"].items())]
    assert not lost and not held and GIVEN_UP not in ends, (lost, held, ends)
    assert sum(failed) <= ends.get("EngineStopped", 0), (failed, ends)  # others were refused meanwhile
    return {
        "rows": rows,
        "ends": ends,
        "restarts": len(failed),
        "lost": lost,
        "preempted": final["preempted"],
        "compile_events": final["compile_events"],
        "pools": final["pools"],
        "threads after": threading.active_count(),
    }


def main(given: Path | None, requests: int, tp: int) -> dict[str, Any]:
    """Measures in a fresh process, and prints."""
    source = (given or DEMO).resolve()
    options = [
        "--paddings",
        "16,128,512",
        "--decode-paddings",
        "1,16,64",
        "--tp",
        tp,
        "--pages",
        96,
        "--context",
        2048,
        "--page-size",
        64,
    ]
    built = artifact(source, f"soak-tp{tp}", options)
    spoiled = shutil.copytree(built, fresh(CACHE / "soak-nan") / built.name)
    put_nan(spoiled, "embeddings.word_embeddings", 0, BAD)
    started = time.perf_counter()
    found = last_line(run(["bench.soak", spoiled, requests]))
    result = {"benchmark": "soak", "machine": machine(), "tp": tp, "seconds": time.perf_counter() - started, **found}
    head = list(found["rows"][0])
    show(
        f"{requests} requests on {source.name} at TP={tp} in {result['seconds']:.0f} s: ends {found['ends']}, "
        f"{found['lost']} lost, {found['restarts']} restarts, {found['preempted']} preempted, "
        f"{found['compile_events']} compiled, {found['threads after']} thread(s) after",
        [table(head, [list(row.values()) for row in found["rows"]])],
        result,
    )
    return result


if __name__ == "__main__":
    import json

    print(json.dumps(soak(Path(sys.argv[1]), int(sys.argv[2]))))
