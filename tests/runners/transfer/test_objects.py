"""Names and the header of 128 bytes: literal values, every limit, and that no flipped bit goes unseen."""

import hashlib
import os
from dataclasses import replace

import numpy as np
import pytest

from ling3export.foundation.errors import Ling3Error, RequestError
from ling3export.runners.transfer.objects import (
    HEADER,
    Header,
    Key,
    Kind,
    Layout,
    State,
    StateMismatch,
    check_same_state,
    prefix_hashes,
    start_of,
    state_abi,
)
from tests.support.transfers import ABI, DESCRIPTION, LAYOUT, backend, keys, random_arrays, write

HEAD = Header(Kind.SNAPSHOT, State.READY, 300, b"k" * 16, b"a" * 32, 0x01020304, 7, 5, 6, 9)


def test_the_bytes_of_a_header():
    wanted = (
        b"L3XS"
        + b"\x01\x00"
        + b"\x02"
        + b"\x01"
        + (300).to_bytes(8, "little")
        + b"k" * 16
        + b"a" * 32
        + b"\x04\x03\x02\x01"
        + (7).to_bytes(8, "little")
        + (5).to_bytes(8, "little")
        + (6).to_bytes(4, "little")
        + (9).to_bytes(8, "little")
        + bytes(32)
    )
    assert HEAD.pack() == wanted and len(wanted) == HEADER.size == 128
    assert Header.parse(wanted) == HEAD


@pytest.mark.parametrize(
    ("at", "data", "found"),
    [
        (0, b"X", "other magic bytes"),
        (4, b"\x02", "version 2"),
        (6, b"\x00", "kind 0 in state 1"),
        (6, b"\x03", "kind 3 in state 1"),
        (7, b"\x03", "kind 2 in state 3"),
        (8, bytes(8), "0 bytes of payload"),
        (8, ((1 << 30) + 1).to_bytes(8, "little"), "1,073,741,825 bytes of payload"),
        (127, b"\x01", "bytes where zeros belong"),
    ],
)
def test_bytes_that_are_no_header_are_refused(at, data, found):
    whole = bytearray(HEAD.pack())
    whole[at : at + len(data)] = data
    with pytest.raises(ValueError, match=found):
        Header.parse(bytes(whole))


@pytest.mark.parametrize("size", [0, 127, 129])
def test_a_header_has_128_bytes(size):
    with pytest.raises(ValueError, match=f"^{size} bytes$"):
        Header.parse((HEAD.pack() + b"\0")[:size])


