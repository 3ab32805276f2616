"""``GET`` and ``DELETE /v1/states/ID``: another server takes the state of a prompt, or gives it back.

The shared secret is the key of these calls, not the clients' API key (``runners/transfer/http.py``).
"""

from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from ling3export.runners.serve.schema import ApiError, refused
from ling3export.runners.transfer.http import PROOF, STATES, HttpStore

PIECE = 1 << 20  # bytes that are sent at a time


def state_routes(store: HttpStore) -> list[Route]:
    """The routes of a server whose engine keeps states for others."""

    async def state(request: Request) -> Response | Any:
        name = request.path_params["name"]
        if not store.holds(name, request.method, request.headers.get("authorization", "")):
            return refused(ApiError(401, "state: the caller does not prove the secret", code="invalid_secret"))
        proof = {PROOF: store.proof(name)}
        unknown = refused(ApiError(404, "state: it was taken, given back or never here, or its lease is over"))
        if request.method == "DELETE":
            return Response(headers=proof) if store.give_back(name) else unknown
        if (taken := store.take(name)) is None:
            return unknown
        return _StateResponse(*taken, proof)

    return [Route(STATES + "{name}", state, methods=["GET", "DELETE"])]


class _StateResponse(StreamingResponse):
    """The bytes of a state. However the response ends, the state is freed."""

    def __init__(self, memory: np.ndarray, sent: Callable[[bool], None], headers: Mapping[str, str]) -> None:
        headers = {**headers, "Content-Length": str(memory.nbytes)}
        super().__init__(self._pieces(memory.data), headers=headers, media_type="application/octet-stream")
        self._sent, self._whole = sent, False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._sent(self._whole)

    async def _pieces(self, memory: memoryview) -> AsyncGenerator[memoryview, None]:
        for at in range(0, len(memory), PIECE):
            yield memory[at : at + PIECE]
        self._whole = True
