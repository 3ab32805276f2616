"""The servers that a router knows: whether they answer, how busy they are, and what they hold of a prompt.

How one of them is asked to prefill for another one is vLLM's HTTP protocol: the client's body goes to P with one token
to generate and ``do_remote_decode``; P's answer carries what D needs.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from prometheus_client.parser import text_string_to_metric_families

from ling3export.foundation.errors import Ling3Error
from ling3export.runners.endpoint import Endpoint
from ling3export.runners.route.blocks import Tokens
from ling3export.runners.route.events import KVEventSubscriber

AWAY = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
BUSY = {429, 500, 502, 503, 504}  # statuses after which another server may answer


class WorkerLoad(NamedTuple):
    """What decides between servers.

    Attributes:
        hit: Share of the prompt that the server's prefix cache has, by its events; 0 where it tells none.
        usage: Share of its pages that are held.
        waiting: Requests that have no slot.
    """

    hit: float
    usage: float
    waiting: float


def scores(loads: Sequence[WorkerLoad], weight: float = 1.0) -> list[float]:
    """``weight · hit - (usage + waiting / largest waiting) / 2`` of each server."""
    most = max((load.waiting for load in loads), default=0) or 1
    return [weight * load.hit - (load.usage + load.waiting / most) / 2 for load in loads]


@dataclass(eq=False)
class Worker:
    """A server.

    Attributes:
        url: Its address.
        endpoint: How it is called.
        events: What it tells of its blocks.
        well: Whether it answered the last time.
        live: Requests of this router that it has at the moment.
        usage: Share of its pages that are held, when it was asked last.
        queued: Requests without a slot, when it was asked last.
        picked: How often it was chosen.
        failed: How often it did not answer.
    """

    url: str
    endpoint: Endpoint
    events: KVEventSubscriber
    well: bool = True
    live: int = 0
    usage: float = 0.0
    queued: float = 0.0
    picked: int = 0
    failed: int = 0

    def load(self, tokens: Tokens | None = None) -> WorkerLoad:
        """What decides between this server and others for a prompt."""
        known = tokens is not None and self.events.live
        hit = self.events.hit(tokens) / max(1, tokens.length) if known and tokens is not None else 0.0
        return WorkerLoad(hit, self.usage, self.queued + self.live)

    @contextmanager
    def asked(self) -> Iterator[None]:
        """Counts a request that the server has within the block."""
        self.picked += 1
        self.live += 1
        try:
            yield
        finally:
            self.live -= 1

    def lost(self) -> None:
        """Notes that it did not answer: its cache may be lost."""
        self.well = False
        self.failed += 1
        self.events.end()

    async def look(self) -> None:
        """Asks for its health and load; missing figures count as zero."""
        try:
            status, health = await self.endpoint.whole("GET", "/health")
            if status != 200:
                return self.lost()
            _, data = await self.endpoint.whole("GET", "/metrics")
        except Ling3Error:
            return self.lost()
        try:
            self.events.told(json.loads(health))
        except (ValueError, RecursionError):  # another kind of server
            self.events.end()
        said = _samples(data.decode(errors="replace"))
        pages, slots = said.get("ling3_pages", 0.0), said.get("ling3_slots", 0.0)
        self.usage = 1 - said.get("ling3_pages_free", 0.0) / pages if pages else 0.0
        held = slots - said.get("ling3_slots_free", 0.0)
        self.queued = max(0.0, said.get("ling3_requests_live", 0.0) - held - self.live)
        self.well = True


def _samples(text: str) -> dict[str, float]:
    """The values of a page of metrics, by name; empty where the text is no such page."""
    try:
        found = [each for family in text_string_to_metric_families(text) for each in family.samples]
    except ValueError:
        return {}
    return {each.name: each.value for each in found if not each.labels}


def best(workers: Sequence[Worker], weight: float, tokens: Tokens | None = None) -> Worker | None:
    """The server of the highest score among those that answer; of equals the first. None where none does."""
    there = [worker for worker in workers if worker.well]
    if not there:
        return None
    rated = scores([worker.load(tokens) for worker in there], weight)
    return there[rated.index(max(rated))]


class PrefillRefusedError(Exception):
    """A server answered, and did not prefill for another one.

    Attributes:
        status: Its answer's status; 200 where the answer has no ``kv_transfer_params``.
        data: Its answer's body.
        wrong: Whether the request is wrong for every server.
    """

    def __init__(self, status: int, data: bytes) -> None:
        super().__init__(f"status {status}")
        self.status, self.data = status, data
        self.wrong = 400 <= status < 500 and status not in BUSY


async def prefilled(endpoint: Endpoint, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """Has a server prefill the prompt of a client's body; gives the ``kv_transfer_params`` for the server that
    decodes.

    Leaving early closes the connection, by which the server frees what it has computed.

    Raises:
        PrefillRefusedError: The server does not do it.
        Ling3Error: Nobody answered, or the answer broke off.
    """
    asked = {name: value for name, value in body.items() if name not in ("stream_options", "max_completion_tokens")}
    asked |= {"max_tokens": 1, "stream": False, "n": 1, "kv_transfer_params": AWAY}
    if body.get("min_tokens"):
        asked["min_tokens"] = 1  # of the one token; D counts on
    status, data = await endpoint.whole("POST", path, json.dumps(asked).encode())
    try:
        params = json.loads(data).get("kv_transfer_params") if status == 200 else None
    except (ValueError, AttributeError, RecursionError):
        params = None
    if not isinstance(params, dict):
        raise PrefillRefusedError(status, data)
    return params
