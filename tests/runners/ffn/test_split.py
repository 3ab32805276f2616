"""Attention processes and FFN workers, here threads of one process: their tokens are those of one engine."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest

from ling3export.artifacts.agreement import check_agreement
from ling3export.artifacts.manifest import read_manifest
from ling3export.artifacts.records import WrongRecordError
from ling3export.foundation.errors import ArtifactError, Ling3Error
from ling3export.foundation.phases import SPLIT
from ling3export.foundation.shards import Shard
from ling3export.runners.calibrate.receipts import relative_error
from ling3export.runners.engine import Engine
from ling3export.runners.engine.handle import EngineStopped
from ling3export.runners.engine.request import Completion
from ling3export.runners.ffn.segment import FOLDER, PREFIX
from ling3export.runners.ffn.worker import FfnWorker
from tests.support.artifacts_fixture import Artifacts
from tests.support.serving import Server
from tests.support.tolerances import BFLOAT16_MEDIAN, SAME

pytestmark = pytest.mark.build

MICRO = 2  # tokens of a micro batch
LONG = 7


@pytest.fixture(scope="module")
def folder(artifact: Artifacts) -> Path:
    return artifact("micro-tp1-afd")


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    """No test leaves a segment behind. Other processes may run these tests at the same time."""
    yield
    assert [*FOLDER.glob(f"{PREFIX}split-{os.getpid()}-*")] == []


def quiet(_: str) -> None:
    pass


def prompts(session: int) -> list[list[int]]:
    """Seven, of different lengths: more than a step of two rows, and an odd number of them."""
    rng = np.random.default_rng(session)
    return [rng.integers(0, 160, length).tolist() for length in (1, 5, 20, 3, 17, 2, 9)]


def answers(engine: Engine, session: int) -> list[tuple[int, ...]]:
    done = engine.generate(prompts(session), max_tokens=LONG, ignore_eos=True)
    return [tuple(each.token_ids) for each in done]


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[tuple[int, ...]]]:
    """What one engine answers to each session's prompts."""
    with Engine(folder, report=quiet) as engine:
        assert not any(name.partition("@")[0] in SPLIT for name in engine.verdicts)  # nor are they loaded
        return [answers(engine, session) for session in range(3)]


def name(kind: str = "") -> str:
    return f"split-{os.getpid()}-{time.monotonic_ns()}{kind}"


@contextmanager
def workers(folder: Path, count: int, sessions: int, micro_batches: int, **options: Any) -> Iterator[list[str]]:
    """Threads with workers; each has to end in order once its sessions left."""
    base, errors = name(), list[Ling3Error]()
    names = [f"{base}.{index}" for index in range(count)]
    made = [
        FfnWorker(
            folder,
            each,
            sessions=sessions,
            micro_batches=micro_batches,
            share=Shard(index, count),
            check="programs",
            report=quiet,
            **options,
        )
        for index, each in enumerate(names)
    ]

    def run(worker: FfnWorker) -> None:
        try:
            worker.run()
        except Ling3Error as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(each,)) for each in made]
    for thread in threads:
        thread.start()
    try:
        yield names
    finally:
        for thread in threads:
            thread.join(120)
        assert not any(thread.is_alive() for thread in threads)
        assert errors == []


