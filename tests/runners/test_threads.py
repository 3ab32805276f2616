"""Every thread of the runner, and every job of one: an error ends only the job."""

import ast
import itertools
import re
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from ling3export.foundation import threads
from ling3export.foundation.processes import free_port
from ling3export.foundation.threads import GuardedThread, JobThread, ThreadEnded, attempt, failures
from ling3export.runners.engine.engine import Engine
from ling3export.runners.engine.handle import EngineStopped
from ling3export.runners.engine.request import Request
from ling3export.runners.hosts import channel as channels
from ling3export.runners.hosts.channel import Channel
from ling3export.runners.hosts.hosts import Hosts
from ling3export.runners.hosts.rendezvous import meet, welcome
from ling3export.runners.load.loader import say
from ling3export.runners.load.programs import Programs
from ling3export.runners.serve import run
from ling3export.runners.serve.app import Policy, application
from ling3export.runners.state.prefix_cache import Cleared
from ling3export.runners.transfer.options import PrefixFolder, Transfer
from tests.support.hosting import NoService
from tests.support.serving import answered
from tests.support.transfers import AWAY
from tests.support.waiting import until

RUNNERS = Path(run.__file__).parents[1]
WAIT = 60.0  # seconds for an answer; one takes milliseconds

# Threads by file and name. Add a new one to this table, and to a test that ends it.
THREADS = {
    ("engine/loop.py", "ling3-engine"),
    ("engine/loop.py", "ling3-watchdog"),
    ("hosts/channel.py", "ling3-beat"),
    ("hosts/channel.py", "ling3-host-"),
    ("hosts/rendezvous.py", "ling3-caller"),
    ("hosts/rendezvous.py", "ling3-listener"),
    ("load/programs.py", "ling3-load-behind"),
    ("serve/kv_events.py", "ling3-kv-events"),
    ("transfer/transfer_queue.py", "ling3-load"),
    ("transfer/transfer_queue.py", "ling3-save"),
    ("transfer/prefix_store.py", "ling3-prefixes"),
}
JOBS = {
    ("hosts/rendezvous.py", "answer a caller"),
    ("serve/kv_events.py", "publish events"),
    ("transfer/transfer_queue.py", "load"),
    ("transfer/transfer_queue.py", "save"),
    ("transfer/prefix_store.py", "load prefix"),
    ("transfer/prefix_store.py", "touch prefix"),
    ("transfer/prefix_store.py", "write prefix"),
}
PUTS = ("_jobs.put", "_saves.put", "_loads.put", "attempt")
# Pools pass an error to the caller that waits for the future. Timers end a process.
OTHERS = {
    ("engine/follower.py", "Timer"): 1,
    ("hosts/channel.py", "Timer"): 2,
    ("load/fresh.py", "ThreadPoolExecutor"): 1,
    ("load/loader.py", "ThreadPoolExecutor"): 1,
    ("load/recompile.py", "ThreadPoolExecutor"): 1,
    ("route/app.py", "ThreadPoolExecutor"): 1,
    ("serve/app.py", "ThreadPoolExecutor"): 3,
    ("serve/run.py", "Timer"): 1,
    ("text/trial.py", "Timer"): 1,
    ("transfer/http.py", "Timer"): 1,
}


