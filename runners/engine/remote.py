"""Prompts whose prefill an engine asks other servers for, because no router before it does.

A prompt of which the prefix cache lacks many tokens waits in a queue, first come, first served, until two things are
so. It has a place here: fewer requests that came before it are live than there are slots, so the next free slot is its
own, and no state arrives that nobody can take. And a server is free: each is asked for a few prompts at a time. Then
the server is asked over HTTP, and the state is taken as if a router had brought its address. Whatever fails leaves the
prompt to this engine, and is counted. A place holds up nobody: requests that came later may have the slot meanwhile.
"""

import asyncio
import json
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter as now
from typing import TYPE_CHECKING, Any

from ling3export.foundation.errors import Ling3Error
from ling3export.runners.endpoint import Endpoint, told
from ling3export.runners.engine.request import Request
from ling3export.runners.state.prefix_cache import PrefixCache
from ling3export.runners.transfer.asking import PrefillRefusedError, prefilled
from ling3export.runners.transfer.options import Prefillers

if TYPE_CHECKING:
    from ling3export.runners.state.exchange import Exchange
    from ling3export.runners.state.form import Carried

PATH = "/v1/completions"
AT_ONCE = 4  # prompts that a server is asked for at a time; one, from a failure until it has answered
ASIDE = 1.0  # seconds that a server is left aside after a failure; twice as long after each further one,
LONGEST_ASIDE = 60.0  # and so long at most
WHOEVER = (401, 403, 404, 421)  # refusals that any other prompt would get, too
ENDS = ("taken", "failed", "refused", "expired", "late", "left")
HERE = ("short", "queue_full", "no_server")


@dataclass(eq=False)
class _Server:
    url: str
    endpoint: Endpoint
    live: int = 0
    asked: int = 0
    pause: float = 0.0  # of the last failure; 0 once it has answered
    until: float = 0.0  # it is left aside
    refused: bool = False  # which was reported, since it answered

    def failed(self, at: float) -> None:
        self.pause = min(2 * self.pause or ASIDE, LONGEST_ASIDE)
        self.until = at + self.pause


@dataclass(eq=False)
class _Job:
    number: int
    request: Request
    done: "Callable[[Carried | None], None]"
    ahead: Callable[[], int]
    begun: float
    until: float | None = None  # on the clock of the event loop, once it has its place
    timer: asyncio.TimerHandle | None = None
    task: asyncio.Task[None] | None = None
    why: str = "failed"


