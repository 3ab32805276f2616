"""Random JSON schemas and regexes as grammars of a real model: ``python -m tests.support.structure_campaign ARTIFACT``.

Every text that comes to its end has to be what was asked for, as the libraries jsonschema and re see it; one that the
limit of tokens cuts is counted apart. Case N of a seed is always the same.
"""

import json
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jsonschema

from ling3export.runners.engine.engine import Engine
from ling3export.runners.engine.request import Completion, Sampling
from ling3export.runners.text.grammar import Grammar

BATCH, TOKENS = 16, 200
LETTERS = "abcdexyz019 é"
CLASSES = ("[a-f]", "[0-9]", "[A-Za-z]", "[^a-z\\n]", "[ab ]", ".")
FORMATS = ("date", "ipv4", "uuid")


def regex(dice: random.Random, depth: int = 3) -> str:
    """A regex that Rust's and Python's libraries read alike."""
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
    """A JSON schema that some value fits."""
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
        return {
            "type": "array",
            "items": schema(dice, depth - 1),
            "minItems": least,
            "maxItems": least + dice.randint(0, 2),
        }
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
    """Raises where ``text`` is not what ``grammar`` says."""
    if grammar.kind == "regex":
        assert re.fullmatch(grammar.text, text), f"{grammar.text!r} does not match {text!r}"
        return
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    # RFC 3339 has a year 0000, a leap year as 2000 is one; Python's dates, by which jsonschema goes, begin with 0001.
    text = re.sub(r'"0000-(\d\d-\d\d)"', r'"2000-\1"', text)
    jsonschema.Draft202012Validator(json.loads(grammar.text), format_checker=checker).validate(json.loads(text))


def answers(
    engine: Engine, seed: int, numbers: Sequence[int], tokens: int = TOKENS, prompt: str = "Question:"
) -> list[tuple[Grammar, Completion]]:
    """What the model writes, at a temperature of 1."""
    grammars = [case(seed, number) for number in numbers]
    requests = [
        engine.request(prompt, tokens, Sampling(1.0, seed=number), grammar=grammar, name=f"case {number}")
        for number, grammar in zip(numbers, grammars, strict=True)
    ]
    return list(zip(grammars, engine.complete(requests), strict=True))


def speed(engine: Engine, grammar: Grammar | None, tokens: int) -> float:
    """Tokens/s of a batch, from the first submission to the last end."""
    requests = [
        engine.request("Question:", tokens, Sampling(1.0, seed=seed), grammar=grammar, ignore_eos=grammar is None)
        for seed in range(BATCH)
    ]
    started = time.perf_counter()
    done = engine.complete(requests)
    return sum(len(each.token_ids) for each in done) / (time.perf_counter() - started)


def campaign(path: str, count: int, seed: int) -> None:
    """Runs cases 0 … ``count - 1`` and prints what came of them."""
    ends: Counter[str] = Counter()
    wrong = []
    with Engine(path, report=lambda text: None) as engine:
        for first in range(0, count, BATCH):
            numbers = range(first, min(first + BATCH, count))
            for number, (grammar, done) in zip(numbers, answers(engine, seed, numbers), strict=True):
                ends[f"{grammar.kind} {done.stop_reason}"] += 1
                if done.stop_reason == "length":
                    continue
                try:
                    check(grammar, done.text or "")
                except Exception as error:  # whatever a library says against it
                    wrong.append({"case": number, "grammar": grammar, "text": done.text, "why": str(error)[:300]})
    print(json.dumps({"cases": count, "seed": seed, "ends": dict(sorted(ends.items())), "wrong": wrong}, indent=1))


def speeds(path: str, rounds: int = 5, tokens: int = 128) -> None:
    """Prints tokens/s with and without a grammar, turn by turn, and the median of their ratios."""
    form = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "minItems": 200}
    arms = {"none": None, "regex": Grammar("regex", "[a-z0-9 ]{2000}"), "json": Grammar("json", json.dumps(form))}
    with Engine(path, report=lambda text: None) as engine:
        engine.settle()
        found: dict[str, list[float]] = {name: [] for name in arms}
        for turn in range(rounds + 1):
            for name, grammar in arms.items():
                took = speed(engine, grammar, tokens)
                if turn:
                    found[name].append(took)
    ratios = {
        name: sorted(mine / plain for mine, plain in zip(found[name], found["none"], strict=True)) for name in arms
    }
    print(json.dumps({"tokens_per_second": found, "ratios": ratios}))


if __name__ == "__main__":
    if sys.argv[2:] == ["speed"]:
        speeds(sys.argv[1])
    else:
        campaign(sys.argv[1], *map(int, sys.argv[2:]) if sys.argv[2:] else (1000, 0))
