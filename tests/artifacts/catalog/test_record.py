"""Versions, records and paths: which are accepted, and how versions are ordered."""

import itertools
import random

import pytest

from ling3export.artifacts.catalog.record import CatalogRecord, check_paths, is_version, latest, order, read_record
from ling3export.artifacts.records import canonical
from ling3export.foundation.errors import CatalogError, UnsafePath

# Versions from semver.org, and those of the contract.
ORDERED = (
    "1.0.0-alpha 1.0.0-alpha.1 1.0.0-alpha.beta 1.0.0-beta 1.0.0-beta.2 1.0.0-beta.11 1.0.0-rc.1 1.0.0 1.0.0+build "
    "1.9.0-rc.1 1.9.0 1.10.0 2.0.0-0 2.0.0"
).split()


def raw_record(**changes) -> dict:
    return {
        "schema": "ling3.catalog/1",
        "id": "toy",
        "version": "1.0.0",
        "name": "toy",
        "description": "",
        "author": "",
        "kind": "artifact",
        "requirements": {"targets": ["cpu@2"], "devices": 2, "jaxlib": "0.11.2"},
        "tags": ["cpu"],
        "created_at": "2026-11-22T12:00:00+00:00",
        "files": [{"path": "manifest.json", "size": 1, "sha256": "0" * 64}],
    } | changes


def read(raw: dict) -> CatalogRecord:
    return read_record(canonical(raw), "here")


def test_versions_are_ordered_as_semver_says():
    shuffled = random.Random(0).sample(ORDERED, len(ORDERED))
    assert sorted(shuffled, key=order) == ORDERED
    assert all(order(one) < order(other) for one, other in itertools.combinations(ORDERED, 2))
    assert latest(["1.9.0", "1.10.0", "1.9.0-rc.1", "2.0.0-rc.1"]) == "1.10.0"
    assert latest(["1.0.0-a", "1.0.0-b"]) == "1.0.0-b"
    assert latest([]) is None


NO_VERSIONS = ["1", "1.0", "01.0.0", "1.0.0-", "1.0.0-01", "1.0.0+", "v1.0.0", "1.0.0 ", "１.0.0", "1.0.0\n", ""]


@pytest.mark.parametrize("text", [*NO_VERSIONS, "1.0.0-" + "a" * 100, "9" * 200 + ".0.0"])
def test_an_invalid_version_is_refused(text):
    assert not is_version(text)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": "ling3.catalog/2"}, 'record `schema`: expected "ling3.catalog/1"'),
        ({"id": "Toy"}, "record `id`: expected 2 to 64 of a-z"),
        ({"id": "t"}, "record `id`"),
        ({"id": "-toy"}, "record `id`"),
        ({"version": "1.0"}, "record `version`: expected a semantic version"),
        ({"kind": "cat"}, "record `kind`"),
        ({"created_at": "yesterday"}, "record `created_at`: expected an ISO 8601 date"),
        ({"colour": "red"}, 'record: expected only the fields schema, .*, found "colour"'),
        ({"files": [{"path": "a", "size": -1, "sha256": "0" * 64}]}, r"record `files\[0\]\.size`"),
        ({"name": "\x1b[31m"}, "record `name`: expected a printable text"),
    ],
)
def test_a_record_that_is_wrong_is_refused_by_field(change, message):
    with pytest.raises(CatalogError, match=message):
        read(raw_record(**change))


def test_a_record_with_a_repeated_key_is_refused():
    with pytest.raises(CatalogError, match="expected JSON, found a key that stands twice"):
        read_record(b'{"id": 1, "id": 2}', "here")


@pytest.mark.parametrize(
    "paths",
    [["../x"], ["/etc/passwd"], ["a/../../x"], ["a\\..\\x"], ["./a"], ["a//b"], [""], ["."], ["a\x00b"], ["a\nb"],
     ["a", "A"], ["a/b", "A/c"], ["a", "a/b"], ["a/b", "A"], ["ß", "SS"], ["a", "a"]],
)  # fmt: skip
def test_paths_that_leave_their_folder_or_meet_there_are_unsafe(paths):
    with pytest.raises(UnsafePath):
        check_paths(paths, "here")
    files = [{"path": path, "size": 0, "sha256": "0" * 64} for path in paths]
    with pytest.raises(CatalogError):
        read(raw_record(files=files))


def test_ordinary_paths_are_safe():
    paths = ["manifest.json", "programs/cpu-tp2/decode@2.exec", "programs/cpu-tp2/a", "weights/ä.safetensors"]
    files = [{"path": path, "size": 0, "sha256": "0" * 64} for path in paths]
    assert [file.path for file in read(raw_record(files=files)).files] == paths
