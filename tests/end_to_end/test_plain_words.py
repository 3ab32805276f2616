"""Pages, help texts, docstrings, comments and errors in plain words, judged by patterns that readers did not
understand.

A single finding may be fine, but many of them make a text that has to be read twice.
"""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.rooms import modules

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "artifacts/FORMAT.md", *ROOT.glob("docs/**/*.md")]
CODE = {folder: sorted((ROOT / folder).rglob("*.py")) for folder in ("tests", "bench", "tools")}
CODE["the package"] = [*modules().values()]
MOST_IN_PAGES, MOST_IN_CODE = 1.0, 1.0  # findings in 1,000 words
LONG, MOST_LONG = 38, 0.01  # words of a long sentence, and the largest share of long sentences
PATTERNS = {
    "name the subject": r"^(Of (?!course)|As (?!of |a result|with )|What (?!is |does )|Whose|Who(ever)? |Whatever)",
    "say what it is": r"^(It|They|Theirs|Its|The same|The former|The latter)[.;]",
    "split the sentence": r"\bof (which|what|whom|(those|these) (which|that))\b|\bthat\b[^.;:]*\bthat\b[^.;:]*\bthat\b",
    "with, after, next to, only": r"\b(beside|behind)\b(?! (a |the )?(proxy|firewall))",
    "name them": r"\b(by who|of who|those who|who (took|waits|wants|holds))\b",
    "give the number or its name": r"\b(as many [a-z]+ as|so many\b(?! that)|of as many)",
    "what is wrong, what to do": r"(found another|found one\b|found none|expected no [a-z]+, found|expected it to)",
    "the technical verb": r"\b(is|are|was|were|be) (said|told|asked|meant|known) (of|to|for|by|what|that|in)\b",
}
FOUND = {advice: re.compile(pattern) for advice, pattern in PATTERNS.items()}


def of_markdown(text: str) -> Iterator[str]:
    """Paragraphs and list items, without code, tables and headings."""
    text = re.sub(r"^```.*?^```|^ {4}.*?$|^#.*?$|^\|.*?$|<!--.*?-->", "\n", text, flags=re.DOTALL | re.MULTILINE)
    yield from re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )", text)


def of_python(source: str) -> Iterator[str]:
    """Docstrings by paragraph and argument, help texts, messages of errors, and comments of one or more lines."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from re.split(r"\n\s*\n|\n(?=    \w+: )", ast.get_docstring(node) or "")
        elif isinstance(node, ast.keyword) and node.arg in ("help", "hint") and isinstance(node.value, ast.Constant):
            yield str(node.value.value)
        elif isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            for argument in node.exc.args:
                parts = (part.value for part in ast.walk(argument) if isinstance(part, ast.Constant))
                yield " ".join(part for part in parts if isinstance(part, str))
    block, last = "", 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            alone, row = not token.line[: token.start[1]].strip(), token.start[0]
            if not (alone and row == last + 1):
                yield block
                block = ""
            block, last = f"{block} {token.string.lstrip('#: ')}", row if alone else 0
    yield block


def sentences(texts: Iterator[str]) -> Iterator[str]:
    """Sentences of at least two words; code and link addresses are replaced."""
    for text in texts:
        plain = re.sub(r"^\s*(?:[-*]|\d+\.|\w+:) ", "", re.sub(r"``?[^`]*``?|\]\([^)]*\)", "X", text))
        for sentence in re.split(r"(?<=[.!?;:])\s+(?=[A-Z*\"(])", " ".join(plain.split())):
            if len(sentence.split()) > 1:
                yield sentence


def counted(texts: Iterator[str]) -> tuple[float, float, list[str]]:
    """Findings for each 1,000 words, the share of long sentences, and the findings."""
    every = list(sentences(texts))
    words, long = sum(len(each.split()) for each in every), sum(len(each.split()) > LONG for each in every)
    found = [f"{advice}: {each}" for each in every for advice, pattern in FOUND.items() if pattern.search(each)]
    return 1000 * len(found) / words, long / len(every), found


def test_pages_are_in_plain_words():
    rate, long, found = counted(text for page in PAGES for text in of_markdown(page.read_text()))
    assert rate <= MOST_IN_PAGES and long <= MOST_LONG, (rate, long, found)


@pytest.mark.parametrize("code", CODE)
def test_code_speaks_in_plain_words(code: str):
    rate, long, found = counted(text for file in CODE[code] for text in of_python(file.read_text()))
    assert rate <= MOST_IN_CODE and long <= MOST_LONG, (rate, long, found)
