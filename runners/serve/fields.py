"""Fields of a JSON body: each is read by its type, or refused by its name."""

import json
from collections.abc import Mapping
from typing import Any

from ling3export.runners.engine.request import BOUNDS
from ling3export.runners.serve.errors import ApiError, malformed

WORDS = {list: "a list", dict: "an object", str: "a text"}
SHOWN = 60  # characters of a wrong value that are repeated

# Fields of the API that this server does not implement, and the values under which they ask for nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "presence_penalty": (0, 0.0),
    "frequency_penalty": (0, 0.0),
    "logit_bias": ({},),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "store": (False,),
}
# What only labels a request.
LABELS = frozenset({"user", "metadata", "safety_identifier", "prompt_cache_key"})


def found(value: object) -> str:
    """A wrong value, for a message: a short one itself, else what kind it is."""
    if isinstance(value, (list, dict)):
        return WORDS[type(value)] if value else json.dumps(value)
    text = json.dumps(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"


def parse(data: bytes) -> dict[str, Any]:
    """The object in a body.

    Raises:
        ApiError: It is none.
    """

    def refuse(word: str) -> float:
        raise ValueError(f"{word}, which is no JSON")

    try:
        body = json.loads(data.decode(), parse_constant=refuse)
    except RecursionError:
        raise ApiError(400, "body: expected JSON, found it nested too deeply", code="invalid_json") from None
    except ValueError as error:  # also what is no UTF-8, and numbers of thousands of digits
        raise ApiError(400, f"body: expected JSON, found {error}", code="invalid_json") from None
    if not isinstance(body, dict):
        raise ApiError(400, f"body: expected an object, found {found(body)}", code="invalid_json")
    return body


class Fields:
    """A body's fields. A field that is null counts as one that is not there.

    Args:
        body: The object.
        known: The fields that will be read.

    Raises:
        ApiError: There is a field that is neither known nor harmless.
    """

    def __init__(self, body: Mapping[str, Any], known: frozenset[str]) -> None:
        self._body = {name: value for name, value in body.items() if value is not None}
        for name, value in self._body.items():
            if name in known or name in LABELS:
                continue
            harmless = NEUTRAL.get(name)
            if harmless is None:
                raise ApiError(
                    400, f"`{name[:SHOWN]}`: expected fields that this server knows, found another",
                    param=name[:SHOWN], code="unsupported_parameter",
                )  # fmt: skip
            if repr(value) not in map(repr, harmless):  # by repr: 1 is not True
                wanted = " or ".join(json.dumps(each) for each in harmless)
                raise ApiError(
                    400, f"`{name}`: expected it left out or {wanted}, found {found(value)}: not supported here",
                    param=name, code="unsupported_parameter",
                )  # fmt: skip

    def get(self, name: str) -> Any:
        """Whatever the field holds; None if it is not there."""
        return self._body.get(name)

    def text(self, name: str) -> str:
        """A text that has to be there."""
        value = self._body.get(name)
        if not isinstance(value, str):
            raise malformed(name, "a text", "none" if value is None else found(value))
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        """true or false."""
        value = self._body.get(name, default)
        if not isinstance(value, bool):
            raise malformed(name, "true or false", found(value))
        return value

    def whole(self, name: str, low: int, high: int) -> int | None:
        """A whole number from ``low`` to ``high``."""
        value = self._body.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise malformed(name, f"a whole number from {low} to {high}", found(value))
        return value

    def sampling(self, name: str, default: Any) -> Any:
        """A setting of the sampling, within its BOUNDS."""
        value = self._body.get(name, default)
        if not BOUNDS[name].hold(value):
            raise malformed(name, str(BOUNDS[name]), found(value))
        return value
