"""Several hosts: 4 processes of 4 virtual devices each, against one process of 16."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from artifacts_fixture import run
from builds import environment
from ling3export.artifacts.manifest import read_manifest
from ling3export.errors import ArtifactError, Ling3Error, PlanError, RequestError
from ling3export.model.config import Config
from ling3export.peers import free_port
from ling3export.runners import channel as channels
from ling3export.runners.channel import END, TURN, Channel
from ling3export.runners.engine import Engine
from ling3export.runners.follow import decode, encode
from ling3export.runners.hosts import Hosts, find_hosts
from ling3export.runners.rendezvous import HostsError, meet
from ling3export.runners.request import Request, Sampling
from ling3export.runners.targets import check_hosts, choose_target
from ling3export.runners.turns import Arrival, Commands
from ling3export.targets import Target, parse_target
from tiny import tiny_fields

COUNT = 4
PROMPTS = [list(range(1, 40)), [7, 8, 9]]
IDENTITY = {"artifact": "a1", "target": "cpu-4x4-tp16"}
GONE = "error: host {}: expected its process to run, found that it ended\n"
HINT = "hint: hosts live and die together: start the command on all of them again\n"


@contextmanager
def started(artifacts: list[Path], *options: object, variables: bool = False) -> Iterator[list[subprocess.Popen[str]]]:
    """``generate`` on every host; killed at the end of the block.

    Args:
        artifacts: Of each host.
        options: More of the command line.
        variables: Say which host it is by the environment instead of options.
    """
    address, processes = f"127.0.0.1:{free_port()}", []
    for number, path in enumerate(artifacts):
        who = {"DIST_INIT_ADDR": address, "NNODES": str(len(artifacts)), "NODE_RANK": str(number)}
        named = ["--coordinator", address, "--num-hosts", len(artifacts), "--host-id", number]
        command = [sys.executable, "-m", "ling3export.runners.cli", "generate", path, *options]
        processes.append(
            subprocess.Popen(
                [str(part) for part in (*command, *([] if variables else named))], text=True,
                env=environment(who if variables else {}), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            )
        )  # fmt: skip
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def own_slabs_only(source: Path, copy: Path, host: int) -> int:
    """A copy of an artifact with every weight byte inverted that is not of ``host``; returns how many are."""
    shutil.copytree(source, copy)
    manifest = read_manifest(copy)
    used = {row["tensor"]: row["spec"][:1] == ["tp"] for row in manifest["targets"]["cpu-4x4-tp16"]["parameters"]}
    share = 0
    for name, entry in manifest["weights"]["index"].items():
        data = np.memmap(copy / "weights" / entry["file"], np.uint8, "r+")
        count, size = len(entry["sha256"]), entry["slab_bytes"]
        own = range(count // COUNT * host, count // COUNT * (host + 1)) if used.get(name) else range(count)
        own = own if name in used else range(0)
        for slab in range(count):
            at = entry["offset"] + slab * size
            if slab not in own:
                data[at : at + size] ^= 0xFF
        share += len(own) * size
        data.flush()
    return share


def test_four_processes_answer_as_one_and_read_their_own_weights_alone(artifact, tmp_path):
    """Each has a copy in which the others' weights are destroyed: digests, loading and steps never look at them."""
    copies = [tmp_path / f"host{number}.ling3" for number in range(COUNT)]
    shares = [own_slabs_only(artifact("small-4x4"), copy, number) for number, copy in enumerate(copies)]
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out.npz"
    prompts.write_text("".join(json.dumps({"prompt_ids": ids}) + "\n" for ids in PROMPTS))
    options = ("--prompt-file", prompts, "--max-tokens", 6, "--json", "--stats", "--logits", out)
    with started(copies, *options, variables=True) as processes:
        said = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0] * COUNT, said
    with Engine(artifact("small-tp16"), report=lambda text: None) as engine:
        expected = engine.generate(PROMPTS, max_tokens=6, logits=True)
    lines = [json.loads(line) for line in said[0][0].splitlines()]  # gloo's chatter goes to stderr
    assert [line["token_ids"] for line in lines] == [completion.token_ids for completion in expected]
    with np.load(out) as found:
        for number, completion in enumerate(expected):
            np.testing.assert_allclose(found[f"logits.{number}"], completion.logits, rtol=0, atol=2e-4)
    assert [out for out, _ in said[1:]] == [""] * (COUNT - 1)
    stats = json.loads(said[0][1].partition("stats: ")[2].splitlines()[0])
    assert stats["compile_events"] == 0
    assert stats["weight_bytes"] == shares[0]
    for number in range(1, COUNT):
        line = f"host {number}: {shares[number]:,} bytes of weights; following host 0\n"
        assert line in said[number][1]
    entries = read_manifest(copies[0])["weights"]["index"].values()
    whole = sum(entry["slab_bytes"] for entry in entries if not entry["slabs"])
    split = sum(entry["slab_bytes"] * len(entry["sha256"]) for entry in entries if entry["slabs"])
    assert all(abs(share / (whole + split / COUNT) - 1) < 0.01 for share in shares)


