"""The checkpoint's fast tokenizer: text to token ids and back."""

import json
from collections.abc import Sequence
from functools import cached_property

from ling3export.foundation.errors import ArtifactError
from ling3export.runners.text.detokenize import TextStream

FILE = "tokenizer.json"
PRINTED = (*range(33, 127), *range(161, 173), *range(174, 256))  # bytes that byte-level BPE writes as themselves
# The others are written from U+0100 on, in order.
BYTES = {chr(byte): byte for byte in PRINTED} | {
    chr(256 + place): byte for place, byte in enumerate(byte for byte in range(256) if byte not in PRINTED)
}


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
        if not self.byte_level or not set(name) <= BYTES.keys():
            return str(self._tokenizer.decode([token])).encode()
        return bytes(BYTES[character] for character in name)

    @cached_property
    def _added(self) -> dict[int, str]:
        return {id: token.content for id, token in self._tokenizer.get_added_tokens_decoder().items()}

    @cached_property
    def byte_level(self) -> bool:
        """Whether its tokens are spelled in bytes."""
        return "ByteLevel" in str(self._tokenizer.decoder)

    def stream(self, stop: Sequence[str] = (), *, include_stop: bool = False, skip_special: bool = True) -> TextStream:
        """A stream of text for one answer; the arguments are those of TextStream."""
        return TextStream(self._tokenizer, stop, include_stop=include_stop, skip_special=skip_special)

    @property
    def json(self) -> str:
        """It as tokenizer.json has it."""
        return str(self._tokenizer.to_str())

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
