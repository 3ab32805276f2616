"""Messages to text by the checkpoint's own chat template, which is a program: it runs in jinja2's sandbox."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from ling3export.errors import ArtifactError, RequestError

Message = Mapping[str, Any]
FILE = "chat_template.jinja"
WANTED = 'expected messages, [{"role": TEXT, "content": TEXT}, ...]'


class ChatTemplate:
    """A chat template, compiled.

    It sees what published templates expect: ``messages``, ``add_generation_prompt``, the special tokens by name
    (``bos_token`` and so on), ``raise_exception``, ``strftime_now`` and a ``tojson`` that leaves HTML alone.

    Args:
        source: The template.
        tokens: Special tokens by name.
        where: The file's name, for messages.

    Raises:
        ArtifactError: jinja2 cannot compile it.
    """

    def __init__(self, source: str, tokens: Mapping[str, str], where: str) -> None:
        from jinja2 import TemplateSyntaxError
        from jinja2.ext import loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        self._where = where
        self._tokens = dict(tokens)
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.filters["tojson"] = _to_json
        environment.globals |= {"raise_exception": _refuse, "strftime_now": _now}
        try:
            self._template = environment.from_string(source)
        except TemplateSyntaxError as error:
            raise ArtifactError(
                f"chat template `{where}`: expected one that jinja2 compiles, found {error.message}, "
                f"at line {error.lineno}"
            ) from error

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True, name: str = "messages") -> str:
        """The text of a conversation.

        Args:
            messages: In order.
            add_generation_prompt: End with what begins an answer.
            name: What messages of errors call it.

        Raises:
            RequestError: The messages are malformed, or the template refuses them.
            ArtifactError: The template is broken.
        """
        from jinja2 import TemplateError

        check_messages(messages, name)
        values = {**self._tokens, "messages": [dict(message) for message in messages]}
        try:
            return self._template.render(values, add_generation_prompt=add_generation_prompt)
        except _Refusal as error:
            raise RequestError(
                f"{name}: expected messages that the chat template takes, found it refuse them: {error}"
            ) from error
        except RecursionError as error:
            raise ArtifactError(f"chat template `{self._where}`: expected it to end, found no end") from error
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError, ArithmeticError) as error:
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


def _to_json(value: Any, **options: Any) -> str:
    return json.dumps(value, **({"ensure_ascii": False} | options))