@pytest.mark.parametrize("victim", [0, 2])
def test_when_one_process_is_killed_the_others_say_so_and_end(artifact, victim):
    options = ("--prompt-ids", "1,2,3", "--max-tokens", 1000, "--ignore-eos", "--check", "programs")
    with started([artifact("small-4x4")] * COUNT, *options) as processes:
        watched = processes[1].stderr
        assert watched is not None
        for line in watched:
            if "following host 0" in line:
                break
        time.sleep(2)  # steps run
        os.kill(processes[victim].pid, signal.SIGKILL)
        killed = time.monotonic()
        ends = {number: process.communicate(timeout=60) for number, process in enumerate(processes) if number != victim}
        assert time.monotonic() - killed < 60
        assert [processes[number].returncode for number in ends] == [1] * (COUNT - 1)
    for out, err in ends.values():
        assert err.endswith(GONE.format(victim) + HINT), err
        assert out == ""


def test_a_damaged_weight_on_one_host_ends_all_with_its_name(artifact, tmp_path):
    damaged = tmp_path / "damaged.ling3"
    shutil.copytree(artifact("small-4x4"), damaged)
    entry = read_manifest(damaged)["weights"]["index"]["embeddings.lm_head"]
    data = np.memmap(damaged / "weights" / entry["file"], np.uint8, "r+")
    data[entry["offset"] + 13 * entry["slab_bytes"]] ^= 1  # of host 3
    data.flush()
    paths = [artifact("small-4x4")] * 3 + [damaged]
    with started(paths, "--prompt-ids", "1,2,3", "--max-tokens", 2) as processes:
        said = [process.communicate(timeout=60)[1] for process in processes]
        assert [process.returncode for process in processes] == [1] * COUNT
    assert "error: tensor `embeddings.lm_head` slab 13: expected sha256" in said[3]
    assert "error: host 3 ended: tensor `embeddings.lm_head` slab 13: expected sha256" in said[0]


