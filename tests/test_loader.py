"""The ladder on a toy artifact: digests first, then verdicts, then programs; what is damaged is never used."""

import json
import random
import shutil

import pytest

import toy_artifact
from ling3export.artifacts.manifest import read_manifest, write_manifest
from ling3export.errors import ArtifactError, RequestError
from ling3export.runners import pjrt, recompile
from ling3export.runners.engine import Engine
from ling3export.runners.loader import load
from ling3export.runners.recompile import cache_folder
from ling3export.runners.ticket import Ticket

PROMPTS = [[1, 2, 3], [5] * 20, [7] * 40, [300], [100, 200, 4]]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    return toy_artifact.shared(tmp_path_factory)


@pytest.fixture(scope="module")
def compiled(built, tmp_path_factory):
    """An artifact of another jaxlib that was compiled here, and what was said; its cache lies beside it."""
    folder = shutil.copytree(built, tmp_path_factory.mktemp("compiled") / "moved.ling3")
    rebuilt_elsewhere(folder, jaxlib="0.1.2")
    before = sorted(folder.rglob("*"))
    said = []
    with Engine(folder, programs="allow-compile", report=said.append) as engine:
        check_tokens(engine)
        assert engine.stats()["compile_events"] == len(toy_artifact.CELLS)
    assert sorted(folder.rglob("*")) == before, "the cache is beside the artifact, never in it"
    return folder, said


@pytest.fixture
def foreign(compiled, tmp_path):
    """A copy of the artifact of another jaxlib, and of its cache."""
    shutil.copytree(cache_folder(compiled[0]), tmp_path / "moved.ling3.cache")
    return shutil.copytree(compiled[0], tmp_path / "moved.ling3")


@pytest.fixture
def artifact(built, tmp_path):
    """A copy that a test may damage, in another place than it was built."""
    return shutil.copytree(built, tmp_path / "moved.ling3")


def flip(path, offset):
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def rebuilt_elsewhere(artifact, **requires):
    """Makes every executable look as if built on another machine."""
    manifest = read_manifest(artifact)
    for cell in manifest["targets"][toy_artifact.TARGET]["cells"].values():
        cell["call"]["requires"].update(requires)
    write_manifest(artifact, manifest)


def check_tokens(engine):
    completions = engine.generate(PROMPTS, max_tokens=12, ignore_eos=True, logits=True)
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        tokens, logits = toy_artifact.answer(prompt, 12)
        assert completion.token_ids == tokens
        assert (completion.logits == logits).all()


def never_load(monkeypatch):
    monkeypatch.setattr(pjrt, "load_executable", lambda *_: pytest.fail("deserialized"))


@pytest.mark.parametrize("overlap", [True, False])
def test_a_moved_artifact_runs_without_compiling(artifact, overlap):
    said = []
    with Engine(artifact, overlap=overlap, report=said.append) as engine:
        check_tokens(engine)
        stats = engine.stats()
    assert stats["compile_events"] == 0
    assert stats["tokens_in"] == sum(len(prompt) for prompt in PROMPTS)
    assert {verdict.status.value for verdict in engine.verdicts.values()} == {"OPTIMAL"}
    assert said == []
    assert {"manifest", "imports", "backend", "programs", "weights", "state", "check", "first_step"} == set(
        stats["seconds"]
    )


@pytest.mark.parametrize("offset", [0, 1000, -1])
def test_a_flipped_byte_in_a_program_is_found_before_any_is_loaded(artifact, offset, monkeypatch):
    never_load(monkeypatch)
    flip(artifact / "programs" / toy_artifact.TARGET / "decode@2.exec", offset)
    with pytest.raises(ArtifactError, match=r"file `programs/cpu-tp2/decode@2.exec`: expected sha256"):
        load(artifact)


def test_every_flipped_byte_is_found_before_it_is_used(artifact):
    rng = random.Random(0)
    portable = set(artifact.rglob("*.stablehlo"))  # read where it is compiled: another test
    files = sorted(path for path in artifact.rglob("*") if path.is_file() and path not in portable)
    for number in range(200):
        path = files[number % len(files)]
        whole = path.read_bytes()
        flip(path, rng.randrange(len(whole)))
        with pytest.raises(ArtifactError):
            Engine(artifact)
        path.write_bytes(whole)
    with Engine(artifact) as engine:
        check_tokens(engine)


def test_a_missing_program_is_named(artifact):
    (artifact / "programs" / toy_artifact.TARGET / "decode@2.exec").unlink()
    with pytest.raises(ArtifactError, match=r"file `programs/cpu-tp2/decode@2.exec`: expected a readable file"):
        load(artifact)


def test_a_flipped_byte_in_the_weights_is_found_unless_told_not_to_look(artifact):
    flip(artifact / "weights" / "toy.safetensors", -1)
    with pytest.raises(ArtifactError, match=r"`toy.table` slab 1: expected sha256"):
        load(artifact)
    said = []
    load(artifact, check="programs", report=said.append)
    assert said == ["weights are not checked (--check programs)"]


def test_a_missing_weight_file_is_named(artifact):
    (artifact / "weights" / "toy.safetensors").unlink()
    with pytest.raises(ArtifactError, match=r"weight file `toy.safetensors`: expected a readable file"):
        load(artifact, check="programs")


def test_another_jaxlib_is_refused_before_the_deserializer(artifact, monkeypatch):
    never_load(monkeypatch)
    rebuilt_elsewhere(artifact, jaxlib="0.1.2")
    with pytest.raises(ArtifactError, match=r"found RECOMPILE .* \(jaxlib: built for 0.1.2, found "):
        load(artifact)


