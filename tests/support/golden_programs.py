"""The golden programs: cells of the true Ling3-Tiny and of Ling-3.0-flash for a TPU slice, and what they may cost.

    python -m tests.support.golden_programs   compiles them, records the budget, adds a line to docs/log/programs-tpu.md

`make budgets` does that. The budget of each toolchain stands under its versions in ``tests/budgets/``; the test in
``test_golden_programs.py`` compiles the same cells and compares. No checkpoint is needed: programs depend on the
configuration alone.
"""

import datetime
import json
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from importlib import metadata
from pathlib import Path

from ling3export.artifacts.program_records import Program
from ling3export.cache.cells import opened
from ling3export.cache.store import CacheUse
from ling3export.checkpoint.synth import config_fields
from ling3export.compile.pool import Compilers, check
from ling3export.foundation.phases import MOVING
from ling3export.model.config import Config
from ling3export.plan.options import Options
from ling3export.plan.plan import make_plan

ROOT = Path(__file__).parents[2]
TARGET = "tpu:v6e:4x4"
BUDGETS = ROOT / "tests" / "budgets" / "tpu-v6e-4x4.json"
LOG = ROOT / "docs" / "log" / "programs-tpu.md"
HEADING = "## Golden programs: what `make budgets` recorded"
CELLS = ("prefill@512", "decode@64", "int8-channel decode@16", "flash decode@16")
ALLOWED = 0.05  # of the budget, up or down
MOVED = 1.2  # bytes through the large memory, times those that must move, of copy, fetch and store
NONE_RECORDED = "toolchain {found}, recorded with {known}: nothing is compared; `make budgets` records another"

Quantities = dict[str, float]


class NoBudgetError(Exception):
    """The toolchain in use is not one that a budget was recorded for."""


def toolchain() -> str:
    """The versions that decide a TPU program, as a budget is keyed."""
    return ", ".join(f"{name} {metadata.version(name)}" for name in ("jax", "libtpu"))


def compile_cells() -> dict[str, Program]:
    """What describes the cells, and those that move states, by name; compiled for the whole slice or from the cache."""
    found, tiny = dict[str, Program](), Options(decode_paddings=(16, 64))
    narrow, none = replace(tiny, weights="int8-channel"), Options()
    plans = ("", tiny), ("", replace(none, snapshots=32)), ("int8-channel ", narrow), ("flash ", none)
    for model, options in plans:
        config = Config.from_dict(config_fields("flash" if model == "flash " else "full", {}))
        plan = make_plan(config, options, TARGET)
        moves = [cell for cell in plan.cells if cell.phase in MOVING]  # there are none without snapshots
        wanted = moves or [cell for cell in plan.cells if model + cell.name in CELLS]
        with tempfile.TemporaryDirectory() as folder:
            cells = opened(CacheUse("on"), print)
            outcome = Compilers(plan, config, Path(folder), None, cells).run(wanted, lambda cell, built: None)
        check(config, [outcome], True)
        found |= {model + name: built.program for name, built in outcome.built.items()}
    return found


def moved(program: Program) -> float:
    """Bytes through the large memory over those that must move."""
    assert program.floor is not None
    return (program.bytes_accessed or 0) / program.floor.moved


def quantities(program: Program) -> Quantities:
    """What is held to a budget: counts, bytes on a chip, and estimated milliseconds."""
    found = program.estimate
    assert found is not None
    counts = {f"collectives: {kind}": row.count for kind, row in program.collectives.items()}
    counts |= {f"custom calls: {name}": row.count for name, row in found.custom_calls.items()}
    return {
        **counts,
        "fusions": found.instructions.get("fusion", 0),
        "copies over 1 MB": len(found.copies),
        "peak memory, bytes": program.memory.peak,
        "estimated, ms": float(f"{1e3 * found.seconds:.4g}"),
    }


def budget(path: Path = BUDGETS, versions: str | None = None) -> dict[str, Quantities]:
    """The recorded quantities of each cell for this toolchain.

    Raises:
        NoBudgetError: There are none; says for which there are.
    """
    recorded = json.loads(path.read_text()) if path.exists() else {}
    versions = versions or toolchain()
    if versions not in recorded:
        raise NoBudgetError(NONE_RECORDED.format(found=versions, known="; ".join(recorded) or "nothing"))
    return dict(recorded[versions])


def differences(expected: Mapping[str, Quantities], found: Mapping[str, Quantities]) -> list[tuple[str, ...]]:
    """Rows of cell, quantity, budget, found and change: of all that lies more than ALLOWED beside its budget.

    Better counts too: a budget that no longer fits hides the next regression. A quantity that is new or gone is one of
    budget or found 0.
    """
    rows: list[tuple[str, ...]] = []
    for cell in sorted({*expected, *found}):
        before, after = expected.get(cell, {}), found.get(cell, {})
        for name in dict.fromkeys([*before, *after]):
            old, new = before.get(name, 0), after.get(name, 0)
            if abs(new - old) > ALLOWED * old:
                change = f"{100 * (new - old) / old:+.1f} %" if old else "new"
                rows.append((cell, name, f"{old:,}", f"{new:,}", change))
    return rows


def table(rows: list[tuple[str, ...]]) -> str:
    """The differences for a person."""
    lines = [("cell", "quantity", "budget", "found", "change"), *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(5)]
    left, right = widths[:2], widths[2:]
    text = ["  ".join([*map(str.ljust, line[:2], left), *map(str.rjust, line[2:], right)]) for line in lines]
    return "\n".join([*text, f"Allowed: {100 * ALLOWED:g} %, up or down. If the change is meant: make budgets"])


def record_budget(path: Path, log: Path, found: dict[str, Quantities], versions: str, date: datetime.date) -> None:
    """Writes the budget of one toolchain beside the others', and a dated line into the log's table."""
    recorded = json.loads(path.read_text()) if path.exists() else {}
    recorded[versions] = found
    path.write_text(json.dumps(recorded, indent=2) + "\n")
    shown = "; ".join(
        f"{cell} {rows['estimated, ms']:.3g} ms, {rows['peak memory, bytes'] / 1e6:,.0f} MB, {rows['fusions']} fusions"
        for cell, rows in sorted(found.items())
    )
    line = f"- {date.isoformat()}, {versions}: {shown}\n"
    text = log.read_text()
    if HEADING not in text:
        text = f"{text.rstrip()}\n\n{HEADING}\n\nFull config, TP=16, {TARGET}, compiled and never executed.\n\n"
    start = text.index(HEADING)
    end = text.find("\n## ", start)
    section, rest = (text[start:], "") if end < 0 else (text[start:end], text[end:])
    log.write_text(text[:start] + section.rstrip() + "\n" + ("" if "\n- " in section else "\n") + line + rest)


def main() -> None:
    """Compiles the cells and records what they cost."""
    found = {name: quantities(each) for name, each in compile_cells().items() if name in CELLS}
    try:
        rows = differences(budget(), found)
        print(table(rows) if rows else "nothing is further than allowed from the budget that stood")
    except NoBudgetError as error:
        print(error, file=sys.stderr)
    record_budget(BUDGETS, LOG, found, toolchain(), datetime.date.today())
    places = f"{BUDGETS.relative_to(ROOT)}, and a line in {LOG.relative_to(ROOT)}"
    print(f"recorded {toolchain()} in {places}", file=sys.stderr)


if __name__ == "__main__":
    main()