def test_every_bit_of_a_ready_object_counts(tmp_path):
    """Each flipped bit of the header, and some of the payload: it is another object, not ready, or corrupt."""
    end, key = backend("tcp", tmp_path), keys(heads=(1, 3))[-1]
    assert write(end, key)
    memory = end._fresh[key.name].memory.copy()
    end.close()
    whole = Header.parse(memory[:128].tobytes())
    assert whole.fault(key, LAYOUT) is None and whole.crc(memory[128:]) == whole.crc32
    seen = 0
    for bit in [*range(8 * 128), *range(8 * 128, 8 * memory.size, 97)]:
        flipped = memory.copy()
        flipped[bit // 8] ^= 1 << bit % 8
        try:
            header = Header.parse(flipped[:128].tobytes())
        except ValueError:
            seen += 1
            continue
        fault = header.fault(key, LAYOUT) or header.state != State.READY or header.crc(flipped[128:]) != header.crc32
        assert fault, f"bit {bit}"
        seen += 1
    assert seen > 8 * 128


def test_an_object_says_who_wrote_it_and_when_that_process_began():
    header = Header.of(keys()[0], 10)
    assert (header.pid, header.started) == (os.getpid(), start_of(os.getpid()))
    assert header.started > 0 and start_of(2**22 + 1) is None


def test_a_header_of_another_artifact_is_told_apart_from_a_damaged_one():
    key = keys()[0]
    header = Header.of(key, LAYOUT.nbytes(key))
    whole = replace(header, layers=0b11)
    assert whole.fault(key, LAYOUT) is None
    assert whole.fault(replace(key, state_abi="f" * 64), LAYOUT) == "other_state"
    for wrong in ({"layers": 0b01}, {"layers": 0b111}, {"length": 9}, {"kind": Kind.SNAPSHOT}, {"key": bytes(16)}):
        assert replace(whole, **wrong).fault(key, LAYOUT) == "corrupt"


def test_a_name_is_blake2b_of_what_is_the_same_for_the_same_state():
    prefix = hashlib.sha256(b"x").digest()
    key = Key(ABI, Kind.SNAPSHOT, prefix, (4, 8))
    whole = bytes.fromhex(ABI) + b"\x02" + prefix + b"\x04\x00\x08\x00"
    assert key.name == "l3x_" + hashlib.blake2b(whole, digest_size=16).hexdigest()
    others = [
        Key("0" * 64, Kind.SNAPSHOT, prefix, (4, 8)),
        Key(ABI, Kind.BLOCK, prefix, (4, 8)),
        Key(ABI, Kind.SNAPSHOT, bytes(32), (4, 8)),
        Key(ABI, Kind.SNAPSHOT, prefix, (0, 8)),
    ]
    assert len({key.name, *(other.name for other in others)}) == 5


def test_hashes_of_a_prompt_are_chained():
    first = hashlib.sha256(ABI.encode() + b"me").digest()
    second = hashlib.sha256(first + b"\x01\0\0\0\x02\0\0\0").digest()
    third = hashlib.sha256(second + b"\x03\0\0\0").digest()
    assert prefix_hashes(ABI, "me", [1, 2, 3], 2) == [second, third]
    assert prefix_hashes(ABI, "me", [], 2) == []
    assert prefix_hashes(ABI, "me", [1, 2, 4], 2)[0] == second
    assert not {*prefix_hashes(ABI, "you", [1, 2, 3], 2)} & {second, third}


@pytest.mark.parametrize("salt", [None, 5, b"me", ["me"]])
def test_a_salt_is_a_text(salt):
    with pytest.raises(RequestError, match=f"cache_salt: expected a text, found {type(salt).__name__}"):
        prefix_hashes(ABI, salt, [1], 2)


@pytest.mark.parametrize("tokens", [[-1], [1 << 31], [1 << 70], ["a"]])
def test_tokens_are_ids(tokens):
    with pytest.raises(RequestError, match="expected token ids from 0 on"):
        prefix_hashes(ABI, "", tokens, 2)


def test_state_of_another_artifact_is_named_by_its_fields():
    assert state_abi(DESCRIPTION) == state_abi(dict(reversed(DESCRIPTION.items())))
    check_same_state(DESCRIPTION, dict(DESCRIPTION))
    other = {"config": {"heads": 4, "theta": 5.0, "more": 1}, "weights": "b" * 64, "format": 2}
    with pytest.raises(StateMismatch, match=r"expected the same config\.more, config\.theta, weights, found others"):
        check_same_state(DESCRIPTION, other)
    with pytest.raises(StateMismatch, match="expected the same weights, found others"):
        check_same_state(DESCRIPTION, {name: value for name, value in DESCRIPTION.items() if name != "weights"})


@pytest.mark.parametrize(
    "layers", [{Kind.BLOCK: 2}, {Kind.BLOCK: 0, Kind.SNAPSHOT: 1}, {Kind.BLOCK: 65, Kind.SNAPSHOT: 1}]
)
def test_a_layout_has_as_many_layers_as_the_bitmap_has_bits(layers):
    with pytest.raises(Ling3Error, match="state layout: expected 1 to 64 layers of both kinds"):
        Layout(LAYOUT.pieces, layers, 4, 8)


def test_a_payload_goes_layer_by_layer_and_its_arrays_are_views_of_it():
    key = keys(heads=(1, 3))[-1]
    arrays = random_arrays(key)
    layers = [array[layer].view(np.uint8).reshape(-1) for layer in range(3) for array in arrays.values()]
    payload = np.concatenate(layers)
    assert payload.nbytes == LAYOUT.nbytes(key)
    found = LAYOUT.arrays(key, payload)
    assert {name: array.shape for name, array in found.items()} == {
        "kda.recurrent": (3, 2, 3, 2),
        "kda.conv": (3, 3, 2, 5),
    }
    for name, array in found.items():
        assert np.shares_memory(array, payload) and np.array_equal(array.view(np.uint8), arrays[name].view(np.uint8))
