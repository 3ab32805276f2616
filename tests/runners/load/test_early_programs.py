"""Programs load in threads: first those that a first request needs, then the others, or sooner on demand."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from ling3export.artifacts.manifest import read_manifest
from ling3export.foundation.errors import ArtifactError
from ling3export.runners.engine.engine import Engine
from ling3export.runners.load.programs import Programs, first_needed
from tests.support import toy_artifact

LATE = 20  # seconds, for operations that take fractions of one
NAMES = ("d", "c", "b", "a")


class Loads:
    """Loads names as their capitals; ``held`` ones wait until the test lets them go."""

    def __init__(self, *held: str, bad: str = ""):
        self.begun, self.threads, self._bad = [], {}, bad
        self.gates = {name: threading.Event() for name in held}

    def __call__(self, name):
        self.begun.append(name)
        self.threads[name] = threading.current_thread()
        if name in self.gates:
            assert self.gates[name].wait(LATE)
        if name == self._bad:
            raise ArtifactError(f"program `{name}`: expected an executable that loads, found none")
        return name.upper()


@pytest.fixture
def pool():
    with ThreadPoolExecutor(2) as pool:
        yield pool


def test_other_programs_load_after_the_first_ones_or_on_demand(pool):
    loads = Loads("a", "c")
    programs = Programs(loads, NAMES, pool, {"a"})
    assert list(programs) == ["a", "d", "c", "b"] and len(programs) == 4
    assert programs["b"] == "B" and loads.threads["b"] is threading.current_thread(), "its turn had not come"
    assert loads.begun == ["a", "b"], "nothing else begins before the first ones have loaded"
    loads.gates["a"].set()
    loads.gates["c"].set()
    programs.settle()
    assert dict(programs) == {name: name.upper() for name in NAMES} and sorted(loads.begun) == sorted(NAMES)


@pytest.mark.parametrize("first", [None, {"a"}, {"d"}])
def test_one_that_does_not_load_is_said_whenever_it_is_asked_for(pool, first):
    programs = Programs(Loads(bad="a"), NAMES, pool, first)
    assert programs["c"] == "C"
    for ask in (lambda: programs["a"], programs.settle, lambda: programs["a"]):
        with pytest.raises(ArtifactError, match="program `a`"):
            ask()


def test_two_threads_load_one_program_once(pool):
    loads = Loads("a", "b")
    programs = Programs(loads, ("a", "b"), pool, {"a"})
    with ThreadPoolExecutor(2) as asking:
        asked = [asking.submit(lambda: programs["b"]) for _ in range(2)]
        for gate in loads.gates.values():
            gate.set()
        assert [each.result(LATE) for each in asked] == ["B", "B"]
    programs.settle()
    assert sorted(loads.begun) == ["a", "b"]


def test_programs_that_are_no_longer_needed_are_not_loaded():
    """Also if the first ones were never loaded: the thread for the others must not wait forever."""
    loads = Loads("x", "y")
    pool = ThreadPoolExecutor(1)
    pool.submit(loads, "x")
    programs = Programs(loads, NAMES, pool, {"a"})
    pool.shutdown(wait=False, cancel_futures=True)
    programs.close()
    loads.gates["x"].set()
    for thread in [each for each in threading.enumerate() if each.name.startswith("ling3-load-behind")]:
        thread.join(LATE)
        assert not thread.is_alive()
    assert loads.begun == ["x"]


def test_an_engine_serves_before_all_programs_have_loaded(monkeypatch):
    """Regression: a short answer waited for all programs of the artifact."""
    record = next(iter(read_manifest(toy_artifact.shared()).targets.values()))
    needed, gate = first_needed(record), threading.Event()
    assert 0 < len(needed) < len(record.cells)
    state = int(record.state_program is not None)
    from ling3export.machine import pjrt

    load, begun = pjrt.load_executable, []

    def slow(raw, executable):
        begun.append(raw)
        assert len(begun) <= len(needed) + state or gate.wait(LATE)
        return load(raw, executable)

    monkeypatch.setattr(pjrt, "load_executable", slow)
    with Engine(toy_artifact.shared(), report=lambda text: None) as engine:
        (answer,) = engine.generate([[1, 2]], max_tokens=2, ignore_eos=True)
        assert len(answer.token_ids) == 2 and len(begun) <= len(needed) + state + 1
        gate.set()
        toy_artifact.check_tokens(engine)
        engine.settle()
        assert len(begun) == len(record.cells) + state and engine.stats()["compile_events"] == 0
