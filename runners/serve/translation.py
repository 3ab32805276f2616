"""Other protocols as translations: their bodies into the body of a chat, a chat's answer into their blocks."""

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import ConfigDict

from ling3export.runners.engine.handle import RequestDelta
from ling3export.runners.engine.request import Completion
from ling3export.runners.serve.answers import Answer, ChoicesAnswer
from ling3export.runners.serve.generation import GenerationCall, chat, check_messages
from ling3export.runners.serve.schema import CHOICES, ApiError, ModelBody, validated
from ling3export.runners.text.answer import TOOL

if TYPE_CHECKING:
    from ling3export.runners.engine.engine import Engine

Event = dict[str, Any]


class TranslatedBody(ModelBody):
    """The body of a chat in another protocol. ``chat`` checks the fields of ``passed``, which keep their names."""

    model_config = ConfigDict(strict=True, extra="allow")
    renamed: ClassVar[Mapping[str, str]]  # names of fields here, by those that a chat has for them

    @property
    @abstractmethod
    def chat(self) -> dict[str, Any]:
        """The body of the same chat."""

    @property
    def same(self) -> dict[str, Any]:
        """The fields of ``passed`` that the body has, and the model."""
        return {"model": self.model, **(self.model_extra or {})}

    @classmethod
    def call(
        cls, body: dict[str, Any], engine: "Engine", model: str, most: int = CHOICES, default: int | None = None
    ) -> GenerationCall:
        """A call of the protocol; arguments and errors are those of ``chat``."""
        check_messages(body, cls.renamed.get("messages", "messages"), engine)
        request = validated(cls, body, model)
        with request.named():
            return replace(chat(request.chat, engine, model, most, default), outer=request)

    @contextmanager
    def named(self) -> Iterator[None]:
        """Within the block, errors of a chat's fields have the names of this protocol."""
        try:
            yield
        except ApiError as error:
            name = error.param or ""
            if own := self.renamed.get(name):
                error.param, error.message = own, error.message.replace(f"`{name}`", f"`{own}`")
                if error.message.startswith(f"{name}:"):
                    error.message = own + error.message.removeprefix(name)
            raise


class TranslatedAnswer(Answer):
    """The chunks of a chat's stream as blocks: text or thought of one kind that grows, or a call.

    Attributes:
        blocks: The blocks so far. The last one grows while ``kind`` is its kind.
    """

    def __init__(self, call: GenerationCall, model: str) -> None:
        self._call, self._chat = call, ChoicesAnswer(call, model)
        self.blocks: list[dict[str, Any]] = []
        self.kind: str | None = None

    def piece(self, index: int, piece: RequestDelta) -> list[Event]:
        """The events that a piece of the answer adds to a stream."""
        choices = [chunk["choices"][0] for chunk in self._chat.piece(index, piece)]
        events = list[Event]()
        for kind, delta in (part for choice in choices for part in choice["delta"].items() if part[1]):
            if kind != self.kind:
                events += self.close()
            if kind == TOOL:
                events += self.tool_call(delta[0]["id"], **delta[0]["function"])
            else:
                events += self.grow(kind, delta)
        if piece.completion is not None:
            events += self.finish(piece.completion, choices[-1]["finish_reason"])
        return events

    @abstractmethod
    def grow(self, kind: str, delta: str) -> Iterator[Event]:
        """Adds to the open block; opens one if none is."""

    @abstractmethod
    def tool_call(self, id: str, name: str, arguments: str) -> Iterator[Event]:
        """Adds a block with a call; no block is open."""

    @abstractmethod
    def close(self) -> Iterator[Event]:
        """Closes the open block, if there is one."""

    @abstractmethod
    def finish(self, completion: Completion, reason: str) -> Iterator[Event]:
        """Ends the answer, for the reason that a chat gives."""
