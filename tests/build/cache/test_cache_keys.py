"""The inputs of a cell's and of a program's key, and the policies for both. Nothing is traced or compiled."""

import errno
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from msgspec import Struct, structs

from ling3export.artifacts.program_records import Memory, Origin, Program
from ling3export.artifacts.records import sha256_of, to_json
from ling3export.artifacts.schema import Mesh, Requirements
from ling3export.cache import keys
from ling3export.cache.cells import Built, Cells, opened
from ling3export.cache.keys import cell_fields, program_fields
from ling3export.cache.store import Cache, CacheUse
from ling3export.compile import build, pool
from ling3export.compile.pool import BuildOutcome, Compilers
from ling3export.foundation.errors import ArtifactError
from ling3export.foundation.processes import Failure
from ling3export.machine import environment
from ling3export.model.config import Config
from ling3export.plan.options import Options
from ling3export.plan.plan import Plan, PlannedCell, make_plan
from tests.support.package_copy import copied
from tests.support.tiny import tiny_fields

CELL = PlannedCell("decode", 16)
MEMORY = Memory(1, 2, 3, 4, 5)
MADE = Origin("compiler", sha256_of({"n": 1}), 5, 1)
CONFIG = Config.from_dict(tiny_fields())
DEVICES = {"kind": "cpu", "ids": [0, 1], "processes": 1}


def plan(target: str = "cpu", **options: Any) -> Plan:
    return make_plan(CONFIG, Options(**{"paddings": (16,), "tp": 2, "context": 128, **options}), target)


def key_of(config: Config = CONFIG, planned: Plan | None = None, cell: PlannedCell = CELL) -> str:
    return sha256_of(cell_fields(config, plan() if planned is None else planned, cell))


def loaded(*modules: str) -> set[str]:
    """Our source files that a fresh process has loaded after importing these modules."""
    code = f"import sys, {', '.join(modules)}\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    names = [name for name in done.stdout.split() if name.split(".")[0] == "ling3export"]
    return {name.removeprefix("ling3export.").replace(".", "/") + ".py" for name in names}


def test_every_module_that_a_compiling_process_loads_is_in_the_sources():
    names = keys.sources().stamps.keys()
    found = loaded("ling3export.compile.lower", "ling3export.compile.accelerators")
    assert "compile/lower.py" in found
    assert {name for name in found if (keys.ROOT / name).is_file() and not name.endswith("__init__.py")} <= names
    assert {path.relative_to(keys.ROOT).as_posix() for path in (keys.ROOT / "model").rglob("*.py")} <= names
    assert {"model/kda/layer.py", "cost/estimates.py", "machine/pjrt.py"} <= names
    assert not {"compile/build.py", "plan/plan.py", "cache/store.py"} & names