def in_threads(*calls: Callable[[], Any]) -> list[Any]:
    """Results of calls that run at once; an error is a result."""
    results: list[Any] = [None] * len(calls)

    def work(place: int) -> None:
        try:
            results[place] = calls[place]()
        except Ling3Error as error:
            results[place] = error

    threads = [threading.Thread(target=work, args=(place,)) for place in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results


def hosts(count: int = 2, timeout: float = 20.0) -> list[Hosts]:
    address = f"127.0.0.1:{free_port()}"
    return [Hosts(address, count, number, timeout) for number in range(count)]


class NoService:
    """Instead of jax's service, which these tests do not need."""

    def __init__(self, host: str, port: int, count: int) -> None:
        pass

    def end(self) -> None:
        pass


@contextmanager
def connected(lost: list[str]) -> Iterator[list[Channel]]:
    two = in_threads(*(lambda place=place: Channel(place, IDENTITY, lost.append) for place in hosts()))
    try:
        yield two
    finally:
        for each in two:
            each.close()


@pytest.fixture
def no_service(monkeypatch):
    monkeypatch.setattr(channels, "Service", NoService)


def test_a_late_host_is_waited_for(no_service):
    first, second = hosts()

    def late() -> Channel:
        time.sleep(1.5)
        return Channel(second, IDENTITY, print)

    begun = time.monotonic()
    one, two = in_threads(lambda: Channel(first, IDENTITY, print), late)
    assert time.monotonic() - begun >= 1.5
    one.send(TURN, b"hello")
    assert two.take() == (TURN, b"hello")
    two.parts(b"two")
    assert one.parts(b"one") == [b"one", b"two"]
    one.close()
    two.close()


def test_a_host_that_does_not_come_is_named_on_all_that_are_there():
    first, second, _ = hosts(3, timeout=1.0)
    one, two = in_threads(lambda: meet(first, IDENTITY), lambda: meet(second, IDENTITY))
    text = "hosts: expected 3 within 1 s, found no word of host 2"
    assert str(one) == f"{text}\nhint: start the same command on every host; --start-timeout waits longer"
    assert str(two) == f"host 0 gave up: {text}"


def test_a_first_host_that_does_not_come_is_named():
    _, second = hosts(2, timeout=0.5)
    (error,) = in_threads(lambda: meet(second, IDENTITY))
    assert isinstance(error, HostsError)
    assert error.message == f"host 0: expected it at {second.coordinator} within 0.5 s, found Connection refused"


def test_hosts_that_load_another_artifact_or_count_otherwise_are_refused_on_both():
    first, second = hosts()
    other = IDENTITY | {"artifact": "b2"}
    one, two = in_threads(lambda: meet(first, IDENTITY), lambda: meet(second, other))
    text = "host 1: expected artifact a1 as on host 0, found b2"
    assert (one.message, two.message) == (text, f"host 0 gave up: {text}")
    first, second = hosts()
    one, two = in_threads(lambda: meet(first, IDENTITY), lambda: meet(replace(second, count=4), IDENTITY))
    text = "hosts: expected 2 as on host 0, found 4 on host 1"
    assert (one.message, two.message) == (text, f"host 0 gave up: {text}")


def test_a_port_that_is_taken_is_named():
    first, _ = hosts()
    with socket.create_server(first.address), pytest.raises(HostsError) as caught:
        meet(first, IDENTITY)
    assert caught.value.message == (
        f"coordinator {first.coordinator}: expected a free port on this machine, found Address already in use"
    )


def test_a_stranger_is_not_taken_for_a_host(no_service):
    first, second = hosts()

    def stranger() -> Channel:
        until = time.monotonic() + 10
        while time.monotonic() < until:
            try:
                with socket.create_connection(first.address) as caller:
                    caller.sendall(b"GET / HTTP/1.1\r\n\r\n")
                break
            except OSError:
                time.sleep(0.05)
        return Channel(second, IDENTITY, print)

    one, two = in_threads(lambda: Channel(first, IDENTITY, print), stranger)
    one.send(END)
    assert two.take() == (END, b"")
    one.close()
    two.close()


def test_a_silent_host_is_given_up(no_service, monkeypatch):
    """Its machine or the network is gone: nothing closes the connection."""
    monkeypatch.setattr(channels, "SILENCE", 0.5)
    lost: list[str] = []
    with connected(lost):  # both beat every 5 s only
        until = time.monotonic() + 10
        while len(lost) < 2 and time.monotonic() < until:
            time.sleep(0.05)
    assert "host 1: expected a sign of life, found none for 0.5 s" in lost or (
        "host 0: expected a sign of life, found none for 0.5 s" in lost
    )


def test_commands_travel_whole():
    request = Request((1, 2), 5, Sampling(0.5, 3, 0.9, 7), ("\n", "é"), True, True, "line 3")
    commands = Commands((Arrival(4, request, 12.5), Arrival(5, Request((3,), 1))), (2, 3))
    found = decode(encode(commands))
    assert found == Commands((Arrival(4, request), Arrival(5, Request((3,), 1))), (2, 3))
    assert encode(Commands()) == b""
    assert decode(b"") == Commands()


def test_which_host_this_is():
    variables = {"DIST_INIT_ADDR": "10.0.0.1:9", "NNODES": "4", "NODE_RANK": "2"}
    assert find_hosts(None, None, None, environment={}) is None
    assert find_hosts(None, None, None, environment={"NODE_RANK": "0"}) is None
    assert find_hosts(None, 1, None, environment={}) is None
    assert find_hosts(None, None, None, environment=variables) == Hosts("10.0.0.1:9", 4, 2, 300)
    assert find_hosts("[::1]:7", 2, 1, 5, environment=variables) == Hosts("[::1]:7", 2, 1, 5)
    assert Hosts("[::1]:7", 2, 1).address == ("::1", 7)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (("h:1", 4, None), "hosts: expected coordinator, number of hosts and host id, found no --host-id (NODE_RANK)"),
        ((None, 4, 0), "hosts: expected coordinator, number of hosts and host id, found no --coordinator "
                       "(DIST_INIT_ADDR)"),
        (("h", 4, 0), "coordinator: expected HOST:PORT, found h"),
        (("h:1", 4, 4), "host id: expected 0 to 3 of 4 hosts, found 4"),
        (("auto", None, None), "--coordinator auto: expected a cluster's launcher that jax knows, found none"),
    ],
)  # fmt: skip
def test_a_host_that_is_half_known_is_refused(given, text):
    with pytest.raises(Ling3Error) as caught:
        find_hosts(*given, environment={})
    assert caught.value.message == text


