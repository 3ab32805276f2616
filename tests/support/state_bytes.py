"""What the programs that move states move: of the true Ling3-Tiny for a TPU slice, by the compiler's count.

No checkpoint is needed. A sequence's recurrent and conv state of a chip is read and written; of the latents, whole
pages.
"""

from ling3export.artifacts.schema import MOVING
from ling3export.checkpoint.synth import config_fields
from ling3export.compile.lower import Compiled
from ling3export.model.config import Config
from ling3export.plan.options import Options
from ling3export.plan.plan import make_plan
from tests.support.artifacts_fixture import Artifacts
from tests.support.golden_programs import TARGET
from tests.support.tpu_texts import records

BAR = 1.2  # times what must move


def compiled(target: str = TARGET, kept: Artifacts | None = None) -> dict[str, Compiled]:
    """What describes the three cells, by name; ``kept`` has what earlier runs compiled."""
    config = Config.from_dict(config_fields("full", {}))
    plan = make_plan(config, Options(snapshots=32), target)
    return records(config, plan, [cell for cell in plan.cells if cell.phase in MOVING], kept)


def times(program: Compiled) -> float:
    """Bytes through the large memory over those that must move."""
    assert program.floor is not None and program.estimate is not None
    return (program.estimate.memory_bytes or 0) / program.floor.moved
