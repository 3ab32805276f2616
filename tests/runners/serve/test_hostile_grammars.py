"""Short grammars that need hours or gigabytes to compile are refused, and other requests do not wait for them."""

import json
import sys
import threading
import time
from contextlib import ExitStack
from typing import Any

import httpx2
import pytest

from ling3export.foundation.errors import RequestError
from ling3export.runners.engine.engine import Engine
from ling3export.runners.text import trial
from ling3export.runners.text.grammar import Grammar
from ling3export.runners.text.trial import BYTES, PROCESSES, SECONDS, WAIT, GrammarBusy, GrammarTrial
from tests.support import toy_artifact
from tests.support.serving import Server

TOOK = (
    f"expected a json grammar that takes at most {SECONDS:g} s and {BYTES >> 20} MiB to compile, found one that takes"
)
# A server with an additional thread that never returns.
STUCK = "import sys, threading, time; threading.Thread(target=time.sleep, args=(1e6,)).start(); "
STUCK += "from ling3export.runners.cli.main import main; main(sys.argv[1:])"


def hostile(*steps: int) -> dict[str, Any]:
    """A request with a schema for multiples of all ``steps``; each step by itself is cheap."""
    schema = {"type": "integer", "allOf": [{"multipleOf": step} for step in steps]}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    return {"model": "toy", "prompt": [5], "max_tokens": 2, "response_format": form}


def memory(server: Server) -> int:
    """The peak memory of the server's process so far."""
    with open(f"/proc/{server.process.pid}/status") as file:
        (line,) = (line for line in file if line.startswith("VmHWM:"))
    return int(line.split()[1]) << 10


def test_grammars_that_take_hours_stop_nobody():
    """Regression: two requests stopped all completions: 0.7 → 9.1 GB in two minutes; the process survived SIGTERM."""
    with Server(toy_artifact.shared(), "--model", "toy", "--grace", 1) as server:
        before, answers = memory(server), []

        def ask(steps: tuple[int, ...]) -> None:
            answers.append(httpx2.post(f"{server.url}/v1/completions", json=hostile(*steps), timeout=3 * WAIT))

        threads = [threading.Thread(target=ask, args=(steps,)) for steps in ((9973, 9967), (9967, 9949))]
        for thread in threads:
            thread.start()
        plain = {"model": "toy", "prompt": [5], "max_tokens": 2}
        others = 0
        while len(answers) < len(threads):
            assert httpx2.post(f"{server.url}/v1/completions", json=plain, timeout=WAIT).status_code == 200
            others += 1
        for thread in threads:
            thread.join()
        assert others > 10
        for answer in answers:
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, "response_format")
            assert error["message"].startswith(f"response_format: {TOOK} more ")
        assert memory(server) < before + (BYTES >> 1)
        # A malformed schema does not wait for them; it once waited 8 s for its 400.
        threads = [threading.Thread(target=ask, args=(steps,)) for steps in ((9941, 9931), (9931, 9929))]
        for thread in threads:
            thread.start()
        time.sleep(0.5)
        begun = time.monotonic()
        malformed = hostile(5)
        malformed["response_format"]["json_schema"]["schema"] = {"type": "nothing"}
        answer = httpx2.post(f"{server.url}/v1/completions", json=malformed, timeout=WAIT)
        assert answer.status_code == 400 and "more time" not in answer.text
        assert time.monotonic() - begun < SECONDS
        for thread in threads:
            thread.join()
        thread = threading.Thread(target=ask, args=((9949, 9941),))
        thread.start()
        time.sleep(0.3)
        begun = time.monotonic()
        assert server.stop() == 0
        assert time.monotonic() - begun < 1 + 20
        thread.join()
        assert answers[-1].status_code in (400, 503)  # depends on the speed of this machine


def test_sigterm_ends_a_server_whose_thread_never_returns():
    """Regression: Python waited for the threads that read bodies."""
    with Server(toy_artifact.shared(), "--grace", 1, runner=[sys.executable, "-c", STUCK]) as server:
        begun = time.monotonic()
        assert server.stop() == 0
        assert time.monotonic() - begun < 1 + 20


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar("regex", "a{1000000}"),
        Grammar("regex", "(((a{100}){100}){100})"),
        Grammar(
            "json", json.dumps({"type": "object", "properties": {f"p{at}": {"type": "integer"} for at in range(520)}})
        ),
    ],
)
def test_a_grammar_that_fails_after_its_first_token_is_refused(grammar):
    """Regression: the grammar was accepted, and then every request with it got a 500."""
    with (
        Engine(toy_artifact.shared(), report=lambda text: None) as engine,
        pytest.raises(RequestError, match=f"expected a {grammar.kind} grammar that some text fits, found"),
    ):
        engine.submit(engine.request([5], 4, grammar=grammar))


def test_a_grammar_that_gets_no_turn_is_refused_for_now(monkeypatch):
    """While others use all processes, a waiting request gets 503 and can be sent again."""
    monkeypatch.setattr(trial, "TURN", 0.05)
    grammars = GrammarTrial("{}", 320, [316])
    with ExitStack() as held:
        for _ in range(PROCESSES):
            held.enter_context(grammars.turns)
        with pytest.raises(GrammarBusy, match=f"{PROCESSES} others are being compiled"):
            grammars.refusal(Grammar("regex", "a"))