def replaced(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    seen = replace(keys.sources(), **changes)
    monkeypatch.setattr(keys, "sources", lambda: seen)


def test_sources_of_the_model_and_of_the_lowering_and_this_processor_are_in_a_cells_key(monkeypatch):
    first = key_of()
    with monkeypatch.context() as patch:
        replaced(patch, model="0")
        changed = [key_of()]
    with monkeypatch.context() as patch:
        replaced(patch, lowering="0")
        changed.append(key_of())
    tpu = plan("tpu:v6e:2x2")
    before = key_of(planned=tpu)
    monkeypatch.setattr(keys.environment, "cpu_features", lambda: ["sse2"])
    assert len({first, *changed, key_of()}) == 4 and key_of(planned=tpu) == before


def test_only_inputs_of_a_cell_change_its_key(monkeypatch):
    first = key_of()
    assert key_of() == first
    assert key_of(planned=plan(paddings=(16, 32), decode_paddings=(16,))) == first  # with another cell in the plan
    assert key_of(planned=plan(jobs=3)) == first
    changed = [
        key_of(cell=PlannedCell("decode", 32)),
        key_of(Config.from_dict(tiny_fields(rope_theta=20000))),
        key_of(planned=plan(pages=7)),
        key_of(planned=plan(dtype="float32")),
        key_of(planned=plan(tp=4)),
        key_of(planned=plan("tpu:v6e:2x2")),
        key_of(planned=plan("tpu:v6e:2x2", memory_fraction=0.5, pages=8)),
    ]
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_max_isa=AVX2")
    changed.append(key_of())
    monkeypatch.delenv("XLA_FLAGS")
    monkeypatch.setattr(keys.metadata, "version", lambda name: "9.9" if name == "jaxlib" else "1")
    changed.append(key_of())
    assert len({first, *changed}) == 1 + len(changed)


def test_a_programs_key_follows_program_and_devices_and_no_source_of_the_model(monkeypatch):
    def made(**changes: Any) -> str:
        values = {"lowering": "0", "modules": {"portable": "0"}, "devices": DEVICES, "priced": None} | changes
        return sha256_of(program_fields(plan().target, **values))

    first = made()
    changed = [
        made(modules={"portable": "1"}),
        made(devices=DEVICES | {"ids": [1, 0]}),
        made(devices=DEVICES | {"processes": 2}),
        made(priced={"config": 1}),
    ]
    replaced(monkeypatch, model="0")
    assert made() == first
    assert len({first, *changed, made(lowering="1")}) == 2 + len(changed)


def built(origin: Origin | None = MADE) -> Built:
    program = Program(
        phase=CELL.phase,
        padding=CELL.padding,
        fields=(),
        inputs=(),
        outputs=(),
        collectives={},
        lower_seconds=0.5,
        compile_seconds=2.0,
        memory=MEMORY,
        origin=origin,
    )
    return Built(program, Requirements("0.11.2", "cpu", "cpu"), Mesh("tp", (0, 1), (0, 0)))


def folder_with(tmp_path: Path, name: str, content: bytes) -> Path:
    folder = tmp_path / name
    folder.mkdir()
    for suffix in ("stablehlo", "exec"):
        (folder / f"{CELL.name}.{suffix}").write_bytes(content + suffix.encode())
    return folder


PROGRAM = {"n": 1}


def kept(use: CacheUse, folder: Path) -> Built:
    """A cell of a folder and its program, stored as a build stores them."""
    cache = Cache(use, pytest.fail)
    cache.write("programs", PROGRAM, {}, (folder / f"{CELL.name}.exec").read_bytes())
    cache.write("programs", {"graph": sha256_of(PROGRAM)}, {}, b"text")
    return Cells(use, pytest.fail).keep(CONFIG, plan(), CELL, folder, built())


def test_the_policies_of_cells(tmp_path):
    """``on`` stores and returns equal bytes; ``redo`` only replaces; ``readonly`` and ``off`` store nothing."""
    said: list[str] = []
    use = CacheUse("on", tmp_path / "cache")

    def cells(policy: str) -> Cells:
        return Cells(replace(use, policy=policy), said.append)

    def fetched(policy: str, name: str) -> bytes | None:
        folder = tmp_path / name
        folder.mkdir()
        found = cells(policy).fetch(CONFIG, plan(), CELL, folder)
        if found is None:
            assert list(folder.iterdir()) == []
            return None
        assert found == built(Origin("cache", MADE.program, 0, 0, key_of()))
        return (folder / f"{CELL.name}.exec").read_bytes()

    for policy in ("off", "readonly"):
        whole = kept(replace(use, policy=policy), folder_with(tmp_path, policy, b"1"))
        assert whole == built(structs.replace(MADE, key=key_of()))
        assert not (tmp_path / "cache").exists()
    assert fetched("on", "none") is None
    kept(use, folder_with(tmp_path, "first", b"1"))
    found = [fetched(policy, f"a-{policy}") for policy in ("on", "readonly", "redo", "off")]
    assert found == [b"1exec", b"1exec", None, None]
    kept(replace(use, policy="redo"), folder_with(tmp_path, "second", b"2"))
    assert fetched("on", "b-on") == b"2exec"
    Cache(use, pytest.fail).path("programs", MADE.program).unlink()
    assert fetched("on", "c-on") is None  # a cleanup removed the program, so the cell is made again
    assert said == []


@pytest.mark.parametrize(
    ("edit", "found"),
    [
        (lambda record: record.pop("mesh"), "another record (expected the field mesh, found none)"),
        (
            lambda record: record["program"].update(padding="16"),
            'another record (expected a whole number, found "16", at program.padding)',
        ),
        (lambda record: record["program"].pop("origin"), "a cell without its origin"),
    ],
)
def test_a_crafted_cell_with_right_digests_is_broken_and_made_again(tmp_path, edit, found):
    """Regression: such a cell ended a build with a traceback."""
    said: list[str] = []
    use = CacheUse("on", tmp_path / "cache")
    cells = Cells(use, said.append)
    record = to_json(kept(use, folder_with(tmp_path, "first", b"1")))
    edit(record)
    Cache(use, said.append).write("cells", cell_fields(CONFIG, plan(), CELL), record, b"1")
    folder = tmp_path / "second"
    folder.mkdir()
    assert cells.fetch(CONFIG, plan(), CELL, folder) is None
    assert said == [
        f"cache entry cells/{key_of()[:12]}: expected a whole one, found {found}, in {use.where}; discarded, it is "
        "made again"
    ]
    assert list(folder.iterdir()) == []
    assert not Cache(use, said.append).path("cells", key_of()).exists()


def test_a_folder_that_cannot_be_written_is_named_once_and_what_it_has_is_used(tmp_path, monkeypatch):
    """Regression: the warning was repeated for each file of each cell."""
    said: list[str] = []
    (tmp_path / "file").touch()
    folder = folder_with(tmp_path, "programs", b"1")
    cells = opened(CacheUse("on", tmp_path / "file" / "cache"), said.append)
    assert cells.fetch(CONFIG, plan(), CELL, folder) is None
    cells.keep(CONFIG, plan(), CELL, folder, built())
    assert cells.use == CacheUse("readonly", tmp_path / "file" / "cache")
    assert (cells.use.reads, cells.use.writes) == (True, False)
    told = "not cached: write `cache`: expected a writable file, found "
    assert said.pop() == f"{told}Not a directory, in {tmp_path / 'file'}"

    use = CacheUse("on", tmp_path / "cache")
    kept(use, folder)
    before = sorted(use.where.rglob("*"))
    make = os.open

    def refuse(path: str, flags: int, *more: Any, **named: Any) -> int:
        makes = flags & os.O_CREAT or flags & os.O_TMPFILE == os.O_TMPFILE
        if makes and Path(path).is_relative_to(use.where):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return make(path, flags, *more, **named)

    monkeypatch.setattr(os, "open", refuse)
    for policy, there in (("on", True), ("redo", False)):
        cells = opened(replace(use, policy=policy), said.append)
        found = cells.fetch(CONFIG, plan(), CELL, folder_with(tmp_path, policy, b"2"))
        assert (found is not None, cells.use.writes) == (there, False)
        assert said.pop() == f"{told}Permission denied, in {tmp_path}"
    assert said == []
    assert sorted(use.where.rglob("*")) == before


def test_a_file_of_flags_counts_by_its_content(tmp_path, monkeypatch):
    """Regression: the key had only the name of ``XLA_FLAGS=FILE``, so new flags got the programs of old ones."""
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_max_isa=AVX2")
    assert environment.compiler_flags() == {"XLA_FLAGS": "--xla_cpu_max_isa=AVX2"}
    flags, results = tmp_path / "flags", tmp_path / "autotuned"
    results.write_text("first")
    found = set()
    for value in (str(flags), f"--flagfile={flags}", f"--xla_a=1 --xla_gpu_load_autotune_results_from={results}"):
        monkeypatch.setenv("XLA_FLAGS", value)
        for text in ("--xla_a=1", "--xla_a=2", f"--xla_gpu_load_autotune_results_from={results}"):
            flags.write_text(text)
            found.add(key_of())
        results.write_text(f"{len(found)}")
        found.add(key_of())
    assert len(found) == 4 + 4 + 2
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.setenv("XLA_FLAGS", str(tmp_path / "pipe"))
    key_of()  # the second call has to check again


def test_a_source_that_changes_during_a_build_fails_its_cell_and_nothing_is_kept(tmp_path):
    """Regression: a source that was edited while workers started, then restored, left wrong cache entries."""
    tree = copied(tmp_path / "tree")
    code = """
import os, sys
from pathlib import Path
from ling3export.cache import keys
path = Path(sys.argv[1])
before, stat = path.read_bytes(), path.stat()
seen = keys.sources()
print(seen.changed())
path.write_bytes(before + b"# edited\\n")
print(seen.changed())
path.write_bytes(before)
os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
print(seen.changed(), keys.sources() is seen, keys.sources.__wrapped__().model == seen.model)
"""
    path = tree / "model" / "parameters.py"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, str(path)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"},
    )
    assert done.returncode == 0, done.stderr
    changed = "['model/parameters.py']"
    assert done.stdout.splitlines() == ["[]", changed, f"{changed} True True"]


