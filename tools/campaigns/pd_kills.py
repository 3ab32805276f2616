"""Kills of servers that prefill and decode apart, and of their router, at random moments: every answer is right or said
to be broken off, who was not killed serves on, and who comes back at the same address does, too.

``python -m tools.campaigns.pd_kills ARTIFACT COUNT [CARRIER [FAULT]]`` kills COUNT times for each fault whose name has
FAULT in it, with states over CARRIER (tcp), and prints a row of a table for each. After each kill whoever was killed is
started again, and two more prompts are answered: one whose state D takes from P, and one through the router.
"""

import json
import multiprocessing
import os
import random
import sys
import tempfile
import threading
import time
import urllib.error
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from bench.pd import WAIT, asked, metric, options
from ling3export.runners.cli.main import main as main_of_runner
from ling3export.runners.route.workers import AWAY
from ling3export.runners.transfer import shm

TOKENS = 24
BROKEN = (OSError, urllib.error.URLError, ValueError, KeyError)  # what a client sees of a process that died
Found = list[list[int] | None]  # the tokens of each answer; None for one that was broken off


FORKING = multiprocessing.get_context("forkserver")  # of a process that has imported all: a start takes a third


def run(words: Sequence[str], output: str) -> None:
    """A command of the runner, in a process of its own."""
    sys.stdout = open(output, "w")  # noqa: SIM115
    main_of_runner(words, prog_name="ling3-runner")


class Place:
    """A server that can be killed and started again at the same address."""

    def __init__(self, stack: ExitStack, folder: str, *words: str) -> None:
        self._words, self._port, self._output = words, "0", f"{folder}/{id(self)}"
        stack.callback(self.stop)
        self.start()

    def start(self) -> None:
        Path(self._output).write_text("")
        self.process = FORKING.Process(target=run, args=([*self._words, "--port", self._port], self._output))
        self.process.start()

    def ready(self) -> str:
        end = time.monotonic() + WAIT
        while not (said := Path(self._output).read_text()).endswith("\n"):
            assert self.process.is_alive() and time.monotonic() < end, f"{self._words}: it does not start"
            time.sleep(0.02)
        self.url = said.strip()
        self._port = self.url.rpartition(":")[2]
        return self.url

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    def stop(self) -> None:
        self.process.terminate()
        self.process.join(WAIT)
        self.kill()


