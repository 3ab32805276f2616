"""FORMAT.md has a table for each record of the manifest, with every field and the type that the reader checks."""

import re
import types
import typing
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta, structs

from ling3export.artifacts import program_records, schema
from ling3export.artifacts.manifest import FORMAT_VERSION
from ling3export.artifacts.program_records import Padding, Relative
from ling3export.artifacts.records import Digest, Record
from ling3export.artifacts.schema import Manifest

TEXT = (Path(schema.__file__).parent / "FORMAT.md").read_text()
WORDS = {str: "text", int: "whole number", float: "number", bool: "true or false", type(None): "null"}
NAMED = {
    "Digest": Digest,
    "Path": Relative,
    "Padding": Padding,
    "Shape": program_records.Shape,
    "Dtype": program_records.Dtype,
    "Spec": program_records.Spec,
    "Devices": program_records.Devices,
    "ConfigValue": schema.ConfigValue,
}


def spelled(kind: Any, named: bool = True) -> str:
    """A field's type as FORMAT.md writes it: a name of its table of types, or the JSON type, then its bounds."""
    for name, other in NAMED.items():
        if named and kind == other:
            return f"`{name}`"
    origin, parameters = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        rules = [str(rule.description) for rule in parameters[1:] if isinstance(rule, Meta)]
        return ", ".join([spelled(parameters[0]), *(rule.removeprefix("a number ") for rule in rules)])
    if origin in (typing.Union, types.UnionType):
        return " or ".join(spelled(part) for part in parameters)
    if origin is tuple:
        return f"list of {element(parameters[0])}"
    if origin is dict:
        return f"object of {element(parameters[1])}"
    return WORDS.get(kind) or f"`{kind.__name__}`"


def element(kind: Any) -> str:
    """The type of a list's or an object's values."""
    text = spelled(kind)
    return f"({text})" if " or " in text else text


def rows(kind: type) -> list[tuple[str, str]]:
    """Name and type of every field of a record; optional fields have a question mark."""
    hints, found = typing.get_type_hints(kind, include_extras=True), []
    for field in structs.fields(kind):
        hint, optional = hints[field.name], not field.required
        if field.default is None:
            hint = typing.Union[tuple(inner for inner in typing.get_args(hint) if inner is not type(None))]  # noqa: UP007
        found.append((f"`{field.name}`{'?' * optional}", spelled(hint)))
    return found


def records(kind: Any) -> list[type]:
    """A record and all records in it, each once."""
    found: list[type] = []
    waiting = [kind]
    while waiting:
        inner = waiting.pop(0)
        if isinstance(inner, type) and issubclass(inner, Record) and inner not in found:
            found.append(inner)
            waiting += typing.get_type_hints(inner, include_extras=True).values()
        waiting += [part for part in typing.get_args(inner) if not isinstance(part, Meta)]
    return found


def table(name: str) -> list[tuple[str, str, str]]:
    """The rows of a record's table in FORMAT.md."""
    head = r"\| field \| type \| meaning \|\n\|---\|---\|---\|\n"
    section = re.search(rf"^### {name}\n[^\n]+\n\n{head}((?:\|[^\n]*\n)+)", TEXT, re.M)
    assert section is not None, f"FORMAT.md: expected a table of {name}, found none"
    lines = section[1].splitlines()
    return [tuple(cell.strip() for cell in line.strip("|").split(" | ")) for line in lines]  # type: ignore[misc]


def test_every_record_has_a_table_with_its_fields_types_and_meanings() -> None:
    for kind in records(Manifest):
        found = table(kind.__name__)
        assert [row[:2] for row in found] == rows(kind), kind.__name__
        assert all(len(row) == 3 and len(row[2]) > 3 for row in found), kind.__name__
    headings = re.findall(r"^### (\w+)$", TEXT, re.M)
    assert headings == [kind.__name__ for kind in records(Manifest)]


def test_the_types_with_a_name_are_spelled_out_once() -> None:
    section = TEXT.partition("| type | values |\n")[2].partition("\n\n")[0]
    found = dict(re.findall(r"^\| `(\w+)` \| ([^|]+) \|$", section, re.M))
    assert found == {name: spelled(kind, named=False) for name, kind in NAMED.items()}


def test_the_version_is_the_one_that_is_written() -> None:
    assert f"# The artifact's format, version {FORMAT_VERSION}\n" in TEXT
    assert re.search(rf"^\| {FORMAT_VERSION} \|", TEXT, re.M)
