"""Sequences in files: who resumes one goes on with the same tokens; a file that is not whole is refused by name."""

import json
from dataclasses import replace

import numpy as np
import pytest
from msgspec import structs

from ling3export.foundation.errors import ArtifactError, RequestError
from ling3export.runners.engine.engine import Engine
from ling3export.runners.engine.request import Request, Sampling
from ling3export.runners.engine.saving import check_savable
from ling3export.runners.state.layout import LATENT, StateMismatch, check_same_state, description_of, layout_of, root_of
from ling3export.runners.state.sequence_state import (
    SequenceState,
    StateBytes,
    StateFileError,
    canonical,
    load_state,
    save_state,
    token_of,
)
from tests.support.transfers import DESCRIPTION, LAYOUT, random_state, same

TOLD = {"check": "programs", "report": lambda text: None}
PROMPT = tuple(range(20, 90))
VOCAB = 100


@pytest.fixture
def file(tmp_path):
    """Eleven positions of a request, in pages of eight."""
    state = replace(random_state(11), descriptor={"state": DESCRIPTION, "request": {"prompt_ids": [1] * 10}})
    save_state(tmp_path / "a", state, LAYOUT)
    return tmp_path / "a"


def test_what_was_written_is_read_bit_for_bit(file):
    read = load_state(file, LAYOUT, DESCRIPTION)
    assert read.descriptor == {"state": DESCRIPTION, "request": {"prompt_ids": [1] * 10}} and read.stop == 11
    assert same(read, random_state(11))
    assert read.nbytes == LAYOUT.nbytes(11) == 2 * 11 * 6 * 2 + 3 * 4 * 3 * 2 * 4 + 3 * 3 * 4 * 3 * 3 * 2


