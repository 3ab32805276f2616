"""What the programs that move states move: of the true Ling3-Tiny for a TPU slice, by the compiler's count.

``python tests/support/state_bytes.py [SNAPSHOTS]`` compiles ``copy``, ``fetch`` and ``store`` and prints a table. No
checkpoint is needed. A sequence's recurrent and conv state of a chip is read and written; of the latents whole pages.
"""

import sys
import tempfile
from pathlib import Path

from golden_programs import TARGET
from ling3export.checkpoint.synth import config_fields
from ling3export.compile.pool import Compilers
from ling3export.model.config import Config
from ling3export.plan.options import Options
from ling3export.plan.plan import make_plan


def main(snapshots: int) -> None:
    """Compiles and prints."""
    config = Config.from_dict(config_fields("full", {}))
    plan = make_plan(config, Options(snapshots=snapshots), TARGET)
    cells = [cell for cell in plan.cells if cell.phase in ("copy", "fetch", "store")]
    with tempfile.TemporaryDirectory() as folder:
        outcome = Compilers(plan, config, Path(folder), None, None).run(cells, lambda cell, record: None)
    assert not outcome.failures, outcome.failures
    print("| cell | must move, bytes a chip | compiler's count | ratio | memory traffic of its instructions | copies |")
    print("|---|---|---|---|---|---|")
    for cell in cells:
        program = outcome.built[cell.name].program
        must = program.floor.moved if program.floor else 0
        estimate = program.estimate
        row = (
            cell.name, f"{must:,}", f"{program.bytes_accessed or 0:,.0f}",
            f"{(program.bytes_accessed or 0) / must:.3f}" if must else "-",
            f"{estimate.memory_bytes or 0:,}" if estimate else "-", estimate.copies if estimate else "-",
        )  # fmt: skip
        print(f"| {' | '.join(map(str, row))} |")
        print(f"  memory: {program.memory}", file=sys.stderr)
        for leaf in (*program.inputs, *program.outputs):
            print(f"  {cell.name} {leaf.group} {leaf.name} {leaf.shape} {leaf.dtype} {leaf.spec}", file=sys.stderr)


if __name__ == "__main__":
    main(int(sys.argv[1]) if sys.argv[1:] else 32)
