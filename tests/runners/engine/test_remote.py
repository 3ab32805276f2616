"""Prompts that other servers prefill: which are asked for, who waits, and that a failure is a prefill of one's own."""

import json
import queue
import socket
import threading
import time
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from types import SimpleNamespace

import pytest

from ling3export.foundation.errors import Ling3Error, RequestError
from ling3export.runners.engine import remote
from ling3export.runners.engine.engine import Engine
from ling3export.runners.engine.remote import AT_ONCE, RemotePrefills, body_of
from ling3export.runners.engine.request import Request, Sampling
from ling3export.runners.serve.calls import _sampling
from ling3export.runners.serve.schema import CompletionsBody, checked
from ling3export.runners.serve.structure import grammar
from ling3export.runners.state.form import Carried
from ling3export.runners.text.grammar import Grammar
from ling3export.runners.transfer.asking import AWAY
from ling3export.runners.transfer.options import Prefillers, Transfer
from ling3export.runners.transfer.renewals import Renewals
from tests.support.transfers import moved

WAIT = 60  # seconds, for what takes milliseconds
PARAMS = {"do_remote_prefill": True, "phases_ms": {"queue": 1.0, "prefill": 2.0, "save": 0.5}}
TOLD = {"check": "programs", "report": lambda text: None}
PROMPT = tuple(range(20, 90))


class Fake:
    """A server over HTTP whose answers are those of a function: a status and an object; None says nothing."""

    def __init__(self, answer):
        self.asked, self.left = queue.SimpleQueue(), threading.Event()

        class Handler(BaseHTTPRequestHandler):
            def do_POST(handler):
                body = json.loads(handler.rfile.read(int(handler.headers["content-length"])))
                self.asked.put(body)
                found = answer(body)
                if found is None:
                    handler.connection.settimeout(WAIT)
                    if not handler.connection.recv(1):
                        self.left.set()
                    handler.close_connection = True
                    return
                data = json.dumps(found[1]).encode()
                handler.send_response(found[0])
                handler.send_header("Content-Length", str(len(data)))
                handler.end_headers()
                handler.wfile.write(data)

            def log_message(handler, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    def __enter__(self):
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,))
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


def gives(body):
    return 200, {"kv_transfer_params": PARAMS}


class FakeExchange:
    """Takes states as a test says."""

    def __init__(self, outcome=None):
        self.outcome, self.loads, self.dropped = outcome, queue.SimpleQueue(), queue.SimpleQueue()

    def load(self, number, request, done, why):
        self.loads.put((number, request))
        if self.outcome is None:
            return
        if isinstance(self.outcome, str):
            why(self.outcome)
            return done(None)
        done(self.outcome)

    def drop(self, number):
        self.dropped.put(number)


STATE = Carried(((7, None),), 12, None, {"queue": 3.0, "transfer": 1.0})


@contextmanager
def asking(*servers, exchange=None, cache=None, slots=2, said=None, **how):
    """A rig: ``ask(length)`` gives a queue on which the outcome comes."""
    urls = tuple(each if isinstance(each, str) else each.url for each in servers)
    told = [] if said is None else said
    how = Prefillers(urls, "m", **{"most_local": 10, "most_queued": 2, "deadline": WAIT} | how)
    asker = RemotePrefills(how, exchange or FakeExchange(STATE), cache, slots, told.append)
    numbers, ahead = count(), [0]

    def ask(length=11, **more):
        found, request = queue.SimpleQueue(), Request(tuple(range(1, length + 1)), 5, **more)
        if asker.wants(request):
            asker.load(next(numbers), request, found.put, lambda: ahead[0])
        else:
            found.put(None)
        return found

    ask.asker, ask.ahead = asker, ahead
    try:
        yield ask
    finally:
        asker.close()
        asker.close()


def until(true):
    end = time.monotonic() + WAIT
    while not true():
        assert time.monotonic() < end
        time.sleep(0.005)


def counted(asker):
    return {name: number for name, number in asker.record().items() if number}


def test_more_tokens_than_the_threshold_are_asked_for_and_as_many_are_not():
    with Fake(gives) as p, asking(p) as ask:
        assert ask(10).get(timeout=WAIT) is None and p.asked.empty()
        carried = ask(11).get(timeout=WAIT)
        assert carried == STATE._replace(asked=True)
        (body,) = (p.asked.get(timeout=WAIT),)
        assert (body["prompt"], body["max_tokens"], body["n"], body["stream"]) == (list(range(1, 12)), 1, 1, False)
        assert body["kv_transfer_params"] == AWAY and body["model"] == "m"
        assert counted(ask.asker) == {"short": 1, "taken": 1}


