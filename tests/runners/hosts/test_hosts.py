"""Several hosts: 4 processes of 4 virtual devices each, against one process of 16."""

import json
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from ling3export.artifacts.manifest import read_manifest
from ling3export.foundation.errors import ArtifactError, Ling3Error, PlanError, RequestError
from ling3export.machine.targets import choose_target
from ling3export.model.config import Config
from ling3export.plan.targets import TargetSpec, parse_target
from ling3export.runners.engine import assembly
from ling3export.runners.engine.core import StepInputs, decode, encode
from ling3export.runners.engine.engine import Engine
from ling3export.runners.engine.follower import follow
from ling3export.runners.engine.request import Request, Sampling
from ling3export.runners.engine.sequence import Sequence
from ling3export.runners.hosts.hosts import Hosts, find_hosts
from tests.support.artifacts_fixture import run
from tests.support.builds import environment
from tests.support.hosting import hosting
from tests.support.tiny import tiny_fields

pytestmark = pytest.mark.hosts

COUNT = 4
PROMPTS = [list(range(1, 40)), [7, 8, 9]]


def own_shards_only(source: Path, copy: Path, host: int) -> int:
    """A copy of an artifact in which all weight bytes of other hosts are inverted; returns their number."""
    shutil.copytree(source, copy)
    manifest = read_manifest(copy)
    used = {row.tensor: row.split is not None for row in manifest.targets["cpu-4x1-tp4"].parameters}
    share = 0
    for name, entry in manifest.weights.index.items():
        data = np.memmap(copy / entry.file, np.uint8, "r+")
        count, size = len(entry.sha256), entry.shard_bytes
        own = range(count // COUNT * host, count // COUNT * (host + 1)) if used.get(name) else range(count)
        own = own if name in used else range(0)
        for shard in range(count):
            at = entry.offset + shard * size
            if shard not in own:
                data[at : at + size] ^= 0xFF
        share += len(own) * size
        data.flush()
    return share


def test_four_processes_answer_as_one_and_read_only_their_own_weights(artifact, tmp_path):
    """In each host's copy, the others' weights are destroyed: digests, loading and steps never read them."""
    copies = [tmp_path / f"host{number}.ling3" for number in range(COUNT)]
    shares = [own_shards_only(artifact("micro-4x1"), copy, number) for number, copy in enumerate(copies)]
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out.npz"
    prompts.write_text("".join(json.dumps({"prompt_ids": ids}) + "\n" for ids in PROMPTS))
    options = ("--prompt-file", prompts, "--max-tokens", 6, "--json", "--stats", "--logits", out)
    with hosting([["generate", copy, *options] for copy in copies]) as processes:
        said = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0] * COUNT, said
    with Engine(artifact("micro-tp4"), report=lambda text: None) as engine:
        expected = engine.generate(PROMPTS, max_tokens=6, logits=True)
    lines = [json.loads(line) for line in said[0][0].splitlines()]  # gloo's messages go to stderr
    # checked first: where tokens differ, the logits show which side is wrong and from which token on
    with np.load(out) as found:
        for number, completion in enumerate(expected):
            np.testing.assert_allclose(found[f"logits.{number}"], completion.logits, rtol=0, atol=2e-4)
    assert [line["token_ids"] for line in lines] == [completion.token_ids for completion in expected]
    assert [out for out, _ in said[1:]] == [""] * (COUNT - 1)
    stats = json.loads(said[0][1].partition("stats: ")[2].splitlines()[0])
    assert stats["compile_events"] == 0
    assert stats["weight_bytes"] == shares[0]
    for number in range(1, COUNT):
        line = f"host {number}: {shares[number]:,} bytes of weights; following host 0\n"
        assert line in said[number][1]
    entries = read_manifest(copies[0]).weights.index.values()
    whole = sum(entry.shard_bytes for entry in entries if not entry.shards)
    split = sum(entry.shard_bytes * len(entry.sha256) for entry in entries if entry.shards)
    assert all(abs(share / (whole + split / COUNT) - 1) < 0.01 for share in shares)


