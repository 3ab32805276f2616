"""The tokenizer files of an artifact: text in and out, chats and grammars.

A chat template is a program, which runs in jinja2's sandbox. An artifact runs native code, so its template is trusted;
the messages of a request are not. A rendering has bounds: its text, its numbers and lists, and its time, which is
checked in each turn of a loop and whenever the template reads or calls something.
"""

import json
import re
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence, Sized
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

from ling3export.artifacts.manifest import read_checked
from ling3export.artifacts.schema import FileRecord
from ling3export.foundation.errors import ArtifactError, RequestError
from ling3export.foundation.strict_json import parse_json
from ling3export.runners.text import answer
from ling3export.runners.text.grammar import Grammars
from ling3export.runners.text.trial import GrammarTrial
from ling3export.runners.text.vocabulary import FILE, Tokenizer

Message = Mapping[str, Any]
TEMPLATE = "chat_template.jinja"
SECONDS = 5.0  # that a template may take; published ones take milliseconds
LARGEST = 1 << 24  # characters of its text
BITS = 1 << 16  # of a power or a product, which jinja2 would work out while it compiles, however long that takes
SLOW = ("wordwrap", "urlize")  # filters that take minutes for a long text and that no published template uses
WANTED = 'expected messages, [{"role": TEXT, "content": TEXT}, ...]'
CONFIG = "tokenizer_config.json"
MARKS = answer.THINK, answer.THOUGHT, answer.CALL, answer.CALLED, answer.KEY, answer.KEYED, answer.VALUE, answer.VALUED
# Some tokenizers call the marks of thoughts and calls special tokens, which texts of answers do not have.
SPECIAL_MARK = re.compile(rf'("content":\s*"(?:{"|".join(MARKS)})"[^{{}}]*"special":\s*)true'.encode())


class ChatTemplate:
    """A chat template, compiled.

    It sees what published templates expect: ``messages``, ``tools``, ``add_generation_prompt``, the special tokens by
    name (``bos_token`` and so on), ``raise_exception``, ``strftime_now`` and a ``tojson`` that leaves HTML alone.

    Raises:
        ArtifactError: jinja2 cannot compile it.
    """

    def __init__(self, source: str, tokens: Mapping[str, str], where: str) -> None:
        from jinja2 import TemplateSyntaxError

        self._where = where
        self._tokens = dict(tokens)
        self._deadline = _Deadline()
        environment = _environment(self._deadline.check)
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
        variables: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
    ) -> str:
        """The text of a conversation.

        Args:
            add_generation_prompt: End with the begin of an answer.
            name: The name of the messages in errors.
            tools: Functions that the template offers.
            variables: Others that the template may read, such as ``enable_thinking``.
            continue_final_message: End within the last message, after its content; after its thought where it has a
                thought and no content.

        Raises:
            RequestError: The messages are malformed, the template refuses them, or it does not write the last one.
            ArtifactError: The template is broken, takes more than SECONDS, or writes more than LARGEST.
        """
        from jinja2 import TemplateError

        check_messages(messages, name)
        copies = [dict(message) for message in messages]
        values = {**self._tokens, **(variables or {}), "messages": copies}
        if continue_final_message:
            mark, last, add_generation_prompt = secrets.token_hex(16), copies[-1], False
            field = "content" if last["content"] or not last.get("reasoning_content") else "reasoning_content"
            last[field] = f"{last[field]}{mark}"
        if tools is not None:
            values["tools"] = list(tools)
        self._deadline.begin()
        try:
            pieces, size = [], 0
            for piece in self._template.generate(values, add_generation_prompt=add_generation_prompt):
                pieces.append(piece)
                self._deadline.check()
                if (size := size + len(piece)) > LARGEST:
                    raise _TooMuch(f"more than {LARGEST:,} characters")
            text = "".join(pieces)
            if not continue_final_message:
                return text
            if mark not in text:
                wanted = "a last message that the chat template writes, to be continued"
                raise RequestError(f"{name}: expected {wanted}, found one that it leaves out or changes")
            return text[: text.index(mark)]
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
        raise RequestError(f"{name}: {WANTED}, found an empty list")
    for place, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise RequestError(f"{name}: {WANTED}, found {type(message).__name__} at place {place}")
        for field in ("role", "content"):
            if not isinstance(message.get(field), str):
                actual = (
                    f"{field} {json.dumps(message[field], default=str)[:60]}" if field in message else f"no {field}"
                )
                raise RequestError(f"{name}: {WANTED}, found {actual} at place {place}")


