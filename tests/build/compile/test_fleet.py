"""Cells that nodes of a cluster compile, in the cache of the machine that asked; the compilers are stubs."""

import json
import re
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from ling3export.artifacts.program_records import Memory, Origin, Program
from ling3export.artifacts.schema import Mesh, Requirements
from ling3export.cache.cells import Built, Cells
from ling3export.cache.use import CacheUse
from ling3export.checkpoint.forms import INT4
from ling3export.checkpoint.synth import config_fields
from ling3export.checkpoint.synth_forms import quantization_config
from ling3export.cli.main import main
from ling3export.cli.progress import Console
from ling3export.compile import fleet
from ling3export.compile.pool import BuildOutcome, Compilers
from ling3export.compile.replay import replay
from ling3export.foundation.errors import PlanError
from ling3export.foundation.processes import Failure
from ling3export.model.config import Config
from ling3export.plan.options import Options
from ling3export.plan.plan import make_plans
from tests.support.tiny import tiny_fields, tiny_weights, write_tiny

OPTIONS = Options((16,), (1,), tp=1, max_running=1, page_size=16, context=64)
CELLS = ["decode@1", "logits_processor@1", "prefill@16", "sample@1"]


def stub(self: Compilers, cells, done) -> BuildOutcome:
    """In place of ``Compilers.run``: two small files a cell."""
    outcome = BuildOutcome(self.plan, {}, {})
    for cell in cells:
        for suffix in ("stablehlo", "exec"):
            (self.job.folder / f"{cell.name}.{suffix}").write_text(f"{suffix} of {cell.name}")
        program = Program(
            phase=cell.phase,
            padding=cell.padding,
            fields=(),
            inputs=(),
            outputs=(),
            collectives={},
            lower_seconds=0.5,
            compile_seconds=1.25,
            memory=Memory(arguments=1, outputs=1, temporaries=1, alias=0, code=0),
            origin=Origin("compiler", "a" * 64, 1, 1),
        )
        built = Built(program, Requirements("0.11.2", "cpu", "cpu"), Mesh("tp", (0,), (0,)))
        outcome.built[cell.name] = built
        done(cell, built)
    return outcome


class InProcess(AbstractContextManager["InProcess"]):
    """One worker in this process, in place of a pool of them."""

    def __init__(self, make) -> None:
        self.worker = make()
        self.worker.start(None)

    def __exit__(self, *_: object) -> None:
        pass

    def map(self, pieces, ended):
        for number, piece in enumerate(pieces):
            done = self.worker.work(piece)
            ended(number)
            yield done


