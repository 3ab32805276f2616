"""The engine with real programs in fp32 against a plain loop, for any arrival times; streams, striped pages."""

import asyncio
import random
import time
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from ling3export.compile.build import build
from ling3export.plan import plan
from ling3export.plan.options import Options
from ling3export.runners.engine.engine import Engine
from ling3export.runners.engine.request import Request, Sampling
from ling3export.runners.load.loader import load
from ling3export.runners.load.model_runner import ModelRunner
from ling3export.runners.state.block_manager import BlockManager
from tests.support.artifacts_fixture import RECIPES, Artifacts
from tests.support.driver import Driver

NAME = "micro-tp4"
VOCAB = 320
LENGTHS = (1, 3, 16, 17, 40, 64, 65, 100, 128, 129, 200, 300, 7, 50)
ANSWER = 24


def prompts():
    rng = np.random.default_rng(11)
    return [rng.integers(0, VOCAB, length).tolist() for length in LENGTHS]


def silent(text: str) -> None:
    """Discards the reports of a start."""


@pytest.fixture(scope="module")
def naive(artifact: Artifacts) -> list[list[int]]:
    """Greedy answers, one request at a time, by calls of the programs: no scheduler, block manager or engine."""
    loaded = load(artifact(NAME), report=silent)
    driver = Driver(loaded.runner, loaded.record)
    (decode,) = driver.paddings["decode"]
    (padding,) = driver.paddings["prefill"]
    answers = []
    for prompt in prompts():
        for start in range(0, len(prompt), padding):
            handle = driver.prefill(1, prompt[start : start + padding], start)
        used = -(-(len(prompt) - start) // 16)
        tokens = [int(loaded.runner.read(handle)[used - 1])]
        while len(tokens) < ANSWER:
            tokens.append(int(loaded.runner.read(driver.decode(decode, {1: len(prompt) + len(tokens) - 1}))[0]))
        answers.append(tokens)
    return answers


def greedy(prompt, max_tokens=ANSWER, **options):
    return Request(tuple(prompt), max_tokens, ignore_eos=True, **options)


def run_in_random_order(engine, seed):
    """Sends each prompt twice, in random order at random moments; returns tokens by prompt."""
    rng = random.Random(seed)
    order = [place for place in range(len(LENGTHS)) for _ in range(2)]
    rng.shuffle(order)
    asked, handles = prompts(), []
    for place in order:
        handles += [(place, engine.submit(greedy(asked[place]))[0])]
        time.sleep(rng.choice([0, 0, 0.002, 0.01]))
    return [(place, handle.result(60).token_ids) for place, handle in handles]


@pytest.mark.parametrize("overlap", [True, False])
def test_the_engine_says_what_a_naive_loop_says(artifact: Artifacts, naive: list[list[int]], overlap: bool):
    with Engine(artifact(NAME), overlap=overlap, report=silent) as engine:
        for place, tokens in run_in_random_order(engine, int(overlap)):
            assert tokens == naive[place], place
        stats = engine.stats()
    cells = stats["cells"]
    assert cells["decode@8"]["padding_waste"] < 0.9 and cells["prefill@128"]["padding_waste"] < 0.9
    assert stats["compile_events"] == 0
    assert (stats["live"], stats["free"]) == (0, stats["pools"])


@pytest.mark.usefixtures("unoptimized")
def test_striped_pages_give_the_same_tokens(
    artifact: Artifacts, naive: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A striped artifact, as for TPU targets, built for cpu: each device has only its own latent pages."""
    forms = {"form": "tiles"}
    given = plan.forms
    monkeypatch.setattr(plan, "forms", lambda config, target: given(config, target) | forms)
    recipe = RECIPES[NAME]
    options = Options(
        paddings=recipe.paddings,
        decode_paddings=(recipe.decode,),
        tp=recipe.tp,
        max_running=8,
        page_size=64,
        context=1024,
        pages=24,
        dtype="float32",
    )
    manifest = build(artifact.checkpoint(NAME), tmp_path / "striped.ling3", options, Mock())
    (target,) = manifest.targets.values()
    (latent,) = [row for row in target.state.arrays if row.name == "mla_latent"]
    assert (target.state.placement, latent.spec) == ("striped", (None, "tp"))
    tables: list[np.ndarray] = []
    step = ModelRunner.step
    monkeypatch.setattr(
        ModelRunner,
        "step",
        lambda runner, p, n, fields: tables.append(fields["page_table"]) or step(runner, p, n, fields),
    )
    with Engine(tmp_path / "striped.ling3", report=silent) as engine:
        for place, tokens in run_in_random_order(engine, 2):
            assert tokens == naive[place], place
        stats = engine.stats()
    rows = np.concatenate(tables)
    rows = rows[rows[:, 0] > 0]
    columns = np.broadcast_to(np.arange(rows.shape[1]), rows.shape)[rows > 0]
    np.testing.assert_array_equal((rows - rows[:, :1])[rows > 0] % 4, columns % 4)
    assert set((rows[:, 0] - 1) % 4) == {0, 1, 2, 3}, "sequences begin on all four devices"
    assert columns.max() == 5, "sequences of six pages went round the four devices"
    assert stats["free"] == stats["pools"] == {"slots": 8, "pages": 24}


def test_giving_pages_back_changes_no_token_in_fp32(
    artifact: Artifacts, naive: list[list[int]], monkeypatch: pytest.MonkeyPatch
):
    """Eight sequences in eight pages all need a second page. docs/engine.md says what holds in bf16."""
    place = LENGTHS.index(50)
    few = BlockManager(slots=8, pages=8, page_size=64, max_pages=16)
    monkeypatch.setattr(BlockManager, "of", lambda target: few)
    with Engine(artifact(NAME), report=silent) as engine:
        done = engine.complete([greedy(prompts()[place]) for _ in range(8)])
        stats = engine.stats()
    assert [each.token_ids for each in done] == [naive[place]] * 8
    assert stats["preempted"] > 0
    assert stats["tokens_in"] == 8 * 50, "what is stored again does not count again"


def random_mate(rng: random.Random) -> Request:
    prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 90))]
    return greedy(prompt, rng.randint(1, 30), sampling=Sampling(1.3, seed=rng.randrange(99)))


def test_sampling_depends_only_on_the_request(artifact: Artifacts):
    """The same request three times in random batches."""
    hot = Sampling(temperature=1.0, top_k=40, top_p=0.9, seed=5)
    asked = greedy(prompts()[4], sampling=hot)
    found = []
    with Engine(artifact(NAME), report=silent) as engine:
        for seed in range(3):
            rng = random.Random(seed)
            mates = [random_mate(rng) for _ in range(rng.randint(0, 12))]
            place = rng.randint(0, len(mates))
            found.append(engine.complete([*mates[:place], asked, *mates[place:]])[place].token_ids)
        other = engine.complete([greedy(prompts()[4], sampling=Sampling(1.0, 40, 0.9, 6))])[0].token_ids
    assert found[0] == found[1] == found[2] != other


def test_a_stream_in_asyncio(artifact: Artifacts, naive: list[list[int]]):
    async def read(engine, place):
        pieces = [p async for p in engine.stream(prompts()[place], max_tokens=ANSWER, ignore_eos=True)]
        done = pieces[-1].completion
        assert "".join(piece.text for piece in pieces) == done.text
        assert [token for piece in pieces for token in piece.token_ids] == done.token_ids == naive[place]
        return len(pieces)

    async def all_of_them(engine):
        return await asyncio.gather(*(read(engine, place) for place in range(len(LENGTHS))))

    with Engine(artifact(NAME), report=silent) as engine:
        assert sum(asyncio.run(all_of_them(engine))) > 3 * len(LENGTHS), "it came in many pieces"