@pytest.mark.parametrize("page", [1, 4, 8, 16])
def test_pages_of_any_size_hold_the_same_positions(page):
    state = random_state(11)
    pools = state.pool_arrays(page)
    assert pools["mla_latent"].shape == (2, -(-11 // page), page, 6) and pools["kda_conv"].shape == (3, 4, 27)
    again = SequenceState(
        state.descriptor, state.tokens, {**(found := canonical(pools)), LATENT: found[LATENT][:, :11]}
    )
    assert same(again, state)


def test_any_reader_of_safetensors_opens_a_file(file):
    from safetensors import safe_open

    with safe_open(file, "numpy") as opened:
        assert sorted(opened.keys()) == ["kda.conv", "kda.recurrent", "mla.latent", "tokens"]
        assert opened.get_slice("mla.latent").get_shape() == [2, 11, 6]
        assert json.loads(opened.metadata()["ling3.state"])["tokens"] == 11


def test_a_file_that_is_not_whole_is_refused_by_name(file, tmp_path):
    data = file.read_bytes()
    head = int.from_bytes(data[:8], "little") + 8
    cases = {
        b"": "no safetensors file",
        data[:-1]: "bytes in a file of",
        data + b"x": "bytes in a file of",
        data[:head] + bytes([data[head] ^ 1]) + data[head + 1 :]: "bytes of another digest",
        data.replace(b'version\\": 2', b'version\\": 1'): "version 1 of a state, where this is 2",
        data.replace(b"crc32", b"sha25"): "version 2 of a state",
        data.replace(b"ling3.state", b"ling4.state"): "a file without a saved state",
        data.replace(b'tokens\\": 11', b'tokens\\": 10'): "another header",
        data.replace(b"[1, 1,", b"[1, 5,"): "bytes of another digest",
    }
    assert len(cases) == 9
    for damaged, found in cases.items():
        (tmp_path / "b").write_bytes(damaged)
        with pytest.raises(StateFileError, match=rf"^state `b`: expected a whole file .*found .*{found}"):
            load_state(tmp_path / "b", LAYOUT, DESCRIPTION)
    for path, found in ((tmp_path / "none", "No such file or directory"), (tmp_path, "a folder")):
        with pytest.raises(StateFileError, match=found):
            load_state(path, LAYOUT, DESCRIPTION)


def test_the_state_of_another_artifact_is_refused_by_what_differs(file):
    with pytest.raises(StateMismatch, match=r"^state of another artifact: expected the same weights, found others"):
        load_state(file, LAYOUT, DESCRIPTION | {"weights": "c"})
    other = {"config": {"heads": 4, "theta": 5.0, "more": 1}, "weights": "b" * 64, "format": 2}
    with pytest.raises(StateMismatch, match="expected the same config, weights, found others"):
        check_same_state(DESCRIPTION, other)
    check_same_state(DESCRIPTION, dict(reversed(DESCRIPTION.items())))


def test_a_number_too_large_for_a_float_is_refused_like_any_other():
    """It ended the thread that takes states: JSON has integers that no float holds."""
    assert token_of(3, [-0.5, [[3, -0.5]]], VOCAB) == (3, (-0.5, ((3, -0.5),)))
    for logprobs in ([10**400, []], [-0.5, [[3, 10**400]]]):
        with pytest.raises(ValueError, match="a number that is none"):
            token_of(3, logprobs, VOCAB)


def test_names_of_states_tell_weights_apart(artifact):
    """Names began with a digest of the form alone: two models of one form took each other's states by name."""
    manifest = artifact.manifest("micro-tp1-snapshots")
    (target,) = manifest.targets.values()
    other = structs.replace(manifest, weights_digest="0" * 64)
    assert root_of(manifest, target) != root_of(other, target)


@pytest.fixture(scope="module")
def engine(artifact):
    with Engine(artifact("micro-tp1-snapshots"), **TOLD) as engine:
        yield engine


@pytest.fixture(scope="module")
def other(artifact):
    """The same model on two devices."""
    with Engine(artifact("micro-tp2-snapshots"), **TOLD) as engine:
        yield engine


def test_another_engine_of_another_tp_goes_on_with_the_same_tokens(engine, other, tmp_path):
    asked = Request(PROMPT, 30, Sampling(1.0, seed=3, frequency_penalty=0.5), ignore_eos=True, logprobs=2)
    (alone,) = engine.complete([asked])
    for first, second in ((engine, other), (other, engine)):
        begun = first.save(replace(asked, max_tokens=9), tmp_path / "state")
        assert (begun.token_ids, begun.stop_reason) == (alone.token_ids[:9], "length")
        before = second.stats()["tokens_in"]
        done = second.resume(tmp_path / "state", max_tokens=30).result()
        assert (done.token_ids, done.stop_reason) == (alone.token_ids, "length")
        assert done.kv_transfer_params is None and done.cached_tokens == len(PROMPT)
        assert [[token for token, _ in each.top] for each in done.logprobs] == [
            [token for token, _ in each.top] for each in alone.logprobs
        ]
        assert second.stats()["tokens_in"] == before, "nothing is computed again"


def test_a_request_that_runs_ends_where_it_is(engine, tmp_path):
    """Six at once over four slots: some decode, some wait for a slot. Long enough that none ends before it is saved."""
    asked = [Request(PROMPT[: 20 + n], 200, Sampling(1.0, seed=n), ignore_eos=True) for n in range(6)]
    alone = [each.token_ids for each in engine.complete(asked)]
    handles = engine.submit(*asked)
    begun = [engine.save(handle, tmp_path / str(n)) for n, handle in enumerate(handles)]
    assert "saved" in {each.stop_reason for each in begun}
    assert all(each.token_ids == whole[: len(each.token_ids)] for each, whole in zip(begun, alone, strict=True))
    done = [engine.resume(tmp_path / str(n)).result() for n in range(6)]
    assert [each.token_ids for each in done] == alone
    with pytest.raises(RequestError, match="expected a request that runs in this engine, found one that ended"):
        engine.save(handles[0], tmp_path / "again")


def test_an_answer_that_ended_by_itself_ends_again(engine, other, tmp_path):
    (alone,) = engine.generate([PROMPT], max_tokens=1)
    stop = alone.text or ""
    assert stop
    asked = engine.request(PROMPT, 40, stop=[stop])
    begun = engine.save(asked, tmp_path / "state")
    assert begun.stop_reason == "stop"
    done = other.resume(tmp_path / "state", max_tokens=50).result()
    assert (done.token_ids, done.text, done.stop_reason) == (begun.token_ids, begun.text, "stop")


def test_what_cannot_be_saved_or_resumed_is_refused(engine, other, artifact, tmp_path):
    with pytest.raises(RequestError, match=r"^request: expected tokens alone where a state is saved, found logits"):
        engine.save(Request((1,), 1, logits=True), tmp_path / "a")
    with pytest.raises(RequestError, match="found scores"):
        check_savable(Request((1, 2), 0, score_from=1))
    with pytest.raises(ArtifactError, match=r"expected a file, found|No such file|expected a writable file"):
        engine.save(Request((1,), 1), tmp_path / "none" / "a")
    (handle,) = engine.submit(Request(PROMPT, 100, ignore_eos=True))
    with pytest.raises(RequestError, match="expected a request that runs in this engine"):
        other.save(handle, tmp_path / "a")
    handle.cancel()
    manifest = artifact.manifest("micro-tp1-snapshots")
    (target,) = manifest.targets.values()
    layout, description = layout_of(target), description_of(manifest, target)

    def refused(request: dict, generated: list, found: str) -> None:
        descriptor = {"state": description, "request": request, "generated": generated}
        save_state(tmp_path / "b", SequenceState(descriptor, np.empty(0, np.int32), {}), layout)
        with pytest.raises(StateFileError, match=found):
            engine.resume(tmp_path / "b")

    for request in ({"prompt_ids": [1]}, {"prompt_ids": [1], "max_tokens": 1, "sampling": {}, "x": 1}):
        refused(request, [], r"^state `b`: expected a whole file that Engine.save wrote, found another form")
    request = {"prompt_ids": [1], "max_tokens": 1, "sampling": {}}
    refused(request, [(1, None), (2, None)], "expected fewer positions than tokens, found 0 stored of 3, 2 of 1")
    refused(request, [(1 << 20, None)], "found a token outside of the vocabulary")
    tokens = np.asarray([2], np.int32)
    data = StateBytes(layout, {"state": description, "request": request, "generated": [(1, None)]}, tokens)
    (tmp_path / "b").write_bytes(data.seal().tobytes())
    with pytest.raises(StateFileError, match="found the state of other tokens"):
        engine.resume(tmp_path / "b")
    assert engine.stopped is None