class Asked:
    """A build that is asked for on a cluster."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        fields = tiny_fields()
        self.checkpoint = write_tiny(folder / "tiny", fields, tiny_weights(fields))
        self.use = CacheUse("on", folder / "cache")
        self.pools = 0
        monkeypatch.setattr(Compilers, "run", stub)

    def pool(self, make) -> InProcess:
        self.pools += 1
        return InProcess(make)

    def run(self, use: CacheUse | None = None) -> None:
        with Console() as console:
            fleet.build_on(self.pool, self.checkpoint / "config.json", OPTIONS, console, cache=use or self.use)

    def kept(self, folder: Path) -> dict[str, Built | None]:
        """What the build itself finds in the cache, its files in ``folder``."""
        config = Config.from_path(self.checkpoint, ())
        (plan,) = make_plans(config, OPTIONS)
        cells = Cells(self.use, lambda text: None)
        return {cell.name: cells.fetch(config, plan, cell, folder) for cell in plan.cells}


@pytest.fixture
def asked(tmp_path, monkeypatch):
    return Asked(tmp_path, monkeypatch)


def test_cells_of_nodes_are_what_the_build_finds_and_a_second_run_needs_no_cluster(asked, tmp_path):
    asked.run()
    assert asked.pools == 1
    found = asked.kept(tmp_path)
    assert sorted(found) == CELLS
    for name, built in found.items():
        assert built is not None and built.program.name == name
        assert built.program.origin is not None and built.program.origin.source == "cache"
        assert (tmp_path / f"{name}.exec").read_text() == f"exec of {name}"
    asked.run()
    assert asked.pools == 1


def test_cells_are_told_by_name_as_they_start_and_end_on_the_cluster(asked, capsys):
    """A build on a cluster said nothing for minutes."""
    asked.run()
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("cpu-tp1, ")]
    assert [line.partition(": ")[0] for line in said[::2]] == [line.partition(": ")[0] for line in said[1::2]]
    assert sorted(line.split()[1].rstrip(":") for line in said[::2]) == CELLS
    assert all(line.endswith(": compiling on the cluster") for line in said[::2])
    assert all(re.search(r": ended after \d+\.\d s$", line) for line in said[1::2])


def test_a_cell_that_fails_loses_none_of_the_others(asked, tmp_path, monkeypatch):
    def failing(self, cells, done):
        (cell,) = cells
        if cell.phase != "decode":
            return stub(self, cells, done)
        return BuildOutcome(self.plan, {}, {cell.name: Failure("too large")})

    monkeypatch.setattr(Compilers, "run", failing)
    with pytest.raises(PlanError, match="expected 4 cells to build, 1 did not: decode@1: too large") as caught:
        asked.run()
    assert "the 3 others are in the cache" in str(caught.value)
    assert [name for name, built in asked.kept(tmp_path).items() if built is None] == ["decode@1"]


def test_a_node_that_compiles_otherwise_is_refused_by_name(asked, tmp_path, monkeypatch):
    work = fleet.CompileWorker.work

    def other(self, piece):
        fields, built, files = work(self, piece)
        return fields | {"toolchain": fields["toolchain"] | {"jaxlib": "0.12.0"}}, built, files

    monkeypatch.setattr(fleet.CompileWorker, "work", other)
    message = r"expected nodes that compile as this machine, found one with another .*jaxlib.*0\.12\.0"
    with pytest.raises(PlanError, match=message):
        asked.run()
    assert set(asked.kept(tmp_path).values()) == {None}


def test_a_cache_that_keeps_nothing_is_refused(asked):
    with pytest.raises(PlanError, match="--on: expected a cache that is written, found off"):
        asked.run(replace(asked.use, policy="off"))
    assert asked.pools == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--on", "ray", "--shard", "0/2"], "--on: expected no --shard beside it"),
        (["--on", "ray", "--format", "savedmodel"], "--on: expected no --format beside it"),
        (["--shard", "0/2", "--format", "savedmodel"], "--shard: expected no --format beside it"),
        (["--shard", "2/2"], "--shard: expected a share I/N, found `2/2`"),
        (["--shard", "0/2", "--cache", "readonly"], "--shard: expected a cache that is written, found readonly"),
    ],
)
def test_what_does_not_go_together_is_refused(tmp_path, words, message):
    (tmp_path / "config.json").write_text(json.dumps(config_fields("micro", {})))
    command = ["build", str(tmp_path / "config.json"), *words, "--cache-dir", str(tmp_path / "c")]
    done = CliRunner().invoke(main, command)
    assert done.exit_code in (1, 2)
    assert message in done.stderr


def test_cells_of_an_int4_checkpoint_are_compiled_for_what_the_build_stores(tmp_path, monkeypatch):
    """Those of a cluster, and of a failed build that was replayed, were once of bf16, which nobody wanted."""
    compiled = []

    def noted(self, cells, done):
        compiled.append((self.plan.geometry.weights, [cell.name for cell in cells]))
        return stub(self, cells, done)

    monkeypatch.setattr(Compilers, "run", noted)
    file, use = tmp_path / "config.json", CacheUse("on", tmp_path / "cache")
    fields, config = config_fields("micro", {}), Config.from_dict(config_fields("micro", {}))
    file.write_text(json.dumps(fields | {"quantization_config": quantization_config(INT4, config)}))
    with Console() as console:
        fleet.build_on(InProcess, file, OPTIONS, console, cache=use)
    assert sorted(cell for _, cells in compiled for cell in cells) == CELLS
    replay(tmp_path / "no.ling3", "decode@1", use, file, OPTIONS, lambda text: None)
    assert [cells for _, cells in compiled[4:]] == [["decode@1"]]
    assert {weights for weights, _ in compiled} == {"int4-experts"}