class RemotePrefills:
    """Asks other servers for the states of prompts, in a thread of its own.

    Args:
        how: Whom, and for which prompts.
        exchange: Takes their states.
        cache: What need not be asked for; only asked here what it knows. None where it is off.
        slots: How many sequences the engine runs at once.
        report: Told of each failure of a server.

    Attributes:
        counts: How prompts ended that servers were to be asked for: ``taken``; ``failed`` (no server, or no state),
            ``refused`` (by the server, or its state by this engine), ``expired`` (the lease of its state was over),
            ``late`` (no answer within the deadline), ``left`` (cancelled). And why others were prefilled here:
            ``short``, ``queue_full``, ``no_server`` (all are left aside).
    """

    def __init__(
        self,
        how: Prefillers,
        exchange: "Exchange",
        cache: PrefixCache | None,
        slots: int,
        report: Callable[[str], None],
    ) -> None:
        self._how, self._exchange, self._cache, self._slots, self._report = how, exchange, cache, slots, report
        self.counts: Counter[str] = Counter()
        self._counting = threading.Lock()
        self._servers = [_Server(url, Endpoint(url, key=how.key, timeout=2 * how.deadline)) for url in how.urls]
        self._queue: dict[int, _Job] = {}
        self._running: dict[int, _Job] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="ling3-remote", daemon=True)
        self._thread.start()

    def wants(self, request: Request) -> bool:
        """Whether a request's prompt is long enough, if the prefix cache knows nothing of it."""
        plain = not (request.leaves or request.comes or request.logits) and request.score_from is None
        if plain and len(request.prompt_ids) <= self._how.most_local:
            self._count("short")
        return plain and len(request.prompt_ids) > self._how.most_local

    def load(
        self, number: int, request: Request, done: "Callable[[Carried | None], None]", ahead: Callable[[], int]
    ) -> None:
        """Tells ``done`` the state of the request's prompt; None where it is to be prefilled here.

        Args:
            number: The request's; later ones have higher numbers.
            request: It.
            done: Called once, in another thread, unless the request is dropped.
            ahead: How many live requests came before it.
        """
        self._soon(self._arrive, _Job(number, request, done, ahead, now()))

    def drop(self, number: int) -> None:
        """Nobody waits for a request any more: a server that works for it is left, and frees what it has."""
        self._soon(self._drop, number)

    def look(self) -> None:
        """A request has ended, so another one may have a place."""
        if self._queue:
            self._soon(self._turn)

    def record(self) -> dict[str, int]:
        """How many prompts wait and how many are asked for or taken now, and all counts, as JSON."""
        counted = {name: self.counts[name] for name in (*ENDS, *HERE)}
        return {"queued": len(self._queue), "running": len(self._running), **counted}

    def close(self) -> None:
        """Ends the thread; who is asked is left. May be called again."""
        self._soon(self._end)
        if threading.current_thread() is not self._thread:
            self._thread.join()
            self._loop.close()

    def _count(self, what: str) -> None:
        with self._counting:
            self.counts[what] += 1

    def _soon(self, step: Callable[..., object], *given: object) -> None:
        with suppress(RuntimeError):  # it is closed
            self._loop.call_soon_threadsafe(step, *given)

    # What follows runs in the thread.

    def _arrive(self, job: _Job) -> None:
        if (why := self._here(job.request)) is not None:
            self._count(why)
            return job.done(None)
        self._queue[job.number] = job
        self._turn()

    def _here(self, request: Request) -> str | None:
        """Why a prompt is prefilled here; None where a server is asked."""
        length, hit = len(request.prompt_ids), 0
        if self._cache is not None:
            names = list(self._cache.names(self._cache.start(request.cache_salt), request.prompt_ids))
            hit = self._cache.look_up(names, length - 1).tokens
        if length - hit <= self._how.most_local:
            return "short"
        if len(self._queue) >= self._how.most_queued:
            return "queue_full"
        return None if self._well() else "no_server"

    def _well(self) -> list[_Server]:
        return [server for server in self._servers if server.until <= self._loop.time()]

    def _turn(self) -> None:
        """Asks for the prompts whose turn it is, in order of arrival."""
        while self._queue:
            job = next(iter(self._queue.values()))
            if job.ahead() >= self._slots:
                return
            if not (well := self._well()):
                for each in [*self._queue.values()]:
                    self._give_up(each, "no_server")
                return
            if job.until is None:
                job.until = self._loop.time() + self._how.deadline
            free = [server for server in well if server.live < (1 if server.pause else AT_ONCE)]
            if not free:
                if job.timer is None:
                    job.timer = self._loop.call_at(job.until, self._late, job)
                return
            if job.timer is not None:
                job.timer.cancel()
            server = min(free, key=lambda each: (each.live, each.asked))
            server.live += 1
            server.asked += 1
            self._running[job.number] = self._queue.pop(job.number)
            job.task = self._loop.create_task(self._fill(job, server))
            job.task.add_done_callback(partial(self._answered, server))

    def _answered(self, server: _Server, task: asyncio.Task[None]) -> None:
        server.live -= 1
        self._turn()

    def _late(self, job: _Job) -> None:
        if self._queue.get(job.number) is job:
            self._give_up(job, "late")
            self._turn()

    def _give_up(self, job: _Job, why: str) -> None:
        self._queue.pop(job.number, None)
        self._running.pop(job.number, None)
        self._count(why)
        job.done(None)

    async def _fill(self, job: _Job, server: _Server) -> None:
        try:
            async with asyncio.timeout_at(job.until):
                params = await prefilled(server.endpoint, PATH, body_of(job.request, self._how.model))
            self._take(job, params)
            server.pause, server.refused = 0.0, False
        except PrefillRefusedError as error:
            self._refused(server, error)
            self._give_up(job, "refused")
        except TimeoutError:
            self._fault(server, f"no answer within {self._how.deadline:g} s")
            self._give_up(job, "late")
        except Exception as error:  # whatever a server does, the prompt is prefilled here
            self._fault(server, error.message if isinstance(error, Ling3Error) else repr(error))
            self._give_up(job, "failed")

    def _refused(self, server: _Server, error: PrefillRefusedError) -> None:
        found = f"status {error.status}: {told(error.data)}"
        if not error.wrong or error.status in WHOEVER:
            self._fault(server, found)
        elif not server.refused:
            server.refused = True
            self._report(f"prefill at {server.url}: expected a state, found {found}")

    def _fault(self, server: _Server, found: str) -> None:
        at = self._loop.time()
        if at >= server.until:  # what it was asked for at the same time fails alike
            server.failed(at)
            self._report(f"prefill at {server.url}: expected a state, found {found}: left aside for {server.pause:g} s")

    def _take(self, job: _Job, params: Mapping[str, Any]) -> None:
        """Has the exchange take a state.

        Raises:
            Ling3Error: The server's answer names none.
        """
        asking = 1e3 * (now() - job.begun)
        taking = replace(job.request, kv_transfer_params={**params, "phases_ms": _phases(asking, params)})
        if not taking.comes:
            raise Ling3Error("kv_transfer_params without a state")

        def done(carried: "Carried | None") -> None:
            self._soon(self._taken, job, carried)

        self._exchange.load(job.number, taking, done, lambda reason: setattr(job, "why", reason))

    def _taken(self, job: _Job, carried: "Carried | None") -> None:
        if self._running.get(job.number) is not job:
            return
        if carried is None:
            return self._give_up(job, job.why)
        del self._running[job.number]
        self._count("taken")
        job.done(carried._replace(asked=True))

    def _drop(self, number: int) -> None:
        job = self._queue.pop(number, None) or self._running.pop(number, None)
        if job is None:
            return
        self._count("left")
        if job.task is not None and not job.task.done():
            job.task.cancel()
        elif job.task is not None:
            self._exchange.drop(number)
        self._turn()

    def _end(self) -> None:
        self._queue.clear()
        self._running.clear()
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        self._ending = self._loop.create_task(self._stop(tasks))

    async def _stop(self, tasks: set[asyncio.Task[Any]]) -> None:
        await asyncio.gather(*tasks, return_exceptions=True)
        self._loop.stop()