@pytest.mark.parametrize(
    ("attention", "ffn", "micro_batches", "synchronous"),
    [(2, 1, 2, True), (1, 2, 1, False), (3, 2, 3, False)],
    ids=["2A1F", "1A2F", "3A2F"],
)
def test_tokens_are_those_of_one_engine(
    folder: Path, expected: list[list[tuple[int, ...]]], attention: int, ffn: int, micro_batches: int, synchronous: bool
):
    """Also where one session has fewer sequences in the end, and one worker no expert of a micro batch."""
    found: dict[int, list[tuple[int, ...]]] = {}

    def run(session: int, names: list[str]) -> None:
        with Engine(folder, check="programs", report=quiet, ffn=names) as engine:
            found[session] = answers(engine, session)

    with workers(folder, ffn, attention, micro_batches, synchronous=synchronous) as names:
        threads = [threading.Thread(target=run, args=(session, names)) for session in range(attention)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
    assert [found[session] for session in range(attention)] == expected[:attention]


def test_an_artifact_without_split_programs_is_refused(artifact: Artifacts):
    whole = artifact("micro-tp1")
    with pytest.raises(ArtifactError, match="expected the programs of `build --afd`, found none"):
        FfnWorker(whole, name(), report=quiet)
    with pytest.raises(ArtifactError, match="expected the programs of `build --afd`, found none"):
        Engine(whole, report=quiet, ffn=["any"])


def test_more_sessions_than_were_built_for_are_refused(folder: Path):
    with pytest.raises(ArtifactError, match=r"micro batches of 2 tokens of 4 sessions: .* experts at \[8, 24\] pairs"):
        FfnWorker(folder, name(), sessions=4, report=quiet)


def test_receipts_have_the_split_cells(folder: Path):
    manifest = read_manifest(folder)
    receipts = manifest.vectors.receipts["cpu-tp1"]
    names = {"attend@2", "combine@2", "head@2", "dispatch@8", "dispatch@24", "experts@8", "experts@24"}
    assert {cell.name for cell in manifest.targets["cpu-tp1"].cells.values() if cell.phase in SPLIT} == names
    assert all(receipts.cells[each].status == "passed" and receipts.cells[each].positions == 14 for each in names)
    assert receipts.agreement["split_against_decode"] < SAME  # a whole step through the split equals decode@2


@pytest.mark.parametrize(
    ("without", "said"),
    [("head@2", "expected [2], the paddings of head"), ("experts@8", "expected [8, 24], the paddings of experts")],
)
def test_a_manifest_without_one_of_the_split_cells_is_refused(folder: Path, without: str, said: str):
    manifest = read_manifest(folder)
    target = manifest.targets["cpu-tp1"]
    cells = {key: cell for key, cell in target.cells.items() if key != without}
    receipts = manifest.vectors.receipts["cpu-tp1"]
    kept = replace(receipts, cells={key: each for key, each in receipts.cells.items() if key != without})
    changed = replace(
        manifest,
        targets={"cpu-tp1": replace(target, cells=cells)},
        vectors=replace(manifest.vectors, receipts={"cpu-tp1": kept}),
    )
    with pytest.raises(WrongRecordError, match=re.escape(said)):
        check_agreement(changed)


def test_a_server_answers_through_a_worker_and_says_when_it_has_ended(
    folder: Path, expected: list[list[tuple[int, ...]]]
):
    """Four clients at once; then a session left in order, the worker with it, and no segment is there."""

    def ask(prompt: list[int]) -> httpx2.Response:
        asked = {"model": "micro", "prompt": prompt, "max_tokens": LONG, "temperature": 0, "ignore_eos": True}
        return httpx2.post(f"{server.url}/v1/completions", json=asked | {"return_token_ids": True}, timeout=120)

    base = name()
    worker = FfnWorker(folder, base, check="programs", report=quiet)
    thread = threading.Thread(target=worker.run)
    thread.start()
    with Server(folder, "--ffn", base, "--check", "programs", "--model", "micro") as server:
        with ThreadPoolExecutor(4) as clients:
            found = list(clients.map(ask, prompts(0)))
        assert [tuple(each.json()["choices"][0]["token_ids"]) for each in found] == expected[0]
        worker.segment.say("SIGTERM came")
        worker.segment.buffers.stop()
        thread.join(60)
        failed = ask([1, 2])
        assert failed.status_code == 503 and failed.json()["error"]["code"] == "engine_stopped"
        assert "found it ended: SIGTERM came" in server.said()
        assert server.stop() == 0
    assert not thread.is_alive()


def test_eight_bits_on_the_wire_are_within_the_tolerance_of_bfloat16(artifact: Artifacts):
    """Logits of a bf16 model through a worker against those of the fused step, while the tokens are the same."""
    folder = artifact("micro-tp1-afd-int8")
    manifest = read_manifest(folder)
    receipts = manifest.vectors.receipts["cpu-tp1"]
    assert receipts.cells["attend@2"].status == "passed" and receipts.agreement["split_against_decode"] > 0

    def asked(engine: Engine) -> list[Completion]:
        return engine.generate(prompts(0), max_tokens=LONG, ignore_eos=True, logits=True)

    with Engine(folder, check="programs", report=quiet) as engine:
        fused = asked(engine)
    with workers(folder, 1, 1, 2) as names, Engine(folder, check="programs", report=quiet, ffn=names) as engine:
        split = asked(engine)
        sent = engine.stats()["split"]
    errors = []
    for one, other in zip(fused, split, strict=True):
        assert one.logits is not None and other.logits is not None
        for at, (left, right) in enumerate(zip(one.logits, other.logits, strict=True)):
            if at and one.token_ids[at - 1] != other.token_ids[at - 1]:
                break
            if at:  # the first comes from prefill, which is not cut
                errors.append(relative_error(right, left))
    assert len(errors) > LONG and 0 < np.median(errors) < BFLOAT16_MEDIAN
    (tokens,) = (leaf for leaf in manifest.targets["cpu-tp1"].cells["attend@2"].outputs if leaf.name == "tokens")
    bytes_a_pair = manifest.config["hidden_size"] + 4
    assert (tokens.shape, tokens.dtype) == ((2, bytes_a_pair), "uint8")
    assert sent["bytes_sent"] % bytes_a_pair == 0


def test_a_killed_worker_ends_generate_and_leaves_no_segment(folder: Path):
    """Two processes: the only test that kills one, so that the kernel gives its lock back."""
    base, runner = name(), [sys.executable, "-m", "ling3export.runners.cli"]
    with ExitStack() as stack:
        command = [*runner, "ffn-worker", folder, "--context", base, "--check", "programs"]
        worker = stack.enter_context(subprocess.Popen(command, stderr=subprocess.PIPE, text=True))
        stack.callback(worker.kill)
        with Engine(folder, check="programs", report=quiet, ffn=[base]) as engine:
            timer = threading.Timer(1, worker.send_signal, (signal.SIGKILL,))
            timer.start()
            with pytest.raises(EngineStopped, match="found its process gone"):
                engine.generate([[1, 2, 3]] * 5, max_tokens=900, ignore_eos=True)
            timer.join()
    assert not (FOLDER / f"{PREFIX}{base}").exists()
