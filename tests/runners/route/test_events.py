"""A router that follows the events of publishers: what was missed is asked for, and what may be wrong is forgotten."""

import asyncio
import json
import time
from contextlib import AsyncExitStack, closing

import httpx2
import pytest
import zmq

from ling3export.foundation.errors import ArtifactError
from ling3export.runners.engine.engine import Engine
from ling3export.runners.route.app import Router, RoutingPolicy, workers_of
from ling3export.runners.route.blocks import Tokens
from ling3export.runners.route.events import KVEventSubscriber, source_of
from ling3export.runners.route.workers import best
from ling3export.runners.serve.kv_events import Publisher, encoded
from ling3export.runners.state.prefix_cache import Cleared, Removed, Stored
from tests.support.routers import FakeServer
from tests.support.serving import Server

HOST = "127.0.0.1"
WAIT = 30.0


def chain(*texts):
    """What is told of a path of blocks of two tokens with a state at its end."""
    names = tuple(bytes(24) + text.encode().rjust(8) for text in texts)
    tokens = tuple(byte for text in texts for byte in (2 * text).encode())
    behind = names[-2] if len(names) > 1 else None
    return [Stored(names, None, tokens, 2), Stored(names[-1:], behind, tokens[-2:], 2, state=True)]


def tell(publisher, *events):
    for event in events:
        publisher.tell(event)


def publisher():
    return closing(Publisher(f"tcp://{HOST}:0"))


def said(publisher):
    """What ``/health`` of its server says."""
    return {"status": "ok", "kv_events": publisher.record(2)}


async def until(true, feed=None, of=None):
    """Waits until something is so; meanwhile the feed is told what ``/health`` says, as a router does each second."""
    end = time.monotonic() + WAIT
    while not true():
        assert time.monotonic() < end, feed and (feed.live, feed.last, feed.counts)
        if of is not None:
            feed.told(said(of))
        await asyncio.sleep(0.02)


def hit(feed, text):
    return feed.hit(Tokens([*text.encode()], "")) if feed.live else None


def run(scenario):
    """Runs a scenario with a feed of the loopback."""

    async def whole():
        feed = KVEventSubscriber(HOST, pause=0.01)
        try:
            await asyncio.wait_for(scenario(feed), 2 * WAIT)
        finally:
            feed.end()
            await asyncio.sleep(0)
        return feed

    return asyncio.run(whole())


def test_what_was_told_before_and_what_is_told_later_is_known():
    async def scenario(feed):
        with publisher() as one:
            tell(one, Cleared(), *chain("a", "b"))
            await until(lambda: hit(feed, "aabbx") == 4, feed, one)
            tell(one, *chain("c"))
            await until(lambda: hit(feed, "ccx") == 2)
            tell(one, Removed(chain("c")[0].hashes, state=True), Removed(chain("c")[0].hashes))
            await until(lambda: hit(feed, "ccx") == 0)
            assert hit(feed, "aabbx") == 4 and feed.blocks == 2
            tell(one, Cleared())
            await until(lambda: hit(feed, "aabbx") == 0)
            assert feed.live and feed.blocks == 0 and feed.counts["replays"] == 1
            assert feed.counts["received"] >= 3 and not feed.counts["gaps"]

    run(scenario)


class Loud:
    """A publisher of a test's own: any frames on one socket, and prepared answers on the other."""

    def __init__(self, *answer):
        self._context = zmq.Context()
        self.answer = answer
        self.sockets = [self._context.socket(kind) for kind in (zmq.XPUB, zmq.ROUTER)]
        self.ports = [each.bind_to_random_port(f"tcp://{HOST}") for each in self.sockets]

    def close(self):
        self._context.destroy(linger=0)

    def record(self, block):
        place = {"port": self.ports[0], "replay_port": self.ports[1], "topic": "", "instance": "x"}
        return place | {"block_size": block, "sequence": -1}

    def say(self, *frames):
        self.sockets[0].send_multipart(frames)

    def tell(self, number, *events):
        self.say(b"t", number.to_bytes(8, "big"), encoded(0.0, events))

    def look(self):
        """Answers what was asked."""
        while self.sockets[1].poll(0):
            who, _, _ = self.sockets[1].recv_multipart()
            for number, events in self.answer:
                self.sockets[1].send_multipart((who, b"", number.to_bytes(8, "big"), encoded(0.0, events)))
            self.sockets[1].send_multipart((who, b"", b"\xff" * 8, b""))


