"""Checks which texts a grammar accepts, and which calls an answer makes."""

import random
from typing import Any

import numpy as np

from ling3export.runners.engine.engine import Engine
from ling3export.runners.engine.request import Completion
from ling3export.runners.serve.answers import ChoicesAnswer
from ling3export.runners.serve.generation import GenerationCall
from ling3export.runners.text.grammar import Grammar
from tests.support import toy_artifact


def followed(engine: Engine, grammar: Grammar | None, text: str) -> tuple[bool, bool]:
    """Whether a text is a prefix of one that the grammar accepts, and whether the grammar is complete after it."""
    assert grammar is not None
    matcher = engine.files.grammars(toy_artifact.VOCAB).matcher(grammar)
    for id in engine.files.tokenizer("test").encode(text, special=False):
        mask = np.zeros(-(-toy_artifact.VOCAB // 32), np.int32)
        matcher.fill(mask)
        if not mask[id // 32] >> id % 32 & 1:
            return False, False
        matcher.accept(id)
    return True, matcher.over


def drawn(engine: Engine, grammar: Grammar | None, draw: random.Random) -> str:
    """A random text that the grammar accepts; marks are written out where the grammar allows them."""
    assert grammar is not None
    matcher, ids = engine.files.grammars(toy_artifact.VOCAB).matcher(grammar), []
    while not matcher.over:
        mask = np.zeros(-(-toy_artifact.VOCAB // 32), np.int32)
        matcher.fill(mask)
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        ids.append(int(draw.choice(allowed)))
        matcher.accept(ids[-1])
    return engine.files.tokenizer("test").decode(ids)


def message_of(call: GenerationCall, text: str) -> dict[str, Any]:
    """The message of a call whose answer is ``text``."""
    (choice,) = ChoicesAnswer(call, "toy").whole([Completion([1], [2], text, "eos", 0, 0)])["choices"]
    return dict(choice["message"])


def written(name: str, *arguments: tuple[str, str]) -> str:
    """A call in the dialect of the public checkpoints, with these pairs of key and value."""
    pairs = (f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>" for key, value in arguments)
    return f"<tool_call>{name}\n{''.join(pairs)}\n</tool_call>"
