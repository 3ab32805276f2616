"""The golden programs: cells of the true Ling3-Tiny and of Ling-3.0-flash for a TPU slice, and their budgets.

    python -m tests.support.golden_programs   compiles them and writes a budgets file for each model, 5 % above the cost

`make budgets` runs this. ``ling3export graph audit --budgets`` reads the same files; each begins with the versions of
the toolchain that it was recorded with. No checkpoint is needed: programs depend on the configuration only.
"""

import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path

from ling3export.artifacts.program_records import Program
from ling3export.artifacts.schema import GRAPH
from ling3export.cache.cells import opened
from ling3export.cache.store import CacheUse
from ling3export.checkpoint.synth import config_fields
from ling3export.compile.pool import Compilers, check
from ling3export.cost.estimates import context_of
from ling3export.foundation.phases import MOVING
from ling3export.graph.audit import Expected, quantities
from ling3export.graph.hlo import unpacked
from ling3export.graph.optimized import read
from ling3export.graph.record import Graph
from ling3export.model.config import Config
from ling3export.plan.options import Options
from ling3export.plan.plan import make_plan
from ling3export.report.cells import expected, input_names

BUDGETS = Path(__file__).parents[1] / "budgets"
TARGET = "tpu:v6e:4x4"
TINY = Options(decode_paddings=(16, 64))
# By model: the preset, the options, and the cells that get a budget; an empty list means all cells that move states.
MODELS = {
    "tiny": ("full", TINY, ("prefill@512", "decode@64")),
    "snapshots": ("full", Options(snapshots=32), ()),
    "int8-channel": ("full", replace(TINY, weights="int8-channel"), ("decode@16",)),
    "flash": ("flash", Options(), ("decode@16",)),
}
# In flash, `kda.o_proj` of layer 39 is first sliced out of its stack: 21 MB, some 13 µs of 8 ms a call.
RULES = {"flash": {"weight-layout": 22_000_000}}
ALLOWED = 1.05  # times the cost of a program when its budget was recorded
LIMITED = ("seconds", "peak_bytes", "collectives", "fusions")
MOVED = 1.2  # bytes through the large memory, relative to the bytes that copy, fetch and store have to move


@dataclass(frozen=True)
class Golden:
    """A compiled cell: its record, its graph, and its expectation in the plan."""

    program: Program
    graph: Graph
    expected: Expected


def toolchain() -> str:
    """The versions that decide a TPU program, written as the first line of a budgets file."""
    return "# " + ", ".join(f"{name} {metadata.version(name)}" for name in ("jax", "libtpu"))


def compile_cells(model: str) -> dict[str, Golden]:
    """The cells of a model by name, compiled for the whole slice or read from the cache."""
    preset, options, names = MODELS[model]
    config = Config.from_dict(config_fields(preset, {}))
    plan = make_plan(config, options, TARGET)
    wanted = [cell for cell in plan.cells if (cell.name in names if names else cell.phase in MOVING)]
    golden = {}
    with tempfile.TemporaryDirectory() as folder:
        cells = opened(CacheUse("on"), print)
        outcome = Compilers(plan, config, Path(folder), None, cells).run(wanted, lambda: None)
        check(config, [outcome], True)
        for cell in wanted:
            program = outcome.built[cell.name].program
            inputs = input_names(program, compiled=True)
            context = context_of(config, plan.geometry, cell.phase, cell.padding, inputs, plan.target.chip)
            (packed,) = Path(folder).rglob(f"{cell.name}.{GRAPH}")
            graph = read(unpacked(packed.read_bytes()), cell.name, model, context, program.memory.compiler_peak)
            golden[cell.name] = Golden(program, graph, expected(config, plan.geometry, program))
    return golden


def moved(program: Program) -> float:
    """Bytes through the large memory, divided by the bytes that the program has to move."""
    assert program.floor is not None
    return (program.bytes_accessed or 0) / program.floor.moved


def limits(model: str, cells: Mapping[str, Golden]) -> str:
    """A budgets file for a model's cells: each quantity may grow by 5 %, a count may not grow."""
    lines = [toolchain()]
    if model in RULES:
        lines += ["", "[rules]", *(f"{rule} = {limit}" for rule, limit in RULES[model].items())]
    for name, golden in cells.items():
        lines += ["", f'[cells."{name}"]']
        for quantity in LIMITED:
            amount = quantities(golden.graph)[quantity] or 0.0
            limit = amount if quantity == "collectives" else float(f"{ALLOWED * amount:.4g}")
            lines.append(f"{quantity} = {limit if quantity == 'seconds' else round(limit)}")
    return "\n".join(lines) + "\n"


def main(models: list[str]) -> None:
    """Compiles the cells of the models (default: all that have budgets) and writes their budgets files."""
    for model in models or [name for name, (_, _, cells) in MODELS.items() if cells]:
        text = limits(model, compile_cells(model))
        (BUDGETS / f"{model}.toml").write_text(text)
        print(text)


if __name__ == "__main__":
    main(sys.argv[1:])