async def heard(loud, feed):
    """Waits until a feed is live and listens."""
    await until(lambda: loud.look() or feed.live, feed, loud)
    await until(lambda: loud.sockets[0].poll(0))


@pytest.mark.parametrize(
    ("frames", "why"),
    [
        ((b"", (10**6).to_bytes(8, "big"), encoded(0.0, [])), "gaps"),
        ((b"", bytes(8), encoded(0.0, [])), "restarts"),
        ((b"", b"short", encoded(0.0, [])), "malformed"),
        ((b"", bytes(8)), "malformed"),
        (None, "malformed"),
    ],
    ids=["a number is missing", "numbers begin again", "no number", "no batch", "another batch"],
)
def test_what_was_known_is_dropped_and_asked_for_again(frames, why):
    async def scenario(feed):
        with closing(Loud((5, chain("a")))) as loud:
            await heard(loud, feed)
            loud.tell(6)
            await until(lambda: feed.last == 6)
            before = feed.counts[why]
            assert hit(feed, "aax") == 2
            loud.answer = ((9, [Cleared()]), (10, chain("b")))
            loud.say(*(frames or (b"", (feed.last + 1).to_bytes(8, "big"), b"\xc1")))
            await until(lambda: feed.counts[why] > before)
            assert hit(feed, "aax") is None and feed.blocks == 0, "nothing counts until it was asked"

            def again():
                loud.look()
                return feed.live

            await until(again)
            assert (hit(feed, "aax"), hit(feed, "bbx")) == (0, 2) and feed.counts["replays"] >= 2

    run(scenario)


def test_a_message_that_was_lost_last_is_missed_by_what_health_says():
    """No later number tells of it: the server is further than what came, and still a look later."""

    async def scenario(feed):
        with closing(Loud((5, chain("a")))) as loud:
            await heard(loud, feed)
            place = loud.record(2)
            feed.told({"kv_events": place | {"sequence": feed.last + 1}})
            assert feed.live and not feed.counts["gaps"], "it may be on its way"
            feed.told({"kv_events": place | {"sequence": feed.last + 1}})
            assert not feed.live and feed.counts["gaps"] == 1
            await until(lambda: loud.look() or feed.live)
            assert feed.counts["replays"] == 2

    run(scenario)


def test_a_server_that_starts_again_has_nothing_of_before():
    async def scenario(feed):
        with publisher() as one, publisher() as two:
            tell(one, *chain("a"))
            await until(lambda: hit(feed, "aax") == 2, feed, one)
            tell(two, *chain("b"), *chain("c"))
            feed.told(said(two))
            assert hit(feed, "aax") is None
            await until(lambda: hit(feed, "ccx") == 2, feed, two)
            assert hit(feed, "aax") == 0 and feed.counts["restarts"] == 1
            feed.told({"status": "ok"})
            assert not feed.live and feed.blocks == 0

    run(scenario)


@pytest.mark.parametrize(
    "answer", [[(5, []), (5, [])], [(5, []), (4, [])], [(1, [Stored((b"a" * 8,), None, (1,), 1)])]]
)
def test_an_answer_that_is_none_leaves_the_router_without_events_and_it_asks_again(answer):
    async def scenario(feed):
        with closing(Loud(*answer)) as loud:
            await until(lambda: loud.look() or feed.counts["failed"] > 1, feed, loud)
            assert not feed.live
            loud.answer = ((7, chain("a")),)
            await until(lambda: loud.look() or feed.live)
            assert hit(feed, "aax") == 2

    run(scenario)


def test_a_large_message_is_not_taken_in():
    async def scenario(feed):
        with closing(Loud((5, chain("a")))) as loud:
            await heard(loud, feed)
            loud.tell(6)
            await until(lambda: feed.last == 6)
            loud.say(b"", (feed.last + 1).to_bytes(8, "big"), bytes(2 << 20))
            loud.tell(8)

            def missed():
                feed.told({"kv_events": loud.record(2) | {"sequence": 8}})
                return feed.counts["gaps"]

            await until(missed)  # the connection ended with it, which nothing but the server's own word tells
            assert feed.counts["received"] == 1 and not feed.live
            await until(lambda: loud.look() or feed.live)

    run(scenario)


