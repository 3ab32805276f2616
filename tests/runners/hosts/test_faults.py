"""One of two hosts is killed, stopped, slowed or cut off, and a server on two hosts gets SIGTERM."""

import json
import os
import re
import signal
from pathlib import Path

import httpx2
import pytest

from ling3export.runners.engine.engine import Engine
from ling3export.runners.engine.request import Request, Sampling
from ling3export.runners.text.grammar import Grammar
from tests.support import faults
from tests.support.faults import Fault
from tests.support.hosting import hosting, wait_until_following

pytestmark = pytest.mark.hosts


@pytest.mark.parametrize(
    "fault",
    [
        Fault("killed", "running", 0, 0.3),
        *(
            pytest.param(fault, marks=pytest.mark.extras)
            for fault in (
                Fault("stopped", "starting", 1, 0.1),
                Fault("stopped", "running", 0, 0.3),
                Fault("slowed", "running", 1, 20),
                Fault("partitioned", "running", 1, 0.3),
            )
        ),
    ],
    ids=lambda fault: f"{fault.kind} {fault.phase}",
)
def test_a_fault_ends_every_host_with_its_name_within_the_stated_time(artifact, fault):
    """Regression: if a host only stopped taking its steps, the others waited forever."""
    assert faults.inject(artifact("micro-2x1-snapshots"), fault).wrong == []


def test_the_page_states_the_time_that_is_tested():
    page = " ".join((Path(__file__).parents[3] / "docs/hosts.md").read_text().split())
    assert f"Every process has ended {faults.STATED} s later at most" in page


def test_two_hosts_follow_grammars_and_penalties_and_sigterm_lets_running_calls_end(artifact):
    """The request is sent to each host, which follows it by the tokens that it reads itself.

    Regression: followers had no handler of SIGTERM, so that calls were cut when the first of them ended.
    """
    command = ["serve", artifact("micro-2x1-snapshots"), "--port", 0, "--grace", 60, "--check", "programs"]
    ask = {"model": "micro-2x1-snapshots", "prompt": [1, 2, 3], "max_tokens": 100, "ignore_eos": True}
    edited = ask | {
        "max_tokens": 12,
        "temperature": 0.8,
        "seed": 5,
        "frequency_penalty": 1.5,
        "repetition_penalty": 1.2,
        "logit_bias": {"7": 2},
        "structured_outputs": {"regex": "[a-f]{3,20}"},
        "logprobs": 2,
        "return_token_ids": True,
    }
    ask |= {"stream": True, "stream_options": {"include_usage": True}}
    with Engine(artifact("micro-tp2"), report=lambda text: None) as engine:
        sampling = Sampling(0.8, seed=5, frequency_penalty=1.5, repetition_penalty=1.2, logit_bias=((7, 2.0),))
        grammar = Grammar("regex", "[a-f]{3,20}")
        (alone,) = engine.complete([Request((1, 2, 3), 12, sampling, ignore_eos=True, grammar=grammar, logprobs=2)])
    with hosting([command] * 2) as processes:
        assert processes[0].stdout is not None
        url = processes[0].stdout.readline().strip()
        (choice,) = httpx2.post(f"{url}/v1/completions", json=edited, timeout=60).json()["choices"]
        assert choice["token_ids"] == alone.token_ids and re.fullmatch("[a-f]{3,20}", choice["text"])
        expected = pytest.approx([each.logprob for each in alone.logprobs], abs=1e-4)
        assert choice["logprobs"]["token_logprobs"] == expected
        with httpx2.stream("POST", f"{url}/v1/completions", json=ask, timeout=60) as reply:
            lines = (line.removeprefix("data: ") for line in reply.iter_lines() if line)
            events = [json.loads(next(lines))]
            for process in processes:
                os.kill(process.pid, signal.SIGTERM)
            events += [json.loads(line) for line in lines if line != "[DONE]"]
        said = [process.communicate(timeout=60)[1] for process in processes]
        assert [process.returncode for process in processes] == [0, 0], said
    assert [event["choices"][0]["finish_reason"] for event in events if event["choices"]][-1] == "length"
    assert events[-1]["usage"]["completion_tokens"] == 100


@pytest.mark.extras
def test_sigterm_to_a_follower_only_ends_it_after_its_timeout(artifact):
    command = ["serve", artifact("micro-2x1-snapshots"), "--port", 0, "--grace", 0, "--check", "programs"]
    with hosting([command] * 2, more={"LING3_HOST_TIMEOUT": "6"}) as processes:
        wait_until_following(processes[1])
        assert processes[0].stdout is not None
        processes[0].stdout.readline()
        os.kill(processes[1].pid, signal.SIGTERM)
        said = [process.communicate(timeout=60)[1] for process in processes]
        assert [process.returncode for process in processes] == [1, 1], said
    text = "host 1: expected host 0 to end within 6 s of a signal, found it running"
    assert f"error: {text}\n" in said[1]
    assert f"error: host 1 ended: {text}\n" in said[0]
