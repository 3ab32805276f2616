"""An attention process and an FFN worker, as threads of one process: the tokens are those of one engine."""

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx2
import numpy as np
import pytest
from msgspec.structs import replace

from ling3export.artifacts.agreement import check_agreement
from ling3export.artifacts.manifest import read_manifest
from ling3export.artifacts.records import WrongRecordError
from ling3export.foundation.errors import ArtifactError, Ling3Error
from ling3export.foundation.phases import SPLIT
from ling3export.runners.calibrate.receipts import relative_error
from ling3export.runners.engine import Engine
from ling3export.runners.engine.request import Completion
from ling3export.runners.ffn.worker import FfnWorker
from tests.support.artifacts_fixture import Artifacts
from tests.support.serving import Server
from tests.support.tolerances import BFLOAT16_MEDIAN, SAME

pytestmark = pytest.mark.build

LONG = 7


@pytest.fixture(scope="module")
def folder(artifact: Artifacts) -> Path:
    return artifact("micro-tp1-afd")


def quiet(_: str) -> None:
    pass


def prompts() -> list[list[int]]:
    """Seven prompts of different lengths: more than a step of two rows holds, and an odd number."""
    rng = np.random.default_rng(0)
    return [rng.integers(0, 160, length).tolist() for length in (1, 5, 20, 3, 17, 2, 9)]


def answers(engine: Engine) -> list[tuple[int, ...]]:
    done = engine.generate(prompts(), max_tokens=LONG, ignore_eos=True)
    return [tuple(each.token_ids) for each in done]


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[tuple[int, ...]]:
    """The answers of one engine."""
    with Engine(folder, report=quiet) as engine:
        assert not any(name.partition("@")[0] in SPLIT for name in engine.verdicts)  # nor are they loaded
        return answers(engine)


def name() -> str:
    return f"split-{os.getpid()}-{time.monotonic_ns()}"


@contextmanager
def worker(folder: Path) -> Iterator[str]:
    """A thread with a worker, which has to end without an error when the attention process leaves."""
    chosen, errors = name(), list[Ling3Error]()
    made = FfnWorker(folder, chosen, check="programs", report=quiet)

    def run() -> None:
        try:
            made.run()
        except Ling3Error as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield chosen
    finally:
        thread.join(120)
        assert not thread.is_alive()
        assert errors == []


def test_tokens_are_those_of_one_engine(folder: Path, expected: list[tuple[int, ...]]):
    with worker(folder) as chosen, Engine(folder, check="programs", report=quiet, ffn=chosen) as engine:
        assert answers(engine) == expected


def test_an_artifact_without_split_programs_is_refused(artifact: Artifacts):
    whole = artifact("micro-tp1")
    with pytest.raises(ArtifactError, match="the artifact has none of the programs of `build --afd`"):
        FfnWorker(whole, name(), report=quiet)
    with pytest.raises(ArtifactError, match="the artifact has none of the programs of `build --afd`"):
        Engine(whole, report=quiet, ffn="any")


def test_receipts_have_the_split_cells(folder: Path):
    manifest = read_manifest(folder)
    receipts = manifest.vectors.receipts["cpu-tp1"]
    names = {"attend@2", "combine@2", "head@2", "dispatch@8", "experts@8"}
    assert {cell.name for cell in manifest.targets["cpu-tp1"].cells.values() if cell.phase in SPLIT} == names
    assert all(receipts.cells[each].status == "passed" and receipts.cells[each].positions == 14 for each in names)
    assert receipts.agreement["split_against_decode"] < SAME  # a whole step through the split equals decode@2


@pytest.mark.parametrize(
    ("without", "said"),
    [("head@2", "expected [2], the paddings of head"), ("experts@8", "expected [8], the paddings of experts")],
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


def test_a_server_answers_through_a_worker_and_says_when_it_has_ended(folder: Path, expected: list[tuple[int, ...]]):
    """Four clients at once; then the worker is killed, and the kernel closes its socket."""

    def ask(prompt: list[int]) -> httpx2.Response:
        asked = {"model": "micro", "prompt": prompt, "max_tokens": LONG, "temperature": 0, "ignore_eos": True}
        return httpx2.post(f"{server.url}/v1/completions", json=asked | {"return_token_ids": True}, timeout=120)

    chosen = name()
    command = [sys.executable, "-m", "ling3export.runners.cli", "ffn-worker", folder, "--context", chosen]
    with ExitStack() as stack:
        killed = stack.enter_context(subprocess.Popen(command, stderr=subprocess.PIPE, text=True))
        stack.callback(killed.kill)
        server = stack.enter_context(Server(folder, "--ffn", chosen, "--check", "programs", "--model", "micro"))
        with ThreadPoolExecutor(4) as clients:
            found = list(clients.map(ask, prompts()))
        assert [tuple(each.json()["choices"][0]["token_ids"]) for each in found] == expected
        killed.kill()
        failed = ask([1, 2])
        assert failed.status_code == 503 and failed.json()["error"]["code"] == "engine_stopped"
        assert "found its process gone" in server.said()
        assert server.stop() == 0


@pytest.mark.extras
def test_eight_bits_on_the_wire_are_within_the_tolerance_of_bfloat16(artifact: Artifacts):
    """Logits of a bf16 model through a worker against those of the fused step, for the same tokens."""
    folder = artifact("micro-tp1-afd-int8")
    manifest = read_manifest(folder)
    receipts = manifest.vectors.receipts["cpu-tp1"]
    assert receipts.cells["attend@2"].status == "passed" and receipts.agreement["split_against_decode"] > 0

    def asked(engine: Engine) -> list[Completion]:
        return engine.generate(prompts(), max_tokens=LONG, ignore_eos=True, logits=True)

    with Engine(folder, check="programs", report=quiet) as engine:
        fused = asked(engine)
    with worker(folder) as chosen, Engine(folder, check="programs", report=quiet, ffn=chosen) as engine:
        split = asked(engine)
    errors = []
    for one, other in zip(fused, split, strict=True):
        assert one.logits is not None and other.logits is not None
        for at, (left, right) in enumerate(zip(one.logits, other.logits, strict=True)):
            if at and one.token_ids[at - 1] != other.token_ids[at - 1]:
                break
            if at:  # the first comes from prefill, which is not split
                errors.append(relative_error(right, left))
    assert len(errors) > LONG and 0 < np.median(errors) < BFLOAT16_MEDIAN
    (tokens,) = (leaf for leaf in manifest.targets["cpu-tp1"].cells["attend@2"].outputs if leaf.name == "tokens")
    bytes_a_pair = manifest.config["hidden_size"] + 4
    assert (tokens.shape, tokens.dtype) == ((2, bytes_a_pair), "uint8")