@pytest.mark.parametrize(
    "change",
    [
        {"port": 0},
        {"port": "1"},
        {"replay_port": 1 << 16},
        {"block_size": 0},
        {"block_size": 1 << 20},
        {"sequence": -2},
        {"topic": None},
        {"topic": "x" * 300},
        {"instance": 1},
        {"port": True},
    ],
)
def test_a_place_that_is_none_is_passed_over(change):
    place = {"port": 1, "replay_port": 2, "topic": "t", "block_size": 2, "instance": "i", "sequence": -1}
    assert source_of({"kv_events": place}) is not None
    assert source_of({"kv_events": place | change}) is None
    assert source_of([]) is source_of({}) is source_of({"kv_events": 3}) is None


TEXT = "Question: Hana has 11 apples, buys 8 and drops 6. How many now?\nAnswer: "
BODY = {"model": "m", "prompt": [*b"aabbx"], "max_tokens": 1}


class Worker(FakeServer):
    """Answers ``/health`` with what its publisher says, ``/tokenize`` with bytes, the rest with 200."""

    def __init__(self, publisher):
        super().__init__(self._said)
        self.publisher, self.tokens = publisher, 200

    def _said(self, path, body):
        if path == "/health" and self.publisher is not None:
            return 200, said(self.publisher)
        if path == "/tokenize":
            text = body.get("prompt") or "".join(each["content"] for each in body["messages"])
            return self.tokens, {"tokens": [*text.encode()]}
        return 200, {"id": 1}


def routed(scenario):
    """Runs a scenario with two servers, their publishers and a router that has heard both."""

    async def whole():
        async with AsyncExitStack() as stack:
            publishers = [stack.enter_context(publisher()) for _ in range(2)]
            servers = [await stack.enter_async_context(Worker(each)) for each in publishers]
            router = Router([], workers_of([each.url for each in servers], None, 60.0), RoutingPolicy(every=0.02))
            for each in publishers:
                tell(each, Cleared())
            async with router.watching():
                await until(lambda: all(worker.events.live for worker in router.decode))
                await scenario(router, servers, publishers)

    asyncio.run(whole())


async def picked(router, body=BODY, path="/v1/completions"):
    """Which server gets a request."""
    before = [worker.picked for worker in router.decode]
    async for _ in router.answer(path, body):
        pass
    return next(at for at, worker in enumerate(router.decode) if worker.picked > before[at])


def test_a_prompt_goes_where_events_say_that_it_hits_until_they_say_that_it_does_not():
    async def scenario(router, servers, publishers):
        second = router.decode[1]
        assert await picked(router) == 0
        tell(publishers[1], *chain("a", "b"))
        await until(lambda: second.events.blocks == 2)
        assert await picked(router) == 1
        assert second.load(Tokens(BODY["prompt"], "")).hit == 4 / 5
        assert await picked(router, BODY | {"cache_salt": "me"}) == 0, "another salt shares nothing"
        assert await picked(router, BODY | {"prompt": "aabbx"}) == 1
        assert await picked(router, {"messages": [{"role": "user", "content": "aabbx"}]}, "/v1/chat/completions") == 1
        names = chain("a", "b")[0].hashes
        tell(publishers[1], Removed(names[1:], state=True), Removed(names[::-1]))
        await until(lambda: second.events.blocks == 0)
        assert await picked(router) == 0
        text = router.text().decode()
        assert 'ling3_route_prompts_total{by="events"} 6.0' in text
        assert f'ling3_route_kv_events{{role="decode",url="{servers[1].url}",what="replays"}} 1.0' in text
        assert f'ling3_route_blocks{{role="decode",url="{servers[1].url}"}} 0.0' in text

    routed(scenario)


def test_a_text_is_tokenized_and_a_server_that_cannot_is_not_asked_for_a_while():
    async def scenario(router, servers, publishers):
        tell(publishers[1], *chain("a", "b"))
        await until(lambda: router.decode[1].events.blocks == 2)
        assert await picked(router, BODY | {"prompt": "aabbx"}) == 1
        assert sum([path for path, _ in each.asked].count("/tokenize") for each in servers) == 1
        for each in servers:
            each.tokens = 503
        for text in ("aabby", "aabbz"):
            assert await picked(router, BODY | {"prompt": text}) == 0, "without tokens by load"
        assert sum([path for path, _ in each.asked].count("/tokenize") for each in servers) == 2
        assert await picked(router) == 1, "token ids need nobody"
        assert 'ling3_route_prompts_total{by="load"} 2.0' in router.text().decode()

    routed(scenario)


