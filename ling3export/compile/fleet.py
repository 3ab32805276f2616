"""A build's cells compiled on a cluster, into the cache of this machine: the build then only collects."""

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ling3export.artifacts.files import write_new
from ling3export.artifacts.records import from_json, to_json
from ling3export.cache.cells import SUFFIXES, Built, opened
from ling3export.cache.explain import differences
from ling3export.cache.keys import cell_fields
from ling3export.cache.store import LARGEST_BLOB
from ling3export.cache.use import CacheUse
from ling3export.compile.build import Reporter, written
from ling3export.compile.pool import BuildOutcome, Compilers, check
from ling3export.foundation.errors import PlanError, listed
from ling3export.foundation.processes import Failure
from ling3export.foundation.reading import read_bytes
from ling3export.model.config import Config
from ling3export.plan.options import Options
from ling3export.plan.plan import Plan, PlannedCell, as_stored, make_plans
from ling3export.runners.fleet.pool import PoolWorker, WorkerPool, versions
from ling3export.runners.hosts.hosts import Hosts

STAGE = "compile on the cluster"
Compiled = tuple[dict[str, Any], Any, dict[str, bytes]]  # what decides the cell there, Built as JSON, files by suffix


@dataclass
class CompileWorker:
    """A node that compiles cells, each in a process of its own, for ``WorkerPool``.

    Args:
        config: The model.
    """

    config: Config

    def start(self, hosts: Hosts | None) -> dict[str, Any]:
        """Nothing to get ready."""
        return {"versions": versions()}

    def work(self, piece: tuple[Plan, PlannedCell]) -> Compiled | Failure:
        """A cell, or why it failed."""
        plan, cell = piece
        with tempfile.TemporaryDirectory(prefix="ling3-cell-") as name:
            folder = Path(name)
            done = Compilers(plan, self.config, folder, 1).run([cell], lambda cell, built: None)
            if cell.name in done.failures:
                return done.failures[cell.name]
            files = {suffix: read_bytes(folder, f"{cell.name}.{suffix}", LARGEST_BLOB) for suffix in SUFFIXES}
        return cell_fields(self.config, plan, cell), to_json(done.built[cell.name]), files


def build_on(
    make_pool: Callable[[Callable[[], PoolWorker]], AbstractContextManager[WorkerPool]],
    checkpoint: Path,
    options: Options,
    report: Reporter,
    *,
    ignore: Sequence[str] = (),
    cache: CacheUse,
) -> None:
    """Compiles what the cache has not of a build, on a cluster.

    Args:
        make_pool: Makes the pool of CompileWorker; not called where the cache has every cell.
        checkpoint: A checkpoint's folder, of which only config.json is read.
        options: What to build.
        report: Told of every cell.
        ignore: Fields of config.json to ignore.
        cache: Where programs are kept.

    Raises:
        PlanError: A cell failed, the cache cannot be written, or a node compiles otherwise than this machine would.
        ClusterError: The cluster is not there, has no room, or its workers die.
    """
    config = Config.from_path(checkpoint, ignore)
    plans = make_plans(config, as_stored(options, checkpoint))
    outcomes = {plan.target.name: BuildOutcome(plan, {}, {}) for plan in plans}
    cells = opened(cache, report.note)
    with tempfile.TemporaryDirectory(prefix="ling3-fleet-") as name:
        written(cells, "--on")
        folder = Path(name)
        wanted = [(plan, cell) for plan in plans for cell in plan.cells]
        todo = [(plan, cell) for plan, cell in wanted if cells.fetch(config, plan, cell, folder) is None]
        if not todo:
            return
        with make_pool(partial(CompileWorker, config)) as pool:
            report.start(STAGE, len(todo))
            started: list[float] = []
            names = [f"{plan.target.name}, {cell.name}" for plan, cell in todo]

            def taken() -> Iterator[tuple[Plan, PlannedCell]]:
                for name, piece in zip(names, todo, strict=True):
                    report.note(f"{name}: compiling on the cluster")
                    started.append(time.perf_counter())
                    yield piece

            def ended(number: int) -> None:
                report.note(f"{names[number]}: ended after {time.perf_counter() - started[number]:.1f} s")

            for (plan, cell), made in zip(todo, pool.map(taken(), ended), strict=True):
                outcome = outcomes[plan.target.name]
                if isinstance(made, Failure):
                    outcome.failures[cell.name] = made
                    continue
                fields, built, files = made
                if other := differences(cell_fields(config, plan, cell), fields):
                    hint = "nodes need the same package, versions and flags, and for cpu targets the same processor"
                    found = f"found one with another {listed(other)}"
                    raise PlanError(f"{cell.name}: expected nodes that compile as this machine, {found}", hint)
                for suffix in SUFFIXES:
                    write_new(folder / f"{cell.name}.{suffix}", files[suffix])
                outcome.built[cell.name] = cells.keep(config, plan, cell, folder, from_json(Built, built))
                report.advance(STAGE, 1)
        became = [*outcomes.values()]
        if any(outcome.failures for outcome in became):
            report.failed(became)
        check(config, became, True)
