"""The servers that a router knows: whether they answer, how busy they are, and how one prefills for another.

That is vLLM's HTTP protocol: P gets the client's body with one token to generate and ``do_remote_decode``; its answer
carries what D needs.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from ling3export.foundation.errors import Ling3Error
from ling3export.runners.endpoint import Endpoint

AWAY = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
BUSY = {429, 500, 502, 503, 504}  # statuses after which another server may answer


@dataclass(eq=False)
class Worker:
    """A server."""

    url: str
    endpoint: Endpoint
    healthy: bool = True  # whether it answered the last time
    live: int = 0  # requests of this router that it has at the moment
    usage: float = 0.0  # share of its pages that are held, at the last look
    queued: float = 0.0  # requests of others without a slot, at the last look

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Counts a request that the server has within the block."""
        self.live += 1
        try:
            yield
        finally:
            self.live -= 1

    def lost(self) -> None:
        """Notes that it did not answer."""
        self.healthy = False

    async def look(self) -> None:
        """Reads its health and load; missing figures count as zero."""
        try:
            status, _ = await self.endpoint.whole("GET", "/health")
            if status != 200:
                return self.lost()
            _, data = await self.endpoint.whole("GET", "/metrics")
        except Ling3Error:
            return self.lost()
        samples = _samples(data.decode(errors="replace"))
        pages, slots = samples.get("ling3_pages", 0.0), samples.get("ling3_slots", 0.0)
        self.usage = 1 - samples.get("ling3_pages_free", 0.0) / pages if pages else 0.0
        held = slots - samples.get("ling3_slots_free", 0.0)
        self.queued = max(0.0, samples.get("ling3_requests_live", 0.0) - held - self.live)
        self.healthy = True


def _samples(text: str) -> dict[str, float]:
    """The values of a page of metrics, by name; empty where the text is no such page."""
    try:
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    except ValueError:
        return {}
    return {sample.name: sample.value for sample in samples if not sample.labels}


def least_loaded(workers: Sequence[Worker], tried: Sequence[Worker] = ()) -> Worker | None:
    """The healthy server with the fewest requests, then the fewest pages; of equals the first. None if none is.

    Those that were ``tried`` do not count.
    """
    healthy = (worker for worker in workers if worker.healthy and worker not in tried)
    return min(healthy, key=lambda worker: (worker.queued + worker.live, worker.usage), default=None)


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


def written(body: Mapping[str, Any]) -> bytes:
    """A body as JSON, by msgspec unless it has half a character: json needs five times as long."""
    try:
        return msgspec.json.encode(body)
    except ValueError:
        return json.dumps(body).encode()


def prefill_body(body: Mapping[str, Any]) -> bytes:
    """The body for the server that prefills a client's prompt."""
    fields = {name: value for name, value in body.items() if name not in ("stream_options", "max_completion_tokens")}
    fields |= {"max_tokens": 1, "stream": False, "n": 1, "kv_transfer_params": AWAY}
    if body.get("min_tokens"):
        fields["min_tokens"] = 1  # of the one token; D counts on
    return written(fields)


async def prefilled(endpoint: Endpoint, path: str, body: bytes) -> dict[str, Any]:
    """Has a server prefill a prompt; returns the ``kv_transfer_params`` for the server that decodes.

    Leaving early closes the connection, by which the server frees what it has computed.

    Raises:
        PrefillRefusedError: The server does not do it.
        Ling3Error: Nobody answered, or the answer broke off.
    """
    status, data = await endpoint.whole("POST", path, body)
    try:
        params = json.loads(data).get("kv_transfer_params") if status == 200 else None
    except (ValueError, AttributeError, RecursionError):
        params = None
    if not isinstance(params, dict):
        raise PrefillRefusedError(status, data)
    return params
