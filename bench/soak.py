"""2,000 requests of random lengths, a part of them cancelled or left, on a built artifact: what is held afterwards."""

import asyncio
import gc
import random
import sys
import threading
import time
from contextlib import aclosing
from pathlib import Path
from typing import Any

from bench.engine import DEMO
from bench.inputs import artifact, last_line, run
from bench.report import machine, show, table
from ling3export.runners.engine.engine import Engine

AT_ONCE = 100
WAVES = 4


def anonymous() -> float:
    """MiB of anonymous memory of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("RssAnon")).split()[1]) / 1024


async def client(engine: Engine, rng: random.Random, places: asyncio.Semaphore, ends: dict[str, int]) -> None:
    """Sends a request; reads it to the end, leaves, is cut off, or cancels."""
    async with places:
        vocabulary = engine.manifest.vocab_size
        prompt = [rng.randrange(vocabulary) for _ in range(int(rng.lognormvariate(3.5, 1.0)) + 1)]
        (handle,) = engine.submit(engine.request(prompt[:1500], rng.randint(1, 48)))
        way = rng.random()
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
        done = await handle.wait()
        ends[done.stop_reason] = ends.get(done.stop_reason, 0) + 1


def soak(folder: Path, requests: int) -> dict[str, Any]:
    """Runs the requests in waves in this process."""
    rng, ends = random.Random(0), dict[str, int]()

    async def wave(engine: Engine, count: int) -> None:
        places = asyncio.Semaphore(AT_ONCE)
        await asyncio.gather(*(client(engine, rng, places, ends) for _ in range(count)))

    rows = []
    with Engine(folder, report=lambda text: None) as engine:
        asyncio.run(wave(engine, AT_ONCE))
        for number in range(WAVES + 1):
            if number:
                asyncio.run(wave(engine, requests // WAVES))
            gc.collect()
            stats = engine.stats()
            rows.append({"requests": number * (requests // WAVES), "live": stats["live"], **stats["free"],
                         "threads": threading.active_count(), "anonymous MiB": anonymous()})  # fmt: skip
        final = engine.stats()
    return {"rows": rows, "ends": ends, "preempted": final["preempted"], "compile_events": final["compile_events"],
            "pools": final["pools"], "threads after": threading.active_count()}  # fmt: skip


def main(given: Path | None, requests: int, tp: int) -> dict[str, Any]:
    """Measures in a fresh process, and prints."""
    source = (given or DEMO).resolve()
    options = ["--paddings", "16,128,512", "--decode-paddings", "1,16,64", "--tp", tp, "--pages", 96, "--context", 2048,
               "--page-size", 64]  # fmt: skip
    built = artifact(source, f"soak-tp{tp}", options)
    started = time.perf_counter()
    found = last_line(run(["bench.soak", built, requests]))
    result = {"benchmark": "soak", "machine": machine(), "tp": tp, "seconds": time.perf_counter() - started, **found}
    head = list(found["rows"][0])
    show(
        f"{requests} requests on {source.name} at TP={tp} in {result['seconds']:.0f} s: ends {found['ends']}, "
        f"{found['preempted']} preempted, {found['compile_events']} compiled, {found['threads after']} thread(s) after",
        [table(head, [list(row.values()) for row in found["rows"]])],
        result,
    )
    return result


if __name__ == "__main__":
    import json

    print(json.dumps(soak(Path(sys.argv[1]), int(sys.argv[2]))))
