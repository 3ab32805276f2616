"""Requests to an engine of a toy artifact: results, ends of answers, and immediate errors."""

import json
import math
import shutil
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
from msgspec.structs import replace

from ling3export.artifacts.manifest import read_manifest, write_manifest
from ling3export.foundation.errors import RequestError
from ling3export.runners.cli.generate import read_prompts
from ling3export.runners.engine.core import StepInputs, decode, encode
from ling3export.runners.engine.engine import Engine
from ling3export.runners.engine.handle import RequestHandle
from ling3export.runners.engine.request import Request, Sampling
from ling3export.runners.engine.sequence import Sequence
from tests.support import toy_artifact
from tests.support.manifests import changed_targets


@pytest.fixture(scope="module")
def built():
    return toy_artifact.shared()


@pytest.fixture
def artifact(built, tmp_path):
    """A copy that a test may change."""
    return shutil.copytree(built, tmp_path / "moved.ling3")


def test_text_in_and_out(engine):
    completion = engine.generate(["the time"], max_tokens=12, ignore_eos=True)[0]
    tokens, _ = toy_artifact.answer(completion.prompt_ids, 12)
    assert completion.token_ids == tokens
    tokenizer = engine.files.tokenizer("test")
    assert completion.text == tokenizer.decode(tokens)
    assert tokenizer.decode(completion.prompt_ids) == "the time"


def test_eos_ends_the_answer(artifact):
    tokens, _ = toy_artifact.answer([1, 2, 3], 12)
    manifest = read_manifest(artifact)
    write_manifest(artifact, replace(manifest, config=manifest.config | {"eos_token_id": (tokens[4],)}))
    with Engine(artifact) as engine:
        completion = engine.generate([[1, 2, 3]], max_tokens=12)[0]
    assert (completion.token_ids, completion.stop_reason) == (tokens[: tokens.index(tokens[4]) + 1], "eos")


def test_temperatures_next_to_0_take_the_best_token(built):
    with Engine(built, report=lambda text: None) as engine:
        cold = engine.generate([[1, 2, 3]], max_tokens=12, temperature=1e-9, top_p=0.9, ignore_eos=True)[0]
    assert cold.token_ids == toy_artifact.answer([1, 2, 3], 12)[0]


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ([[]], {}, "prompt 0: expected a prompt of at least one token, found an empty one"),
        ([[1], [320]], {}, "prompt 1: expected token ids from 0 to 319, found 320 at place 0"),
        ([[1] * 64], {}, "within the context of 64 tokens, found a prompt of 64 tokens + 1 = 65"),
        ([[1.5]], {}, "prompt 0: expected token ids, found 1.5 at place 0"),
        ([[1]], {"max_tokens": 0}, "prompt 0: max_tokens: expected a whole number from 1 to 2147483647, found 0"),
        ([[1]], {"temperature": -1.0}, "sampling `temperature`: expected a number from 0 to 2, found -1.0"),
        ([[1]], {"temperature": float("nan")}, "sampling `temperature`: expected a number from 0 to 2, found NaN"),
        ([[1]], {"seed": 1 << 32}, "sampling `seed`: expected a whole number from 0 to 4294967295, found 4294967296"),
        ([[1]], {"stop": ""}, "prompt 0: expected stop strings of at least one character, found an empty one"),
        ("hello", {}, "prompts: expected a list of prompts, found a single one"),
        ([[1]], {"stop": [5]}, "prompt 0: expected stop strings, found 5 among them"),
        ([[1]], {"stop": "\ud83d"}, 'prompt 0: expected stop strings in Unicode, found half a character in "\\ud83d"'),
        ([[1]], {"max_tokens": float("nan")}, "max_tokens: expected a whole number from 1 to 2147483647, found NaN"),
        ([[1]], {"ignore_eos": 1}, "prompt 0: expected ignore_eos to be true or false, found 1"),
        ([b"abc"], {}, "prompt 0: expected token ids, found b'abc'"),
        ([np.array([[1, 2]])], {}, "prompt 0: expected token ids, found [1, 2] at place 0"),
    ],
)
def test_impossible_requests_are_refused_at_once(engine, prompts, options, message):
    before = engine.stats()["tokens_in"]
    with pytest.raises(RequestError) as caught:
        engine.generate(prompts, **({"max_tokens": 4} | options))
    assert message in caught.value.message
    assert engine.stats()["tokens_in"] == before


