"""The blocks of a server by its events: what they say a prompt hits is what the server's cache hits."""

import random

import msgspec
import pytest

from ling3export.runners.route.blocks import Blocks, MalformedError, Tokens, events_of
from ling3export.runners.serve.kv_events import History, encoded
from ling3export.runners.state.prefix_cache import Cleared, Removed, Stored
from tests.support.scheduler_rig import Rig, prompt


def same_hits(rig, blocks, heads, rng, salts=("",)):
    """Compares what events and the cache itself say of prompts; how many hit something."""
    some = 0
    for _ in range(30):
        head, salt = rng.choice(heads), rng.choice(salts)
        ids = [*head[: rng.randint(0, len(head))], *prompt(rng, rng.randint(1, 9))]
        names = list(rig.cache.names(rig.cache.start(salt), ids))
        expected = rig.cache.look_up(names, len(ids) - 1).tokens
        assert blocks.hit(Tokens(ids, salt)) == expected
        some += expected > 0
    return some


@pytest.mark.parametrize("evict", ["lru", "flops"])
def test_events_say_of_each_prompt_what_the_cache_hits(evict):
    """Random families of prompts in few pages and snapshots, salts among them, and another reader that asks late."""
    hits = removals = late_hits = 0
    for seed in range(12):
        rng, events = random.Random(seed), []
        rig = Rig(snapshots=5, every=8, pages=36, evict=evict, tell=events.append)
        heads, blocks, history = [prompt(rng, 40) for _ in range(4)], Blocks(4), History(batches=3)
        for _ in range(40):
            head = rng.choice(heads)
            ids = [*head[: rng.randint(0, len(head))], *prompt(rng, rng.randint(1, 12))]
            rig.submit(ids, rng.randint(1, 12), cache_salt=rng.choice(["", "", "me"]))
            rig.run(rng.choice([3, 100_000]))
            if events:
                removals += sum(isinstance(each, Removed) for each in events)
                _, data = history.add(0.0, events)
                events.clear()
                blocks.take(events_of(data))
            hits += same_hits(rig, blocks, heads, rng, ("", "me", "you"))
        late = Blocks(4)
        for _, data in history.since(0):
            late.take(events_of(data))
        late_hits += same_hits(rig, late, heads, rng, ("", "me"))
        assert len(late) == len(blocks)
        rig.run()
        rig.cache.reset()
        blocks.take(events_of(encoded(0.0, events)))
        assert len(blocks) == same_hits(rig, blocks, heads, rng) == 0
    assert hits > 1000 and removals > 500 and late_hits > 30


def test_a_salted_block_is_no_hit_of_another_salt():
    blocks = Blocks(2)
    blocks.take(events_of(encoded(0.0, [stored("a", "b", salt="me"), stored("b", parent="a", salt="me", state=True)])))
    ids = [*b"aabbx"]
    assert [blocks.hit(Tokens(ids, salt)) for salt in ("me", "", "you")] == [4, 0, 0]


def stored(*texts, parent=None, salt="", state=False):
    """Blocks of two tokens; the name of each is its letter."""
    tokens = tuple(byte for text in texts for byte in (2 * text).encode())
    return Stored(tuple(map(name, texts)), parent and name(parent), tokens, 2, salt, state)


def name(text):
    return bytes(24) + text.encode().rjust(8)


def taken(*events, block=2, most=1 << 18):
    blocks = Blocks(block, most)
    blocks.take(events_of(encoded(0.0, events)))
    return blocks


def test_a_prompt_hits_up_to_its_last_state_and_leaves_a_token_to_compute():
    chain = [stored("a", "b", "c"), stored("a", state=True), stored("c", parent="b", state=True)]
    blocks = taken(*chain)
    found = [blocks.hit(Tokens([*text], "")) for text in (b"aabbccx", b"aabbcc", b"aabbx", b"aa", b"xaabbcc")]
    assert found == [6, 2, 2, 0, 0]
    assert taken(*chain, Removed((name("c"),), state=True)).hit(Tokens([*b"aabbccx"], "")) == 2
    assert taken(*chain, Removed((name("b"),))).hit(Tokens([*b"aabbccx"], "")) == 2
    assert taken(*chain, Cleared()).hit(Tokens([*b"aabbccx"], "")) == 0
    assert taken(stored("a", "b", "c")).hit(Tokens([*b"aabbccx"], "")) == 0, "no state, no hit"


@pytest.mark.parametrize("count", [2, 3, 4])
def test_blocks_are_kept_up_to_their_bound_and_hit_so_far(count):
    blocks = taken(stored(*"abcd"[:count]), stored(*"abcd"[:count], state=True), most=3)
    assert len(blocks) == min(3, count)
    assert blocks.hit(Tokens([*b"aabbccddx"], "")) == 2 * min(3, count)


def test_what_leads_nowhere_and_what_is_too_much_is_not_kept():
    assert len(taken(stored("c", parent="b"))) == 0
    assert len(taken(stored("a", "b", "c", "d"), most=3)) == 3
    again = taken(stored("a", "b"), stored("a", "b"), Removed((name("b"), name("b"), name("x"))))
    assert len(again) == 1
    renamed = [Stored((name("a"),), None, (9, 9), 2, state=state) for state in (False, True)]
    blocks = taken(stored("a"), stored("a", state=True), *renamed)
    assert [blocks.hit(Tokens([each] * 3, "")) for each in (9, ord("a"))] == [2, 0] and len(blocks) == 1


@pytest.mark.parametrize(
    "batch",
    [
        b"",
        b"\xc1",
        b"{}",
        msgspec.msgpack.encode([0.0]),
        msgspec.msgpack.encode(["x", [], 0]),
        msgspec.msgpack.encode([0.0, [7], 0]),
        msgspec.msgpack.encode([0.0, [{"type": "BlockMoved"}], 0]),
        msgspec.msgpack.encode([0.0, [{"type": "BlockRemoved", "block_hashes": ["a"], "medium": None}], 0]),
        msgspec.msgpack.encode([0.0, [["AllBlocksCleared"]], 0]),
        b"\x93\xcb" + bytes(8) + b"\x91" * 100_000,
    ],
)
def test_what_is_no_batch_is_refused(batch):
    with pytest.raises(MalformedError, match="expected a batch"):
        events_of(batch)


@pytest.mark.parametrize(
    "change", [{"block_size": 3}, {"token_ids": [1, 2, 3]}, {"token_ids": [1, 2, 3, 2**31]}, {"group_idx": 2}]
)
def test_an_event_that_contradicts_itself_is_refused(change):
    event = {
        "type": "BlockStored",
        "block_hashes": [1, 2],
        "parent_block_hash": None,
        "token_ids": [1, 2, 3, 4],
        "block_size": 2,
        "lora_id": None,
        "medium": None,
        "lora_name": None,
        "extra_keys": [["x"], None],
        "group_idx": 0,
    }
    blocks = Blocks(2)
    blocks.take(events_of(msgspec.msgpack.encode([0.0, [event, event | {"group_idx": 1}], 0])))
    assert blocks.hit(Tokens([1, 2, 3, 4, 5], "x")) == 4
    with pytest.raises(MalformedError, match="expected"):
        blocks.take(events_of(msgspec.msgpack.encode([0.0, [event | change], 0])))