def calls():
    """File, function name and first argument of each call in the runner; for a formatted text, its first part."""
    for path in sorted(RUNNERS.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                name = getattr(node.func, "id", getattr(node.func, "attr", ""))
                if name == "put":
                    name = f"{getattr(getattr(node.func, 'value', None), 'attr', '')}.put"
                first = node.args[0] if node.args else None
                if isinstance(first, ast.JoinedStr):
                    first = first.values[0]
                yield str(path.relative_to(RUNNERS)), name, getattr(first, "value", None)


def test_the_tables_have_every_thread_and_every_job():
    found = list(calls())
    assert {(path, text) for path, name, text in found if name in ("GuardedThread", "JobThread")} == THREADS
    assert {(path, text) for path, name, text in found if name in PUTS and text} == JOBS
    others = Counter((path, name) for path, name, _ in found if name in ("Thread", "Timer", "ThreadPoolExecutor"))
    assert others == OTHERS


class Injected(Exception):
    """Raised by these tests."""


@pytest.fixture
def inject(monkeypatch):
    """Makes a job or a thread raise once, before or after its work; the returned event is set when it has raised."""

    def start(label, when="before", error=Injected):
        raised = threading.Event()
        perform = threads.perform

        def instead(name, job):
            due = name == label and not raised.is_set()
            if due:
                raised.set()
            if due and when == "before":
                raise error(f"injected into {name}")
            perform(name, job)
            if due:
                raise error(f"injected into {name}")

        monkeypatch.setattr(threads, "perform", instead)
        return raised

    return start


PROMPTS = [tuple(range(first, first + 70)) for first in (20, 21, 22)]


def asked(prompt, **options):
    return Request(prompt, 6, ignore_eos=True, **options)


def opened(artifact, folder):
    return Engine(
        artifact("micro-tp1-snapshots"),
        check="programs",
        report=lambda text: None,
        transfer=Transfer(deadline=WAIT),
        prefix_store=PrefixFolder(folder),
        step_timeout=WAIT,
    )


@pytest.fixture(scope="module")
def right(artifact):
    """The tokens of each prompt."""
    with Engine(artifact("micro-tp1-snapshots"), check="programs", report=lambda text: None) as engine:
        return [completion.token_ids for completion in engine.complete([asked(prompt) for prompt in PROMPTS])]


@pytest.fixture(scope="module")
def engine(artifact, tmp_path_factory):
    with opened(artifact, tmp_path_factory.mktemp("known")) as engine:
        yield engine


salts = itertools.count()  # prompts with a new salt hit nothing, and have the same tokens


def traffic(engine, right, count=1):
    """Requests of every kind. Each ends; those that the engine does not stop have the right tokens."""
    stopped, salt = 0, str(next(salts))
    for prompt, tokens in zip(PROMPTS[:count], right, strict=False):
        plain = asked(prompt, cache_salt=salt)
        try:
            (given,) = engine.complete([replace(plain, max_tokens=1, kv_transfer_params=AWAY)])
            requests = [plain]
            if given.kv_transfer_params is not None:
                taking = replace(plain, kv_transfer_params=given.kv_transfer_params)
                (cancelled,) = engine.submit(taking)
                cancelled.cancel()
                cancelled.result(WAIT)
                (given,) = engine.complete([replace(plain, max_tokens=1, kv_transfer_params=AWAY)])
                requests.append(replace(plain, kv_transfer_params=given.kv_transfer_params))
            handles = engine.submit(*requests)
            assert given.token_ids == tokens[:1]
            assert {tuple(handle.result(WAIT).token_ids) for handle in handles} == {tuple(tokens)}
        except EngineStopped:
            stopped += 1
    return stopped


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(
    "label",
    [*("save", "load", "load prefix", "write prefix", "touch prefix"), *("ling3-save between", "ling3-save idle")],
)
def test_a_failed_job_of_the_engine_ends_nothing_but_the_job(engine, inject, right, label, when):
    raised = inject(label, when)
    assert traffic(engine, right) == 0
    until(raised.is_set)
    assert traffic(engine, right) == 0 and failures() == {}


def test_an_engine_closes_after_its_transfers_failed_to(artifact, tmp_path, inject):
    raised = inject("ling3-save last")
    with opened(artifact, tmp_path / "known"):
        pass
    assert raised.is_set() and failures() == {}


@pytest.mark.parametrize("name", ["ling3-engine", "ling3-watchdog", "ling3-save", "ling3-load", "ling3-prefixes"])
def test_the_end_of_a_thread_of_the_engine_is_reported_and_nobody_waits(artifact, tmp_path, inject, right, name):
    raised = inject(name)
    with opened(artifact, tmp_path / "known") as engine:
        until(raised.is_set)
        if name not in ("ling3-engine", "ling3-watchdog"):
            until(failures)
            health = answered(application(engine, Policy("toy", None, 4, 5000)), "GET", "/health")
            assert (health.status_code, health.json()["error"]["code"]) == (503, "thread_ended")
            assert health.json()["error"]["message"] == f"thread {name}: ended: Injected: injected into {name}"
        else:
            until(lambda: engine.stopped is not None)
        stopped = name in ("ling3-engine", "ling3-watchdog")
        assert traffic(engine, right, 2) == (2 if stopped else 0)
    assert failures() == {}


@pytest.mark.parametrize("label", ["publish events", "ling3-kv-events"])
def test_events_go_on_after_an_error(inject, label):
    from ling3export.runners.serve.kv_events import Publisher

    raised = inject(label)
    publisher = Publisher("tcp://127.0.0.1:0")
    publisher.tell(Cleared())
    if label == "ling3-kv-events":
        until(failures)
        assert [*failures()] == [label]
        publisher.tell(Cleared())
        assert publisher.record(16)["sequence"] == -1
    else:
        until(lambda: publisher.record(16)["sequence"] == 0)  # publishes that all blocks are gone
        publisher.tell(Cleared())
        until(lambda: publisher.record(16)["sequence"] == 1)
    publisher.close()
    assert failures() == {} and raised.is_set()


def two_hosts():
    address = f"127.0.0.1:{free_port()}"
    return [Hosts(address, 2, number, WAIT) for number in range(2)]


def test_a_caller_whose_answer_fails_is_dropped_and_calls_again(inject):
    raised = inject("answer a caller")

    def lead(hosts):
        peers, port = meet(hosts, {})
        welcome(peers, port)
        return peers, port

    with ThreadPoolExecutor(2) as pool:
        first, second = two_hosts()
        ends = [pool.submit(lead, first), pool.submit(meet, second, {})]
        (peers, port), (peer, told) = (end.result(WAIT) for end in ends)
    assert raised.is_set() and port == told
    for connection in (*peers.values(), *peer.values()):
        connection.close()


@pytest.mark.parametrize("label", ["ling3-host-0", "ling3-host-1", "ling3-beat"])
def test_the_end_of_a_thread_between_hosts_reaches_both_hosts(monkeypatch, inject, label):
    """Without its watch or its signs of life, a host would wait forever, or end the others without a reason."""

    monkeypatch.setattr(channels, "Service", NoService)
    raised, lost = inject(label), ([], [])
    with ThreadPoolExecutor(2) as pool:
        made = [
            pool.submit(Channel, hosts, {}, lambda *how, number=number: lost[number].append(how))
            for number, hosts in enumerate(two_hosts())
        ]
        made = [channel.result(WAIT) for channel in made]
    until(lambda: all(lost))
    assert raised.is_set() and lost[0] == lost[1] and lost[0][0][1] == 1
    assert re.fullmatch(rf"host \d: its thread ended: Injected: injected into {label}", lost[0][0][0])
    for channel in made:
        channel.close()


def test_programs_load_on_demand_after_their_thread_ended(inject):
    raised = inject("ling3-load-behind")
    with ThreadPoolExecutor(1) as pool:
        programs = Programs(lambda name: name, ["a", "b"], pool, first=["a"])
        until(raised.is_set)
        programs.settle()
        assert [programs["a"], programs["b"]] == ["a", "b"]
        programs.close()
    assert failures() == {}


class _Broken:
    def write(self, text):
        raise BrokenPipeError("nobody reads")

    flush = write


@pytest.mark.parametrize("stream", [None, _Broken()])
def test_a_line_for_a_user_who_has_gone_is_lost_quietly(monkeypatch, stream):
    """Regression: with `serve … 2>&1 | head`, every prompt after one failed read waited forever."""
    monkeypatch.setattr(sys, "stderr", stream)
    assert say("a line") is None


def test_a_report_that_raises_ends_no_thread(artifact, tmp_path, inject, right):
    """The same with a report of the caller's own."""

    def report(text):
        if "load prefix" in text:
            raise BrokenPipeError("nobody reads")

    raised = inject("load prefix", error=OSError)
    folder = PrefixFolder(tmp_path / "known")
    with Engine(artifact("micro-tp1-snapshots"), check="programs", report=report, prefix_store=folder) as engine:
        for prompt, tokens in zip(PROMPTS, right, strict=True):
            (handle,) = engine.submit(asked(prompt))
            assert handle.result(WAIT).token_ids == tokens
    assert raised.is_set()


HALF = {
    "do_remote_prefill": True,
    "remote_host": "127.0.0.1",
    "remote_port": 1,
    "remote_block_ids": [],
    "tp_size": 1,
    "transfer_id": "0" * 32,
    "tail": {"token": 1},
}


@pytest.mark.parametrize("state", [{"a": "\ud800"}, {"a": float("nan")}, {"a": float("inf")}, {"a": object()}])
def test_a_state_that_is_no_json_does_not_end_the_transfers(engine, right, state):
    """Regression: this body ended the transfer thread, and every later request with a state waited forever."""
    before = engine.stats()["transfer"].get("bad_params", 0)
    (handle,) = engine.submit(Request((5, 5, 5), 1, kv_transfer_params=HALF | {"state": state}))
    assert len(handle.result(WAIT).token_ids) == 1
    assert engine.stats()["transfer"]["bad_params"] > before
    assert traffic(engine, right) == 0


@pytest.mark.parametrize("call", ["remove", "touch"])
def test_an_error_of_the_folder_does_not_end_the_transfers(engine, monkeypatch, right, call):
    """Regression: one EMFILE in `_end` or `remove` ended the thread."""
    from ling3export.runners.transfer.folder import FolderStore

    real, tries = getattr(FolderStore, call), [0]

    def failing(self, names):
        tries[0] += 1
        if tries[0] == 1:
            raise OSError(24, "Too many open files")
        return real(self, names)

    monkeypatch.setattr(FolderStore, call, failing)
    assert traffic(engine, right) == 0
    until(lambda: tries[0] > 1)
    assert traffic(engine, right) == 0


def test_jobs_of_a_thread_that_ended_fail_by_name():
    done, go = list[object](), threading.Event()
    jobs = JobThread("test", lambda text: None)
    jobs.put("wait", go.wait)
    jobs.put("first", lambda: done.append("first"))
    closing = threading.Thread(target=jobs.close, args=(WAIT,))
    closing.start()
    until(lambda: jobs.waiting == 2)
    jobs.put("late", lambda: done.append("late"), done.append)
    go.set()
    closing.join()
    jobs.put("later", lambda: done.append("later"), done.append)
    assert done[0] == "first" and [str(error).split(":")[0] for error in done[1:]] == ["late", "later"]
    assert all(isinstance(error, ThreadEnded) for error in done[1:])


def test_an_attempt_never_raises():
    def refuse(argument):
        raise SystemExit(argument)

    assert not attempt("job", lambda: refuse(1), refuse, refuse)
    worker = GuardedThread("short", lambda: time.sleep(0))
    worker.join()
    assert not worker.running
