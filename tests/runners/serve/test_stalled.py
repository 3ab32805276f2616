"""/health of a server whose engine stalled."""

from ling3export.runners.engine.handle import EngineStalled
from ling3export.runners.serve.app import Policy, application
from tests.support.serving import answered, error_of


class Engine:
    shared_states = None  # none travel

    def __init__(self, stopped):
        self.stopped = stopped


def test_health_names_the_program_that_did_not_return():
    said = "engine: expected `decode@16` to return within 3 s, found it still running"
    engine = Engine(EngineStalled(said))
    answer = answered(application(engine, Policy("toy", None, 4, 5000)), "GET", "/health")
    assert answer.status_code == 503
    assert answer.json() == {"error": error_of(said, "server_error", "engine_stalled")}
