"""Bounds of a request's fields, for the command line, Python and HTTP."""

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from ling3export.foundation.errors import ArtifactError, RequestError, shown

SEEDS = 1 << 32


@dataclass(frozen=True)
class NumberRange:
    """The range of a setting: a number from ``low`` to ``high``, both included.

    Attributes:
        low: Least.
        high: Most.
        above: ``low`` itself is left out.
        whole: Whole numbers only.
    """

    low: float
    high: float
    above: bool = False
    whole: bool = False

    def __contains__(self, value: object) -> bool:
        if isinstance(value, bool) or not isinstance(value, Integral if self.whole else Real):
            return False
        number: Any = value
        return bool((self.low < number if self.above else self.low <= number) and number <= self.high)  # NaN: neither

    def number(self, value: object, what: str) -> Any:
        """``value`` as Python's own int or float; numpy's numbers are numbers, too.

        Raises:
            RequestError: ``value`` is no number of the range; ``what`` says whose it is.
        """
        if value not in self:
            raise RequestError(f"{what}: expected {self}, found {shown(value)}")
        return int(value) if self.whole else float(value)  # type: ignore[call-overload, arg-type]

    def __str__(self) -> str:
        if self.above:
            return f"a number above {self.low:g}, at most {self.high:g}"
        if self.whole:
            return f"a whole number from {self.low} to {self.high}"
        return f"a number from {self.low:g} to {self.high:g}"


# The hottest temperature is that of OpenAI's API.
BOUNDS = {
    "temperature": NumberRange(0, 2),
    "top_k": NumberRange(0, (1 << 31) - 1, whole=True),
    "top_p": NumberRange(0, 1, above=True),
    "min_p": NumberRange(0, 1),
    "seed": NumberRange(0, SEEDS - 1, whole=True),
    "presence_penalty": NumberRange(-2, 2),
    "frequency_penalty": NumberRange(-2, 2),
    "repetition_penalty": NumberRange(0.01, 10),  # a smaller divisor makes infinities of finite logits
}
TOP_LOGPROBS = NumberRange(0, 20, whole=True)
BIASES, BIAS = 1024, NumberRange(-100, 100)  # tokens that a request may name, and what is added to their logits
MAX_TOKENS = NumberRange(1, (1 << 31) - 1, whole=True)
PRIORITY = NumberRange(-(1 << 31), (1 << 31) - 1, whole=True)
PLACE, NONE = NumberRange(0, (1 << 31) - 1, whole=True), NumberRange(0, 0, whole=True)
# What is taken from generation_config.json: as with vLLM, `do_sample` is not.
DEFAULTS = {name: BOUNDS[name] for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")}
DEFAULTS["max_new_tokens"] = MAX_TOKENS


def generation_defaults(generation_config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of DEFAULTS in a generation_config.json, as vLLM's ``--generation-config auto`` reads it.

    Raises:
        ArtifactError: One of them is no number of its range.
    """
    values = {name: generation_config[name] for name in DEFAULTS if generation_config.get(name) is not None}
    for name, value in values.items():
        if value not in DEFAULTS[name]:
            raise ArtifactError(
                f"generation_config.json `{name}`: expected {DEFAULTS[name]}, found {shown(value)}",
                "--generation-config none leaves it out",
            )
    return values


def token_ids(values: object, name: str = "request") -> tuple[int, ...]:
    """``values``, a sequence or an array of one axis, as token ids.

    Raises:
        RequestError: They are no sequence, or one of them is not a whole number.
    """
    listed = values.tolist() if hasattr(values, "tolist") else values  # an array's own types become Python's
    if not isinstance(listed, Sequence) or isinstance(listed, (str, bytes, bytearray)):
        raise RequestError(f"{name}: expected token ids, found {shown(values)}")
    if set(map(type, listed)) <= {int}:
        return tuple(listed)
    ids = []
    for place, value in enumerate(listed):
        try:
            if isinstance(value, bool):
                raise TypeError
            ids.append(int(operator.index(value)))
        except TypeError:
            raise RequestError(f"{name}: expected token ids, found {shown(value)} at place {place}") from None
    return tuple(ids)


def biases(values: object) -> tuple[tuple[int, float], ...]:
    """``values``, token ids and what is added to their logits, as pairs without zeros.

    Raises:
        RequestError: They are no such pairs, too many, or one of them names a token twice or is out of its bounds.
    """
    try:
        pairs = [(token, add) for token, add in (values.items() if isinstance(values, Mapping) else values)]  # type: ignore[attr-defined]
    except (TypeError, ValueError):
        raise RequestError(f"sampling `logit_bias`: expected token ids with numbers, found {shown(values)}") from None
    if len(pairs) > BIASES:
        raise RequestError(f"sampling `logit_bias`: expected at most {BIASES} tokens, found {len(pairs)}")
    what = "sampling `logit_bias`"
    checked = [(PLACE.number(token, f"{what}, a token"), BIAS.number(add, what)) for token, add in pairs]
    if len(dict(checked)) < len(checked):
        raise RequestError(f"{what}: expected each token once, found one twice")
    return tuple((token, add) for token, add in checked if add)


def stop_strings(values: object, name: str = "request") -> tuple[str, ...]:
    """``values``, a text or several, as stop strings.

    Raises:
        RequestError: One of them is no text, is empty, or has half a character.
    """
    if isinstance(values, str):
        values = (values,)
    try:
        texts: tuple[object, ...] = tuple(values)  # type: ignore[arg-type]
    except TypeError:
        raise RequestError(f"{name}: expected stop strings, found {shown(values)}") from None
    for text in texts:
        if not isinstance(text, str):
            raise RequestError(f"{name}: expected stop strings, found {shown(text)} among them")
        if not text:
            raise RequestError(f"{name}: expected stop strings of at least one character, found an empty one")
        try:
            text.encode()
        except UnicodeEncodeError:
            problem = f"half a character in {shown(text)}"
            raise RequestError(f"{name}: expected stop strings in Unicode, found {problem}") from None
    return tuple(map(str, texts))
