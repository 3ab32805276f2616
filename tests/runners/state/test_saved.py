"""The bytes of a sequence's state: read bit for bit, and refused if they are incomplete."""

import io

import pytest
from msgspec import structs

from ling3export.runners.state.layout import LATENT, StateMismatch, check_same_state, root_of
from ling3export.runners.state.sequence_state import SequenceState, canonical, read_state, token_of
from tests.support.transfers import DESCRIPTION, LAYOUT, bytes_of, random_state, same

VOCAB = 100
DESCRIPTOR = {"state": DESCRIPTION, "request": {"prompt_ids": [1] * 10}}


@pytest.fixture
def data() -> bytes:
    """Eleven positions, in pages of eight."""
    return bytes_of(random_state(11), DESCRIPTOR)


def read(data: bytes, description=DESCRIPTION) -> SequenceState:
    return read_state(io.BytesIO(data), len(data), LAYOUT, description)


def test_a_written_state_is_read_bit_for_bit(data):
    state = read(data)
    assert state.descriptor == DESCRIPTOR and state.stop == 11
    assert same(state, random_state(11))
    assert state.nbytes == LAYOUT.nbytes(11) == 2 * 11 * 6 * 2 + 3 * 4 * 3 * 2 * 4 + 3 * 3 * 4 * 3 * 3 * 2


@pytest.mark.parametrize("page", [1, 4, 8, 16])
def test_pages_of_any_size_hold_the_same_positions(page):
    state = random_state(11)
    pools = state.pool_arrays(page)
    assert pools["mla_latent"].shape == (2, -(-11 // page), page, 6) and pools["kda_conv"].shape == (3, 4, 27)
    again = SequenceState(
        state.descriptor, state.tokens, {**(found := canonical(pools)), LATENT: found[LATENT][:, :11]}
    )
    assert same(again, state)


def test_bytes_that_are_not_whole_are_refused(data):
    head = int.from_bytes(data[:8], "little") + 8
    cases = {
        b"": "no safetensors file",
        data[:-1]: "bytes in a file of",
        data + b"x": "bytes in a file of",
        data[:head] + bytes([data[head] ^ 1]) + data[head + 1 :]: "bytes of another digest",
        data.replace(b'version\\": 2', b'version\\": 1'): "version 1 of a state, where this is 2",
        data.replace(b"crc32", b"sha25"): "version 2 of a state",
        data.replace(b"ling3.state", b"ling4.state"): "a file without a state",
        data.replace(b'tokens\\": 11', b'tokens\\": 10'): "another header",
        data.replace(b"[1, 1,", b"[1, 5,"): "bytes of another digest",
    }
    assert len(cases) == 9
    for damaged, found in cases.items():
        with pytest.raises(ValueError, match=found):
            read(damaged)


def test_the_state_of_another_artifact_is_refused_by_what_differs(data):
    with pytest.raises(StateMismatch, match=r"^state of another artifact: expected the same weights, found others"):
        read(data, DESCRIPTION | {"weights": "c"})
    other = {"config": {"heads": 4, "theta": 5.0, "more": 1}, "weights": "b" * 64, "format": 2}
    with pytest.raises(StateMismatch, match="expected the same config, weights, found others"):
        check_same_state(DESCRIPTION, other)
    check_same_state(DESCRIPTION, dict(reversed(DESCRIPTION.items())))


def test_a_number_too_large_for_a_float_is_refused_like_any_other():
    """Regression: it ended the thread that imports states. JSON has integers that no float can represent."""
    assert token_of(3, [-0.5, [[3, -0.5]]], VOCAB) == (3, (-0.5, ((3, -0.5),)))
    for logprobs in ([10**400, []], [-0.5, [[3, 10**400]]]):
        with pytest.raises(ValueError, match="a number that is none"):
            token_of(3, logprobs, VOCAB)


def test_names_of_states_tell_weights_apart(artifact):
    """Regression: names began with a digest of the form only: two models of one form used each other's states."""
    manifest = artifact.manifest("micro-tp1-snapshots")
    (target,) = manifest.targets.values()
    other = structs.replace(manifest, weights_digest="0" * 64)
    assert root_of(manifest, target) != root_of(other, target)
