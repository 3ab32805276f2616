"""Answers in the shapes of OpenAI's API."""

import secrets
import time
from collections.abc import Sequence
from typing import Any

from ling3export.runners.engine.handle import Piece
from ling3export.runners.engine.request import Completion
from ling3export.runners.serve.schema import Call

REASONS = {"eos": "stop", "stop": "stop", "length": "length"}


class Shapes:
    """The shapes of one call's answer.

    Args:
        call: What was asked.
        model: Name that the model is served under.
    """

    def __init__(self, call: Call, model: str) -> None:
        self._call = call
        kind, name = ("chat.completion", "chatcmpl") if call.chat else ("text_completion", "cmpl")
        self._kind = kind
        self._head = {"id": f"{name}-{secrets.token_hex(12)}", "created": int(time.time()), "model": model}

    def whole(self, completions: Sequence[Completion]) -> dict[str, Any]:
        """The answer that is no stream."""
        choices = []
        for index, done in enumerate(completions):
            text, reason = done.text or "", REASONS.get(done.stop_reason, done.stop_reason)
            said = {"message": {"role": "assistant", "content": text}} if self._call.chat else {"text": text}
            ids = {"token_ids": done.token_ids} if self._call.token_ids else {}
            choices.append({"index": index, **said, **ids, "finish_reason": reason, "logprobs": None})
        return {**self._head, "object": self._kind, "choices": choices, "usage": usage(completions)}

    def first(self, index: int) -> dict[str, Any] | None:
        """What begins a choice of a stream."""
        return self._chunk([self._choice(index, {"role": "assistant", "content": ""})]) if self._call.chat else None

    def piece(self, index: int, piece: Piece) -> list[dict[str, Any]]:
        """What a piece of a choice adds to a stream: none where it has no text yet."""
        chunks = []
        ids = {"token_ids": piece.token_ids} if self._call.token_ids else {}
        if piece.text or ids.get("token_ids"):
            chunks.append(self._chunk([self._choice(index, {"content": piece.text}) | ids]))
        if piece.completion is not None:
            reason = piece.completion.stop_reason
            chunks.append(self._chunk([self._choice(index, {}, REASONS.get(reason, reason))]))
        return chunks

    def counts(self, completions: Sequence[Completion]) -> dict[str, Any] | None:
        """What ends a stream, if it was asked for."""
        return self._chunk([]) | {"usage": usage(completions)} if self._call.include_usage else None

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self._call.chat else self._kind
        empty = {"usage": None} if self._call.include_usage else {}
        return {**self._head, "object": kind, "choices": choices, **empty}

    def _choice(self, index: int, delta: dict[str, str], reason: str | None = None) -> dict[str, Any]:
        content: dict[str, Any] = {"delta": delta} if self._call.chat else {"text": delta.get("content", "")}
        return {"index": index, **content, "finish_reason": reason, "logprobs": None}


def usage(completions: Sequence[Completion]) -> dict[str, int]:
    """Tokens in and out."""
    prompt = sum(len(done.prompt_ids) for done in completions)
    answer = sum(len(done.token_ids) for done in completions)
    return {"prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer}
