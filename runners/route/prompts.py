"""The token ids of prompts: those that a request has, or what a server's ``/tokenize`` makes of its text.

A prompt waits for them only as long as ``WITHIN``, and not at all while servers fail to tell them, nor for a request
whose prompt ``/tokenize`` does not make: one with several prompts or with tools, and those of ``/v1/responses``.
"""

import asyncio
import json
from collections.abc import Sequence
from time import monotonic as now
from typing import Any

from ling3export.foundation.errors import Ling3Error
from ling3export.runners.route.blocks import Tokens
from ling3export.runners.route.workers import Worker

WITHIN = 1.0  # seconds for an answer
TEMPLATE = ("chat_template_kwargs", "reasoning_effort", "add_generation_prompt", "continue_final_message")
AGAIN = 10.0  # seconds until the next question after a failure


class Prompts:
    """Asks servers for the tokens of prompts.

    Args:
        workers: Whom to ask.
    """

    def __init__(self, workers: Sequence[Worker]) -> None:
        self._workers, self._until = workers, 0.0

    async def tokens(self, path: str, body: dict[str, Any]) -> Tokens | None:
        """The tokens of a request's prompt; None where they are not known, or no server tells its events."""
        salt, asked = body.get("cache_salt") or "", _asked(path, body)
        listened = [worker for worker in self._workers if worker.well and worker.events.live]
        if asked is None or not isinstance(salt, str) or not listened:
            return None
        if isinstance(asked, list):
            return _tokens(asked, salt)
        return await self._said(min(listened, key=lambda worker: worker.live), json.dumps(asked).encode(), salt)

    async def _said(self, worker: Worker, data: bytes, salt: str) -> Tokens | None:
        if now() < self._until:
            return None
        try:
            status, answer = await asyncio.wait_for(worker.endpoint.whole("POST", "/tokenize", data), WITHIN)
            said = json.loads(answer)
        except (Ling3Error, TimeoutError, ValueError):
            status, said = 503, None
        if status == 200 and isinstance(said, dict):
            return _tokens(said.get("tokens"), salt)
        if status != 400:  # not the prompt's fault
            self._until = now() + AGAIN
        return None


def _asked(path: str, body: dict[str, Any]) -> list[Any] | dict[str, Any] | None:
    """Token ids, or what ``/tokenize`` is asked; None where it cannot be."""
    if path == "/v1/chat/completions":
        messages = body.get("messages")
        asked = {name: body[name] for name in TEMPLATE if body.get(name) is not None}
        return {"messages": messages} | asked if isinstance(messages, list) and not body.get("tools") else None
    if path != "/v1/completions":
        return None
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
        (prompt,) = prompt
    if isinstance(prompt, str):
        return {"prompt": prompt}
    return prompt if isinstance(prompt, list) else None


def _tokens(ids: Any, salt: str) -> Tokens | None:
    try:
        return Tokens(ids, salt) if ids and isinstance(ids, list) else None
    except ValueError:
        return None
