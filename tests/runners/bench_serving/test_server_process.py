"""Servers that benchmarks start: errors show their last output, and they are always ended."""

import sys
from pathlib import Path

import pytest

from bench import server_process
from bench.server_process import ServerProcess
from ling3export.foundation.errors import Ling3Error


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import time; time.sleep(100)", "found none within 0.5 s: silent"),
        ("import sys; print('no room', file=sys.stderr); sys.exit(3)", "found that it ended with code 3: no room"),
    ],
)
def test_a_server_without_an_address_is_named_and_ended(monkeypatch, code, message):
    monkeypatch.setattr(server_process, "WAIT", 0.5)
    with (
        pytest.raises(Ling3Error, match=rf"one: expected the address at which it listens, {message}"),
        ServerProcess("one", [sys.executable, "-c", code]) as server,
    ):
        server.address()
    assert not Path(f"/proc/{server.process.pid}/stat").exists()
