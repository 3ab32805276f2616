"""Messages to text by the checkpoint's own chat template, which is a program: it runs in a sandbox."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from ling3export.foundation.errors import ArtifactError, RequestError

Message = Mapping[str, Any]
FILE = "chat_template.jinja"
SECONDS = 5.0  # that a template may take; published ones take milliseconds
WANTED = 'expected messages, [{"role": TEXT, "content": TEXT}, ...]'


class ChatTemplate:
    """A chat template, compiled.

    It sees what published templates expect: ``messages``, ``tools``, ``add_generation_prompt``, the special tokens by
    name (``bos_token`` and so on), ``raise_exception``, ``strftime_now`` and a ``tojson`` that leaves HTML alone.

    Args:
        source: The template.
        tokens: Special tokens by name.
        where: The file's name, for messages.

    Raises:
        ArtifactError: jinja2 cannot compile it.
    """

    def __init__(self, source: str, tokens: Mapping[str, str], where: str) -> None:
        from jinja2 import TemplateSyntaxError

        from ling3export.runners.text.sandbox import Sandbox

        self._where = where
        self._tokens = dict(tokens)
        environment = self._sandbox = Sandbox()
        environment.globals |= {
            "raise_exception": environment.counted("raise_exception", _refuse),
            "strftime_now": _now,
        }
        try:
            self._template = environment.from_string(source)
        except TemplateSyntaxError as error:
            raise ArtifactError(
                f"chat template `{where}`: expected one that jinja2 compiles, found {error.message}, "
                f"at line {error.lineno}"
            ) from error
        except RecursionError as error:
            raise ArtifactError(
                f"chat template `{where}`: expected one that jinja2 compiles, found it nested too deeply"
            ) from error

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        name: str = "messages",
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """The text of a conversation.

        Args:
            messages: In order.
            add_generation_prompt: End with what begins an answer.
            name: What messages of errors call it.
            tools: Functions that the template is to offer.

        Raises:
            RequestError: The messages are malformed, or the template refuses them.
            ArtifactError: The template is broken, takes more than SECONDS, or makes more than its sandbox
                lets it.
        """
        from jinja2 import TemplateError

        from ling3export.runners.text.sandbox import LARGEST, TooMuch

        check_messages(messages, name)
        values = {**self._tokens, "messages": [dict(message) for message in messages]}
        if tools is not None:
            values["tools"] = list(tools)
        try:
            with self._sandbox.rendering(SECONDS):
                pieces, size = [], 0
                for piece in self._template.generate(values, add_generation_prompt=add_generation_prompt):
                    pieces.append(piece)
                    size += len(piece)
                    if size > LARGEST:
                        raise TooMuch(f"more than {LARGEST:,} characters")
                return "".join(pieces)
        except _Refusal as error:
            raise RequestError(
                f"{name}: expected messages that the chat template takes, found it refuse them: {error}"
            ) from error
        except RecursionError as error:
            raise ArtifactError(f"chat template `{self._where}`: expected it to end, found no end") from error
        except TooMuch as error:
            raise ArtifactError(f"chat template `{self._where}`: expected it to end, found {error}") from error
        except (
            TemplateError,
            TypeError,
            ValueError,
            LookupError,
            AttributeError,
            ArithmeticError,
            MemoryError,
        ) as error:
            raise ArtifactError(
                f"chat template `{self._where}`: expected it to render {name}, found {type(error).__name__}: {error}"
            ) from error


def check_messages(messages: object, name: str) -> None:
    """Refuses ``messages`` that are no list of messages.

    Raises:
        RequestError: The list is empty, or a message lacks a role or content.
    """
    if isinstance(messages, (str, Mapping)) or not isinstance(messages, Sequence):
        raise RequestError(f"{name}: {WANTED}, found {type(messages).__name__}")
    if not messages:
        raise RequestError(f"{name}: {WANTED}, found none")
    for place, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise RequestError(f"{name}: {WANTED}, found {type(message).__name__} at place {place}")
        for field in ("role", "content"):
            if not isinstance(message.get(field), str):
                found = f"{field} {json.dumps(message[field], default=str)[:60]}" if field in message else f"no {field}"
                raise RequestError(f"{name}: {WANTED}, found {found} at place {place}")


class _Refusal(Exception):
    """Raised by a template through ``raise_exception``."""


def _refuse(message: object) -> NoReturn:
    raise _Refusal(str(message))


def _now(form: str) -> str:
    return datetime.now().strftime(form)
