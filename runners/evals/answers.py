"""Answers found in texts: the last number, and the letter of a choice. Their rules are tables in the tests."""

import re
import unicodedata
from decimal import Decimal

LETTERS = "ABCDEFGHIJ"

_DASHES = str.maketrans("\u2212\u2013", "--")
_GROUPING = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_NUMBER = re.compile(r"(?<![A-Za-z0-9_)\].])-?[$¥€£]?(?:\d+(?:\.\d+)?|\.\d+)")
_CURRENCY = re.compile(r"[$¥€£]")

# The first stage that matches wins, its last match counts. Only the letter itself must be upper case.
_STAGES = (
    re.compile(r"(?i:answer\s+is)[\s:*]*\(?([A-J])\)?(?![A-Za-z])"),
    re.compile(r"(?i:answer|答案)[\s*]*[:：是为][\s*]*\(?([A-J])\)?(?![A-Za-z])"),
    re.compile(r"\(([A-J])\)|^[^A-Za-z\n]*([A-J])[^A-Za-z\n]*$", re.MULTILINE),
)


def extract_answer(text: str) -> str | None:
    """The last number in a text, without currency sign and grouping commas; None when there is none.

    A minus behind a digit, a letter or a closing bracket is no sign; ``3/4`` has the last number 4, by definition.
    """
    plain = _GROUPING.sub("", unicodedata.normalize("NFKC", text).translate(_DASHES))
    found = None
    for match in _NUMBER.finditer(plain):
        found = match.group()
    return None if found is None else _CURRENCY.sub("", found)


def gold_answer(target: str) -> str | None:
    """The number of a published answer: behind its last ``####`` if it has one."""
    return extract_answer(target.rpartition("####")[2])


def same_number(answer: str | None, gold: str | None) -> bool:
    """Whether two extracted numbers are equal, as decimals: ``18`` is ``18.00``. None equals nothing."""
    return answer is not None and gold is not None and Decimal(answer) == Decimal(gold)


def choice_letter(text: str, choices: int = len(LETTERS)) -> str | None:
    """The letter that a text settles on among the first ``choices`` of A … J; None when there is none.

    There is no random guess: a text without a letter is a wrong answer.
    """
    for stage in _STAGES:
        letters = [next(filter(None, match.groups())) for match in stage.finditer(text)]
        letters = [letter for letter in letters if LETTERS.index(letter) < choices]
        if letters:
            return letters[-1]
    return None
