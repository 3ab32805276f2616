"""Until when portable programs are promised to be read: the rule, the verdict behind the day, and the command."""

from contextlib import suppress
from datetime import date
from random import Random
from types import SimpleNamespace

import pytest

from ling3export.foundation.errors import MisfitError
from ling3export.machine import promise
from ling3export.machine.verdict import VerdictStatus, enforce, judge
from tests.machine.test_verdict import here, target


@pytest.mark.parametrize(
    ("jaxlib", "portable", "until"),
    [
        ("0.11.2", "1.18.0", date(2031, 7, 19)),
        ("0.10.2", "1.15.0", date(2031, 4, 18)),
        ("0.11.7", "1.18.0", date(2031, 7, 19)),  # not in the table: the one before it
        ("0.9.0", "1.1.0", date(2031, 4, 18)),
    ],
)
def test_stablehlo_promises_five_years(jaxlib, portable, until):
    record = SimpleNamespace(requires=SimpleNamespace(jaxlib=jaxlib), portable=portable)
    assert promise.promise(record).until == until


def test_behind_its_day_a_program_that_has_to_be_compiled_is_expired(monkeypatch):
    """And one whose executable fits is not: nothing reads its portable form."""
    other = here(jaxlib="0.12.0")
    until = promise.promise(target()).until
    monkeypatch.setattr(promise, "today", lambda: until)
    assert {each.status for each in judge(target(), other).values()} == {VerdictStatus.RECOMPILE}
    monkeypatch.setattr(promise, "today", lambda: until.replace(day=until.day + 1))
    verdicts = judge(target(), other)
    assert {each.status for each in verdicts.values()} == {VerdictStatus.EXPIRED}
    assert {each.status for each in judge(target(), here()).values()} == {VerdictStatus.OPTIMAL}
    with pytest.raises(MisfitError) as caught:
        enforce(verdicts, "prebuilt-only", "cpu-tp2", "a.ling3")
    assert "found EXPIRED prefill@16, decode@16" in caught.value.message
    assert f"read until {until}" in caught.value.message
    assert "ling3export build --into a.ling3 --target cpu@2 --force; or try" in (caught.value.hint or "")
    assert len(enforce(verdicts, "allow-compile", "cpu-tp2", "a.ling3")) == 2


def test_the_form_of_a_program_is_read_from_its_first_bytes():
    head = b"ML\xefR\x0dStableHLO_v1.18.0\0"
    assert promise.stablehlo_version(head + b"\x01") == "1.18.0"
    rng = Random(0)
    for _ in range(2000):
        damaged = bytearray(head)
        damaged[rng.randrange(len(head))] = rng.randrange(256)
        with suppress(ValueError):
            assert promise.stablehlo_version(bytes(damaged[: rng.randrange(len(head) + 1)])).replace(".", "").isdigit()
    with pytest.raises(ValueError, match="expected StableHLO's portable form, found b'ML'"):
        promise.stablehlo_version(b"ML")
