"""Texts generated for random JSON schemas and regexes match them, according to the libraries jsonschema and re."""

import json
import random
import re
from typing import Any

import jsonschema
import pytest

from ling3export.runners.engine.request import Sampling
from ling3export.runners.text.grammar import Grammar

LETTERS = "abcdexyz019 é"
CLASSES = ("[a-f]", "[0-9]", "[A-Za-z]", "[^a-z\\n]", "[ab ]", ".")
FORMATS = ("date", "ipv4", "uuid")


def regex(dice: random.Random, depth: int = 3) -> str:
    """A regex that Rust's and Python's libraries interpret alike."""
    kind = dice.randrange(6 if depth else 2)
    if kind == 0:
        return "".join(dice.choices(LETTERS, k=dice.randint(1, 4)))
    if kind == 1:
        return dice.choice(CLASSES)
    if kind == 2:
        return f"({'|'.join(regex(dice, depth - 1) for _ in range(dice.randint(2, 3)))})"
    if kind == 3:
        least = dice.randint(0, 3)
        times = dice.choice(("?", "*", "+", f"{{{least},{least + dice.randint(0, 4)}}}"))
        return f"({regex(dice, depth - 1)}){times}"
    return "".join(regex(dice, depth - 1) for _ in range(dice.randint(2, 3)))


def _value(dice: random.Random) -> Any:
    return dice.choice(
        (None, True, False, dice.randint(-99, 99), "".join(dice.choices(LETTERS, k=3)), [1, "a"], {"a": 1})
    )


def _text(dice: random.Random) -> dict[str, Any]:
    how = dice.randrange(4)
    if how == 0:
        return {"type": "string", "pattern": f"^{regex(dice, 1)}$"}
    if how == 1:
        return {"type": "string", "format": dice.choice(FORMATS)}
    least = dice.randint(0, 4)
    return {"type": "string", "minLength": least, "maxLength": least + dice.randint(0, 9)}


def _number(dice: random.Random) -> dict[str, Any]:
    low = dice.randint(-1000, 1000)
    high = low + dice.randint(0, 2000)
    least = {dice.choice(("minimum", "exclusiveMinimum")): low}
    if dice.random() < 0.3:
        return {"type": "number", **least, "maximum": high + 1}
    return {"type": "integer", **least, "maximum": high + 1}


def schema(dice: random.Random, depth: int = 3) -> dict[str, Any]:
    """A JSON schema that some value matches."""
    kind = dice.randrange(9 if depth else 5)
    if kind == 0:
        return {"enum": [_value(dice) for _ in range(dice.randint(1, 4))]}
    if kind == 1:
        return dice.choice(({"const": _value(dice)}, {"type": "boolean"}, {"type": ["null", "boolean"]}))
    if kind in (2, 3):
        return _text(dice) if kind == 2 else _number(dice)
    if kind == 4:
        return {"type": "string", "enum": ["".join(dice.choices(LETTERS, k=dice.randint(0, 5))) for _ in range(3)]}
    if kind == 5:
        return {"anyOf": [schema(dice, depth - 1) for _ in range(dice.randint(1, 3))]}
    if kind == 6:
        least = dice.randint(0, 2)
        sizes = {"minItems": least, "maxItems": least + dice.randint(0, 2)}
        return {"type": "array", "items": schema(dice, depth - 1)} | sizes
    names = dice.sample(["a", "b", "name", "größe", 'q"', "x y"], dice.randint(0, 4))
    properties = {name: schema(dice, depth - 1) for name in names}
    needed = [name for name in names if dice.random() < 0.7]
    return {"type": "object", "properties": properties, "required": needed, "additionalProperties": False}


def case(seed: int, number: int) -> Grammar:
    """One grammar: two of three are schemas."""
    dice = random.Random(f"{seed}/{number}")
    if number % 3 == 2:
        return Grammar("regex", regex(dice))
    found = schema(dice)
    if dice.random() < 0.1:
        found = {"$defs": {"one": found}, "type": "array", "items": {"$ref": "#/$defs/one"}, "maxItems": 2}
    return Grammar("json", json.dumps(found))


def check(grammar: Grammar, text: str) -> None:
    """Raises if ``text`` does not match ``grammar``."""
    if grammar.kind == "regex":
        assert re.fullmatch(grammar.text, text), f"{grammar.text!r} does not match {text!r}"
        return
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    # RFC 3339 has a year 0000, a leap year like 2000. jsonschema uses Python's dates, which begin with 0001.
    text = re.sub(r'"0000-(\d\d-\d\d)"', r'"2000-\1"', text)
    jsonschema.Draft202012Validator(json.loads(grammar.text), format_checker=checker).validate(json.loads(text))


def test_json_of_a_model_has_only_the_blanks_of_python(engine):
    """Regression: a model could write blanks forever: 148 of 667 random schemas did not end."""
    properties = {"a": {"type": "integer"}, "b": {"type": "string"}}
    schema = {"type": "object", "properties": properties, "required": ["a", "b"]}
    grammar, encode = Grammar("json", json.dumps(schema)), engine.files.tokenizer("test").encode
    for text, fits in (
        ('{"a": 1, "b": " "}', True),
        ('{"a":1, "b": ""}', False),
        ('{ "a"', False),
        ('{"a": 1,  ', False),
    ):
        ids = encode(text, special=False)
        matcher = engine.files.grammars(engine.limits.vocab_size).matcher(grammar).inner
        assert (matcher.validate_tokens(ids) == len(ids)) is fits, text


@pytest.mark.parametrize("seed", [1])
def test_texts_that_end_are_what_was_asked_for(engine, seed):
    grammars = [case(seed, number) for number in range(12)]
    requests = [
        engine.request("the", 40, Sampling(1.0, seed=number), grammar=grammar)
        for number, grammar in enumerate(grammars)
    ]
    ended = 0
    for grammar, done in zip(grammars, engine.complete(requests), strict=True):
        assert done.stop_reason in ("eos", "stop", "length")
        if done.stop_reason != "length":
            check(grammar, done.text)
            ended += 1
    assert ended >= 6


def test_a_constrained_text_begins_after_the_mark_and_does_not_end_before_it(engine):
    """Regression: the constrained text could come first, in place of the thought that the template had begun."""
    grammar = Grammar("regex", "[A-C]{3}", behind="e")
    requests = [engine.request("the", 60, Sampling(1.0, seed=number), grammar=grammar) for number in range(3)]
    ended = [done.text for done in engine.complete(requests) if done.stop_reason != "length"]
    assert ended and all(re.fullmatch("[^e]*e\n{0,2}[A-C]{3}", text) for text in ended)