def test_what_the_prefix_cache_has_is_subtracted():
    known = {"hit": 8}
    cache = SimpleNamespace(
        start=lambda salt: b"",
        names=lambda start, ids: [b"a"],
        look_up=lambda names, most: SimpleNamespace(tokens=known["hit"]),
    )
    with Fake(gives) as p, asking(p, cache=cache) as ask:
        assert ask(18).get(timeout=WAIT) is None and p.asked.empty()
        assert ask(19).get(timeout=WAIT) is not None
        assert counted(ask.asker) == {"short": 1, "taken": 1}


def test_the_queue_is_bounded_and_first_come_first_served():
    with Fake(gives) as p, asking(p) as ask:
        ask.ahead[0] = 2  # no place
        first, second = ask(11), ask(12)
        assert ask(13).get(timeout=WAIT) is None, "two wait, which is the most"
        assert counted(ask.asker) == {"queued": 2, "queue_full": 1} and p.asked.empty()
        ask.ahead[0] = 1
        ask.asker.look()
        assert None not in (first.get(timeout=WAIT), second.get(timeout=WAIT))
        assert sorted(len(p.asked.get(timeout=WAIT)["prompt"]) for _ in range(2)) == [11, 12]
        assert counted(ask.asker) == {"queue_full": 1, "taken": 2}


def test_a_server_is_asked_for_a_few_at_a_time_and_the_least_loaded_first():
    go = threading.Event()

    def slow(body):
        return gives(body) if go.wait(WAIT) else None

    with Fake(slow) as p, Fake(slow) as q, asking(p, q, slots=100, most_queued=100) as ask:
        found = [ask(11 + n) for n in range(2 * AT_ONCE + 3)]
        until(lambda: (p.asked.qsize(), q.asked.qsize()) == (AT_ONCE, AT_ONCE))
        assert counted(ask.asker) == {"queued": 3, "running": 2 * AT_ONCE}
        assert [len(p.asked.get(timeout=WAIT)["prompt"]) % 2 for _ in range(AT_ONCE)] == [1] * AT_ONCE, "in turn"
        go.set()
        assert all(each.get(timeout=WAIT) is not None for each in found)


@pytest.mark.parametrize(
    ("answer", "end"),
    [
        ((503, {"error": {"message": "full"}}), "refused"),
        ((429, {}), "refused"),
        ((500, {}), "refused"),
        ((401, {}), "refused"),
        ((200, {"id": 1}), "refused"),
        ((200, {"kv_transfer_params": {"do_remote_prefill": False}}), "failed"),
        ((200, {"kv_transfer_params": {"do_remote_decode": True}}), "failed"),
    ],
)
def test_a_server_that_gives_no_state_is_left_aside_for_a_while(answer, end, monkeypatch):
    monkeypatch.setattr(remote, "ASIDE", 0.2)
    said, answers = [], [answer, answer, (200, {"kv_transfer_params": PARAMS})]
    with Fake(lambda body: answers.pop(0)) as p, asking(p, said=said) as ask:
        assert ask().get(timeout=WAIT) is None and ask().get(timeout=WAIT) is None
        assert counted(ask.asker) == {end: 1, "no_server": 1}
        for pause in (0.2, 0.4):  # twice as long after the second failure
            time.sleep(pause + 0.05)
            found = ask().get(timeout=WAIT)
        assert found is not None and not answers
        assert ask.asker.record()["taken"] == 1 and ask.asker.record()[end] == 2
        assert [text.rpartition(" for ")[2] for text in said] == ["0.2 s", "0.4 s"]


def test_a_request_that_a_server_calls_wrong_does_not_put_it_aside():
    said, answers = [], [(400, {"error": {"message": "context"}})] * 2 + [(200, {"kv_transfer_params": PARAMS})]
    with Fake(lambda body: answers.pop(0)) as p, asking(p, said=said) as ask:
        assert [ask().get(timeout=WAIT) is None for _ in range(3)] == [True, True, False]
        assert counted(ask.asker) == {"refused": 2, "taken": 1}
        assert said == [f"prefill at {p.url}: expected a state, found status 400: context"], "said once"


def test_nobody_at_the_address_is_a_failure_and_another_server_is_asked_then():
    with socket.create_server(("127.0.0.1", 0)) as free:
        nobody = f"http://127.0.0.1:{free.getsockname()[1]}"
    with Fake(gives) as p, asking(nobody, p) as ask:
        assert ask().get(timeout=WAIT) is None
        assert all(ask().get(timeout=WAIT) is not None for _ in range(3))
        assert counted(ask.asker) == {"failed": 1, "taken": 3}


