"""Which tokens may come next, where a text must follow a JSON schema, a regex or a grammar.

llguidance (extra ``structured``) follows the grammar byte by byte and fills a bit mask of tokens. Counted steps bound
its work for a token, so several hosts come to the same end. Nothing bounds the compilation of a grammar, so every new
one is compiled in another process first (``trial.py``).
"""

import json
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from ling3export.foundation.errors import ArtifactError, RequestError
from ling3export.foundation.extras import installed, require

if TYPE_CHECKING:
    import numpy as np

    from ling3export.runners.text.vocabulary import Tokenizer

KINDS = ("json", "regex", "lark")
LARGEST = 1 << 16  # characters of a schema, regex or grammar
# Blanks as Python and the templates of tools write them: a model that may choose them may never come to an end.
AS_WRITTEN = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
KEPT = 32  # of the last ones, what they were compiled to
TRIED = 1024  # of the last ones, what their trial said


class Grammar(NamedTuple):
    """The form of a text."""

    kind: str  # ``json`` (a JSON schema), ``regex`` (Rust's syntax, the whole text matches) or ``lark``
    text: str  # the schema, the regex or the grammar
    behind: str = ""  # the grammar begins after this mark; empty where it begins with the text


def library() -> str:
    """The version of llguidance; ``none`` where it is not installed."""
    return installed("llguidance") or "none"


class Matcher:
    """Follows one text through a grammar."""

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
        vocab_size: Token ids of the model are below it.
        eos: Ids that end a text.
        trial: Called by ``check`` before a grammar is compiled here; returns its fault, or an empty text.

    Raises:
        RequestError: llguidance is not installed.
        ArtifactError: llguidance cannot read the tokenizer.
    """

    def __init__(
        self, tokenizer: "Tokenizer", vocab_size: int, eos: Iterable[int], trial: Callable[[Grammar], str] | None = None
    ) -> None:
        require("structured output", "structured", "llguidance", kind=RequestError)
        import llguidance

        self._library = llguidance
        self._compiled, self._refusal = lru_cache(KEPT)(self._compile), lru_cache(TRIED)(self._try)
        self._words, self._trial = -(-vocab_size // 32), trial
        try:
            by_bytes = tokenizer.byte_level and llguidance.TokenizerWrapper(_ByBytes(tokenizer, vocab_size, eos))
            self._tokenizer = llguidance.LLTokenizer(
                by_bytes or tokenizer.json, n_vocab=vocab_size, eos_token=sorted(eos)
            )
        except ValueError as error:
            raise ArtifactError(f"tokenizer: expected one that llguidance reads, found {error}") from error

    def check(self, grammar: Grammar, name: str = "grammar") -> None:
        """Refuses a grammar that cannot be used; one that is new takes the time of two processes to compile it.

        Raises:
            RequestError: The grammar is malformed or too large, or no text fits it.
        """
        # The result is kept without the name: a grammar is checked under one, and runs under another. A trial takes the
        # first tokens, so the part after a mark is tried by itself, too.
        if refusal := self._refusal(grammar._replace(behind="")) or self._refusal(grammar):
            raise RequestError(f"{name}: {refusal}")

    def matcher(self, grammar: Grammar) -> Matcher:
        """A matcher at the begin of a text.

        Raises:
            RequestError: For the reasons that ``check`` gives.
        """
        return Matcher(self._compiled(grammar).deep_copy())

    def follow(self, grammar: Grammar, tokens: int) -> None:
        """Takes the first tokens of a text, each from the middle of the allowed ones.

        Raises:
            RequestError: For the reasons that ``check`` gives.
        """
        import numpy as np

        matcher, mask = self.matcher(grammar), np.zeros(self._words, np.int32)
        for _ in range(tokens):
            matcher.fill(mask)
            allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
            if matcher.error or not len(allowed):
                raise _unusable(grammar, matcher)
            matcher.accept(int(allowed[len(allowed) // 2]))
            if matcher.over:
                return

    def _try(self, grammar: Grammar) -> str:
        refusal = "" if self._trial is None else self._trial(grammar)
        if not refusal:
            try:
                self._compiled(grammar)  # so that the engine's thread finds it
            except RequestError as error:
                return error.message
        return refusal

    def _compile(self, grammar: Grammar) -> Any:
        kind, text, behind = grammar
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
        if behind:
            answer = {"lark_grammar": text} if kind == "lark" else json.loads(inner)["grammars"][0]
            before = (
                f"start: before BLANKS @answer\nbefore[suffix={json.dumps(behind)}]: /(?s:.*)/\nBLANKS: /\\n{{0,2}}/\n"
            )
            named = [{"name": "before", "lark_grammar": before}, answer | {"name": "answer"}]
            inner = json.dumps({"grammars": named})
        # A mask takes at most about 0.02 s of a thread, 2.7 s by default; a matcher's states take up to 100 MB.
        limits = self._library.LLParserLimits(
            max_items_in_row=1000, step_max_items=10_000,
            initial_lexer_fuel=200_000, step_lexer_fuel=50_000, max_lexer_states=50_000,
        )  # fmt: skip
        compiled = make(self._tokenizer, inner, log_level=0, limits=limits)
        if (matcher := Matcher(compiled)).error:
            raise _unusable(grammar, matcher)
        return compiled


class _ByBytes:
    """A tokenizer as llguidance takes it from other libraries: the bytes of each token, and how a text is spelled.

    From a tokenizer.json llguidance takes every added token of the form ``<NAME>`` for a special one, which no grammar
    allows: a model with tokens for the marks of thoughts and calls could write none of them.
    """

    bos_token_id = None

    def __init__(self, tokenizer: "Tokenizer", vocab_size: int, eos: Iterable[int]) -> None:
        self.eos_token_id = min(eos)
        self.tokens = [tokenizer.bytes_of(id) for id in range(vocab_size)]
        self.special_token_ids = sorted(id for id in tokenizer.special_ids if id < vocab_size)
        self._tokenizer = tokenizer

    def __call__(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, special=False)


def _unusable(grammar: Grammar, matcher: Matcher) -> RequestError:
    why = " ".join(matcher.error.split())
    why = "that no text fits it" if not why or why.startswith("NoExtension") else why
    return RequestError(f"expected a {grammar.kind} grammar that some text fits, found {why}")


def grammar_of(value: object, name: str) -> Grammar:
    """``value``, a kind and a text, as a grammar.

    Raises:
        RequestError: It is none, or too large.
    """
    parts = tuple(value) if isinstance(value, (tuple, list)) else ()
    kind, text, behind = (*parts, "") if len(parts) == 2 else parts if len(parts) == 3 else (None, None, None)
    if kind not in KINDS or not isinstance(text, str) or not isinstance(behind, str):
        raise RequestError(f"{name}: expected a grammar, (KIND, TEXT) with KIND one of {', '.join(KINDS)}")
    if len(text) > LARGEST:
        raise RequestError(f"{name}: expected a grammar of at most {LARGEST:,} characters, found {len(text):,}")
    return Grammar(str(kind), str(text), str(behind))
