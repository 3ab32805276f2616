"""Stacks on stderr: after a crash, after SIGUSR1, and once in a start that hangs, but not in one that compiles."""

import signal
import subprocess

import pytest

from tests.support.builds import python


def shown(body: str) -> subprocess.CompletedProcess[str]:
    """A small process that prints stacks as commands do."""
    return python(
        "-c", f"import os, signal, time\nfrom ling3export.runners import stacks\nwith stacks.shown():\n{body}"
    )


def test_a_crash_prints_the_stacks_and_keeps_its_signal():
    done = shown("    os.abort()")
    assert done.returncode == -signal.SIGABRT
    assert "Fatal Python error: Aborted" in done.stderr and 'File "<string>", line 4 in <module>' in done.stderr


def test_a_signal_prints_the_stacks_and_the_process_goes_on():
    done = shown("    os.kill(os.getpid(), signal.SIGUSR1)\n    print('on')")
    assert (done.returncode, done.stdout) == (0, "on\n")
    assert 'File "<string>", line 4 in <module>' in done.stderr


@pytest.mark.parametrize(
    ("body", "count"),
    [
        ("    with stacks.if_slow(0.2):\n        time.sleep(0.8)", 1),
        ("    with stacks.if_slow(30):\n        pass", 0),
        ("    with stacks.if_slow(0.2):\n        stacks.expect_slow()\n        time.sleep(0.8)", 0),
        ("    pass\nwith stacks.if_slow(0.2):\n    time.sleep(0.8)", 0),
    ],
    ids=["hangs", "fast", "compiles", "not in a command"],
)
def test_only_a_start_that_hangs_in_a_command_prints_the_stacks(body, count):
    """Regression: after 60 s, `--programs allow-compile` printed 70 lines of stacks, as if it had crashed."""
    done = shown(body)
    assert (done.returncode, done.stderr.count("Timeout (0:00:00.200000)!")) == (0, count)
    assert bool(done.stderr) == bool(count)