class Rig:
    """Two servers that prefill, two that decode, of each of which the first may be killed, and a router."""

    def __init__(self, artifact: Path, carrier: str, folder: str, stack: ExitStack) -> None:
        serve = ["serve", str(artifact), "--check", "programs", "--transfer", carrier, "--transfer-timeout", "5"]
        serve += ["--lease", "10", *(["--transfer-folder", folder] if carrier == "file" else [])]
        self.servers = [
            Place(stack, folder, *serve, "--role", role) for role in ("prefill", "prefill", "decode", "decode")
        ]
        self.p, _, self.d, self.other = self.servers
        urls = [each.ready() for each in self.servers]
        self.router = Place(stack, folder, "route", *options("prefill", urls[:2]), *options("decode", urls[2:]))
        self.router.ready()
        self.name = json.loads(asked(self.d.url, "/v1/models"))["data"][0]["id"]

    def asked(self, url: str, seed: int, **more: Any) -> Any:
        """An answer to the prompt of a seed."""
        rng = random.Random(seed)
        prompt = [rng.randrange(300) for _ in range(rng.randint(1, 80))]
        body = {
            "model": self.name,
            "prompt": prompt,
            "max_tokens": TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        return json.loads(asked(url, "/v1/completions", body | more))

    def tokens(self, url: str, seed: int, **more: Any) -> list[int]:
        found: list[int] = self.asked(url, seed, **more)["choices"][0]["token_ids"]
        return found

    def moved(self, seed: int) -> list[int]:
        """An answer of D to a prompt of P, as a router asks; D must have taken the state."""
        params = self.asked(self.p.url, seed, max_tokens=1, kv_transfer_params=AWAY)["kv_transfer_params"]
        found = self.asked(self.d.url, seed, kv_transfer_params=params)
        usage, tokens = found["usage"], found["choices"][0]["token_ids"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"], "no state was taken"
        return list(tokens)

    def taken(self) -> Counter[str]:
        """How many states servers that decode took, and how many they could not."""
        names = ("loaded", "load_failed", "not_loaded")
        return Counter({name: int(metric(self.d.url, f'ling3_transfer_total{{what="{name}"}}')) for name in names})

    def idle(self) -> None:
        """Waits until no server has a request or holds a slot."""
        end = time.monotonic() + WAIT
        for each in self.servers:
            while self.holding(each.url):
                assert time.monotonic() < end, "a server still holds what nobody waits for"
                time.sleep(0.05)

    @staticmethod
    def holding(url: str) -> bool:
        """Whether a server has a request or holds a slot."""
        live, free, slots = (metric(url, f"ling3_{name}") for name in ("requests_live", "slots_free", "slots"))
        return bool(live) or free != slots


def before(rig: Rig, rng: random.Random, seed: int) -> Found:
    """P dies while it computes the prompt or hands it over, or before: whoever routes asks D alone."""
    given: dict[str, Any] = {}
    killing = threading.Timer(rng.uniform(0, 0.2), rig.p.kill)
    killing.start()
    with suppress(*BROKEN):
        answer = rig.asked(rig.p.url, seed, max_tokens=1, kv_transfer_params=AWAY)
        given = {"kv_transfer_params": answer["kv_transfer_params"]}
    killing.join()
    return [rig.tokens(rig.d.url, seed, **given)]


def during(rig: Rig, rng: random.Random, seed: int, delay: float = 0.02) -> Found:
    """P dies while D takes the state, or a little before or after."""
    params = rig.asked(rig.p.url, seed, max_tokens=1, kv_transfer_params=AWAY)["kv_transfer_params"]
    killing = threading.Timer(rng.uniform(0, delay), rig.p.kill)
    killing.start()
    if not delay:
        killing.join()
    found = rig.tokens(rig.d.url, seed, kv_transfer_params=params)
    killing.join()
    return [found]


def after(rig: Rig, rng: random.Random, seed: int) -> Found:
    """P dies behind its answer, before D asks for the state."""
    return during(rig, rng, seed, 0)


def several(rig: Rig, rng: random.Random, seed: int, victim: Place) -> Found:
    """Four requests through the router, while a process dies."""
    found: Found = [None] * 4

    def ask(at: int) -> None:
        with suppress(*BROKEN):
            found[at] = rig.tokens(rig.router.url, seed + at)

    threads = [threading.Thread(target=ask, args=(at,)) for at in range(4)]
    for thread in threads:
        thread.start()
    time.sleep(rng.uniform(0, 0.5))
    victim.kill()
    for thread in threads:
        thread.join(WAIT)
        assert not thread.is_alive(), "a request hangs"
    return found


def prefiller(rig: Rig, rng: random.Random, seed: int) -> Found:
    """P dies under requests that came through the router: none is lost."""
    found = several(rig, rng, seed, rig.p)
    assert None not in found, "a request was lost with a server that prefills"
    return found


def decoder(rig: Rig, rng: random.Random, seed: int) -> Found:
    """D dies under requests that came through the router."""
    return several(rig, rng, seed, rig.d)


def router(rig: Rig, rng: random.Random, seed: int) -> Found:
    """The router dies: its requests break off, and the servers end them."""
    return several(rig, rng, seed, rig.router)


Fault = tuple[Callable[[Rig, random.Random, int], Found], Callable[[Rig], Place]]  # what happens, and to whom
FAULTS: dict[str, Fault] = {
    "P killed before it hands over": (before, lambda rig: rig.p),
    "P killed while D takes": (during, lambda rig: rig.p),
    "P killed after its answer": (after, lambda rig: rig.p),
    "P killed behind the router": (prefiller, lambda rig: rig.p),
    "D killed behind the router": (decoder, lambda rig: rig.d),
    "router killed": (router, lambda rig: rig.router),
}


def inject(rig: Rig, fault: str, count: int) -> tuple[int, str]:
    """How many answers were wrong, and a row of the table."""
    act, whose = FAULTS[fault]
    counts, taken, longest = Counter[str](), Counter[str](), 0.0
    for seed in range(0, 10 * count, 10):
        known, begun = rig.taken(), time.monotonic()
        found = act(rig, random.Random(f"{fault} {seed}"), seed)
        longest = max(longest, time.monotonic() - begun)
        if whose(rig) is not rig.d:
            taken += rig.taken() - known
        whose(rig).start()
        whose(rig).ready()
        rig.idle()
        found += [rig.moved(seed), rig.tokens(rig.router.url, seed)]  # who came back serves
        for at, tokens in zip([*range(len(found) - 2), 0, 0], found, strict=True):
            right = None if tokens is None else tokens == rig.tokens(rig.other.url, seed + at)
            counts["broken off" if right is None else "right" if right else "wrong"] += 1
    row = (
        fault,
        count,
        *(counts[each] for each in ("right", "broken off", "wrong")),
        taken["loaded"],
        taken["load_failed"] + taken["not_loaded"],
        f"{longest:.1f} s",
    )
    return counts["wrong"], f"| {' | '.join(map(str, row))} |"


def main(artifact: str, count: str, carrier: str = "tcp", only: str = "") -> int:
    """Kills, and prints what came of it; how many answers were wrong and how many segments were left."""
    wrong, segments = 0, set(shm.FOLDER.glob(f"{shm.own_prefix()}*"))
    print("| fault | kills | right | broken off | wrong | states taken | not taken | longest |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="pd-kills-"))
        rig = Rig(Path(artifact), carrier, folder, stack)
        for fault in (each for each in FAULTS if only in each):
            more, row = inject(rig, fault, int(count))
            wrong += more
            print(row, flush=True)
    if carrier != "shm":
        return wrong
    print()
    for age in (shm.YOUNG, 0.0):  # what is empty, as leases are, may be about to be locked: gc leaves it for a minute
        shm.YOUNG = age
        list(shm.collect(dry_run=False))
        left = {path for path in shm.FOLDER.glob(f"{shm.own_prefix()}*") if path not in segments}
        leases = sum(path.suffix == ".lease" for path in left)
        print(f"left after gc{'' if age else ' a minute later'}: {len(left) - leases} segments, {leases} leases")
    return wrong + len(left)


if __name__ == "__main__":
    os.environ["JAX_PLATFORMS"] = "cpu"
    FORKING.set_forkserver_preload(["jax", "ling3export.runners.engine.engine", "ling3export.runners.route.app"])
    sys.exit(main(*sys.argv[1:]) > 0)
