"""The sandbox of chat templates: what it multiplies is counted before it is made.

jinja2's sandbox keeps a template away from Python's insides; here no operation may make a value, and a whole rendering
no sum of values, that would fill the memory. Each way by which a template makes a text or a list longer is looked at:
operators, ``~``, blocks and macros, outputs, methods of texts and numbers, and filters.
"""

import functools
import json
import re
import sys
import threading
import time
from collections.abc import Callable, ItemsView, Iterator, KeysView, ValuesView
from contextlib import contextmanager, suppress
from string import Formatter
from types import FrameType
from typing import Any

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import loopcontrols
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

LARGEST = 1 << 24  # characters and elements of one value
MOST = 1 << 27  # of all values that one rendering makes
BITS = 1 << 16  # of a power
INDENT = 64  # characters of JSON
# Filters that make no text of what they are given, and no more elements: so it need not be counted.
PLAIN = frozenset(
    "abs attr count d default dictsort first float groupby int items last length list map max min random reject "
    "rejectattr reverse round safe select selectattr sort unique".split()
)
# What no published template uses, and whose size is hard to foresee.
ABSENT = ("pprint", "urlize", "wordwrap")
PERCENT = re.compile(r"%(?:\([^)]*\))?([-+ #0]*[0-9*]*(?:\.[0-9*]*)?)")


_SIZED = (str, bytes, list, tuple)


class TooMuch(Exception):
    """A template takes more time or room than it may; says what it took."""


class Sandbox(ImmutableSandboxedEnvironment):
    """The environment of chat templates.

    An operation that would make a value of more than LARGEST characters and elements raises TooMuch, and so does one
    after which the ``rendering`` of its thread has made more than MOST of them in all.
    """

    intercepted_binops = frozenset(("+", "*", "**", "%"))  # nor are they worked out while a template is compiled

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols], finalize=self._written)
        self._made = threading.local()
        self.code_generator_class = _Code
        self.concat = self.joined  # type: ignore[method-assign]
        self.filters = {
            name: filter if name in PLAIN else self.counted(name, filter)
            for name, filter in self.filters.items()
            if name not in ABSENT
        }
        self.filters["tojson"] = self.counted("tojson", self._json)
        del self.globals["lipsum"]

    @contextmanager
    def rendering(self, seconds: float) -> Iterator[None]:
        """Counts what this thread makes in the block from 0, and ends the block once it has run for so long.

        Loops and macros of a template are Python functions, which are looked at line by line; one operation is not
        ended.

        Raises:
            TooMuch: The time is over.
        """
        until, before = time.monotonic() + seconds, sys.gettrace()
        self._made.sum = 0

        def look(frame: FrameType, event: str, value: object) -> Any:
            if time.monotonic() > until:
                raise TooMuch(f"no end within {seconds:g} s")
            return look if frame.f_code.co_filename == "<template>" else None

        sys.settrace(look)
        try:
            yield
        finally:
            sys.settrace(before)

    def joined(self, pieces: Any) -> str:
        """The pieces of a block or of ``~`` as one text."""
        pieces = list(pieces)
        self.count(weight(pieces))
        return "".join(map(str, pieces))

    def call(self, context: Context, function: Any, /, *args: Any, **named: Any) -> Any:
        """Calls a function or a method that a template names."""
        bound = getattr(function, "__wrapped__", function)  # str.format is wrapped by jinja2
        value = getattr(bound, "__self__", None)
        if isinstance(value, (str, bytes, int)):
            args = _held(args)
            self.count(_size(bound.__name__, value, *args, **named))
        return super().call(context, function, *args, **named)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Works out an operator."""
        if operator == "**":
            if isinstance(left, int) and isinstance(right, int) and left.bit_length() * right > BITS:
                raise TooMuch(f"a power of {left.bit_length() * right:,} bits")
        elif operator == "%" and isinstance(left, (str, bytes)):
            self.count(_size("%", left, right))
        elif operator == "*" and (isinstance(left, _SIZED) or isinstance(right, _SIZED)):
            value, times = (left, right) if isinstance(left, _SIZED) else (right, left)
            self.count(len(value) * times if isinstance(times, int) else 0)
        elif operator == "+" and isinstance(left, _SIZED):
            self.count(len(left) + (len(right) if isinstance(right, _SIZED) else 0))
        return super().call_binop(context, operator, left, right)

    def count(self, size: int) -> None:
        """Notes that a value of ``size`` characters and elements is about to be made.

        Raises:
            TooMuch: It is too large, or the rendering has made too much already.
        """
        if size > LARGEST:
            raise TooMuch(f"a value of {size:,} elements")
        self._made.sum = getattr(self._made, "sum", 0) + max(size, 0)
        if self._made.sum > MOST:
            raise TooMuch(f"values of {self._made.sum:,} elements in all")

    def _written(self, value: Any) -> Any:
        if not isinstance(value, str):
            self.count(weight(value))
        return value

    def _json(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: int | str | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        """JSON that leaves HTML alone."""
        if indent is None:
            return json.dumps(value, ensure_ascii=ensure_ascii, separators=separators, sort_keys=sort_keys)
        wide = len(indent) if isinstance(indent, str) else indent
        if wide > INDENT:
            raise TooMuch(f"an indent of {wide:,}")
        pieces = []
        options: dict[str, Any] = {"indent": indent, "separators": separators, "sort_keys": sort_keys}
        # Line by line: a line is as long as its level is deep.
        for piece in json.JSONEncoder(ensure_ascii=ensure_ascii, **options).iterencode(value):
            self.count(len(piece))
            pieces.append(piece)
        return "".join(pieces)

    def counted(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The filter or function ``name``, what it gives being counted."""
        skipped = 1 if hasattr(function, "jinja_pass_arg") else 0

        @functools.wraps(function)
        def bounded(*args: Any, **named: Any) -> Any:
            args = args[:skipped] + _held(args[skipped:])
            self.count(_size(name, *args[skipped:], **named))
            return function(*args, **named)

        return bounded