class _Refusal(Exception):
    """Raised by a template through ``raise_exception``."""


class _TooMuch(Exception):
    """A template takes more time or room than it may; says what it took."""


class _Deadline(threading.local):
    _time = float("inf")

    def begin(self) -> None:
        """This thread's rendering may take SECONDS from now on."""
        self._time = time.monotonic() + SECONDS

    def check(self) -> None:
        """Ends this thread's rendering once its time is over."""
        if time.monotonic() > self._time:
            raise _TooMuch(f"no end within {SECONDS:g} s")


def _environment(check: Callable[[], None]) -> Any:
    """jinja2's sandbox; ``check`` is called in each turn of a loop and whenever a template reads or calls something."""
    from jinja2 import nodes
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Environment(ImmutableSandboxedEnvironment):
        intercepted_binops = frozenset({"*", "**"})

        def _parse(self, *source: Any) -> Any:
            tree = super()._parse(*source)
            for loop in tree.find_all(nodes.For):
                turn = nodes.Call(nodes.Name("in_time", "load"), [], [], None, None)
                loop.body.insert(0, nodes.ExprStmt(turn).set_lineno(loop.lineno))
            return tree

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            check()
            if isinstance(left, int) and isinstance(right, int):
                size = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
                if size > BITS:
                    raise _TooMuch(f"a {'power' if operator == '**' else 'product'} of more than {BITS:,} bits")
            elif any(
                isinstance(a, Sized) and isinstance(b, int) and len(a) * b > LARGEST
                for a, b in ((left, right), (right, left))
            ):
                raise _TooMuch(f"more than {LARGEST:,} characters or elements")
            return super().call_binop(context, operator, left, right)

        def getattr(self, obj: Any, attribute: str) -> Any:
            check()
            return super().getattr(obj, attribute)

        def getitem(self, obj: Any, argument: Any) -> Any:
            check()
            return super().getitem(obj, argument)

        def call(self, context: Any, function: Any, /, *args: Any, **named: Any) -> Any:
            check()
            return super().call(context, function, *args, **named)

    environment = Environment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.globals |= {"raise_exception": _refuse, "strftime_now": _now, "in_time": lambda: None}  # `call` checks
    for name in SLOW:
        del environment.filters[name]
    environment.filters["tojson"] = _json
    return environment


def _json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _refuse(message: object) -> NoReturn:
    raise _Refusal(str(message))


def _now(form: str) -> str:
    return datetime.now().strftime(form)


