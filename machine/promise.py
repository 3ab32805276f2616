"""Until when portable programs are promised to be read, and by which versions of jax.

StableHLO promises to read its portable form for five years, counted from one libStablehlo to the other
(openxla/stablehlo, docs/compatibility.md). The promise counts from the version that wrote the programs: here from the
release of its jaxlib, less what a release's StableHLO may be older than it.
"""

import re
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta

from ling3export.artifacts.schema import Target

# When versions of jaxlib were released, as the Python package index says.
RELEASED = {
    (0, 10, 2): date(2026, 6, 17),
    (0, 11, 0): date(2026, 7, 16),
    (0, 11, 1): date(2026, 8, 17),
    (0, 11, 2): date(2026, 9, 17),
    (0, 12, 0): date(2026, 10, 19),
}
YEARS = 5
OLDER = timedelta(days=60)  # than a release its StableHLO is at most
SOON = timedelta(days=90)  # before the last day, every start says it


@dataclass(frozen=True)
class Promise:
    """What is promised of a target's portable programs.

    Attributes:
        until: The last day.
        form: What they are written in.
        readers: Which versions of jax read them until then.
    """

    until: date
    form: str
    readers: str

    def ends_soon(self, day: date) -> bool:
        """Whether it ends within SOON, or has ended."""
        return day > self.until - SOON

    def told(self, day: date) -> str:
        """One line, with the day on which it is read."""
        over = "; that day is over" if day > self.until else ""
        return f"portable programs: {self.form}, read until {self.until} by {self.readers} (today: {day}){over}"


def today() -> date:
    """This day, in UTC; what a test replaces to move the clock."""
    return datetime.now(UTC).date()


def stablehlo_version(blob: bytes) -> str:
    """The version of StableHLO that a portable program is written in.

    Raises:
        ValueError: The bytes are no portable form of StableHLO.
    """
    found = re.match(rb"ML\xefR\x0dStableHLO_v(\d{1,4}\.\d{1,4}\.\d{1,4})\0", blob)
    if found is None:
        raise ValueError(f"expected StableHLO's portable form, found {blob[:24]!r}")
    return found[1].decode()


def promise(target: Target) -> Promise:
    """What is promised of a target's portable programs, from the manifest alone.

    A version of jaxlib that is not in the table counts as the last one before it that is, which is never later.
    """
    made = target.requires.jaxlib
    version = tuple(int(each) for each in re.findall(r"\d+", made)[:3])
    released = RELEASED[max((each for each in RELEASED if each <= version), default=min(RELEASED))]
    day = released - OLDER
    until = date(day.year + YEARS, day.month, min(day.day, 28))
    form = f"StableHLO {target.portable}"
    return Promise(until, form, f"every jax whose StableHLO is at least that, such as jax {made} and later ones")


def rebuild(target: Target, artifact: str) -> str:
    """The command that builds a target's programs anew, over the weights that the artifact has."""
    return f"ling3export build --into {artifact} --target {target.text}@{target.tp} --force"
