"""Answers in the dialect of Ling-3's template: thoughts, text and calls, in pieces of any size."""

import json
import random
import time
from typing import Any

import pytest

from ling3export.runners.text.answer import (
    AnswerFormat,
    AnswerParser,
    JsonCall,
    KeyedCall,
    argument,
    kinds_of_property,
    reader_of,
    split_thought,
)
from tests.support.matching import written

SCHEMA = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "count": {"type": "integer"},
        "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "listed": {"type": ["string", "integer"]},
        "named": {"$ref": "#/$defs/Name"},
        "round": {"$ref": "#/$defs/Round"},
        "both": {"allOf": [{"type": ["string", "null"]}, {"enum": ["3", "4"]}]},
        "chosen": {"enum": ["1", "2"]},
        "any": {},
    },
    "$defs": {"Name": {"type": "string"}, "Round": {"anyOf": [{"$ref": "#/$defs/Round"}, {"type": "string"}]}},
}
FUNCTIONS = {"f": SCHEMA, "g": None}


def parsed(text: str, sizes: list[int], within: bool = False, reader: Any = KeyedCall) -> dict[str, Any]:
    """The parts of an answer that arrives in pieces of these sizes, then as a whole."""
    parser, at, said = AnswerParser(AnswerFormat(True, within, FUNCTIONS, reader)), 0, dict[str, Any]()
    while at < len(text) or not at:
        size = sizes.pop(0) if sizes else max(1, len(text) - at)
        for kind, part in parser.push(text[at : at + size], last=at + size >= len(text)):
            if kind == "tool_calls":
                assert part["index"] == len(said.setdefault(kind, []))
                said[kind].append((part["function"]["name"], json.loads(part["function"]["arguments"])))
            else:
                said[kind] = said.get(kind, "") + part
        at += size
    return said


ONE, NONE = written("f", ("text", "3"), ("count", "3")), "<tool_call>g</tool_call>"
CALLED = ("f", {"text": "3", "count": 3})
CUT = "<tool_call>f\n<arg_key>text</arg_key>\n<arg_value>a</tool_call>"
ANSWERS: list[tuple[str, bool, dict[str, Any]]] = [
    (ONE, False, {"tool_calls": [CALLED]}),
    (f"before {ONE}\n{NONE}\nbehind", False, {"content": "before \nbehind", "tool_calls": [CALLED, ("g", {})]}),
    (f"{ONE} between {NONE}", False, {"content": "between ", "tool_calls": [CALLED, ("g", {})]}),
    ("<tool_call>\n g \n\n</tool_call> \n", False, {"tool_calls": [("g", {})]}),
    ("<tool_call>other</tool_call>", False, {"tool_calls": [("other", {})]}),
    (ONE.replace("\n", ""), False, {"tool_calls": [CALLED]}),
    (ONE.replace("\n", " \n\t").replace("><arg_key", "> \n <arg_key"), False, {"tool_calls": [CALLED]}),
    ("hm</think>\n\n answer", True, {"reasoning_content": "hm", "content": "answer"}),
    ("\nhm \n</think>", True, {"reasoning_content": "\nhm \n"}),
    (f"hm{ONE}", True, {"reasoning_content": "hm", "tool_calls": [CALLED]}),
    (f"hm{ONE}\n</think>\nanswer", True, {"reasoning_content": "hm", "tool_calls": [CALLED], "content": "answer"}),
    (f"so <tool_call> or</think>{NONE}", True, {"reasoning_content": "so <tool_call> or", "tool_calls": [("g", {})]}),
    (f"hm {CUT}</think>answer", True, {"reasoning_content": f"hm {CUT}", "content": "answer"}),
    ("a</think>b <think> c", True, {"reasoning_content": "a", "content": "b <think> c"}),
    ("<think>a</think>b", False, {"reasoning_content": "a", "content": "b"}),
    (" \n", False, {"content": " \n"}),
    ("a <tool", False, {"content": "a <tool"}),
]
BROKEN = [
    CUT,
    "<tool_call>",
    "<tool_call>f",
    "<tool_call>f\n<arg_key>",
    "<tool_call>f\n<arg_key>text</arg_key>",
    "<tool_call>f\n<arg_key>text</arg_key>\n<arg_value>a",
    "<tool_call>f\n<arg_key>text</arg_key>\n<arg_value>a</arg_value>\n",
    "<tool_call></tool_call>",
    "<tool_call>two words</tool_call>",
    "<tool_call>f<arg_value>a</arg_value></tool_call>",
    "<tool_call>f<arg_key>text</arg_key></tool_call>",
    "<tool_call>f<arg_key>text</tool_call>",
    "<tool_call>f<arg_key>text</arg_key>a</tool_call>",
    f"<tool_call>{'f' * 65}</tool_call>",
    '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>',
]


