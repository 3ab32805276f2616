"""The checkpoint's fast tokenizer: text to token ids and back, whole or as tokens come."""

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from ling3export.foundation.errors import ArtifactError

if TYPE_CHECKING:
    import tokenizers

FILE = "tokenizer.json"
TRIED = "a1 \ue000"  # in no vocabulary as a whole
PRINTED = (*range(33, 127), *range(161, 173), *range(174, 256))  # bytes that byte-level BPE writes as themselves
# The others are written from U+0100 on, in order.
BYTES = {chr(byte): byte for byte in PRINTED} | {
    chr(256 + place): byte for place, byte in enumerate(byte for byte in range(256) if byte not in PRINTED)
}


class TextStream:
    """Text of a growing list of tokens: never half a character, never the begin of a stop string.

    Attributes:
        stopped: Whether a stop string was met.
    """

    def __init__(
        self,
        tokenizer: "tokenizers.Tokenizer",
        stop: Sequence[str] = (),
        *,
        include_stop: bool = False,
        skip_special: bool = True,
    ) -> None:
        self.stopped = False
        self._include_stop, self._skip_special = include_stop, skip_special
        self._tokenizer = tokenizer
        self.stop = tuple(stop)
        self._held = ""  # decoded, not yet given away: it may be the begin of a stop string
        self._restart()

    def push(self, token: int, *, watch: bool = True) -> str:
        """Adds a token; returns the text that is certain now: nothing after a stop string.

        Without ``watch`` none ends with this token; one that begins here may end later.
        """
        if self.stopped:
            return ""
        try:
            new = self._decoder.step(self._tokenizer, token) or ""
        except Exception:  # the library raises a plain Exception where bytes that are no text change with what follows
            rest = self._rest()
            self._restart()
            return self._release(rest + self._taken(token, self._decoder.step(self._tokenizer, token) or ""), watch)
        return self._release(self._taken(token, new), watch)

    def finish(self) -> str:
        """The text that was held back, an unfinished character as U+FFFD; the stream ends here."""
        if self.stopped:
            return ""
        rest = self._release(self._rest())
        if not self.stopped:
            rest, self._held = rest + self._held, ""
        self._restart()
        return rest

    def _restart(self) -> None:
        from tokenizers.decoders import DecodeStream

        self._decoder = DecodeStream(skip_special_tokens=self._skip_special)
        self._ids: list[int] = []  # since then
        self._decoded = 0  # characters of their text that the decoder gave

    def _taken(self, token: int, new: str) -> str:
        self._ids.append(token)
        self._decoded += len(new)
        return new

    def _rest(self) -> str:
        """The text that the decoder holds back: of an unfinished character, or of bytes that are none."""
        return str(self._tokenizer.decode(self._ids, skip_special_tokens=self._skip_special))[self._decoded :]

    def _release(self, new: str, watch: bool = True) -> str:
        text, before = self._held + new, len(self._held)
        # One that lies before the new text was not to be watched for.
        starts = ((text.find(stop, max(0, before - len(stop) + 1)), len(stop)) for stop in self.stop)
        stops = [(place, size) for place, size in starts if place >= 0]
        if stops and watch:
            self.stopped, self._held = True, ""
            place, size = min(stops)
            return text[: place + size if self._include_stop else place]
        keep = max((overlap(text, stop) for stop in self.stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that begins ``stop``."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[-size:]):
            return size
    return 0


class Tokenizer:
    """The tokenizer of an artifact. Raises ArtifactError: the library cannot read it."""

    def __init__(self, data: bytes, where: str = FILE) -> None:
        import tokenizers

        try:
            self._tokenizer: tokenizers.Tokenizer = tokenizers.Tokenizer.from_str(data.decode())
            self.decode(self._tokenizer.encode(TRIED).ids)  # some are read, and fail at the first text
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

    @property
    def largest_id(self) -> int:
        """The largest id of a token."""
        return max(self._tokenizer.get_vocab().values(), default=0)

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids of the special tokens, which have no text."""
        added = self._tokenizer.get_added_tokens_decoder()
        return frozenset(number for number, token in added.items() if token.special)

    def id_of(self, token: str) -> int | None:
        """Id of a token by its name."""
        return self._tokenizer.token_to_id(token)