def test_a_worker_of_other_sources_fails_its_cell_and_keeps_nothing(tmp_path, monkeypatch):
    cells = Cells(CacheUse("on", tmp_path / "cache"), pytest.fail)
    folder = folder_with(tmp_path, "built", b"1")
    stamps = keys.sources().stamps
    with monkeypatch.context() as patch:
        patch.setattr(pool, "sources", lambda: replace(keys.sources(), stamps=stamps | {"model/kda/layer.py": "0"}))
        changed = Compilers(plan(), CONFIG, folder, 1, cells)
    reply = {"built": to_json(built()), "messages": []}
    worker: Any = SimpleNamespace(send=lambda message: None, receive=lambda: reply)
    failure = changed.made(worker, CELL)
    assert isinstance(failure, Failure)
    assert failure.error == "expected no source to change during the build, model/kda/layer.py did"
    assert not (tmp_path / "cache").exists()
    assert isinstance(Compilers(plan(), CONFIG, folder, 1, cells).made(worker, CELL), Built)


class Vectors(Struct):
    receipts: dict[str, Any]
    portable: dict[str, Any] | None = None


class Written(Struct):
    """The fields of a manifest that are changed before anything is measured."""

    targets: dict[str, Any]
    vectors: Vectors
    producer: dict[str, str]
    notes: tuple[str, ...]
    has_weights: bool = True


def refusing(*_: object, **__: object) -> None:
    raise ArtifactError("expected a cell that runs")


def test_a_program_that_fails_its_receipt_leaves_the_cache(tmp_path, monkeypatch):
    """Regression: every later build got a wrong program from the cache, and its receipts failed again."""
    cells = Cells(CacheUse("on", tmp_path / "cache"), pytest.fail)
    whole = kept(cells.use, folder_with(tmp_path, "built", b"1"))
    outcome = BuildOutcome(plan(), {CELL.name: whole}, {})
    monkeypatch.setattr(build, "target_record", lambda *arguments: None)
    monkeypatch.setattr(build, "measure_apart", refusing)
    manifest: Any = Written({}, Vectors({}), {}, ())
    assert len(list((tmp_path / "cache").glob("*/*"))) == 3
    with pytest.raises(ArtifactError, match="expected a cell that runs"):
        build.complete(tmp_path, manifest, [outcome], Mock(), cells)
    assert list((tmp_path / "cache").glob("*/*")) == []
