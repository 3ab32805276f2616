"""States that fail to be saved, and states that nobody takes: an answer without one, and no memory held."""

import time
from dataclasses import replace

import pytest

from ling3export.foundation.errors import Ling3Error
from ling3export.runners.engine.engine import Engine
from ling3export.runners.engine.request import Request, Sampling
from ling3export.runners.transfer import transfer_queue
from ling3export.runners.transfer.options import Transfer
from tests.support.transfers import AWAY
from tests.support.waiting import until

pytestmark = pytest.mark.build

PROMPT = tuple(range(20, 90))
QUIET = {"check": "programs", "report": lambda text: None, "prefix_cache": False}


def asked(length: int, salt: str = "") -> Request:
    return Request(PROMPT[:length], 9, Sampling(1.0, seed=length), ignore_eos=True, cache_salt=salt)


def test_a_save_that_fails_is_an_answer_without_a_state(artifact, monkeypatch):
    """That of the first request; the next one is saved."""
    right, turns = transfer_queue.fill, iter([1])

    def fill(state, source):
        if next(turns, None) == 1:
            raise Ling3Error("a copy failed")
        right(state, source)

    monkeypatch.setattr(transfer_queue, "fill", fill)
    with Engine(artifact("micro-tp1-snapshots"), transfer=Transfer("shm", deadline=60.0), **QUIET) as engine:
        salt = "salt"
        given, again = (
            engine.complete([replace(asked(30, f"{salt} {n}"), max_tokens=1, kv_transfer_params=AWAY)])[0]
            for n in range(2)
        )
        assert given.kv_transfer_params is None and again.kv_transfer_params is not None
        assert given.token_ids == again.token_ids
        said = engine.stats()["transfer"]
        assert (said["save_failed"], said["saved"], said["abandoned"]) == (1, 1, 1)
        assert engine.stats()["free"] == engine.stats()["pools"]


def test_what_nobody_will_take_is_freed_at_once(artifact):
    """Cancelled before the call, while it runs, while its state is saved, or behind it; no lease has to end."""
    with Engine(artifact("micro-tp1-snapshots"), transfer=Transfer("shm", lease=600.0), **QUIET) as engine:
        salt, kept = "salt", 0
        for number in range(12):
            (handle,) = engine.submit(replace(asked(30, f"{salt} {number}"), max_tokens=1, kv_transfer_params=AWAY))
            time.sleep(0.002 * number)
            handle.cancel()
            kept += handle.result(60).kv_transfer_params is not None

        def left() -> int:
            said = engine.stats()["transfer"]
            return said.get("stored", 0) - said.get("pulled", 0) - said.get("expired", 0)

        until(lambda: left() == kept)
        assert engine.stats()["free"] == engine.stats()["pools"] and engine.stats()["live"] == 0