def test_a_server_without_an_answer_is_left_at_the_deadline():
    with Fake(lambda body: None) as p, asking(p, deadline=0.2) as ask:
        found = [ask() for _ in range(AT_ONCE + 1)]  # the last waits for its turn
        assert [each.get(timeout=WAIT) for each in found] == [None] * (AT_ONCE + 1)
        assert p.left.wait(WAIT), "its connection is closed"
        record = counted(ask.asker)
        assert record.pop("no_server", 0) + record.pop("late") == AT_ONCE + 1 and not record


@pytest.mark.parametrize("reason", ["failed", "refused", "expired"])
def test_a_state_that_was_not_taken_is_counted_by_its_reason(reason):
    with Fake(gives) as p, asking(p, exchange=FakeExchange(reason)) as ask:
        assert ask().get(timeout=WAIT) is None
        assert counted(ask.asker) == {reason: 1}


def test_who_leaves_is_taken_out_of_the_queue_and_its_server_or_its_state_let_go():
    exchange = FakeExchange()
    with (
        Fake(lambda body: None if len(body["prompt"]) == 11 else gives(body)) as p,
        asking(p, exchange=exchange) as ask,
    ):
        asked = ask(11)
        p.asked.get(timeout=WAIT)
        ask.asker.drop(0)
        assert p.left.wait(WAIT), "who computes is told by the connection"
        taken = ask(12)
        assert exchange.loads.get(timeout=WAIT)[0] == 1
        ask.asker.drop(1)
        assert exchange.dropped.get(timeout=WAIT) == 1
        ask.ahead[0] = 2
        waiting = ask(13)
        until(lambda: ask.asker.record()["queued"] == 1)
        ask.asker.drop(2)
        ask.asker.drop(99)
        until(lambda: ask.asker.record()["left"] == 3)
        assert counted(ask.asker) == {"left": 3}
        assert asked.empty() and taken.empty() and waiting.empty(), "nobody is told who does not wait"


def test_the_phases_of_another_server_are_parts_of_the_time_here():
    exchange = FakeExchange()
    slow = {"queue": 9e9, "prefill": 1.0, "save": 9e9}
    with (
        Fake(lambda body: (200, {"kv_transfer_params": {**PARAMS, "phases_ms": slow}})) as p,
        asking(p, exchange=exchange) as ask,
    ):
        begun = time.perf_counter()
        ask()
        _, request = exchange.loads.get(timeout=WAIT)
        most = 1e3 * (time.perf_counter() - begun)
    phases = request.kv_transfer_params["phases_ms"]
    assert phases["prefill"] == 1.0 and phases["queue"] == 0 and 0 < sum(phases.values()) <= most


@pytest.mark.parametrize(
    "asked",
    [
        Request((3, 4), 9),
        Request((3,), 9, Sampling(0.7, 5, 0.9, 77, 0.5, -0.5, 1.5, ((3, 1.5), (9, -2.0))), logprobs=3, cache_salt="s"),
        Request((3,), 9, Sampling(1.0, seed=(1 << 32) - 1), ignore_eos=True, stop=("x",)),
        Request((3,), 9, grammar=Grammar("regex", "[ab]+")),
        Request((3,), 9, grammar=Grammar("lark", 'start: "a"')),
        Request((3,), 9, grammar=Grammar("json", '{"type": "object", "properties": {"a": {"const": 1.5}}}')),
    ],
)
def test_the_body_asks_for_the_same_first_token(asked):
    """Read by the server's own checks."""
    body = json.loads(json.dumps(body_of(asked, "m") | {"max_tokens": 1, "kv_transfer_params": AWAY}))
    found = checked(CompletionsBody, body, "m")
    assert (tuple(found.prompts[0]), found.logprobs, found.cache_salt) == (
        asked.prompt_ids,
        asked.logprobs,
        asked.cache_salt,
    )
    assert (_sampling(found, 0), found.ignore_eos, grammar(found)) == (asked.sampling, asked.ignore_eos, asked.grammar)


