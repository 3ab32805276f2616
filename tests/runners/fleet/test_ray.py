"""Batches and evaluations on a cluster of three nodes in this machine: what one engine gives, whoever dies."""

import json
import re
import threading
from pathlib import Path

import pytest
from click.testing import CliRunner

from ling3export.runners.batch.run import run_batch
from ling3export.runners.cli.main import main
from ling3export.runners.engine.engine import Engine
from tests.support import ray_nodes, toy_artifact
from tests.support.waiting import until

pytestmark = [pytest.mark.extras, pytest.mark.jit]

SETTINGS = {"max_tokens": 6, "temperature": 1.0, "seed": 5}


@pytest.fixture(scope="module")
def cluster():
    """Two nodes beside the head, with room for two workers each."""
    pytest.importorskip("ray")
    with ray_nodes.cluster() as nodes:
        for _ in range(2):
            nodes.add(engine=2)
        yield nodes


def quiet(text: str) -> None:
    pass


def written(path: Path, count: int) -> Path:
    lines = [{"prompt_ids": [1, 2, 3 + n % 50], "custom_id": f"n{n}"} for n in range(count)]
    path.write_text("".join(json.dumps(line) + "\n" for line in [*lines, {"messages": []}]))
    return path


def call(*words: object):
    return CliRunner().invoke(main, list(map(str, words)), catch_exceptions=False)


def test_a_node_that_dies_in_the_middle_of_a_batch_loses_nothing(cluster, tmp_path):
    """The output is that of one engine, but for the times; many requests, so that some are left when the node ends."""
    source = written(tmp_path / "in.jsonl", 3000)
    with Engine(toy_artifact.shared(), report=quiet) as engine:
        run_batch(engine, source, tmp_path / "whole", model="toy", settings=SETTINGS)
    partial_output = tmp_path / "out.partial"
    cluster.add(engine=2)

    def kill() -> None:
        until(lambda: partial_output.exists() and partial_output.stat().st_size)
        cluster.kill()

    thread = threading.Thread(target=kill)
    thread.start()
    options = ["--max-tokens", 6, "--temperature", 1, "--seed", 5, "--model", "toy", "--replicas", 3]
    where = ["--on", f"ray://{cluster.address}", "--resources", '{"engine": 2}']
    done = call("batch", toy_artifact.shared(), source, tmp_path / "out", *options, *where)
    thread.join()
    assert done.exit_code == 0, done.output
    assert "a worker is gone" in done.stderr
    timeless = [re.sub(r'"created": \d+', "", (tmp_path / name).read_text()) for name in ("out", "whole")]
    assert timeless[0] == timeless[1]
    assert timeless[0].count("\n") == 3001


def test_an_engine_on_two_hosts_of_the_cluster_answers_as_one(cluster, artifact, tmp_path):
    """Each host is an actor on a node of its own; greedy tokens of float32 are those of one process."""
    source = written(tmp_path / "in.jsonl", 9)
    with Engine(artifact("micro-tp2"), check="programs", report=quiet) as engine:
        run_batch(engine, source, tmp_path / "one", model="m", settings=SETTINGS | {"temperature": 0.0})
    where = ["--on", f"ray://{cluster.address}", "--num-hosts", 2, "--resources", '{"engine": 1}']
    options = ["--max-tokens", 6, "--seed", 5, "--model", "m", "--check", "programs"]
    done = call("batch", artifact("micro-2x1"), source, tmp_path / "two", *options, *where)
    assert done.exit_code == 0, done.output
    assert "ray: 1 workers of 2 hosts" in done.stderr and "some on one node" not in done.stderr
    timeless = [re.sub(r'"created": \d+', "", (tmp_path / name).read_text()) for name in ("one", "two")]
    assert timeless[0] == timeless[1]


def test_an_evaluation_on_a_cluster_is_that_of_one_engine(cluster, tmp_path):
    tasks = tmp_path / "tasks.json"
    tasks.write_text(
        json.dumps(
            [
                {"id": f"t{n}", "input": {"prompt_ids": [n % 9 + 1, 2]}, "graders": ["last_numeric"], "target": "42"}
                for n in range(40)
            ]
        )
    )
    options = ["--suite", tasks, "--batch", 4, "--max-tokens", 5]
    where = ["--on", f"ray://{cluster.address}", "--replicas", 2, "--resources", '{"engine": 1}']
    one = call("eval", "run", toy_artifact.shared(), tmp_path / "one", *options)
    many = call("eval", "run", toy_artifact.shared(), tmp_path / "many", *options, *where)
    assert (one.exit_code, many.exit_code) == (0, 0), many.output
    assert one.stdout == many.stdout
    lines = [
        [json.loads(line) | {"ttft_ms": 0, "e2e_ms": 0} for line in written.read_text().splitlines()]
        for written in (tmp_path / name / "predictions.jsonl" for name in ("one", "many"))
    ]
    assert lines[0] == lines[1]
    assert len(lines[0]) == 40
    smoke = call("eval", "run", toy_artifact.shared(), tmp_path / "smoke", "--suite", "product-smoke", *where)
    assert "expected a suite that looks at answers alone, found `product-smoke`" in smoke.stderr
    gone = call("eval", "run", tmp_path / "nothing", tmp_path / "gone", *options, *where)
    assert gone.exit_code == 1
    assert re.search(r"error: ray: artifact `nothing`: .*; on node ", gone.stderr), gone.stderr
