"""Semantic versions (semver.org, 2.0.0): which texts are one, and which of two is the later."""

import re
from collections.abc import Iterable

PATTERN = re.compile(
    r"(0|[1-9]\d{0,17})\.(0|[1-9]\d{0,17})\.(0|[1-9]\d{0,17})"
    r"(?:-((?:0|[1-9]\d{0,17}|\d*[a-zA-Z-][0-9a-zA-Z-]*)(?:\.(?:0|[1-9]\d{0,17}|\d*[a-zA-Z-][0-9a-zA-Z-]*))*))?"
    r"(?:\+([0-9a-zA-Z-]+(?:\.[0-9a-zA-Z-]+)*))?",
    re.ASCII,
)
LONGEST = 100  # characters: a registry's tag has 128


def is_version(text: str) -> bool:
    """Whether a text is a semantic version."""
    return len(text) <= LONGEST and PATTERN.fullmatch(text) is not None


def is_release(version: str) -> bool:
    """Whether a version is no pre-release."""
    return "-" not in version.partition("+")[0]


def order(version: str) -> tuple[object, ...]:
    """A key that sorts versions from the earliest to the latest; build metadata decides last."""
    match = PATTERN.fullmatch(version)
    assert match is not None
    major, minor, patch, before, metadata = match.groups()
    parts = [(0, int(each), "") if each.isdigit() else (1, 0, each) for each in (before or "").split(".") if each]
    return int(major), int(minor), int(patch), before is None, tuple(parts), metadata or ""


def latest(versions: Iterable[str]) -> str | None:
    """The latest release; of pre-releases the latest where there is nothing else; None of none."""
    there = list(versions)
    return max([each for each in there if is_release(each)] or there, key=order, default=None)
