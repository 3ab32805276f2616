"""Loading a toy artifact: first digests, then verdicts, then programs; damaged files are never used."""

import gc
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata

import pytest
from msgspec.structs import replace

from ling3export.artifacts.manifest import read_manifest
from ling3export.artifacts.program_records import CallRecord
from ling3export.artifacts.schema import Executable, Mesh, Requirements
from ling3export.foundation.errors import ArtifactError
from ling3export.machine import pjrt
from ling3export.runners.engine.engine import Engine
from ling3export.runners.load import recompile
from ling3export.runners.load.loader import collector_off, load, no_plugin_search
from ling3export.runners.load.recompile import cache_folder
from tests.support import toy_artifact
from tests.support.manifests import changed_targets, crafted


@pytest.fixture(scope="module")
def built():
    return toy_artifact.shared()


@pytest.fixture(scope="module")
def compiled(built, tmp_path_factory):
    """An artifact of another jaxlib that was compiled on this machine, the messages, and the cache."""
    folder = shutil.copytree(built, tmp_path_factory.mktemp("compiled") / "moved.ling3")
    rebuilt_elsewhere(folder, jaxlib="0.1.2")
    before = sorted(folder.parent.rglob("*"))
    said = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LING3_CACHE", str(tmp_path_factory.mktemp("cache")))
        cache = cache_folder()
        _compiled(folder, said)
    assert sorted(folder.parent.rglob("*")) == before, "the cache is neither in the artifact nor beside it"
    return folder, said, cache


def _compiled(folder, said):
    with Engine(folder, programs="allow-compile", report=said.append) as engine:
        toy_artifact.check_tokens(engine)
        assert engine.stats()["compile_events"] == len(toy_artifact.CELLS)


@pytest.fixture
def foreign(compiled, tmp_path, monkeypatch):
    """A copy of the artifact of another jaxlib, with a copy of the cache."""
    monkeypatch.setenv("LING3_CACHE", str(tmp_path / "cache"))
    shutil.copytree(compiled[2], cache_folder())
    return shutil.copytree(compiled[0], tmp_path / "moved.ling3")


@pytest.fixture
def artifact(built, tmp_path):
    """A copy that a test may damage, in another folder than it was built in."""
    return shutil.copytree(built, tmp_path / "moved.ling3")


def flip(path, offset):
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def rebuilt_elsewhere(artifact, **requires):
    """Makes every executable look as if it was built on another machine."""
    changed_targets(artifact, lambda target: replace(target, requires=replace(target.requires, **requires)))


def never_load(monkeypatch):
    monkeypatch.setattr(pjrt, "load_executable", lambda *_: pytest.fail("deserialized"))


@pytest.mark.parametrize("overlap", [True, False])
def test_a_moved_artifact_runs_without_compiling(artifact, overlap):
    said = []
    with Engine(artifact, overlap=overlap, report=said.append) as engine:
        toy_artifact.check_tokens(engine)
        stats = engine.stats()
    assert stats["compile_events"] == 0
    assert stats["tokens_in"] == sum(len(prompt) for prompt in toy_artifact.PROMPTS)
    assert {verdict.status.value for verdict in engine.verdicts.values()} == {"OPTIMAL"}
    assert "\n".join(said) == "moved.ling3: unsigned"
    assert {"manifest", "imports", "backend", "programs", "weights", "state", "check", "first_step"} == set(
        stats["seconds"]
    )


def test_a_flipped_byte_in_the_weights_is_found_unless_told_not_to_look(artifact):
    flip(artifact / "weights" / "toy.safetensors", -1)
    with pytest.raises(ArtifactError, match=r"`toy.table` shard 1: expected sha256"):
        load(artifact)
    said = []
    load(artifact, check="programs", report=said.append)
    assert "\n".join(said) == "weights are not checked (--check programs)\nmoved.ling3: unsigned"


def test_a_copy_of_the_weights_is_checked_and_does_not_change_with_the_file(artifact):
    """Regression: weights are a shared mapping; a write after the check gave garbage with exit code 0."""
    path = artifact / "weights" / "toy.safetensors"
    before = path.read_bytes()
    with Engine(artifact, check="copy") as engine:
        with open(path, "r+b") as file:
            file.write(bytes(len(before)))
        toy_artifact.check_tokens(engine)
    path.write_bytes(before)
    flip(path, -1)
    with pytest.raises(ArtifactError, match=r"`toy.table` shard 1: expected sha256"):
        load(artifact, check="copy")


@pytest.mark.parametrize(
    ("requires", "reason"),
    [
        ({"jaxlib": "0.1.2"}, r"found RECOMPILE .* \(jaxlib: built for 0.1.2, found "),
        ({"cpu_features": ("avx1024",)}, "processor: built for avx1024, which this one lacks"),
    ],
)
def test_executables_for_other_machines_are_refused_before_the_deserializer(artifact, monkeypatch, requires, reason):
    never_load(monkeypatch)
    rebuilt_elsewhere(artifact, **requires)
    with pytest.raises(ArtifactError, match=reason):
        load(artifact)


def test_allow_compile_says_what_it_compiles_and_why(compiled):
    folder, (*said, last), cache = compiled
    assert last == f"{folder.name}: unsigned"
    begun = [line for line in said if line.endswith(": compiling")]
    ended = [line.partition(": compiled in ") for line in said if line not in begun]
    assert len(begun) == len(ended) == len(toy_artifact.CELLS)
    assert all(": RECOMPILE (jaxlib: built for 0.1.2, found " in line for line in begun)
    assert {name for name, _, _ in ended} == toy_artifact.CELLS.keys()
    assert sum(line.endswith(f"(9 of {len(ended)} programs)") for *_, line in ended) == 1
    assert len(list(cache.iterdir())) == 2 * len(toy_artifact.CELLS)