def body_of(request: Request, model: str) -> dict[str, Any]:
    """A body of /v1/completions that asks for what matters to a request's first token."""
    how, bodies = request.sampling, {"regex": "guided_regex", "lark": "guided_grammar"}
    body: dict[str, Any] = {
        "model": model,
        "prompt": list(request.prompt_ids),
        "temperature": how.temperature,
        "top_k": how.top_k,
        "top_p": how.top_p,
        "seed": how.seed,
        "presence_penalty": how.presence_penalty,
        "frequency_penalty": how.frequency_penalty,
        "repetition_penalty": how.repetition_penalty,
        "logit_bias": {str(token): add for token, add in how.logit_bias},
        "ignore_eos": request.ignore_eos,
        "cache_salt": request.cache_salt,
        "logprobs": request.logprobs,
    }
    if request.grammar is not None and request.grammar.kind == "json":
        schema = {"name": "schema", "schema": json.loads(request.grammar.text)}
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
    elif request.grammar is not None:
        body[bodies[request.grammar.kind]] = request.grammar.text
    return body


def _phases(asking: float, params: Mapping[str, Any]) -> dict[str, float]:
    """Milliseconds from a request's arrival to its server's answer: what the server did, and what was waiting."""
    said = params.get("phases_ms")
    found, left = {}, asking
    for name in ("prefill", "save"):
        each = said.get(name) if isinstance(said, Mapping) else None
        found[name] = max(0.0, min(float(each), left)) if isinstance(each, (int, float)) else 0.0
        left -= found[name]
    return {"queue": left, **found}
