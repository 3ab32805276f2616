"""The KV events that a server publishes: vLLM's own declarations decode the bytes, and a subscriber receives them."""

import time
from contextlib import closing

import msgspec
import pytest
import zmq

from ling3export.foundation.errors import Ling3Error
from ling3export.runners.serve.kv_events import Publisher, encoded, number_of
from ling3export.runners.state.prefix_cache import Cleared, Removed, Stored
from tests.support.waiting import until

NAMES = tuple(bytes([n]) * 32 for n in range(1, 9))


# The declarations in vLLM 0.26 (vllm/distributed/kv_events.py): names, order and defaults are those of its wire format.
class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True):
    ts: float
    events: list["BlockStored | BlockRemoved | AllBlocksCleared"]
    data_parallel_rank: int | None = None


class BlockStored(msgspec.Struct, omit_defaults=True, tag=True):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[str, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class BlockRemoved(msgspec.Struct, omit_defaults=True, tag=True):
    block_hashes: list[bytes | int]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, omit_defaults=True, tag=True):
    pass


def read(data: bytes) -> EventBatch:
    return msgspec.msgpack.decode(data, type=EventBatch)


def number(n: int) -> int:
    return n * 0x0101010101010101


def stored(*names: int, parent: int | None = None, salt: str = "", state: bool = False) -> Stored:
    """Blocks of two tokens; their names are numbers."""
    tokens = tuple(each for name in names for each in (name, name))
    before = None if parent is None else NAMES[parent - 1]
    return Stored(tuple(NAMES[name - 1] for name in names), before, tokens, 2, salt, state)


def removed(*names: int, state: bool = False) -> Removed:
    return Removed(tuple(NAMES[name - 1] for name in names), state)


def test_a_batch_is_what_vllm_declares_byte_for_byte():
    events = [Cleared(), stored(1, 2, salt="me"), stored(2, parent=1, salt="me", state=True)]
    data = encoded(1.5, [*events, removed(2, state=True), removed(2, 1)])
    found = read(data)
    assert found == EventBatch(
        1.5,
        [
            AllBlocksCleared(),
            BlockStored(
                [number(1), number(2)], None, [1, 1, 2, 2], 2, None, "GPU", None, [("me",), None], 0, "mla_attention"
            ),
            BlockStored([number(2)], number(1), [2, 2], 2, None, "GPU", None, [None], 1, "mamba"),
            BlockRemoved([number(2)], "GPU", 1),
            BlockRemoved([number(2), number(1)], "GPU", 0),
        ],
        0,
    )
    assert msgspec.msgpack.encode(found) == data
    assert (
        encoded(0.0, [Cleared()]).hex()
        == "93cb0000000000000000" + "91" + "81a474797065b0" + b"AllBlocksCleared".hex() + "00"
    )
    assert number_of(bytes(range(32))) == 0x18191A1B1C1D1E1F


def test_half_a_character_in_a_salt_is_published_as_a_question_mark():
    """It cannot be written in msgpack; without the replacement, the thread that publishes events would end."""
    assert read(encoded(0.0, [stored(1, salt="a\ud800")])).events[0].extra_keys == [("a?",)]


@pytest.mark.parametrize("wrong", ["5557", "tcp://127.0.0.1", "tcp://127.0.0.1:65536", "ipc:///tmp/x", "tcp://a b:1"])
def test_an_invalid_endpoint_is_refused(wrong):
    with pytest.raises(Ling3Error, match="--kv-events: expected tcp://HOST:PORT"):
        Publisher(wrong)


def test_a_port_that_is_taken_is_named():
    with closing(Publisher("tcp://127.0.0.1:0")) as first:
        port = first.record(2)["port"]
        with pytest.raises(Ling3Error, match=f"--kv-events tcp://127.0.0.1:{port}: expected a port that is free"):
            Publisher(f"tcp://127.0.0.1:{port}")


def test_a_subscriber_of_vllm_reads_messages():
    """The calls are those of vLLM's example: SUB with a topic, three frames."""
    with closing(Publisher("tcp://127.0.0.1:0", "kv@a@b")) as publisher, zmq.Context() as context:
        record = publisher.record(2)
        assert record["block_size"] == 2 and record["topic"] == "kv@a@b" and record["sequence"] == -1
        publisher.tell(stored(1))
        until(lambda: publisher.record(2)["sequence"] >= 0)  # without any subscriber
        with context.socket(zmq.SUB) as heard:
            heard.connect(f"tcp://127.0.0.1:{record['port']}")
            heard.setsockopt(zmq.SUBSCRIBE, b"kv@")
            while not heard.poll(20):  # until the subscription has arrived
                publisher.tell(stored(2, parent=1))
            topic, count, data = heard.recv_multipart()
            assert topic == b"kv@a@b" and read(data).events[0].block_hashes == [number(2)]
            assert int.from_bytes(count, "big") > 0 and abs(read(data).ts - time.time()) < 60


def test_another_start_is_another_instance():
    with closing(Publisher("tcp://127.0.0.1:0")) as one, closing(Publisher("tcp://127.0.0.1:0")) as other:
        assert one.record(2)["instance"] != other.record(2)["instance"]
        assert one.record(2)["port"] != other.record(2)["port"]
