"""Names and docstrings of product code: no pronoun as a variable, no argument documented by one word."""

import ast
import re

from tests.support.rooms import modules

PRONOUNS = {"found", "each", "asked", "given", "here", "there", "said", "how"}
ENTRY = re.compile(r"^ {4,}(\w+): ([A-Za-z]+\.?)$", re.M)  # such as "tokenizer: It."


def bound(node: ast.AST) -> str | None:
    """The name that a node binds."""
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        return node.id
    return node.arg if isinstance(node, ast.arg) else None


def test_no_variable_is_a_pronoun():
    wrong = [
        f"{file.name}:{node.lineno} {bound(node)}"
        for file in modules().values()
        for node in ast.walk(ast.parse(file.read_text()))
        if bound(node) in PRONOUNS
    ]
    assert not wrong


def test_no_argument_is_described_by_one_word():
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    wrong = []
    for file in modules().values():
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, documented):
                _, _, entries = (ast.get_docstring(node) or "").partition("Args:\n")
                entries = entries.split("\n\n")[0]
                wrong += [f"{file.name} {name}: {text}" for name, text in ENTRY.findall(entries)]
    assert not wrong
