"""Answers through servers that prefill and servers that decode, which are killed at random moments.

    python -m tools.campaigns.pd_kills ARTIFACT ANSWERS KILLS [CARRIER [SECONDS]]

The artifact is in fp32 and can move states: each answer must have the tokens that one engine gives by itself. Prints
how many answers were wrong or missing, and what was not removed. A kill counts if the server had requests. The run ends
with both counts reached, or after SECONDS.
"""

import asyncio
import itertools
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

from bench.server_process import RUNNER, ServerProcess
from bench.servers import metric
from ling3export.foundation.errors import Ling3Error
from ling3export.foundation.processes import LOOPBACK, free_port
from ling3export.runners.endpoint import Endpoint
from ling3export.runners.engine.engine import Engine
from ling3export.runners.engine.request import Request, Sampling
from ling3export.runners.transfer.folder import PARTIAL, PREFIX, SHM, YOUNG
from ling3export.runners.transfer.options import Transfer

CLIENTS = 8
SPARE = 10.0  # seconds allowed after the time at which states must be removed
HUNG = 120.0  # seconds after which an answer counts as missing
ROLES = ("prefill", "prefill", "decode", "decode")


class Replica:
    """A server that is killed and started again at its address."""

    def __init__(self, artifact: Path, role: str, options: list[str]) -> None:
        self.role, self.port = role, free_port()
        self._words = [*RUNNER, "serve", artifact, "--model", "m", "--port", self.port, "--role", role, *options]
        self.url, self.pids = f"http://{LOOPBACK}:{self.port}", list[int]()
        self.start()

    def start(self) -> None:
        """Starts the server and waits until it listens."""
        self.server = ServerProcess("server", self._words)
        self.pids.append(self.server.process.pid)
        self.server.address()

    def kill(self) -> None:
        """Ends the server by SIGKILL, and starts it again."""
        self.server.process.kill()
        self.server.__exit__()
        self.start()


def requests(vocab: int, count: int) -> list[Request]:
    """Seeded prompts; half of them are sampled."""
    dice = random.Random(0)
    return [
        Request(
            tuple(dice.choices(range(vocab), k=dice.randint(20, 200))),
            dice.randint(4, 24),
            Sampling(temperature=dice.choice((0.0, 1.0)), seed=number),
            ignore_eos=True,
        )
        for number in range(count)
    ]


def body(request: Request) -> bytes:
    """A request as JSON."""
    how = {"temperature": request.sampling.temperature, "seed": request.sampling.seed, "ignore_eos": True}
    prompt = {"model": "m", "prompt": list(request.prompt_ids), "max_tokens": request.max_tokens}
    return json.dumps(prompt | how | {"return_token_ids": True}).encode()


async def answered(
    url: str, wanted: list[Request], kills: int, replicas: list[Replica], seconds: float
) -> tuple[list[tuple[int, list[int] | str]], int]:
    """Numbers of requests with their tokens or failures, and the kills that met a server with requests."""
    router, end = Endpoint(url, key=None, timeout=HUNG), time.monotonic() + seconds
    answers, numbers, dice = list[tuple[int, list[int] | str]](), itertools.count(), random.Random(1)
    down, struck = set[Replica](), 0

    def more() -> bool:
        return time.monotonic() < end and (len(answers) < len(wanted) or struck < kills)

    async def ask(request: Request) -> list[int] | str:
        while True:
            try:
                status, data = await asyncio.wait_for(router.whole("POST", "/v1/completions", body(request)), HUNG)
            except (Ling3Error, TimeoutError) as error:
                return f"hung: {error}"
            if status == 200:
                return list(json.loads(data)["choices"][0]["token_ids"])
            if status not in (429, 502, 503):
                return f"status {status}: {data[:200]!r}"
            await asyncio.sleep(0.1)  # a client that gets one of these tries again

    async def client() -> None:
        while more():
            number = next(numbers) % len(wanted)
            answers.append((number, await ask(wanted[number])))

    async def restart(replica: Replica) -> None:
        await asyncio.to_thread(replica.kill)
        down.remove(replica)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(CLIENTS):
            tasks.create_task(client())
        while more():
            await asyncio.sleep(dice.uniform(0, 0.3))
            replica = dice.choice(replicas)
            if struck == kills or any(other.role == replica.role for other in down):
                continue  # keep one server of each role running
            with suppress(OSError):
                if await asyncio.to_thread(metric, replica.url, "ling3_requests_live"):
                    struck += 1
                    down.add(replica)
                    tasks.create_task(restart(replica))
    return answers, struck


def states(folder: Path, before: set[str]) -> list[str]:
    """Names of states in a folder and in shared memory, without earlier ones."""
    names = {*os.listdir(folder), *os.listdir(SHM)} - before
    return sorted(name for name in names if PREFIX in name)


def emptied(names: Callable[[], list[str]]) -> float:
    """Waits until the servers have removed all states of killed ones, or the allowed time is over; returns the seconds.

    A new server finds a lease that has not ended. It looks again after a lease, and later for incomplete files.
    """
    begun = time.monotonic()
    while left := names():
        partial = any(name.endswith(PARTIAL) for name in left)
        if time.monotonic() > begun + 2 * Transfer.lease + (YOUNG if partial else 0) + SPARE:
            break
        time.sleep(1)
    return time.monotonic() - begun


def main() -> None:
    """Prints a line of JSON.

    Raises:
        SystemExit: An answer was wrong or missing, or something was not removed.
    """
    artifact, count, kills = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    carrier = sys.argv[4] if sys.argv[4:] else "file"
    seconds = float(sys.argv[5]) if sys.argv[5:] else 3600.0
    begun, before = time.monotonic(), set(os.listdir(SHM))
    with Engine(artifact, report=lambda text: None) as engine:
        wanted = requests(engine.manifest.vocab_size, count)
        tokens = [list(completion.token_ids) for completion in engine.complete(wanted)]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ling3-kills-")))
        options = ["--transfer", carrier, *(["--transfer-folder", str(folder)] if carrier == "file" else [])]
        replicas = list[Replica]()
        for role in ROLES:
            replicas.append(Replica(artifact, role, options))
            stack.callback(lambda replica: replica.server.__exit__(), replicas[-1])
        urls = [part for role, replica in zip(ROLES, replicas, strict=True) for part in (f"--{role}", replica.url)]
        route = [*RUNNER, "route", "--port", 0, *urls]
        url = stack.enter_context(ServerProcess("router", route)).address()
        answers, struck = asyncio.run(answered(url, wanted, kills, replicas, seconds))
        taken = sum(metric(replica.url, "ling3_transfer_total", what="loaded") for replica in replicas[2:])
        waited = emptied(lambda: states(folder, before))
        kept = len(states(folder, before))
        for replica in replicas:
            replica.server.__exit__()
        files = sum(path.is_file() for path in folder.rglob("*"))
    failures = Counter(answer.split(":")[0] for _, answer in answers if isinstance(answer, str))
    wrong = sum(isinstance(answer, list) and answer != tokens[number] for number, answer in answers)
    left = {
        "files while servers ran": kept,
        "files": files,
        "shared memory": len(states(SHM, before)),
        "processes": sum(Path(f"/proc/{pid}").exists() for replica in replicas for pid in replica.pids),
    }
    result = {"answers": len(answers), "wrong": wrong, "failed": failures, "kills": struck, "carrier": carrier}
    seconds = round(time.monotonic() - begun)
    print(
        json.dumps(
            result
            | {"states taken since the last kill": taken, "left": left, "waited": round(waited), "seconds": seconds}
        )
    )
    if wrong or failures or any(left.values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