class _Code(CodeGenerator):
    """Has ``~`` go through the environment, too."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.joined((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")


def weight(value: Any, known: dict[int, int] | None = None) -> int:
    """Characters and elements of a value as its text would have them, without making that text.

    A list that stands twice in another is counted twice, yet looked at once.
    """
    if isinstance(value, (str, bytes)):
        return len(value)
    if isinstance(value, Namespace):
        value = object.__getattribute__(value, "_Namespace__attrs")
    if not isinstance(value, (list, tuple, set, frozenset, dict, KeysView, ValuesView, ItemsView)):
        return value.bit_length() // 3 + 1 if isinstance(value, int) else 1
    known = {} if known is None else known
    if id(value) not in known:
        known[id(value)] = size = 0  # one that holds itself ends here
        # Pairs that are made while one looks have no ids of their own, so their halves are looked at.
        pairs = value.items() if isinstance(value, dict) else value if isinstance(value, ItemsView) else None
        for each in value if pairs is None else [half for pair in pairs for half in pair]:
            # In this frame, since every call under a trace takes microseconds.
            size += 1 + (len(each) if isinstance(each, str) else weight(each, known))
        known[id(value)] = size
    return known[id(value)]


def _held(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arguments whose size can be told: iterators become lists."""
    return tuple(list(each) if isinstance(each, Iterator) else each for each in args)


def _size(name: str, value: Any, *args: Any, **named: Any) -> int:
    """Most characters and elements that a filter, or a method of ``value``, gives; more than LARGEST at once if
    ``value`` and the arguments have so many.
    """
    rest = (*args, *named.values())
    total = sum(map(weight, (value, *rest)))
    if total > LARGEST:  # before any text is made of it
        return total
    widest = max((each for each in rest if isinstance(each, int)), default=0)
    match name:
        case "replace" if len(rest) > 1:
            text, old, new = (each if isinstance(each, (str, bytes)) else str(each) for each in (value, *rest[:2]))
            return total + text.count(old) * len(new)  # type: ignore[arg-type]
        case "join":
            method = isinstance(value, (str, bytes)) and args and not isinstance(args[0], (str, bytes))
            many, between = (args[0], value) if method else (value, rest[0] if rest else "")
            return total + (len(many) if hasattr(many, "__len__") else 1) * weight(between)
        case "expandtabs":
            return total + value.count("\t" if isinstance(value, str) else b"\t") * max(widest, 8)
        case "indent":
            return total + (str(value).count("\n") + 1) * max(4, widest, *map(weight, rest))
        case "translate" if rest and isinstance(rest[0], dict):
            return total + len(value) * max(map(weight, rest[0].values()), default=1)
        case "format" | "format_map" | "%":
            return total + _formatted(value.decode("latin1") if isinstance(value, bytes) else str(value), rest, total)
        case "tojson":
            around = [each for each in rest if isinstance(each, (list, tuple))]
            return total * (1 + max(map(weight, around), default=0))
        case _:
            return total + widest


def _formatted(text: str, rest: tuple[Any, ...], total: int) -> int:
    """Most characters by which formatting with ``rest`` makes ``text`` longer, by either of Python's two forms."""
    specs = PERCENT.findall(text)
    with suppress(ValueError):  # a text of the other form, or one whose use is an error
        specs += [spec or "" for _, field, spec, _ in Formatter().parse(text) if field is not None]
    given = [each for one in rest for each in (one if isinstance(one, tuple) else (one,)) if isinstance(each, int)]
    widths = sum(int(digits) for spec in specs for digits in re.findall(r"[0-9]+", spec))
    variable = sum(1 for spec in specs if "*" in spec or "{" in spec)
    return len(specs) * total + widths + variable * max((0, *given))