def test_the_cache_makes_the_next_start_compile_nothing(foreign):
    said = []
    with Engine(foreign, programs="allow-compile", report=said.append) as engine:
        toy_artifact.check_tokens(engine)
        assert engine.stats()["compile_events"] == 0
    assert said.pop() == "moved.ling3: unsigned"
    assert all(line.endswith(": from recompiled") for line in said)


def test_a_damaged_cache_entry_is_compiled_again(foreign):
    manifest = read_manifest(foreign)
    small = sorted(cache_folder().glob("*.json"), key=lambda path: path.with_suffix(".exec").stat().st_size)
    flip(small[0].with_suffix(".exec"), 500)
    flip(small[1], 50)
    small[2].with_suffix(".exec").unlink()
    said = []
    with Engine(foreign, programs="allow-compile", report=said.append) as engine:
        toy_artifact.check_tokens(engine)
        assert engine.stats()["compile_events"] == 3
    assert sum("compiling it again" in line for line in said) == 3
    assert read_manifest(foreign) == manifest


def test_a_damaged_portable_program_is_never_compiled(artifact):
    rebuilt_elsewhere(artifact, jaxlib="0.1.2")
    flip(artifact / "programs" / toy_artifact.TARGET / "decode@2.stablehlo", 100)
    with pytest.raises(ArtifactError, match=r"file `programs/cpu-tp2/decode@2.stablehlo`: expected sha256"):
        load(artifact, programs="allow-compile", report=lambda _: None)


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path, monkeypatch):
    monkeypatch.setenv("LING3_CACHE", str(tmp_path))
    cache_folder().write_text("in the way")
    said, executable = [], Executable(Requirements("0", "cpu", "cpu"), Mesh("tp", (0,), (0,)), CallRecord((), (), ()))
    recompile.store_program(cache_folder(), "key", (b"program", executable), said.append)
    assert said == [f"not cached: write `recompiled`: expected a writable file, found File exists, in {tmp_path}"]


@pytest.mark.jit
def test_a_recompiled_program_runs_only_from_a_private_folder(foreign):
    """Regression: a cache next to an artifact came with it: native code that no digest of the artifact covers."""
    shutil.copytree(cache_folder(), foreign.with_name("moved.ling3.cache"))
    for mode, compiles in ((0o777, len(toy_artifact.CELLS)), (0o720, len(toy_artifact.CELLS)), (0o755, 0)):
        cache_folder().chmod(mode)
        said = []
        with Engine(foreign, programs="allow-compile", report=said.append) as engine:
            toy_artifact.check_tokens(engine)
            assert engine.stats()["compile_events"] == compiles
        refused = f"expected a folder that this user alone can write, found mode {mode:o}"
        assert any(refused in line for line in said) == bool(compiles)


def test_a_call_record_that_contradicts_its_cell_is_refused(artifact, monkeypatch):
    never_load(monkeypatch)

    def edit(raw):
        raw["targets"][toy_artifact.TARGET]["cells"]["decode@2"]["call"]["inputs"][0]["shape"] = [1]

    crafted(artifact, edit)
    with pytest.raises(ArtifactError, match=r'decode@2.call.inputs`: expected \[\[2, 320, 160\], "float32"\], input 0'):
        load(artifact)


def test_more_devices_than_there_are_is_an_error(artifact):
    changed_targets(artifact, lambda target: replace(target, mesh=Mesh("tp", (0, 63), (0, 0))))
    with pytest.raises(Exception, match="CPU devices: expected 64, found 16"):
        load(artifact)


def test_only_jax_finds_no_distributions_while_it_is_imported() -> None:
    def names() -> list[str]:
        return [each.name for each in metadata.distributions()]

    before = names()
    with ThreadPoolExecutor(1) as pool, no_plugin_search():
        assert names() == []
        assert pool.submit(names).result() == before
    assert names() == before and "jax" in before


@pytest.mark.parametrize("within", [no_plugin_search, collector_off])
def test_two_loads_at_once_leave_python_as_it_was(within) -> None:
    """Regression: the second to begin took the first one's replacement for the original, and restored that."""
    before, held, over = (metadata.distributions, gc.isenabled()), threading.Event(), threading.Event()

    def first() -> None:
        with within():
            held.set()
            over.wait(0.2)  # the second one begins, and must wait

    def second() -> None:
        held.wait()
        with within():
            over.set()

    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(first), pool.submit(second)]:
            done.result()
    assert (metadata.distributions, gc.isenabled()) == before


def test_the_collector_stays_off_until_the_last_of_two_loads_has_imported_jax() -> None:
    """Regression: the first to end turned it on while the other one still imported."""
    held, entered, left = threading.Event(), threading.Event(), threading.Event()

    def first() -> None:
        with collector_off():
            held.set()
            entered.wait(0.2)  # the second one begins, and must wait
        left.set()

    def second() -> bool:
        held.wait()
        with collector_off():
            entered.set()
            left.wait()
            return gc.isenabled()

    with ThreadPoolExecutor(2) as pool:
        ends = pool.submit(first), pool.submit(second)
        assert [end.result() for end in ends] == [None, False]
    assert gc.isenabled()