def test_what_names_no_servers_is_refused(artifact):
    def refused(text, *given, **named):
        with pytest.raises(Ling3Error, match=text):
            Prefillers(*given, **named)

    for url in ("127.0.0.1:8101", "ftp://a", "http://", "http://a:0", "http://a:x", "http://a:70000"):
        refused(f"--prefill: expected http://HOST:PORT, found {url}", (url,), "m")
    refused("--prefill: expected http://HOST:PORT, found none", (), "m")
    refused("--max-local-prefill: expected 0 or more, found -1", ("http://a",), "m", most_local=-1)
    refused("--max-queue: expected 1 or more, found 0", ("http://a",), "m", most_queued=0)
    refused("--prefill-timeout: expected more than 0 seconds, found -1", ("http://a",), "m", deadline=-1)
    how = Prefillers(("http://a",), "m")
    for transfer, found in ((None, "none"), (Transfer("tcp", "prefill"), "--role prefill")):
        with pytest.raises(
            RequestError, match=f"--prefill: expected --transfer with --role decode or both, found {found}"
        ):
            Engine(artifact("micro-tp1-snapshots"), transfer=transfer, prefill=how, **TOLD)


class Pair:
    """An engine that prefills behind a server of a test's own, and one that asks it."""

    def __init__(self, artifact, stack, **how):
        self.p = Engine(artifact("micro-tp1-snapshots"), transfer=Transfer("tcp", "prefill", deadline=WAIT), **TOLD)
        stack.callback(self.p.close)
        self.change = lambda params: params
        fake = Fake(self.answer)
        stack.enter_context(fake)
        self.said = []
        asks = Prefillers((fake.url,), "m", most_local=16, **how)
        told = TOLD | {"report": self.said.append}
        self.d = Engine(
            artifact("micro-tp1-snapshots"), transfer=Transfer("tcp", "decode", deadline=WAIT), prefill=asks, **told
        )
        stack.callback(self.d.close)
        self.given = self.p._exchange._backend

    def answer(self, body):
        found = checked(CompletionsBody, body, "m")
        asked = Request(
            tuple(body["prompt"]),
            1,
            _sampling(found, 0),
            ignore_eos=found.ignore_eos,
            logprobs=found.logprobs,
            cache_salt=found.cache_salt,
            kv_transfer_params=body["kv_transfer_params"],
        )
        (done,) = self.p.complete([asked])
        return 200, {"kv_transfer_params": self.change(json.loads(json.dumps(done.kv_transfer_params)))}

    def counts(self):
        return {name: count for name, count in self.d.stats()["remote_prefill"].items() if count}

    def handed_out(self, outcome):
        """Waits until the holder has counted the only transfer it handed out, which it does after its puller left."""

        def found():
            return {name: count for name, count in dict(self.given.counts).items() if name != "stored"}

        until(found)
        assert found() == {outcome: 1}

    def nothing_held(self):
        """Waits until neither end holds anything."""
        until(lambda: not self.given._offers)
        for engine in (self.p, self.d):
            until(lambda engine=engine: engine.stats()["live"] == 0)
            assert engine.stats()["free"]["slots"] == engine.stats()["pools"]["slots"]


@pytest.fixture(scope="module")
def alone(artifact):
    with Engine(artifact("micro-tp1-snapshots"), prefix_cache=False, **TOLD) as engine:
        yield lambda asked: engine.complete([asked])[0]


@pytest.fixture
def stack():
    from contextlib import ExitStack

    with ExitStack() as stack:
        yield stack


def test_an_engine_that_asks_goes_on_with_the_tokens_of_one_that_does_not(artifact, alone, stack):
    pair = Pair(artifact, stack)
    for seed, length in enumerate((16, 17, 48, 64, 70)):
        asked = Request(
            PROMPT[:length], 12, Sampling(float(seed % 2), seed=seed), ignore_eos=True, logprobs=2, cache_salt=str(seed)
        )
        (done,) = pair.d.complete([asked])
        one = alone(asked)
        assert done.token_ids == one.token_ids
        assert [[id for id, _ in each.top] for each in done.likely] == [
            [id for id, _ in each.top] for each in one.likely
        ]
        if length == 16:
            assert (done.cached_tokens, done.kv_transfer_params) == (0, None)
            continue
        assert done.cached_tokens == length
        phases = done.kv_transfer_params["phases_ms"]
        assert set(phases) == {"queue", "prefill", "save", "transfer", "decode"}
        assert abs(sum(phases.values()) - done.ttft_ms) < 1 and min(phases.values()) >= 0
    assert pair.counts() == {"short": 1, "taken": 4}
    assert pair.d.stats()["tokens_in"] == 16 and pair.p.stats()["requests"] == 4
    pair.nothing_held()


