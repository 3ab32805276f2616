"""Text that grows by whole characters as tokens come, and ends before a stop string."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import tokenizers


class TextStream:
    """Text of a growing list of tokens: never half a character, never the begin of a stop string.

    Args:
        tokenizer: Decodes the tokens.
        stop: Strings that end the text.
        include_stop: They are part of it.
        skip_special: Special tokens have no text.

    Attributes:
        stop: The strings that end the text.
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
        """Adds a token; returns the text that is certain now: nothing behind a stop string.

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