class Unprintable:
    """An object without a text form."""

    def __repr__(self):
        raise RuntimeError("no text")


# Values that a caller may pass as a number, a text, a flag or a list.
WEIRD = [
    None, True, 0, 3, -1, 3.5, math.nan, math.inf, 10**30, 10**5000, 1j, Fraction(1, 2), Decimal("0.5"), "", "x", "3",
    "\ud83d", b"x", bytearray(b"x"), [], [5], [1.5], ["x"], ["x", 5], [None], [[1]], [True], (1, 2), range(3), {},
    {"a": 1}, {3}, iter((1, 2)), object(), Unprintable(), Request, len, np.int64(3), np.uint8(3), np.int64(-1),
    np.float32(0.5), np.float64("nan"), np.bool_(True), np.str_("x"), np.array(3), np.array([1, 2]), np.array([[1]]),
    np.array([0.5]), np.array(["x"]), np.datetime64("2026-11-22"),
]  # fmt: skip
FIELDS = ("prompt_ids", "max_tokens", "stop", "ignore_eos", "logits", "name", "cache_salt", "score_from", "sampling")
SETTINGS = ("temperature", "top_k", "top_p", "min_p", "seed")


def built_of(field, value):
    """A request with ``value`` in one field, or the error for it."""
    try:
        if field in SETTINGS:
            return Request((1, 2, 3), 4, Sampling(**{field: value}))
        fields = {"prompt_ids": (1, 2, 3), "max_tokens": 0 if field == "score_from" else 4} | {field: value}
        return Request(**fields)
    except RequestError as error:
        return error


@pytest.mark.parametrize("field", [*FIELDS, *SETTINGS])
def test_no_request_of_any_values_ends_the_engine(engine, field):
    """Regression: a number among the stop strings ended the engine, and a max_tokens of NaN kept its slot forever.

    A numpy integer as seed ended several hosts: accepted values must reach other hosts unchanged.
    """
    taken = []
    for value in WEIRD:
        request = built_of(field, value)
        if isinstance(request, RequestError):
            assert len(request.message) < 200 and ": expected " in request.message
            continue
        taken.append(request)
        travelled = decode(encode(StepInputs((Sequence(request, 0),))))
        assert travelled.arrivals[0].request == request
        if request.score_from is None:
            (completion,) = engine.complete([request])
            assert 1 <= len(completion.token_ids) <= request.max_tokens
        assert engine.stopped is None
    toy_artifact.check_tokens(engine)
    assert (engine.stats()["live"], engine.stats()["free"]) == (0, engine.stats()["pools"])
    wanted = {
        "prompt_ids": {(5,), (1, 2), (0, 1, 2)},
        "max_tokens": {3},
        "stop": {(), ("x",), ("3",), ("a",)},
        "ignore_eos": {True},
        "logits": {True},
        "name": {"", "x", "3", "\ud83d"},
        "cache_salt": {"", "x", "3", "\ud83d"},
        "score_from": set(),
        "sampling": set(),
        "temperature": {0.0, 0.5},
        "top_k": {0, 3},
        "top_p": {0.5},
        "min_p": {0.0, 0.5},
        "seed": {0, 3},
    }
    found = [getattr(each.sampling if field in SETTINGS else each, field) for each in taken]
    assert set(found) == wanted[field]
    exact = {int, float, bool, str, type(None), tuple}
    assert {type(value) for value in found} <= exact
    assert {type(part) for value in found if isinstance(value, tuple) for part in value} <= exact