def test_a_launcher_is_asked():
    variables = {"SLURM_JOB_ID": "70000", "SLURM_STEP_NODELIST": "node[1-4]", "SLURM_NTASKS": "4", "SLURM_PROCID": "3",
                 "SLURM_LOCALID": "0", "SLURM_STEP_NUM_NODES": "4"}  # fmt: skip
    code = "from ling3export.runners.hosts import find_hosts; print(find_hosts('auto', None, None))"
    done = run(sys.executable, "-c", code, environment=environment(variables))
    assert done.stdout.startswith("Hosts(coordinator='node1:") and "count=4, number=3" in done.stdout


def test_an_artifact_for_another_number_of_hosts_is_refused_with_both():
    targets = {
        "cpu-4x4-tp16": {"platform": "cpu", "processes": 4},
        "cpu-tp16": {"platform": "cpu", "processes": 1},
    }
    assert choose_target(targets, None, ["cpu"]) == "cpu-tp16"
    assert choose_target(targets, None, ["cpu"], 4) == "cpu-4x4-tp16"
    for name, count, text in (
        ("cpu-4x4-tp16", 1, "target `cpu-4x4-tp16`: expected the 4 hosts that it was built for, found one host"),
        ("cpu-4x4-tp16", 2, "target `cpu-4x4-tp16`: expected the 4 hosts that it was built for, found 2 hosts"),
        ("cpu-tp16", 2, "target `cpu-tp16`: expected the one host that it was built for, found 2 hosts"),
    ):
        with pytest.raises(ArtifactError) as caught:
            check_hosts(name, targets[name], ["cpu"], count)
        assert caught.value.message == text
    with pytest.raises(ArtifactError) as caught:
        choose_target(targets, None, ["cpu"], 2)
    assert caught.value.message == (
        "target: expected one for cpu on 2 hosts, found cpu-4x4-tp16 (4 hosts), cpu-tp16, in the manifest"
    )


def test_a_cpu_target_of_several_hosts_is_parsed():
    config = Config.from_dict(tiny_fields())
    assert parse_target("cpu:2x2", None, config) == Target("cpu", None, "2x2", 4, 2)
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
