"""Digests of the programs of a plan: ``python -m tools.program_digests CONFIG OUT TARGET...``.

Lowers every cell of the default paddings, with decode@1,16,64,128 and score@128, and writes to OUT the sha256 of each
one's StableHLO by target and cell. Names of functions are replaced by numbers. Nothing is compiled, and no machine of
the target is needed. Two trees that compute the same in the same way give the same file.
"""

import hashlib
import json
import os
import re
import sys
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from jax.sharding import AbstractMesh, AxisType

from ling3export.compile.lower import prepared
from ling3export.model.config import Config
from ling3export.model.geometry import AXIS
from ling3export.plan.options import Options
from ling3export.plan.plan import make_plan

OPTIONS = Options(decode_paddings=(1, 16, 64, 128), score_paddings=(128,))


def normalized(module: str) -> str:
    """StableHLO with the names of the module and its functions replaced by numbers, in order of appearance."""
    names: dict[str, str] = {}
    return re.sub(r'@[\w.]+|@"[^"]*"', lambda match: names.setdefault(match[0], f"@f{len(names)}"), module)


def digests(config: Config, target: str) -> dict[str, str]:
    """sha256 of the StableHLO of each cell of ``target``, by ``TARGET CELL``."""
    plan, digest = make_plan(config, OPTIONS, target), {}
    mesh = AbstractMesh((plan.geometry.tp,), (AXIS,), axis_types=(AxisType.Auto,))
    for cell in plan.cells:
        _, function, arguments = prepared(config, plan.geometry, cell.phase, cell.padding, mesh)
        module = function.trace(*arguments).lower(lowering_platforms=(plan.target.platform,)).as_text()
        digest[f"{target} {cell.name}"] = hashlib.sha256(normalized(module).encode()).hexdigest()
    return digest


def main(config: str, out: str, *targets: str) -> None:
    """Writes the digests of all ``targets``."""
    digest: dict[str, str] = {}
    for target in targets:
        digest |= digests(Config.from_path(Path(config)), target)
    Path(out).write_text(json.dumps(digest, indent=1) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
