"""What the programs that move states move: of the true Ling3-Tiny for a TPU slice, by the compiler's count.

``python tests/support/state_bytes.py [TARGET]`` compiles ``copy``, ``fetch`` and ``store`` and prints a table. No
checkpoint is needed. A sequence's recurrent and conv state of a chip is read and written; of the latents whole pages.
"""

import sys
import tempfile
from pathlib import Path

from golden_programs import TARGET
from ling3export.artifacts.schema import MOVING, Program
from ling3export.cache.cells import Cells
from ling3export.cache.use import CacheUse
from ling3export.checkpoint.synth import config_fields
from ling3export.compile.pool import Compilers
from ling3export.model.config import Config
from ling3export.plan.options import Options
from ling3export.plan.plan import make_plan

BAR = 1.2  # times what must move


def compiled(target: str = TARGET, cache: Path | None = None) -> dict[str, Program]:
    """Records of the three cells, by name; ``cache`` is a build cache."""
    config = Config.from_dict(config_fields("full", {}))
    plan = make_plan(config, Options(snapshots=32), target)
    cells = [cell for cell in plan.cells if cell.phase in MOVING]
    with tempfile.TemporaryDirectory() as folder:
        known = None if cache is None else Cells(CacheUse("on", cache), lambda text: None)
        outcome = Compilers(plan, config, Path(folder), None, known).run(cells, lambda cell, record: None)
    assert not outcome.failures, outcome.failures
    return {cell.name: outcome.built[cell.name].program for cell in cells}


def times(program: Program) -> float:
    """Bytes through the large memory over those that must move."""
    assert program.floor is not None and program.estimate is not None
    return (program.estimate.memory_bytes or 0) / program.floor.moved


def main(target: str = TARGET) -> None:
    """Compiles and prints."""
    print("| cell | must move, bytes a chip | memory traffic of its instructions | ratio | compiler's cost analysis |")
    print("|---|---|---|---|---|")
    for name, program in compiled(target).items():
        row = (name, f"{program.floor.moved:,}", f"{program.estimate.memory_bytes:,}", f"{times(program):.3f}",
               f"{program.bytes_accessed or 0:,.0f}")  # fmt: skip
        print(f"| {' | '.join(row)} |")
        print(f"  {name}: {program.memory}, copies {program.estimate.copies}", file=sys.stderr)


if __name__ == "__main__":
    main(*sys.argv[1:])
