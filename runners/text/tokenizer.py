"""Text in and out: the checkpoint's fast tokenizer and its chat template."""

import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from ling3export.artifacts.manifest import read_checked
from ling3export.artifacts.schema import FileRecord
from ling3export.foundation.errors import ArtifactError, RequestError
from ling3export.foundation.strict_json import parse_json
from ling3export.runners.text import chat
from ling3export.runners.text.detokenize import TextStream
from ling3export.runners.text.grammar import Grammars
from ling3export.runners.text.trial import GrammarTrial

FILE = "tokenizer.json"
PRINTED = (*range(33, 127), *range(161, 173), *range(174, 256))  # bytes that byte-level BPE writes as themselves
# The others are written from U+0100 on, in order.
BYTES = {chr(byte): byte for byte in PRINTED} | {
    chr(256 + place): byte for place, byte in enumerate(byte for byte in range(256) if byte not in PRINTED)
}
CONFIG = "tokenizer_config.json"


class Tokenizer:
    """The tokenizer of an artifact.

    Args:
        data: Bytes of tokenizer.json.
        where: The file, for messages.

    Raises:
        ArtifactError: The library cannot read it.
    """

    def __init__(self, data: bytes, where: str = FILE) -> None:
        import tokenizers

        try:
            self._tokenizer: tokenizers.Tokenizer = tokenizers.Tokenizer.from_str(data.decode())
        except BaseException as error:  # the library raises a plain Exception, or panics, which is not even that
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            raise ArtifactError(f"tokenizer `{where}`: expected one that `tokenizers` reads, found {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Ids of ``text``, with the special tokens that the tokenizer adds by itself unless ``special`` is False.

        Other threads run meanwhile: of the library's functions, those for a batch let them.
        """
        return list(self._tokenizer.encode_batch([text], add_special_tokens=special)[0].ids)

    @cached_property
    def longest(self) -> int | None:
        """Bytes of text in UTF-8 that one token can stand for, at most; None where a token has no such bound.

        There is one where every byte of a text is spelled by a token: in byte-level BPE that has all 256 bytes, drops
        nothing between words, and has no added token that takes the spaces beside it.
        """
        import tokenizers

        normalizer, splitter = self._tokenizer.normalizer, self._tokenizer.pre_tokenizer
        state = {} if splitter is None else json.loads(splitter.__getstate__())
        parts = {(part["type"], part.get("behavior")) for part in state.get("pretokenizers", [state] if state else [])}
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=False)
        added = self._tokenizer.get_added_tokens_decoder().values()
        spelled = (
            isinstance(self._tokenizer.model, tokenizers.models.BPE)
            and set(tokenizers.pre_tokenizers.ByteLevel.alphabet()) <= vocabulary.keys()
            and "ByteLevel" in {kind for kind, _ in parts} <= {"ByteLevel", "Digits", "Split"}
            and "Removed" not in {behavior for _, behavior in parts}
            and isinstance(normalizer, tokenizers.normalizers.NFC | None)
            and not any(token.lstrip or token.rstrip for token in added)
        )
        if not spelled:
            return None
        # A token has a character for each byte. NFC leaves at least 2 of 7 bytes (of U+1FBE U+0308 U+0301).
        bytes_of = [*map(len, vocabulary), *(len(token.content.encode()) for token in added)]
        return max(bytes_of) * (1 if normalizer is None else 4)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ``ids`` without special tokens."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def bytes_of(self, token: int) -> bytes:
        """The bytes that a token stands for; of a special token, those of its name; none where there is no such token.

        A token of another tokenizer than a byte-level one is decoded alone.
        """
        name = self._tokenizer.id_to_token(token)
        if name is None:
            return b""
        if token in self._added:
            return self._added[token].encode()
        if not self._byte_level or not set(name) <= BYTES.keys():
            return str(self._tokenizer.decode([token])).encode()
        return bytes(BYTES[character] for character in name)

    @cached_property
    def _added(self) -> dict[int, str]:
        return {id: token.content for id, token in self._tokenizer.get_added_tokens_decoder().items()}

    @cached_property
    def _byte_level(self) -> bool:
        return "ByteLevel" in str(self._tokenizer.decoder)

    def stream(self, stop: Sequence[str] = (), *, include_stop: bool = False, skip_special: bool = True) -> TextStream:
        """A stream of text for one answer; the arguments are those of TextStream."""
        return TextStream(self._tokenizer, stop, include_stop=include_stop, skip_special=skip_special)

    @property
    def size(self) -> int:
        """How many tokens there are, special ones too."""
        return int(self._tokenizer.get_vocab_size())

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids of the special tokens, which have no text."""
        added = self._tokenizer.get_added_tokens_decoder()
        return frozenset(number for number, token in added.items() if token.special)

    def id_of(self, token: str) -> int | None:
        """Id of a token by its name."""
        return self._tokenizer.token_to_id(token)


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
    def there(self) -> bool:
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
        if not self.there:
            raise RequestError(
                f"{purpose}: expected an artifact with a tokenizer, found none, in {self._folder}",
                "give and take token ids, or build from a checkpoint that has tokenizer.json",
            )
        return self._tokenizer

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return Tokenizer(read_checked(self._folder, self._records[FILE]))

    def eos_token_ids(self) -> frozenset[int]:
        """Ids that end a text: those of config.json, generation_config.json and tokenizer_config.json together."""
        ids = {*self._eos, *_ids(self.generation_config().get("eos_token_id"))}
        token = _token(self._json(CONFIG).get("eos_token"))
        if token and self.there:
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

    def render_chat(self, messages: Sequence[chat.Message], *, name: str = "messages", **how: Any) -> str:
        """The text of a conversation, by the checkpoint's chat template.

        Args:
            messages: ``[{"role": TEXT, "content": TEXT}, …]``.
            name: What messages of errors call it.
            how: The other arguments of ``ChatTemplate.render``.

        Raises:
            RequestError: The messages are malformed or refused, or the artifact has no chat template.
            ArtifactError: The template is broken.
        """
        if not self.chats:
            raise RequestError(
                f"{name}: expected an artifact with a chat template, found none, in {self._folder}",
                "give text or token ids, or build from a checkpoint that has a chat template",
            )
        return self._chat_template.render(messages, name=name, **how)

    def grammars(self, vocab_size: int) -> Grammars:
        """Makes matchers of grammars, for a model whose token ids are below ``vocab_size``.

        Raises:
            RequestError: The artifact has no tokenizer, or llguidance is not installed.
            ArtifactError: llguidance cannot read the tokenizer.
        """
        if self._grammars is None:
            self.tokenizer("structured output")
            data = read_checked(self._folder, self._records[FILE]).decode()
            trial = GrammarTrial(data, vocab_size, self.eos_token_ids())
            self._grammars = Grammars(data, vocab_size, self.eos_token_ids(), trial.refusal)
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
    """The ids of a JSON field that holds one, or a list of them, or nothing."""
    values = value if isinstance(value, list) else [value]
    return [item for item in values if type(item) is int]
