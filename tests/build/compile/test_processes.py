"""The pipe between processes of a build: whole messages, errors for dead children, children that end with us."""

import os
import signal
import subprocess
import sys

import pytest

from ling3export.foundation.errors import PlanError
from ling3export.foundation.processes import Child, Failure
from tests.support.builds import environment
from tests.support.waiting import until

LARGE = {"text": "ü" * 10**6, "numbers": list(range(1000))}
# Starts a child, and is killed while the child lives.
PARENT = """
import time
from ling3export.foundation.processes import Child
child = Child("tests.support.pipe_child")
child.send({})
print(child.receive()["pid"], flush=True)
time.sleep(600)
"""


def runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_messages_come_back_whole_whatever_else_is_printed():
    with Child("tests.support.pipe_child") as child:
        for message in (LARGE, {"noise": "not a reply"}, {"a": None}):
            child.send(message)
            reply = child.receive()
            assert reply is not None
            assert reply.pop("pid") != os.getpid()
            assert reply == message


@pytest.mark.parametrize(("code", "said"), [(7, "ended with code 7"), (0, "ended with code 0")])
def test_a_child_that_ends_says_how_and_its_last_words(code, said):
    with Child("tests.support.pipe_child") as child:
        child.send({"noise": "first words", "die": code})
        assert child.receive() is None
        child.send({})  # the child is not reading
        assert child.ended() == (code, f"{said}: first words\nwritten to descriptor 1\nlast words")
        assert not child.alive


def test_the_error_of_a_killed_child_names_its_signal():
    with Child("tests.support.pipe_child") as child:
        child.kill()
        assert child.receive() is None
        assert child.ended() == (-signal.SIGKILL, "was killed by SIGKILL: nothing was printed")


def test_leaving_the_block_ends_the_child_at_once():
    with Child("tests.support.pipe_child") as child:
        child.send({})
        reply = child.receive()
    assert reply is not None
    assert not runs(reply["pid"])


def test_a_child_does_not_outlive_a_parent_that_is_killed():
    path = os.pathsep.join(path for path in sys.path if path)
    with subprocess.Popen(
        [sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True, env=environment({"PYTHONPATH": path})
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert runs(pid)
        parent.kill()
    until(lambda: not runs(pid))


def test_failures_go_through_the_pipe():
    failure = Failure.of(PlanError("too large", "lower it"))
    assert failure == Failure("too large", "lower it", "PlanError") == Failure(**vars(failure))
    assert Failure.of(KeyError("x")) == Failure("KeyError: 'x'")
