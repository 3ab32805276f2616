"""Which tokens may come next, where a request says what its text has to be: a JSON schema, a regex or a grammar.

llguidance (extra ``structured``) follows the grammar byte by byte and fills a bit mask of tokens. Its work is bounded
by counted steps and not by time, so that several hosts come to the same end.
"""

from collections.abc import Iterable
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, NamedTuple

from ling3export.foundation.errors import ArtifactError, RequestError

if TYPE_CHECKING:
    import numpy as np

KINDS = ("json", "regex", "lark")
LARGEST = 1 << 16  # characters of a schema, regex or grammar
# Blanks as Python and the templates of tools write them: a model that may choose them may never come to an end.
AS_WRITTEN = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
KEPT = 32  # of the last ones, what they were compiled to: half a second for a large one


class Grammar(NamedTuple):
    """What a text has to be.

    Attributes:
        kind: ``json`` (the text of a JSON schema), ``regex`` (Rust's syntax, the whole text matches) or ``lark``.
        text: The schema, the regex or the grammar.
    """

    kind: str
    text: str


def library() -> str:
    """The version of llguidance; ``none`` where it is not installed."""
    try:
        return version("llguidance")
    except PackageNotFoundError:
        return "none"


class Matcher:
    """Follows one text through a grammar.

    Args:
        inner: llguidance's matcher.
    """

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    @property
    def error(self) -> str:
        """Why it cannot go on; empty while it can."""
        return str(self.inner.get_error()).partition("\n<state>")[0]  # what follows is for llguidance's makers

    @property
    def over(self) -> bool:
        """Whether the text is complete, and nothing can follow."""
        return bool(self.inner.is_stopped()) and not self.error

    def accept(self, token: int) -> None:
        """Takes the next token, which the mask allowed."""
        self.inner.consume_token(token)

    def fill(self, mask: "np.ndarray") -> None:
        """Writes the allowed tokens, int32 ``[W]``: bit ``id % 32`` of word ``id // 32``."""
        self.inner.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)


class Grammars:
    """Makes matchers for one tokenizer.

    Args:
        tokenizer: Text of tokenizer.json.
        vocab_size: Token ids of the model are below it.
        eos: Ids that end a text.

    Raises:
        RequestError: llguidance is not installed.
        ArtifactError: llguidance cannot read the tokenizer.
    """

    def __init__(self, tokenizer: str, vocab_size: int, eos: Iterable[int]) -> None:
        try:
            import llguidance
        except ImportError:
            raise RequestError(
                "structured output: expected llguidance, found it not installed",
                "pip install 'ling3export[structured]'",
            ) from None
        self._library = llguidance
        self._made = lru_cache(KEPT)(self._make)
        self._words = -(-vocab_size // 32)
        try:
            self._tokenizer = llguidance.LLTokenizer(tokenizer, n_vocab=vocab_size, eos_token=sorted(eos))
        except ValueError as error:
            raise ArtifactError(f"tokenizer: expected one that llguidance reads, found {error}") from error

    def matcher(self, grammar: Grammar, name: str = "grammar") -> Matcher:
        """A matcher at the begin of a text.

        Raises:
            RequestError: The grammar is malformed or too large, or no text fits it.
        """
        try:
            return Matcher(
                self._made(grammar).deep_copy()
            )  # not by name: it is checked under one, and runs under another
        except RequestError as error:
            raise RequestError(f"{name}: {error.message}") from None

    def _make(self, grammar: Grammar) -> Any:
        import numpy as np

        kind, text = grammar
        make = self._library.LLMatcher
        try:
            if kind == "json":
                # The schemas true and false take no options.
                options: Any = AS_WRITTEN if text.lstrip().startswith("{") else None
                inner = make.grammar_from_json_schema(text, defaults=options)
            else:
                inner = make.grammar_from_regex(text) if kind == "regex" else make.grammar_from_lark(text)
        except ValueError as error:
            raise RequestError(f"expected a {kind} grammar, found {error}") from None
        found = Matcher(make(self._tokenizer, inner, log_level=0))
        mask = np.zeros(self._words, np.int32)
        if not found.error:
            found.fill(mask)
        if found.error or not mask.any():
            why = " ".join(found.error.split())
            why = "that no text fits it" if not why or why.startswith("NoExtension") else why
            raise RequestError(f"expected a {kind} grammar that some text fits, found {why}")
        return found.inner


def grammar_of(value: object, name: str) -> Grammar:
    """``value``, a kind and a text, as a grammar.

    Raises:
        RequestError: It is none, or too large.
    """
    pair = tuple(value) if isinstance(value, (tuple, list)) else ()
    kind, text = pair if len(pair) == 2 else (None, None)
    if kind not in KINDS or not isinstance(text, str):
        raise RequestError(f"{name}: expected a grammar, (KIND, TEXT) with one of {', '.join(KINDS)}, found another")
    if len(text) > LARGEST:
        raise RequestError(f"{name}: expected a grammar of at most {LARGEST:,} characters, found {len(text):,}")
    return Grammar(str(kind), str(text))
