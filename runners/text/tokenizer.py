"""The tokenizer files of an artifact: text in and out, chats and grammars."""

import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from ling3export.artifacts.manifest import read_checked
from ling3export.artifacts.schema import FileRecord
from ling3export.foundation.errors import ArtifactError, RequestError
from ling3export.foundation.strict_json import parse_json
from ling3export.runners.text import answer, chat
from ling3export.runners.text.grammar import Grammars
from ling3export.runners.text.trial import GrammarTrial
from ling3export.runners.text.vocabulary import FILE, Tokenizer

CONFIG = "tokenizer_config.json"
MARKS = answer.THINK, answer.THOUGHT, answer.CALL, answer.CALLED, answer.KEY, answer.KEYED, answer.VALUE, answer.VALUED
# Some tokenizers call the marks of thoughts and calls special tokens, which texts of answers do not have.
SPECIAL_MARK = re.compile(rf'("content":\s*"(?:{"|".join(MARKS)})"[^{{}}]*"special":\s*)true'.encode())


class TokenizerFiles:
    """The tokenizer files of an artifact, read when first needed, each by its digest.

    Args:
        folder: The artifact.
        records: The manifest's records of the files.
        eos_token_ids: Those of config.json.
    """

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

        Args:
            purpose: What it is wanted for, as in "text in".

        Raises:
            RequestError: The artifact has none.
            ArtifactError: The tokenizer's file is damaged.
        """
        if not self.exist:
            raise RequestError(
                f"{purpose}: expected an artifact with a tokenizer, found none, in {self._folder}",
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

        That field is a text, or a list of named ones of which ``default`` counts.
        """
        if chat.FILE in self._records:
            return chat.FILE, read_checked(self._folder, self._records[chat.FILE]).decode(errors="replace")
        source = self._json(CONFIG).get("chat_template")
        if isinstance(source, list):
            rows = [row for row in source if isinstance(row, dict) and row.get("name") == "default"]
            source = rows[-1].get("template") if rows else None
        return CONFIG, source

    @cached_property
    def _chat_template(self) -> chat.ChatTemplate:
        where, source = self._template_source
        if not isinstance(source, str):
            raise ArtifactError(
                f"chat template `{where}`: expected a text, found {type(source).__name__}, in {self._folder}"
            )
        return chat.ChatTemplate(source, self.named_tokens, where)

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

    def render_chat(self, messages: Sequence[chat.Message], *, name: str = "messages", **options: Any) -> str:
        """The text of a conversation, by the checkpoint's chat template.

        Args:
            messages: ``[{"role": TEXT, "content": TEXT}, …]``.
            name: What messages of errors call it.
            options: The other arguments of ``ChatTemplate.render``.

        Raises:
            RequestError: The messages are malformed or refused, or the artifact has no chat template.
            ArtifactError: The template is broken.
        """
        if not self.chats:
            raise RequestError(
                f"{name}: expected an artifact with a chat template, found none, in {self._folder}",
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
