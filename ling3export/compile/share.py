"""A share of a build's cells, compiled into the cache: when all shares are there, the build itself only collects."""

import tempfile
from collections.abc import Sequence
from pathlib import Path

from ling3export.cache.cells import Cells, opened, summary
from ling3export.cache.use import CacheUse
from ling3export.compile.build import Reporter, announced, compiling
from ling3export.foundation.errors import PlanError
from ling3export.foundation.shards import Shard
from ling3export.plan.options import Options
from ling3export.plan.plan import make_plans
from ling3export.plan.pricing import config_of


def build_share(
    checkpoint: Path,
    artifact: Path,
    options: Options,
    report: Reporter,
    shard: Shard,
    *,
    ignore: Sequence[str] = (),
    cache: CacheUse,
) -> None:
    """Compiles every N-th cell of a build, counted over its targets, and keeps them in the cache alone.

    Args:
        checkpoint: A checkpoint's folder, of which only config.json is read; or that file.
        artifact: What the build is to make. Only a failure is noted beside it.
        options: What to build.
        report: Told of every cell.
        shard: Which share.
        ignore: Fields of config.json to ignore.
        cache: Where programs are kept.

    Raises:
        PlanError: A cell failed, or the cache cannot be written.
    """
    config = config_of(checkpoint, ignore)
    plans = announced(make_plans(config, options), report)
    with opened(cache, report.note) as cells, tempfile.TemporaryDirectory(prefix="ling3-share-") as folder:
        written(cells, "--shard")
        with compiling(artifact, config, options, plans, Path(folder), cells, report, shard=shard) as compiled:
            outcomes = compiled()
        report.note(summary((built.program for each in outcomes for built in each.built.values()), cache))


def written(cells: Cells, option: str) -> None:
    """Refuses a cache that keeps nothing.

    Raises:
        PlanError: It is one; ``option`` needs another.
    """
    if not cells.use.writes:
        hint = "write it with --cache on, in a folder of your own, or one that all shares share: --cache-dir"
        raise PlanError(f"{option}: expected a cache that is written, found {cells.use.policy}", hint)
