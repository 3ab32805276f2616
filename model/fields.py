"""Rules for the fields of config.json, and the error for a field that breaks one."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from ling3export.foundation.errors import ConfigError, shown


class FieldRule(NamedTuple):
    """The values that a field may hold: in words, for the message, and as a test."""

    expected: str
    accepts: Callable[[Any], bool]


def refused(name: str, expected: str, value: str, where: str, hint: str | None = None) -> ConfigError:
    """The error for a field that does not hold what is expected."""
    return ConfigError(f"config field `{name}`: expected {expected}, found {value}, in {where}", hint)


def is_int(value: Any) -> bool:
    """Whether a JSON value is an integer that 64 bits hold; true and false are none."""
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63


def is_number(value: Any) -> bool:
    """Whether a JSON value is a finite number."""
    return is_int(value) or (isinstance(value, float) and math.isfinite(value))


def only(wanted: Any) -> FieldRule:
    """Exactly ``wanted``, its type included: true is not 1."""
    return FieldRule(shown(wanted), lambda value: type(value) is type(wanted) and value == wanted)


def at_least(least: int) -> FieldRule:
    """An integer from ``least`` on."""
    return FieldRule(f"an integer of at least {least}", lambda value: is_int(value) and value >= least)
