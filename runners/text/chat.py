"""Messages to text by the checkpoint's own chat template, which is a program: it runs in jinja2's sandbox."""

import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from types import FrameType
from typing import Any, NoReturn

from ling3export.errors import ArtifactError, RequestError

Message = Mapping[str, Any]
FILE = "chat_template.jinja"
SECONDS = 5.0  # that a template may take; published ones take milliseconds
LARGEST = 1 << 24  # characters of its text, and elements of a value that it repeats
BITS = 1 << 16  # of a power
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
        from jinja2.ext import loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        self._where = where
        self._tokens = dict(tokens)
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.filters["tojson"] = _to_json
        # Neither is worked out while the template is compiled, as other operators of constants are.
        environment.intercepted_binops = frozenset(("*", "**"))
        environment.binop_table |= {"*": _product, "**": _power}
        environment.globals |= {"raise_exception": _refuse, "strftime_now": _now}
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
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True, name: str = "messages",
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:  # fmt: skip
        """The text of a conversation.

        Args:
            messages: In order.
            add_generation_prompt: End with what begins an answer.
            name: What messages of errors call it.
            tools: Functions that the template is to offer.

        Raises:
            RequestError: The messages are malformed, or the template refuses them.
            ArtifactError: The template is broken, takes more than SECONDS, or gives more than LARGEST characters.
        """
        from jinja2 import TemplateError

        check_messages(messages, name)
        values = {**self._tokens, "messages": [dict(message) for message in messages]}
        if tools is not None:
            values["tools"] = list(tools)
        try:
            with _within(SECONDS):
                pieces, size = [], 0
                for piece in self._template.generate(values, add_generation_prompt=add_generation_prompt):
                    pieces.append(piece)
                    size += len(piece)
                    if size > LARGEST:
                        raise _TooMuch(f"more than {LARGEST:,} characters")
                return "".join(pieces)
        except _Refusal as error:
            raise RequestError(
                f"{name}: expected messages that the chat template takes, found it refuse them: {error}"
            ) from error
        except RecursionError as error:
            raise ArtifactError(f"chat template `{self._where}`: expected it to end, found no end") from error
        except _TooMuch as error:
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


class _TooMuch(Exception):
    """A template takes more time or room than it may; says what it took."""


@contextmanager
def _within(seconds: float) -> Iterator[None]:
    """Ends the block with _TooMuch once a template of this thread has run for so long.

    Loops and macros of a template are Python functions, which are looked at line by line; one operation is not ended.
    """
    until, before = time.monotonic() + seconds, sys.gettrace()

    def look(frame: FrameType, event: str, value: object) -> Any:
        if time.monotonic() > until:
            raise _TooMuch(f"no end within {seconds:g} s")
        return look if frame.f_code.co_filename == "<template>" else None

    sys.settrace(look)
    try:
        yield
    finally:
        sys.settrace(before)


def _product(left: Any, right: Any) -> Any:
    for repeated, count in ((left, right), (right, left)):
        if (
            isinstance(repeated, (str, bytes, list, tuple))
            and isinstance(count, int)
            and len(repeated) * count > LARGEST
        ):
            raise _TooMuch(f"a value of {len(repeated) * count:,} elements")
    return left * right


def _power(left: Any, right: Any) -> Any:
    if isinstance(left, int) and isinstance(right, int) and left.bit_length() * right > BITS:
        raise _TooMuch(f"a power of {left.bit_length() * right:,} bits")
    return left**right


def _refuse(message: object) -> NoReturn:
    raise _Refusal(str(message))


def _now(form: str) -> str:
    return datetime.now().strftime(form)


def _to_json(value: Any, **options: Any) -> str:
    return json.dumps(value, **({"ensure_ascii": False} | options))