def test_a_crowd_is_answered_as_one_engine_answers_it(artifact, alone, stack):
    """More than there are slots and places in the queue, all at once: nothing waits for ever."""
    pair = Pair(artifact, stack, most_queued=4)
    asked = [
        Request(PROMPT[n % 9 : 30 + n], 8, Sampling(1.0, seed=n), ignore_eos=True, cache_salt=str(n)) for n in range(24)
    ]
    done = [handle.result(WAIT) for handle in pair.d.submit(*asked)]
    assert [each.token_ids for each in done] == [alone(each).token_ids for each in asked]
    counts = pair.counts()
    assert counts["taken"] >= 4 and counts["queue_full"] > 0 and sum(counts.values()) == 24
    pair.nothing_held()


def test_a_server_killed_while_its_state_is_taken_changes_no_answer(artifact, alone, stack, monkeypatch):
    pair = Pair(artifact, stack)

    def broken(caller, memory):
        caller.sendall(memory.data[: memory.nbytes // 2])
        caller.close()
        raise ConnectionError

    monkeypatch.setattr(pair.given, "_hand", broken)
    asked = Request(PROMPT, 8, ignore_eos=True)
    (done,) = pair.d.complete([asked])
    assert (done.token_ids, done.cached_tokens) == (alone(asked).token_ids, 0)
    assert pair.counts() == {"failed": 1}
    pair.handed_out("broken_off")
    pair.nothing_held()


@pytest.mark.parametrize("change", [{"prompt_digest": "0" * 64}, {"state": {"weights": "b"}}, {"tail": None}])
def test_a_state_that_is_refused_is_free_where_it_was_offered(artifact, alone, stack, change):
    """Another prompt's, another artifact's, or without its first token: the lease of a minute is not waited for."""
    pair = Pair(artifact, stack)
    pair.change = lambda params: params | change
    asked = Request(PROMPT, 8, ignore_eos=True)
    (done,) = pair.d.complete([asked])
    assert (done.token_ids, done.cached_tokens) == (alone(asked).token_ids, 0)
    pair.nothing_held()
    assert pair.counts() == {"refused": 1}
    pair.handed_out("given_back")


def test_a_lease_that_is_over_is_counted_apart_from_failures(artifact, alone, stack, monkeypatch):
    monkeypatch.setattr(Renewals, "_run", lambda self: None)  # nobody renews
    pair = Pair(artifact, stack)

    def over(params):
        pair.given._clock = lambda: time.monotonic() + 100
        pair.given._expire()
        return params

    pair.change = over
    pair.d._exchange._connector._renewals._clock = count(0, 100).__next__  # 100 s between two looks; the lease is 60 s
    asked = Request(PROMPT, 8, ignore_eos=True)
    (done,) = pair.d.complete([asked])
    assert (done.token_ids, done.cached_tokens) == (alone(asked).token_ids, 0)
    assert pair.counts() == {"expired": 1} and pair.given.counts["expired"] == 1
    pair.nothing_held()


def test_a_request_that_is_cancelled_holds_nothing_anywhere(artifact, stack):
    """While it waits for its server, and while that saves the state: nobody will ever hear of that one."""
    pair = Pair(artifact, stack)
    entered, go = threading.Event(), threading.Event()
    finished = pair.p._exchange._connector.request_finished

    def held(*given):
        entered.set()
        assert go.wait(WAIT)
        return finished(*given)

    pair.p._exchange._connector.request_finished = held
    (handle,) = pair.d.submit(Request(PROMPT, 8, ignore_eos=True))
    assert entered.wait(WAIT)
    handle.cancel()
    assert handle.result(WAIT).stop_reason == "cancelled"
    until(lambda: pair.counts() == {"left": 1})
    (given,) = list(pair.p._loop._handles.values())
    given.cancel()  # as a server does where its client has left
    go.set()
    assert given.result(WAIT).kv_transfer_params is None
    pair.nothing_held()
    pair.handed_out("given_back")


def test_a_request_of_a_router_is_no_matter_of_servers_that_were_named(artifact, alone, stack):
    """It comes with its state, or is asked of this engine by another one."""
    pair = Pair(artifact, stack)
    asked = Request(PROMPT, 8, ignore_eos=True)
    _, taking = moved(pair.p, asked)
    (done,) = pair.d.complete([taking])
    assert (done.token_ids, done.cached_tokens) == (alone(asked).token_ids, len(PROMPT))
    assert pair.counts() == {}
    phases = done.kv_transfer_params["phases_ms"]
    assert phases["transfer"] + phases["decode"] == pytest.approx(done.ttft_ms)
    (scored,) = pair.d.complete([replace(asked, logits=True)])
    assert scored.token_ids == done.token_ids and pair.counts() == {}
