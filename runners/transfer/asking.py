"""How a server is asked to prefill for another one, by routers and by servers that decode: vLLM's HTTP protocol.

The client's body goes to P with one token to generate and ``do_remote_decode``; P's answer carries what D needs.
"""

import json
from collections.abc import Mapping
from typing import Any

from ling3export.runners.endpoint import Endpoint

AWAY = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
BUSY = {429, 500, 502, 503, 504}  # the server cannot now; another one may


class PrefillRefusedError(Exception):
    """A server answered, and gave no state away.

    Attributes:
        status: Its answer's status; 200 where the answer has no ``kv_transfer_params``.
        data: Its answer's body.
        wrong: Whether the request is, whoever is asked.
    """

    def __init__(self, status: int, data: bytes) -> None:
        super().__init__(f"status {status}")
        self.status, self.data = status, data
        self.wrong = 400 <= status < 500 and status not in BUSY


async def prefilled(endpoint: Endpoint, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """Has a server prefill the prompt of a client's body; gives the ``kv_transfer_params`` of who decodes.

    Leaving early closes the connection, by which the server frees what it has computed.

    Raises:
        PrefillRefusedError: The server does not do it.
        Ling3Error: Nobody answered, or the answer broke off.
    """
    asked = {name: value for name, value in body.items() if name not in ("stream_options", "max_completion_tokens")}
    asked |= {"max_tokens": 1, "stream": False, "n": 1, "kv_transfer_params": AWAY}
    status, data = await endpoint.whole("POST", path, json.dumps(asked).encode())
    try:
        params = json.loads(data).get("kv_transfer_params") if status == 200 else None
    except (ValueError, AttributeError, RecursionError):
        params = None
    if not isinstance(params, dict):
        raise PrefillRefusedError(status, data)
    return params
