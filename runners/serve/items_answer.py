"""The answer of /v1/responses: items, and the events in which they grow."""

import itertools
import secrets
from collections.abc import Iterator, Sequence
from typing import Any

from ling3export.runners.engine.handle import Piece
from ling3export.runners.engine.request import Completion
from ling3export.runners.serve.calls import Call
from ling3export.runners.serve.responses import Answer
from ling3export.runners.serve.schema import ApiError
from ling3export.runners.serve.structure import REASONING, TEXT, TOOL, Parts

Event = dict[str, Any]
# Of an item: its type, the begin of its id, the type of its content.
FORMS = {TEXT: ("message", "msg", "output_text"), REASONING: ("reasoning", "rs", "reasoning_text")}


class ItemsAnswer(Answer):
    """The answer to one call of /v1/responses, which has one choice.

    A whole answer is what the last event of a stream has, so both are the same.

    Args:
        call: The call.
        model: The name that the model is served under.
    """

    ending = ""

    def __init__(self, call: Call, model: str) -> None:
        super().__init__(call, model)
        head = {"id": f"resp_{secrets.token_hex(12)}", "object": "response", "created_at": self._head["created"]}
        self._head = head | {"model": model} | dict(call.repeated or {})
        self._events = itertools.count()
        self._items: list[dict[str, Any]] = []  # that are complete
        self._grows: str | None = None  # which kind of item does: content or reasoning_content
        self._id = self._text = ""
        self._entries: list[dict[str, Any]] = []  # log-probabilities of its tokens
        self._unsaid: list[dict[str, Any]] = []  # those of tokens whose text did not come yet
        self._thoughts = _Thoughts(call) if call.format is not None and call.format.thinks else None

    def whole(self, completions: Sequence[Completion]) -> dict[str, Any]:
        """The whole answer.

        Args:
            completions: What the call's request came to.
        """
        (done,) = completions
        *_, last = self.piece(0, Piece(done.text or "", done.token_ids, done, tuple(done.likely or ())))
        return dict(last["response"])

    def begin(self) -> list[Event]:
        """The events before anything of the answer is known."""
        response = self._response("in_progress")
        return [self._event("created", response=response), self._event("in_progress", response=response)]

    def piece(self, index: int, piece: Piece) -> list[Event]:
        """The events that a piece of the answer adds to a stream; the last of an answer has the whole of it."""
        self._counts[0] += len(piece.token_ids)
        thought = [False] * len(piece.token_ids) if self._thoughts is None else self._thoughts.push(piece.token_ids)
        if piece.likely:
            said = self._likely(0, piece.token_ids, piece.likely) or {}
            self._unsaid += [entry for entry, own in zip(said["content"], thought, strict=True) if not own]
        last = piece.completion is not None
        parts: list[tuple[str, Any]] = [(TEXT, piece.text)] if piece.text else []
        if self._parts:
            parts = self._parts[0].push(piece.text, last=last)
        events = [event for kind, said in parts for event in self._grown(kind, said)]
        return events if piece.completion is None else [*events, *self._ended(piece.completion)]

    def end(self) -> list[Event]:
        """Nothing: the last piece had the last event."""
        return []

    def failed(self, error: ApiError) -> Event:
        """The event that ends a stream that cannot go on."""
        found = {"code": error.code or "server_error", "message": error.message}
        return self._event("failed", response=self._response("failed", error=found))

    def _grown(self, kind: str, said: Any) -> Iterator[Event]:
        if kind != self._grows:
            yield from self._closed("completed")
        if kind == TOOL:
            yield from self._called(said["id"], said["function"])
            return
        if self._grows is None:
            yield from self._opened(kind)
        self._text += said
        entries = {}
        if kind == TEXT:
            entries, self._unsaid = {"logprobs": self._unsaid}, []
            self._entries += entries["logprobs"]
        yield self._event(f"{FORMS[kind][2]}.delta", **self._place(), delta=said, **entries)

    def _opened(self, kind: str) -> Iterator[Event]:
        self._grows, self._text, self._entries = kind, "", []
        self._id = f"{FORMS[kind][1]}_{secrets.token_hex(12)}"
        yield self._event("output_item.added", output_index=len(self._items), item=self._item("in_progress", []))
        yield self._event("content_part.added", **self._place(), part=self._part())

    def _closed(self, status: str) -> Iterator[Event]:
        if self._grows is None:
            return
        if self._grows == TEXT:
            self._entries, self._unsaid = self._entries + self._unsaid, []
        entries = {"logprobs": self._entries} if self._grows == TEXT else {}
        part, item = self._part(), self._item(status, [self._part()])
        yield self._event(f"{part['type']}.done", **self._place(), text=self._text, **entries)
        yield self._event("content_part.done", **self._place(), part=part)
        yield self._event("output_item.done", output_index=len(self._items), item=item)
        self._items.append(item)
        self._grows = None

    def _called(self, id: str, function: dict[str, Any]) -> Iterator[Event]:
        item = {"type": "function_call", "id": f"fc_{secrets.token_hex(12)}", "call_id": id, "name": function["name"]}
        place, arguments = {"output_index": len(self._items)}, function["arguments"]
        done = item | {"arguments": arguments, "status": "completed"}
        yield self._event("output_item.added", **place, item=item | {"arguments": "", "status": "in_progress"})
        place["item_id"] = item["id"]
        yield self._event("function_call_arguments.delta", **place, delta=arguments)
        yield self._event("function_call_arguments.done", **place, name=function["name"], arguments=arguments)
        yield self._event("output_item.done", output_index=len(self._items), item=done)
        self._items.append(done)

    def _ended(self, completion: Completion) -> Iterator[Event]:
        self._cached = completion.cached_tokens
        status = "incomplete" if completion.stop_reason == "length" else "completed"
        if not self._items and self._grows is None:  # not even a character
            yield from self._opened(TEXT)
        yield from self._closed(status)
        more = {"incomplete_details": {"reason": "max_output_tokens"}} if status == "incomplete" else {}
        yield self._event(status, response=self._response(status, usage=self._counted(), **more))

    def _event(self, kind: str, **fields: Any) -> Event:
        return {"type": f"response.{kind}", **fields, "sequence_number": next(self._events)}

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._id, "output_index": len(self._items), "content_index": 0}

    def _part(self) -> dict[str, Any]:
        assert self._grows is not None
        more = {"annotations": [], "logprobs": self._entries} if self._grows == TEXT else {}
        return {"type": FORMS[self._grows][2], "text": self._text, **more}

    def _item(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        assert self._grows is not None
        more: dict[str, Any] = {"role": "assistant"} if self._grows == TEXT else {"summary": []}
        return {"type": FORMS[self._grows][0], "id": self._id, "status": status, **more, "content": content}

    def _response(self, status: str, **more: Any) -> dict[str, Any]:
        empty = {"error": None, "incomplete_details": None, "usage": None}
        return {**self._head, "status": status, "output": list(self._items), **empty, **more}

    def _counted(self) -> dict[str, Any]:
        counts = self._usage(self._counts[0])
        return {
            "input_tokens": counts["prompt_tokens"],
            "input_tokens_details": counts["prompt_tokens_details"] | {"cache_write_tokens": 0},
            "output_tokens": counts["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0 if self._thoughts is None else self._thoughts.count},
            "total_tokens": counts["total_tokens"],
        }


def answer_to(call: Call, model: str) -> Answer:
    """The answer to a call, in the form of its endpoint; ``model`` is the name that the model is served under."""
    return (Answer if call.repeated is None else ItemsAnswer)(call, model)


class _Thoughts:
    """Tells which tokens of an answer belong to thoughts, the marks around them included.

    Args:
        call: The call, whose answers may have thoughts.

    Attributes:
        count: How many did so far.
    """

    def __init__(self, call: Call) -> None:
        assert call.format is not None and call.tokenizer is not None
        self._parts, self._text = Parts(call.format), call.tokenizer.stream()
        self.count = 0

    def push(self, ids: Sequence[int]) -> list[bool]:
        """Whether each of the next tokens belongs to one."""
        found = []
        for id in ids:
            before = self._parts.thinking
            self._parts.push(self._text.push(id))
            found.append(before or self._parts.thinking)
        self.count += sum(found)
        return found