def called(arguments: str, name: str = "f") -> str:
    """A call of the dialect of JSON."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


MARKED = called('{"a": "x\\"</tool_call> <tool_call>"}')
ACCENT = called('{"a": "é"}')
HALF = '<tool_call>{"name": "f", "arguments": "</tool_call>'
UNENDED = '<tool_call>{"name": "f</tool_call>'
EMPTY, F = {"tool_calls": [("f", {})]}, ("f", {})
# Regressions: a string with the mark cut the call; a blank was lost after text that only looked like a call; a number
# outside JSON became arguments that no client can parse.
OF_JSON: list[tuple[str, bool, dict[str, Any]]] = [
    ("plain < text <thin", False, {"content": "plain < text <thin"}),
    ("<think>a b</think>\n\nanswer", False, {"content": "answer", "reasoning_content": "a b"}),
    ("never ends", True, {"reasoning_content": "never ends"}),
    (f"so {called('{}')} and on", False, {"content": "so  and on", **EMPTY}),
    (f"{called('{}')}\n{ACCENT}", False, {"tool_calls": [F, ("f", {"a": "é"})]}),
    ('<tool_call>{"name": "f"}</tool_call>', False, EMPTY),
    ('<tool_call>{"name": "f"', False, {"content": '<tool_call>{"name": "f"'}),
    (called("{}", "other"), False, {"tool_calls": [("other", {})]}),
    (MARKED, False, {"tool_calls": [("f", {"a": 'x"</tool_call> <tool_call>'})]}),
    (f"{HALF} and", False, {"content": f"{HALF} and"}),
    (f"{HALF}{called('{}')}", False, {"content": HALF, **EMPTY}),
    *((text, False, {"content": text}) for text in ("<tool_call>{}</tool_call> and", " <tool_call>{}", " \n<tool_c")),
    *((called(f'{{"count": {each}}}'), False, {"content": called(f'{{"count": {each}}}')})
      for each in ("NaN", "Infinity", "-Infinity")),
    *((f"{UNENDED}{called('{}')}{end}", False, {"content": UNENDED + end, **EMPTY})
      for end in ("", '"', '"}}</tool_call>', '\\"}</tool_call>')),
]  # fmt: skip
CASES = [(KeyedCall, *each) for each in [*ANSWERS, *((text, False, {"content": text}) for text in BROKEN)]]


@pytest.mark.parametrize(("reader", "text", "within", "parts"), [*CASES, *((JsonCall, *each) for each in OF_JSON)])
def test_an_answer_has_the_same_parts_cut_at_every_boundary(reader, text, within, parts):
    """The whole text, each split into two pieces, single characters, and random pieces."""
    assert parsed(text, [], within, reader) == parts
    for at in range(1, len(text)):
        assert parsed(text, [at], within, reader) == parts
    for size in (1, 2, 3, 7):
        assert parsed(text, [size] * len(text), within, reader) == parts
    for seed in range(10):
        draw = random.Random(seed)
        assert parsed(text, [draw.randint(1, 9) for _ in text], within, reader) == parts


@pytest.mark.parametrize("broken", BROKEN[7:])
def test_a_call_after_a_broken_one_is_parsed(broken):
    """The broken call is returned as text, and nothing of it is lost."""
    assert parsed(f"{broken}{ONE}", [5] * 99) == {"content": broken, "tool_calls": [CALLED]}


@pytest.mark.parametrize(
    "value",
    [
        "",
        " a \n",
        "<b> & \"c\" 'd' > 1",
        "&lt;&amp;&#10;",
        "</tool_call>",
        "<tool_call>g</tool_call>",
        "<arg_key>k</arg_key><arg_value>v",
        "</arg_value> and more </arg_value>",
        "</arg_value",
        "</think><think>",
        "</arg_value></arg_value>",
        '{"a": 1}',
        "null",
        "\u2028é😀",
    ],
)
def test_a_value_may_hold_what_looks_like_a_mark(value):
    text = written("f", ("text", value), ("count", "1"))
    for within in (False, True):
        for size in (1, 4, len(text)):
            found = parsed(text, [size] * len(text), within)["tool_calls"]
            assert found == [("f", {"text": value, "count": 1})]


@pytest.mark.parametrize(
    "inner", ["</arg_value>\n</tool_call>", "</arg_value><arg_key>b</arg_key>", '"</arg_value></tool_call>\\"', "\\"]
)
def test_a_string_within_a_value_of_json_may_hold_the_end_of_a_call(inner):
    """Regression: it ended the call, although a grammar had made the value."""
    functions = {"f": {"type": "object", "properties": {"o": {"type": "object"}, "count": {"type": "integer"}}}}
    value = {"a": inner, inner: [inner]}
    text = written("f", ("o", json.dumps(value)), ("count", "1"))[len("<tool_call>") :]
    for reader in (KeyedCall(functions),):
        assert [reader.read(text[:size], False) for size in range(len(text))] == [None] * len(text)
        read = reader.read(text, False)
        assert read is not None and read.call is not None and read.end == len(text)
        assert json.loads(read.call.arguments) == {"o": value, "count": 1}


def test_a_value_whose_string_does_not_end_ends_at_its_first_mark():
    """If a model forgot a quote, the call loses the type of its value, but is still a call."""
    functions = {"f": {"type": "object", "properties": {"o": {"type": "object"}}}}
    text = written("f", ("o", '{"a": "b}'))[len("<tool_call>") :]
    behind = "and then"
    reader = KeyedCall(functions)
    assert reader.read(text + behind, False) is None
    read = reader.read(text + behind, True)
    assert read is not None and read.call is not None and (text + behind)[read.end :] == behind
    assert json.loads(read.call.arguments) == {"o": '{"a": "b}'}


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("text", "3", "3"),
        ("text", "true", "true"),
        ("text", '"a"', '"a"'),
        ("text", "", ""),
        ("count", "3", 3),
        ("count", " 3\n", 3),
        ("count", "three", "three"),
        ("count", '"3"', "3"),
        ("count", "NaN", "NaN"),
        ("count", "-Infinity", "-Infinity"),
        ("count", "1" * 5000, "1" * 5000),
        ("maybe", "3", "3"),
        ("maybe", "null", None),
        ("maybe", '"a"', '"a"'),
        ("listed", "3", 3),
        ("listed", "3.5", "3.5"),
        ("named", "3", "3"),
        ("round", "3", 3),
        ("both", "3", "3"),
        ("chosen", "1", "1"),
        ("any", "3", 3),
        ("any", "a", "a"),
        ("any", '"a"', "a"),
        ("any", '{"a": "\\ud83d\\ude42"}', {"a": "🙂"}),
        ("unknown", "so <b>", "so <b>"),
        ("unknown", "[1, {}]", [1, {}]),
        ("unknown", "[" * 100_000, "[" * 100_000),
    ],
)
def test_the_type_of_a_value_follows_from_its_schema(key, text, value):
    assert json.loads(argument(text, kinds_of_property(SCHEMA, key))) == value


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"allOf": [{"properties": {"a": {"type": "string"}}}]}, "3", "3"),
        ({"$ref": "#/$defs/A", "$defs": {"A": {"properties": {"a": {"type": "string"}}}}}, "3", "3"),
        ({"additionalProperties": {"type": "string"}}, "3", "3"),
        ({"properties": {"a": {"type": "string", "nullable": True}}}, "null", None),
        ({"properties": {"a": {"$ref": "#/nowhere"}}}, "3", 3),
        ({"properties": {"a": {"type": 5, "enum": 3, "anyOf": {}, "allOf": [1]}}}, "3", 3),
        ({"properties": [1]}, "3", 3),
        ([1], "3", 3),
        (None, "3", 3),
    ],
)
def test_schemas_are_looked_through_and_odd_ones_say_nothing(schema, text, value):
    assert json.loads(argument(text, kinds_of_property(schema, "a"))) == value


def test_schemas_with_many_ways_to_each_are_looked_through_once():
    """A reference in both branches of each of 200 levels would need 2^200 visits."""
    levels = {
        str(n): {key: [{"$ref": f"#/$defs/{n + 1}"}] * 2 for key in ("anyOf", "allOf", "oneOf")} for n in range(200)
    }
    schema = {"properties": {"a": {"$ref": "#/$defs/0"}}, "$defs": levels | {"200": {"type": "string"}}}
    assert kinds_of_property(schema, "a") == {"string"}
    chain = {str(n): {"$ref": f"#/$defs/{n + 1}"} for n in range(50_000)}
    assert "string" in kinds_of_property({"properties": {"a": {"$ref": "#/$defs/0"}}, "$defs": chain}, "a")


def test_the_last_of_two_values_of_one_key_counts():
    assert parsed(written("f", ("text", "a"), ("text", "b")), [])["tool_calls"] == [("f", {"text": "b"})]


def test_the_template_says_which_dialect_it_is():
    assert reader_of("… <tool_call>{{ name }}<arg_key> …") is KeyedCall
    assert reader_of('… <tool_call>{"name": … ') is JsonCall
    text = '<tool_call>{"name": "f", "arguments": {"text": "<arg_key>"}}</tool_call>'
    assert parsed(text, [3] * 99, reader=JsonCall) == {"tool_calls": [("f", {"text": "<arg_key>"})]}


@pytest.mark.parametrize("unit", ["</tool_call>", '\\"</tool_call>', '"x</tool_call>" '])
def test_a_json_call_with_many_marks_in_strings_is_read_in_linear_time(unit):
    """Regression: 400 marks took 14 s of the server's event loop, since each piece read all earlier text again."""
    strings = json.dumps(unit * 2000) if unit[0] != '"' else f"[{', '.join(['0', *[json.dumps(unit)] * 2000])}]"
    text = f'{{"name": "f", "arguments": {{"text": {strings}}}}}</tool_call>'
    reader, begun = JsonCall({}), time.process_time()
    for size in range(0, len(text), 7):
        assert reader.read(text[:size], False) is None
    read = reader.read(text, False)
    assert read is not None and read.call is not None and read.end == len(text)
    assert json.loads(read.call.arguments)["text"] == json.loads(strings)
    assert time.process_time() - begun < 1


def test_a_whole_answer_is_split_where_its_template_thinks():
    thinks, said = "... <think>...</think>", "I add.</think>The answer is 29."
    assert split_thought(said, thinks, "18+11=?<think>") == ("I add.", "The answer is 29.")
    assert split_thought(f"<think>{said}", thinks, "18+11=?") == ("I add.", "The answer is 29.")
    assert split_thought("I add", thinks, "18+11=?<think>") == ("I add", "")
    assert split_thought(said, thinks, "18+11=?<think></think>") == split_thought(said, "plain", "") == ("", said)
