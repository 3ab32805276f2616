"""The flight record: a process that dies in native code leaves a last line that says what it loaded or ran."""

import signal
import subprocess

import pytest

from ling3export.runners import flight
from tests.support import toy_artifact
from tests.support.builds import python

END = "expected it to end by itself, found it crashed or killed"
# Stands in for the runner: one of its functions dies by a signal when it gets to ``cell``.
DYING = """
import ctypes, os
from ling3export.runners.cli.main import main
from ling3export.{room} import {module}
real, seen = {module}.{function}, []
def dies(*arguments):
    seen.append(arguments)
    if {condition}:
        {death}
    return real(*arguments)
{module}.{function} = dies
main()
"""
SEGFAULT = "ctypes.string_at(0)"


def generate(**dying: str) -> subprocess.CompletedProcess[str]:
    command = ["generate", toy_artifact.shared(), "--prompt-ids", "1,2,3", "--max-tokens", "9", "--ignore-eos"]
    return python("-c", DYING.format(**dying), *command)


@pytest.mark.jit
@pytest.mark.parametrize(("death", "number"), [(SEGFAULT, signal.SIGSEGV), ("os.abort()", signal.SIGABRT)])
def test_a_crash_of_a_deserializer_names_the_program_and_the_target(death, number):
    """Issue 'Repairs', point 4: such a process ended with its signal and said nothing of what it was doing."""
    done = generate(room="machine", module="pjrt", function="load_executable", condition="len(seen) == 2", death=death)
    assert done.returncode == -number
    assert "Fatal Python error" in done.stderr
    last = done.stderr.splitlines()[-1]
    assert f"{END} while {toy_artifact.TARGET} was loaded: " in last
    named = last.rpartition("loaded: ")[2].split(", ")
    assert any(name.removeprefix("program ") in toy_artifact.CELLS for name in named)


@pytest.mark.jit
@pytest.mark.parametrize(("death", "number"), [(SEGFAULT, signal.SIGSEGV), ("os.kill(os.getpid(), 9)", signal.SIGKILL)])
def test_a_crash_of_a_step_names_the_program_and_the_target(death, number):
    """SIGKILL, which no handler sees, is what a machine without memory sends."""
    dying = "b'decode' in arguments[0] and len(seen) >= 5"
    done = generate(
        room="runners", module="flight", function="called", condition=dying, death=f"real(*arguments); {death}"
    )
    assert done.returncode == -number
    last, _, loading = done.stderr.splitlines()[-1].partition(", while it loaded ")  # the others, perhaps
    assert all(name.removeprefix("program ") in toy_artifact.CELLS for name in loading.split(", ") if name)
    assert last.endswith(
        f"{END}; the last program that it started is decode@2 of {toy_artifact.TARGET}, call 5, behind sample@1, "
        "decode@2, sample@2"
    )


@pytest.mark.jit
def test_an_end_that_is_meant_leaves_no_last_line():
    """A whole answer, and an error that is raised within a step."""
    fine = generate(room="machine", module="pjrt", function="load_executable", condition="False", death="pass")
    assert fine.returncode == 0, fine.stderr
    raised = generate(
        room="runners", module="flight", function="called", condition="True", death="raise RuntimeError('device lost')"
    )
    assert raised.returncode == 1
    assert "found RuntimeError: device lost" in raised.stderr
    assert END not in fine.stderr + raised.stderr


def watched(body: str) -> subprocess.CompletedProcess[str]:
    """A small process that has a flight record."""
    program = f"import os, signal\nfrom ling3export.runners import flight\nwith flight.watched():\n    {body}"
    return python("-c", program)


@pytest.mark.parametrize(
    ("body", "code", "words"),
    [
        ("flight.leave(5)", 5, None),
        ("raise SystemExit(4)", 4, None),
        ("os._exit(3)", 3, " before it loaded anything"),
        ("os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM, " before it loaded anything"),
        ("w = flight.loading('manifest'); w.__enter__(); os.abort()", -6, " while the artifact was loaded: manifest"),
        (
            "flight.target('cpu-tp4'); flight.called(flight.name_of('prefill@512')); os.abort()",
            -signal.SIGABRT,
            "; the last program that it started is prefill@512 of cpu-tp4, call 1",
        ),
        (
            "flight.target('c'); flight.called(flight.name_of('b@1')); w = flight.loading('program a@1'); "
            "w.__enter__(); os.abort()",
            -signal.SIGABRT,
            "; the last program that it started is b@1 of c, call 1, while it loaded program a@1",
        ),
    ],
)
def test_only_an_end_that_nobody_announced_gets_a_last_line(body, code, words):
    done = watched(body)
    assert done.returncode == code
    said = [line for line in done.stderr.splitlines() if END in line]
    assert len(said) == (words is not None)
    if words is not None:
        assert done.stderr.splitlines()[-1].startswith("error: process ")
        assert done.stderr.endswith(f"{END}{words}\n")


def test_the_witness_outlives_the_signals_that_end_a_group():
    """A terminal and systemd signal every process of a group: the second one waits for the first all the same."""
    children = "open(f'/proc/{os.getpid()}/task/{os.getpid()}/children').read()"
    done = watched(f"os.kill(int({children}), signal.SIGTERM); os.abort()")
    assert (done.returncode, done.stderr.count(END)) == (-signal.SIGABRT, 1)


def test_a_slow_start_leaves_the_stacks_of_its_threads():
    """One start of some 700 was not done in 60 seconds, and nobody knew where it was."""
    slow = watched("import time\n    with flight.starting(0.2):\n        time.sleep(1.5)")
    assert slow.returncode == 0
    assert slow.stderr.count("Timeout (0:00:00.200000)!") == 1
    assert 'File "<string>", line 6 in <module>' in slow.stderr
    assert watched("with flight.starting(30): pass").stderr == ""


def test_what_is_loaded_beside_each_other_stands_beside_each_other():
    with flight.loading("program decode@1"), flight.loading("weights"):
        assert flight.last_words(flight.record(), "7").endswith("program decode@1, weights")
        with flight.loading("x" * 9000):  # what does not fit is cut
            assert len(flight.record()) == 4096
    assert "weights" not in flight.last_words(flight.record(), "7")