def test_a_damaged_weight_on_one_host_ends_all_with_its_name(artifact, tmp_path):
    damaged = tmp_path / "damaged.ling3"
    shutil.copytree(artifact("micro-4x1"), damaged)
    entry = read_manifest(damaged).weights.index["embeddings.lm_head"]
    data = np.memmap(damaged / entry.file, np.uint8, "r+")
    data[entry.offset + 3 * entry.shard_bytes] ^= 1  # of host 3
    data.flush()
    paths = [artifact("micro-4x1")] * 3 + [damaged]
    options = ("--prompt-ids", "1,2,3", "--max-tokens", 2)
    with hosting([["generate", path, *options] for path in paths]) as processes:
        said = [process.communicate(timeout=60)[1] for process in processes]
        assert [process.returncode for process in processes] == [1] * COUNT
    assert "error: tensor `embeddings.lm_head` shard 3: expected sha256" in said[3]
    assert "error: host 3 ended: tensor `embeddings.lm_head` shard 3: expected sha256" in said[0]


def test_hosts_agree_on_overlap_prefix_cache_and_llguidance_before_anything_is_loaded(monkeypatch):
    """These decide the order of calls. Regression: a host without llguidance failed in the middle of a step."""

    def load(*_, agreed, **others):
        raise Ling3Error(f"{agreed} {others['hosts'].number}")

    monkeypatch.setattr(assembly, "load", load)
    monkeypatch.setattr(assembly, "library", lambda: "none")
    first = "{'overlap': False, 'prefix_cache': None, 'llguidance': 'none'} 0"
    with pytest.raises(Ling3Error, match=f"^{re.escape(first)}$"):
        Engine("none", hosts=Hosts("127.0.0.1:1", 2, 0), overlap=False)
    second = "{'overlap': True, 'prefix_cache': False, 'llguidance': 'none'} 1"
    with pytest.raises(Ling3Error, match=f"^{re.escape(second)}$"):
        follow("none", Hosts("127.0.0.1:1", 2, 1), prefix_cache=False)


def test_inputs_travel_whole():
    request = Request((1, 2), 5, Sampling(0.5, 3, 0.9, 7), ("\n", "é"), True, True, "line 3", cache_salt="a")
    how = Sampling(logit_bias={3: 2.0}, presence_penalty=0.5, repetition_penalty=1.5)
    more = Request((3,), 1, how, logprobs=3, grammar=("regex", "a")), Request((1, 2, 3), 0, score_from=2)
    sent = {4: request, 5: more[0], 7: more[1]}
    arrivals = tuple(Sequence(request, number) for number, request in sent.items())
    found = decode(encode(StepInputs(arrivals, (2, 3), True)))
    assert {sequence.number: sequence.request for sequence in found.arrivals} == sent
    assert found._replace(arrivals=()) == StepInputs((), (2, 3), True)
    assert decode(encode(StepInputs(compare=True))) == StepInputs(compare=True)
    assert encode(StepInputs()) == b""
    assert decode(b"") == StepInputs()


def test_which_host_this_is():
    secret = "of-these-four-hosts"
    variables = {"DIST_INIT_ADDR": "10.0.0.1:9", "NNODES": "4", "NODE_RANK": "2", "LING3_SECRET": secret}
    assert find_hosts({}) is None
    assert find_hosts({"NODE_RANK": "0"}) is None
    assert find_hosts({"NNODES": "1"}) is None
    assert find_hosts(variables) == Hosts("10.0.0.1:9", 4, 2, 300, 30, secret)
    more = {"LING3_START_TIMEOUT": "5", "LING3_HOST_TIMEOUT": "2.5"}
    assert find_hosts(variables | more) == Hosts("10.0.0.1:9", 4, 2, 5, 2.5, secret)
    del variables["LING3_SECRET"]
    assert find_hosts(variables | {"LING3_TRUST_NETWORK": "1"}) == Hosts("10.0.0.1:9", 4, 2, trust_network=True)
    assert Hosts("[::1]:7", 2, 1).address == ("::1", 7)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (("h:1", "4", ""), "hosts: expected DIST_INIT_ADDR, NNODES, NODE_RANK, found no NODE_RANK"),
        (("", "4", "0"), "hosts: expected DIST_INIT_ADDR, NNODES, NODE_RANK, found no DIST_INIT_ADDR"),
        (("h", "4", "0"), "coordinator: expected HOST:PORT, found h"),
        (("h:1", "four", "0"), "NNODES: expected a whole number, found four"),
        (("h:1", "4", "4"), "host id: expected 0 to 3 of 4 hosts, found 4"),
        (("h:1", "4", "3"), "coordinator h:1: other machines reach host 0, and there is no secret"),
        (("auto", "", ""), "DIST_INIT_ADDR=auto: jax knows no launcher of this cluster"),
    ],
)
def test_a_host_that_is_half_known_is_refused(given, text):
    with pytest.raises(Ling3Error) as caught:
        find_hosts(dict(zip(("DIST_INIT_ADDR", "NNODES", "NODE_RANK"), given, strict=True)))
    assert caught.value.message == text