class TokenizerFiles:
    """The tokenizer files of an artifact, read when first needed, each by its digest."""

    def __init__(self, folder: Path, records: Sequence[FileRecord], eos_token_ids: Sequence[int] = ()) -> None:
        self._folder = folder
        self._records = {Path(record.path).name: record for record in records}
        self._eos = eos_token_ids
        self._grammars: Grammars | None = None

    @property
    def exist(self) -> bool:
        """Whether the artifact has a tokenizer."""
        return FILE in self._records

    def tokenizer(self, purpose: str) -> Tokenizer:
        """The tokenizer.

        Raises:
            RequestError: The artifact has none.
            ArtifactError: The tokenizer's file is damaged.
        """
        if not self.exist:
            raise RequestError(
                f"{purpose}: this artifact has no tokenizer, in {self._folder}",
                "give and take token ids, or build from a checkpoint that has tokenizer.json",
            )
        return self._tokenizer

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        data = read_checked(self._folder, self._records[FILE])
        return Tokenizer(SPECIAL_MARK.sub(rb"\1false", data))

    def eos_token_ids(self) -> frozenset[int]:
        """Ids that end a text: those of config.json, generation_config.json and tokenizer_config.json together."""
        ids = {*self._eos, *_ids(self.generation_config().get("eos_token_id"))}
        token = _token(self._json(CONFIG).get("eos_token"))
        if token and self.exist:
            named = self.tokenizer("eos_token").id_of(token)
            ids |= set() if named is None else {named}
        return frozenset(ids)

    @cached_property
    def spelled_ends(self) -> tuple[str, ...]:
        """The special tokens that end a turn in the chat template, by name: models spell them as text at times."""
        tokenizer = self.tokenizer("text out")
        names = (tokenizer.bytes_of(id).decode() for id in sorted(self.eos_token_ids() & tokenizer.special_ids))
        return tuple(name for name in names if name in self.template_text)

    @cached_property
    def _template_source(self) -> tuple[str, object]:
        """File and content of the chat template: chat_template.jinja, else a field of tokenizer_config.json.

        That field is a text, or a list of named ones, where ``default`` counts.
        """
        if TEMPLATE in self._records:
            return TEMPLATE, read_checked(self._folder, self._records[TEMPLATE]).decode(errors="replace")
        source = self._json(CONFIG).get("chat_template")
        if isinstance(source, list):
            rows = [row for row in source if isinstance(row, dict) and row.get("name") == "default"]
            source = rows[-1].get("template") if rows else None
        return CONFIG, source

    @cached_property
    def _chat_template(self) -> ChatTemplate:
        where, source = self._template_source
        if not isinstance(source, str):
            raise ArtifactError(
                f"chat template `{where}`: expected a text, found {type(source).__name__}, in {self._folder}"
            )
        return ChatTemplate(source, self.named_tokens, where)

    @property
    def named_tokens(self) -> dict[str, str]:
        """The special tokens that tokenizer_config.json names: ``bos_token``, ``eos_token`` and so on."""
        values = {key: _token(value) for key, value in self._json(CONFIG).items() if key.endswith("_token")}
        return {key: token for key, token in values.items() if token}

    @property
    def chats(self) -> bool:
        """Whether the artifact has a chat template."""
        return self._template_source[1] is not None

    @property
    def template_text(self) -> str:
        """The chat template itself; empty where there is none."""
        source = self._template_source[1]
        return source if isinstance(source, str) else ""

    def render_chat(self, messages: Sequence[Message], *, name: str = "messages", **options: Any) -> str:
        """The text of a conversation, by the checkpoint's chat template.

        The arguments are those of ``ChatTemplate.render``.

        Raises:
            RequestError: The messages are malformed or refused, or the artifact has no chat template.
            ArtifactError: The template is broken.
        """
        if not self.chats:
            raise RequestError(
                f"{name}: this artifact has no chat template, in {self._folder}",
                "give text or token ids, or build from a checkpoint that has a chat template",
            )
        return self._chat_template.render(messages, name=name, **options)

    def grammars(self, vocab_size: int) -> Grammars:
        """Makes matchers of grammars, for a model whose token ids are below ``vocab_size``.

        Raises:
            RequestError: The artifact has no tokenizer, or llguidance is not installed.
            ArtifactError: llguidance cannot read the tokenizer.
        """
        if self._grammars is None:
            tokenizer = self.tokenizer("structured output")
            trial = GrammarTrial(tokenizer.json, vocab_size, self.eos_token_ids())
            self._grammars = Grammars(tokenizer, vocab_size, self.eos_token_ids(), trial.refusal)
        return self._grammars

    def generation_config(self) -> dict[str, Any]:
        """The checkpoint's generation_config.json; empty where there is none."""
        return self._json("generation_config.json")

    def _json(self, name: str) -> dict[str, Any]:
        if name not in self._records:
            return {}
        try:
            value = parse_json(read_checked(self._folder, self._records[name]))
            if not isinstance(value, dict):
                raise ValueError("no object")
        except ValueError as error:
            raise ArtifactError(f"tokenizer file `{name}`: expected JSON, found {error}, in {self._folder}") from error
        return value


def _token(value: object) -> str | None:
    """The text of a special token of tokenizer_config.json, which is a text or an object with its content."""
    token = value.get("content") if isinstance(value, dict) else value
    return token if isinstance(token, str) else None


def _ids(value: object) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [item for item in values if type(item) is int]
