"""A server's engine after a failed step or a stall: restarted a bounded number of times, and /health says what is."""

import time

import pytest

from ling3export.runners.engine.handle import EngineStalled, EngineStopped
from ling3export.runners.serve import run
from ling3export.runners.serve.app import Policy, application
from ling3export.runners.serve.run import supervised
from tests.support.serving import answered, error_of
from tests.support.waiting import until


class Engine:
    """Stopped by tests; a restart works unless ``stuck``."""

    shared_states = None  # none travel

    def __init__(self):
        self.stopped = None
        self.restarts, self.stuck = 0, False

    def restart(self):
        if self.stuck:
            raise EngineStalled("engine: expected `decode@16` to return within 3 s, found it still running")
        self.restarts += 1
        self.stopped = None
        return 4

    def stats(self):
        raise NotImplementedError


@pytest.fixture
def engine(monkeypatch):
    monkeypatch.setattr(run, "PAUSE", 0.01)
    return Engine()


def test_failed_steps_are_followed_by_so_many_restarts(engine):
    lines: list[str] = []
    with supervised(engine, 2, lines.append):
        for count in (1, 2):
            engine.stopped = EngineStopped(f"engine: expected every step to run, found error {count}")
            until(lambda count=count: len(lines) == count)
            assert (engine.restarts, engine.stopped) == (count, None)
        engine.stopped = EngineStopped("engine: expected every step to run, found error 3")
        until(lambda: len(lines) == 3)
    assert engine.restarts == 2 and engine.stopped is not None
    assert lines == [
        "serve: engine: expected every step to run, found error 1: restarted, 4 requests failed",
        "serve: engine: expected every step to run, found error 2: restarted, 4 requests failed",
        "serve: engine: expected every step to run, found error 3: it stays stopped after 2 restarts in 600 s",
    ]


def test_restarts_of_long_ago_do_not_count(engine, monkeypatch):
    monkeypatch.setattr(run, "WINDOW", 0.0)
    with supervised(engine, 1, lambda line: None):
        for count in (1, 2, 3):
            engine.stopped = EngineStopped("engine: expected every step to run, found an error")
            until(lambda count=count: engine.restarts == count)


def test_an_engine_that_stalled_is_restarted_once_its_call_returned(engine):
    lines: list[str] = []
    engine.stuck, engine.stopped = True, EngineStalled("engine: expected `decode@16` to return within 3 s, found it …")
    with supervised(engine, 1, lines.append):
        until(lambda: lines)
        time.sleep(0.05)
        assert lines == ["serve: engine: expected `decode@16` to return within 3 s, found it still running"]
        engine.stuck = False
        until(lambda: engine.restarts == 1)


def test_nothing_is_restarted_unless_asked(engine):
    engine.stopped = EngineStopped("engine: expected every step to run, found an error")
    with supervised(engine, 0):
        time.sleep(0.05)
    assert engine.restarts == 0


def test_health_names_the_program_that_did_not_return(engine):
    said = "engine: expected `decode@16` to return within 3 s, found it still running"
    engine.stopped = EngineStalled(said)
    answer = answered(application(engine, Policy("toy", None, 4, 5000)), "GET", "/health")
    assert answer.status_code == 503
    assert answer.json() == {"error": error_of(said, "server_error", "engine_stalled")}
