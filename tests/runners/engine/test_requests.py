"""Requests to the engine on a toy artifact: what comes out, what ends an answer, and what is refused at once."""

import json
import shutil
from dataclasses import replace

import pytest

import toy_artifact
from ling3export.artifacts.manifest import read_manifest, write_manifest
from ling3export.errors import RequestError
from ling3export.runners.engine.engine import Engine
from ling3export.runners.engine.handle import RequestHandle
from manifests import changed_targets


@pytest.fixture(scope="module")
def built():
    return toy_artifact.shared()


@pytest.fixture
def artifact(built, tmp_path):
    """A copy that a test may change."""
    return shutil.copytree(built, tmp_path / "moved.ling3")


def test_text_in_and_out(built):
    with Engine(built) as engine:
        completion = engine.generate(["the time"], max_tokens=12, ignore_eos=True)[0]
        tokens, _ = toy_artifact.answer(completion.prompt_ids, 12)
        assert completion.token_ids == tokens
        tokenizer = engine.files.tokenizer("test")
        assert completion.text == tokenizer.decode(tokens)
        assert tokenizer.decode(completion.prompt_ids) == "the time"


def test_a_stop_string_ends_the_text_before_it(built):
    with Engine(built) as engine:
        prompt = [1, 2, 3]
        whole = engine.generate([prompt], max_tokens=12, ignore_eos=True)[0]
        stop = whole.text[3:5]
        assert whole.text.index(stop) == 3
        short = engine.generate([prompt], max_tokens=12, ignore_eos=True, stop=stop)[0]
    assert (short.text, short.stop_reason) == (whole.text[:3], "stop")
    assert whole.token_ids[: len(short.token_ids)] == short.token_ids
    assert len(short.token_ids) < 12


def test_eos_ends_the_answer(artifact):
    tokens, _ = toy_artifact.answer([1, 2, 3], 12)
    manifest = read_manifest(artifact)
    write_manifest(artifact, replace(manifest, config=manifest.config | {"eos_token_id": (tokens[4],)}))
    with Engine(artifact) as engine:
        completion = engine.generate([[1, 2, 3]], max_tokens=12)[0]
    assert (completion.token_ids, completion.stop_reason) == (tokens[: tokens.index(tokens[4]) + 1], "eos")


def test_sampling_depends_on_seed_and_position_alone(built):
    with Engine(built) as engine:
        hot = {"max_tokens": 10, "temperature": 1.5, "ignore_eos": True}
        alone = engine.generate([[1, 2, 3]], seed=3, **hot)[0]
        crowd = engine.generate([*toy_artifact.PROMPTS[1:], [1, 2, 3]], seed=3, **hot)[-1]
        other = engine.generate([[1, 2, 3]], seed=4, **hot)[0]
    assert alone.token_ids == crowd.token_ids
    assert alone.token_ids != other.token_ids


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ([[]], {}, "prompt 0: expected a prompt of at least one token, found an empty one"),
        ([[1], [320]], {}, "prompt 1: expected token ids from 0 to 319, found 320 at place 0"),
        ([[1, -1]], {}, "prompt 0: expected token ids from 0 to 319, found -1 at place 1"),
        ([[1] * 64], {}, "within the context of 64 tokens, found a prompt of 64 tokens + 1 = 65"),
        ([[1.5]], {}, "prompt 0: expected token ids, found 1.5 at place 0"),
        ([[1]], {"max_tokens": 0}, "expected max_tokens of at least 1, found 0"),
        ([[1]], {"temperature": -1.0}, "sampling `temperature`: expected a number from 0 to 2, found -1.0"),
        ([[1]], {"temperature": 2.5}, "sampling `temperature`: expected a number from 0 to 2, found 2.5"),
        ([[1]], {"temperature": float("nan")}, "sampling `temperature`: expected a number from 0 to 2, found nan"),
        ([[1]], {"temperature": True}, "sampling `temperature`: expected a number from 0 to 2, found True"),
        ([[1]], {"top_k": 2.0}, "sampling `top_k`: expected a whole number from 0 to 2147483647, found 2.0"),
        ([[1]], {"top_p": 0.0}, "sampling `top_p`: expected a number above 0, at most 1, found 0.0"),
        ([[1]], {"seed": 1 << 32}, "sampling `seed`: expected a whole number from 0 to 4294967295, found 4294967296"),
        ([[1]], {"stop": ""}, "prompt 0: expected stop strings of at least one character, found an empty one"),
        ("hello", {}, "prompts: expected a list of prompts, found a single one"),
        ([1, 2], {}, "prompts: expected a list of prompts, found a single one"),
    ],
)  # fmt: skip
def test_what_can_never_be_served_is_refused_at_once(built, prompts, options, message):
    with Engine(built) as engine:
        with pytest.raises(RequestError) as caught:
            engine.generate(prompts, **({"max_tokens": 4} | options))
        assert message in caught.value.message
        assert engine.stats()["tokens_in"] == 0


def test_text_without_a_tokenizer_is_refused_by_name(artifact):
    write_manifest(artifact, replace(read_manifest(artifact), tokenizer=()))
    with Engine(artifact) as engine:
        with pytest.raises(RequestError, match="prompt 0: text in: expected an artifact with a tokenizer, found none"):
            engine.generate(["hello"], max_tokens=4)
        with pytest.raises(RequestError, match="prompt 0: stop strings: expected an artifact with a tokenizer"):
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


def test_an_interrupted_batch_leaves_nothing_behind(built, monkeypatch):
    with Engine(built) as engine:
        before = engine.stats()["free"]
        with monkeypatch.context() as patch:
            patch.setattr(RequestHandle, "result", lambda handle: (_ for _ in ()).throw(KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                engine.generate([[1, 2, 3]] * 5, max_tokens=60, ignore_eos=True)
        toy_artifact.check_tokens(engine)
        assert (engine.stats()["live"], engine.stats()["free"]) == (0, before)


def test_the_stats_line_is_json(built):
    with Engine(built) as engine:
        stats = json.loads(json.dumps(engine.stats()))
    assert {"cells", "compile_events", "pools", "free", "live"} <= stats.keys()