def test_another_processor_is_refused_before_the_deserializer(artifact, monkeypatch):
    never_load(monkeypatch)
    rebuilt_elsewhere(artifact, cpu_features=["avx1024"])
    with pytest.raises(ArtifactError, match="processor: built for avx1024, which this one lacks"):
        load(artifact)


def test_allow_compile_says_what_it_compiles_and_why(compiled):
    folder, said = compiled
    assert len(said) == len(toy_artifact.CELLS)
    assert all(": RECOMPILE (jaxlib: built for 0.1.2, found " in line and line.endswith(": compiling") for line in said)
    assert len(list(cache_folder(folder).iterdir())) == 2 * len(toy_artifact.CELLS)


def test_the_cache_makes_the_next_start_compile_nothing(foreign):
    said = []
    with Engine(foreign, programs="allow-compile", report=said.append) as engine:
        check_tokens(engine)
        assert engine.stats()["compile_events"] == 0
    assert all(line.endswith(": from moved.ling3.cache") for line in said)


def test_a_damaged_cache_entry_is_compiled_again(foreign):
    manifest = read_manifest(foreign)
    small = sorted(cache_folder(foreign).glob("*.json"), key=lambda path: path.with_suffix(".exec").stat().st_size)
    flip(small[0].with_suffix(".exec"), 500)
    flip(small[1], 50)
    small[2].with_suffix(".exec").unlink()
    said = []
    with Engine(foreign, programs="allow-compile", report=said.append) as engine:
        check_tokens(engine)
        assert engine.stats()["compile_events"] == 3
    assert sum("compiling it again" in line for line in said) == 3
    assert read_manifest(foreign) == manifest


def test_a_damaged_portable_program_is_never_compiled(artifact):
    rebuilt_elsewhere(artifact, jaxlib="0.1.2")
    flip(artifact / "programs" / toy_artifact.TARGET / "decode@2.stablehlo", 100)
    with pytest.raises(ArtifactError, match=r"file `programs/cpu-tp2/decode@2.stablehlo`: expected sha256"):
        load(artifact, programs="allow-compile", report=lambda _: None)


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path):
    cache_folder(tmp_path / "a.ling3").write_text("in the way")
    said = []
    recompile._store(cache_folder(tmp_path / "a.ling3"), "key", (b"program", {}), said.append)
    assert said == [f"not cached: write `a.ling3.cache`: expected a writable file, found File exists, in {tmp_path}"]


def test_a_call_record_that_contradicts_its_cell_is_refused(artifact, monkeypatch):
    never_load(monkeypatch)
    manifest = read_manifest(artifact)
    cell = manifest["targets"][toy_artifact.TARGET]["cells"]["decode@2"]
    cell["call"]["inputs"][0]["shape"] = [1]
    write_manifest(artifact, manifest)
    with pytest.raises(ArtifactError, match="program `decode@2`: expected 4 inputs as its cell"):
        load(artifact)


def test_more_devices_than_there_are_is_an_error(artifact):
    manifest = read_manifest(artifact)
    manifest["targets"][toy_artifact.TARGET]["mesh"]["devices"] = list(range(64))
    write_manifest(artifact, manifest)
    with pytest.raises(Exception, match="CPU devices: expected 64, found 16"):
        load(artifact)


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
    manifest["config"]["eos_token_id"] = [tokens[4]]
    write_manifest(artifact, manifest)
    with Engine(artifact) as engine:
        completion = engine.generate([[1, 2, 3]], max_tokens=12)[0]
    assert (completion.token_ids, completion.stop_reason) == (tokens[: tokens.index(tokens[4]) + 1], "eos")


def test_sampling_depends_on_seed_and_position_alone(built):
    with Engine(built) as engine:
        hot = {"max_tokens": 10, "temperature": 1.5, "ignore_eos": True}
        alone = engine.generate([[1, 2, 3]], seed=3, **hot)[0]
        crowd = engine.generate([*PROMPTS[1:], [1, 2, 3]], seed=3, **hot)[-1]
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
    write_manifest(artifact, read_manifest(artifact) | {"tokenizer": []})
    with Engine(artifact) as engine:
        with pytest.raises(RequestError, match="prompt 0: text in: expected an artifact with a tokenizer, found none"):
            engine.generate(["hello"], max_tokens=4)
        with pytest.raises(RequestError, match="prompt 0: stop strings: expected an artifact with a tokenizer"):
            engine.generate([[1]], max_tokens=4, stop="x")
        completion = engine.generate([[1, 2, 3]], max_tokens=4)[0]
    assert completion.text is None
    assert completion.token_ids == toy_artifact.answer([1, 2, 3], 4)[0]


def test_a_request_larger_than_the_pool_is_refused_with_the_sum(artifact):
    manifest = read_manifest(artifact)
    manifest["targets"][toy_artifact.TARGET]["state"]["pages"] = 3
    write_manifest(artifact, manifest)
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
            patch.setattr(Ticket, "result", lambda ticket: (_ for _ in ()).throw(KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                engine.generate([[1, 2, 3]] * 5, max_tokens=60, ignore_eos=True)
        check_tokens(engine)
        assert (engine.stats()["live"], engine.stats()["free"]) == (0, before)


def test_the_stats_line_is_json(built):
    with Engine(built) as engine:
        json.dumps(engine.stats())