def test_every_interface_refuses_the_same_token_id(engine, tmp_path):
    """Python, the other hosts' channel and a prompt file give the same error for an invalid token id."""
    said = "expected token ids, found 1.5 at place 1"
    with pytest.raises(RequestError, match=said):
        Request((1, 1.5), 4)  # type: ignore[arg-type]
    sent = encode(StepInputs((Sequence(Request((1, 2), 4), 0),))).replace(b"[1, 2]", b"[1, 1.5]")
    with pytest.raises(RequestError, match=said):
        decode(sent)
    (tmp_path / "prompts").write_text('{"prompt_ids": [1, 1.5]}\n')
    with pytest.raises(RequestError, match=f"line 1: {said}"):
        read_prompts(tmp_path / "prompts")
    with pytest.raises(RequestError, match=said):
        engine.generate([[1, 1.5]], max_tokens=4)


@pytest.mark.parametrize("value", [0, -1, math.nan, "3", True])
def test_a_step_timeout_is_a_number_of_seconds(built, value):
    with pytest.raises(RequestError, match="step_timeout: expected a number above 0, at most"):
        Engine(built, step_timeout=value)


def test_only_requests_are_submitted(engine):
    with pytest.raises(RequestError, match='request: expected a Request, found "hello"'):
        engine.submit("hello")  # type: ignore[arg-type]
    assert engine.stats()["live"] == 0


def test_text_without_a_tokenizer_is_refused_by_name(artifact):
    write_manifest(artifact, replace(read_manifest(artifact), tokenizer=()))
    with Engine(artifact) as engine:
        with pytest.raises(RequestError, match="prompt 0: text in: this artifact has no tokenizer"):
            engine.generate(["hello"], max_tokens=4)
        with pytest.raises(RequestError, match="prompt 0: stop strings: this artifact has no tokenizer"):
            engine.generate([[1]], max_tokens=4, stop="x")
        completion = engine.generate([[1, 2, 3]], max_tokens=4)[0]
    assert completion.text is None
    assert completion.token_ids == toy_artifact.answer([1, 2, 3], 4)[0]


def test_a_request_larger_than_the_pool_is_refused_with_the_sum(artifact):
    changed_targets(
        artifact,
        lambda target: replace(target, state=replace(target.state, pages=3), geometry=target.geometry | {"pages": 3}),
    )
    with Engine(artifact) as engine:
        with pytest.raises(RequestError) as caught:
            engine.generate([[1] * 40], max_tokens=24)
        assert caught.value.message == (
            "prompt 0: expected at most 3 pages of 16 tokens, "
            "found 40 prompt tokens + 23 of the answer = 63 tokens = 4 pages"
        )
        engine.generate([[1] * 40] * 3, max_tokens=9)


def test_an_interrupted_batch_leaves_no_requests(engine, monkeypatch):
    before = engine.stats()["free"]
    with monkeypatch.context() as patch:
        patch.setattr(RequestHandle, "result", lambda handle: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            engine.generate([[1, 2, 3]] * 5, max_tokens=60, ignore_eos=True)
    toy_artifact.check_tokens(engine)
    assert (engine.stats()["live"], engine.stats()["free"]) == (0, before)


def test_the_stats_line_is_json(engine):
    stats = json.loads(json.dumps(engine.stats()))
    assert {"cells", "compile_events", "pools", "free", "live"} <= stats.keys()


def test_a_prompt_takes_the_whole_context_but_for_one_token_and_no_more(engine):
    for length, room in ((toy_artifact.CONTEXT - 2, 2), (toy_artifact.CONTEXT - 1, 1)):
        (done,) = engine.complete([Request((1,) * length, 99, ignore_eos=True)])
        assert done.token_ids == toy_artifact.answer([1] * length, room)[0] and done.stop_reason == "length"
    with pytest.raises(RequestError, match=f"{toy_artifact.CONTEXT}"):
        engine.complete([Request((1,) * toy_artifact.CONTEXT, 1)])