def test_a_chat_is_tokenized_as_its_template_is_told_to_write_it():
    """A prompt without a thought, or that continues a message, was looked for as if it had neither."""
    told = {"chat_template_kwargs": {"enable_thinking": False}, "add_generation_prompt": False}
    told |= {"reasoning_effort": "none", "continue_final_message": True}

    async def scenario(router, servers, publishers):
        tell(publishers[1], *chain("a", "b"))
        await until(lambda: router.decode[1].events.blocks == 2)
        messages = [{"role": "user", "content": "aabbx"}]
        assert await picked(router, {"messages": messages, "max_tokens": 3} | told, "/v1/chat/completions") == 1
        (asked,) = (body for each in servers for path, body in each.asked if path == "/tokenize")
        assert asked == {"messages": messages} | told

    routed(scenario)


def test_a_server_that_is_gone_has_nothing():
    async def scenario(router, servers, publishers):
        tell(publishers[1], *chain("a", "b"))
        second = router.decode[1]
        await until(lambda: second.events.blocks == 2)
        second.lost()
        assert not second.events.live
        assert best(router.decode, 1.0, Tokens(BODY["prompt"], "")) is router.decode[0]
        await until(lambda: second.events.blocks == 2 and second.well)
        assert await picked(router) == 1

    routed(scenario)


def completed(url, prompt, **more):
    body = {"model": "m", "prompt": prompt, "max_tokens": 2, "temperature": 0, "ignore_eos": True} | more
    answer = httpx2.post(f"{url}/v1/completions", json=body, timeout=WAIT)
    assert answer.status_code == 200, answer.text
    return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_a_router_finds_what_clients_computed_past_it_and_loses_it_with_the_server(artifact):
    """Between two real servers: a prompt that one computed, evictions there, and another start of it at its ports."""
    folder, ids = artifact("micro-tp1-snapshots"), [*range(1, 41)]
    body = {"model": "m", "prompt": ids, "max_tokens": 1}

    async def scenario():
        options = "--model", "m", "--kv-events", f"tcp://{HOST}:0"
        with Server(folder, *options) as one, Server(folder, *options) as two:
            router = Router([], workers_of([one.url, two.url], None, WAIT), RoutingPolicy(every=0.05))
            first, second = router.decode
            async with router.watching():
                await until(lambda: first.events.live and second.events.live)
                assert await asyncio.to_thread(completed, two.url, ids) == 0
                await until(lambda: second.events.blocks)
                hit = second.events.hit(Tokens(ids, ""))
                assert hit == 32 and second.events.hit(Tokens(ids, "me")) == first.events.hit(Tokens(ids, "")) == 0
                assert await picked(router, body) == 1, "though this router has sent nothing there"
                assert await asyncio.to_thread(completed, two.url, ids) == hit
                assert await asyncio.to_thread(completed, two.url, TEXT) == 0
                answer = await second.endpoint.whole("POST", "/tokenize", json.dumps({"prompt": TEXT}).encode())
                tokens = Tokens(json.loads(answer[1])["tokens"], "")
                await until(lambda: second.events.hit(tokens))
                assert await picked(router, body | {"prompt": TEXT}) == 1, "of a text, by the tokens of /tokenize"
                for n in range(24):  # more prompts than there are snapshots, each used twice
                    await asyncio.to_thread(completed, two.url, [n // 2 + 50, *range(2, 41)])
                await until(lambda: not second.events.hit(Tokens(ids, "")))
                assert await picked(router, body) == 0
                assert await asyncio.to_thread(completed, two.url, ids) == 0, "the cache says so, too"
                assert not second.events.counts["gaps"] and second.events.counts["replays"] == 1
                assert 'ling3_route_prompts_total{by="load"}' not in router.text().decode()
                two.process.kill()
                await until(lambda: not second.well)
                assert not second.events.live and second.events.blocks == 0
                with Server(folder, *options, "--port", two.url.rpartition(":")[2]) as again:
                    await until(lambda: second.events.live)
                    assert second.load(tokens).hit == 0
                    assert await asyncio.to_thread(completed, again.url, ids[::-1]) == 0
                    await until(lambda: second.events.blocks)
                    assert await picked(router, body | {"prompt": ids[::-1]}) == 1

    asyncio.run(scenario())


def test_events_are_refused_where_nothing_is_cached(artifact):
    with pytest.raises(ArtifactError, match="events of blocks: expected a prefix cache, found it off"):
        Engine(artifact("micro-tp1-snapshots"), prefix_cache=False, tell=print)