def test_a_launcher_is_asked():
    variables = {
        "DIST_INIT_ADDR": "auto",
        "LING3_SECRET": "of-these-four-hosts",
        "SLURM_JOB_ID": "70000",
        "SLURM_STEP_NODELIST": "node[1-4]",
        "SLURM_NTASKS": "4",
        "SLURM_PROCID": "3",
        "SLURM_LOCALID": "0",
        "SLURM_STEP_NUM_NODES": "4",
    }
    code = "from ling3export.runners.hosts.hosts import find_hosts; print(find_hosts())"
    done = run(sys.executable, "-c", code, environment=environment(variables))
    assert done.stdout.startswith("Hosts(coordinator='node1:") and "count=4, number=3" in done.stdout


def test_an_artifact_for_another_number_of_hosts_is_refused_with_both():
    targets = {
        "cpu-4x4-tp16": SimpleNamespace(platform="cpu", processes=4),
        "cpu-tp16": SimpleNamespace(platform="cpu", processes=1),
    }
    assert choose_target(targets, None, ["cpu"]) == "cpu-tp16"
    assert choose_target(targets, None, ["cpu"], 4) == "cpu-4x4-tp16"
    for name, count, text in (
        ("cpu-4x4-tp16", 1, "target `cpu-4x4-tp16`: expected the 4 hosts that it was built for, found one host"),
        ("cpu-4x4-tp16", 2, "target `cpu-4x4-tp16`: expected the 4 hosts that it was built for, found 2 hosts"),
        ("cpu-tp16", 2, "target `cpu-tp16`: expected the one host that it was built for, found 2 hosts"),
    ):
        with pytest.raises(ArtifactError) as caught:
            choose_target(targets, name, ["cpu"], count)
        assert caught.value.message == text
    with pytest.raises(ArtifactError) as caught:
        choose_target(targets, None, ["cpu"], 2)
    assert caught.value.message == (
        "target: expected one for cpu on 2 hosts, found cpu-4x4-tp16 (4 hosts), cpu-tp16, in the manifest"
    )


def test_a_cpu_target_of_several_hosts_is_parsed():
    config = Config.from_dict(tiny_fields())
    assert parse_target("cpu:2x2", None, config) == TargetSpec("cpu", None, "2x2", 4, 2)
    assert parse_target("cpu:2x2@4", None, config).name == "cpu-2x2-tp4"
    for text, tp, message in (
        ("cpu:2", None, "target `cpu:2`: expected HOSTSxDEVICES behind cpu, from two hosts on, found `2`"),
        ("cpu:1x4", None, "target `cpu:1x4`: expected HOSTSxDEVICES behind cpu, from two hosts on, found `1x4`"),
        ("cpu:2x2:x", None, "target `cpu:2x2:x`: expected HOSTSxDEVICES behind cpu, from two hosts on, found `2x2:x`"),
        ("cpu:2x2", 2, "target `cpu:2x2`: expected TP to be its 4 devices, found 2"),
    ):
        with pytest.raises(PlanError) as caught:
            parse_target(text, tp, config)
        assert caught.value.message == message


def test_only_the_first_host_leads(tmp_path):
    with pytest.raises(RequestError, match="engine: expected it on host 0, found host 1"):
        Engine(tmp_path, hosts=Hosts("127.0.0.1:9", 2, 1))
