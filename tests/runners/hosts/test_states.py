"""States of engines on several hosts: exported and imported as by one process."""

import json
import os
import signal
import sys
from contextlib import suppress
from dataclasses import asdict, replace

import numpy as np
import pytest

from ling3export.foundation.errors import RequestError
from ling3export.runners.engine.core import StepInputs, decode, encode
from ling3export.runners.engine.engine import Engine
from ling3export.runners.engine.request import Request, Sampling
from ling3export.runners.engine.sequence import Sequence
from ling3export.runners.load.sharded import PAGED, ShardedState, Shards, packed, unpacked
from ling3export.runners.state.layout import CONV, LATENT, RECURRENT
from ling3export.runners.state.sequence_state import SequenceState, TransferredState
from ling3export.runners.transfer.options import PrefixFolder, Transfer
from tests.support.faults import STATED
from tests.support.hosting import ENDED, hosting

PROMPT = tuple(range(20, 90))
AWAY = {"do_remote_decode": True, "do_remote_prefill": False}

HOST = (sys.executable, "-m", "tests.support.shared_states")
HALF = """
import sys
from tests.support import shared_states
from ling3export.runners.hosts import channel
from ling3export.runners.hosts.handshake import HEAD
def half(peer, kind, payload):
    if kind != channel.PART or len(payload) < 4096:
        return send(peer, kind, payload)
    peer.sendall((HEAD.pack(kind, len(payload)) + payload)[:len(payload) // 2])
    print("half", flush=True)
    sys.stdin.read()
send, channel.send = channel.send, half
shared_states.main()
"""


def state(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    shapes = {PAGED: (2, 3, 4, 5), "kda_recurrent": (3, 4, 2, 2), "kda_conv": (3, 4, 6)}
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def sequence_state(seed: int) -> SequenceState:
    arrays = dict(zip((LATENT, RECURRENT, CONV), state(seed).values(), strict=True))
    return SequenceState({}, np.arange(4 + seed, dtype=np.int32), arrays)


def test_arrays_travel_bit_for_bit():
    arrays = [np.arange(6, dtype="<i4").reshape(2, 3), np.float32([[np.nan, -0.0]]), np.empty((0, 4), np.float32)]
    said, found = unpacked(packed({"a": [1, "\0é"]}, [*arrays, arrays[0].T]))
    assert said == {"a": [1, "\0é"]}
    for mine, its in zip([*arrays, arrays[0].T], found, strict=True):
        assert (mine.shape, mine.dtype, mine.tobytes()) == (its.shape, its.dtype, its.tobytes())


def test_the_states_that_requests_come_with_reach_every_host():
    tokens = ((3, (-0.5, ((3, -0.5), (4, -1.5)))), (4, None))
    arrivals = (
        Sequence(Request((1, 2), 5), 1, 7.5, TransferredState(tokens, sequence_state(5), {"queue": 1.0})),
        Sequence(Request((1,), 1), 2),
        Sequence(Request((1, 2), 5), 3, None, TransferredState((), sequence_state(0))),
        Sequence(Request((1, 2), 5), 4, None, TransferredState(tokens, None)),
    )
    found = decode(encode(StepInputs(arrivals)))
    assert [(each.number, each.request) for each in found.arrivals] == [
        (each.number, each.request) for each in arrivals
    ]
    assert found.arrivals[1].transferred is None
    for mine, its in zip(arrivals, found.arrivals, strict=True):
        if mine.transferred is not None:
            assert (its.transferred.tokens, its.transferred.stored) == (
                mine.transferred.tokens,
                mine.transferred.stored,
            )
            assert (its.transferred.state is None) == (mine.transferred.state is None)
    for seed, each in ((5, found.arrivals[0]), (0, found.arrivals[2])):
        for name, array in sequence_state(seed).arrays.items():
            assert np.array_equal(each.transferred.state.arrays[name], array)


def test_the_first_host_has_what_all_hosts_have():
    """Two hosts have half of the heads each; both have all latents, which are not sent."""
    whole, places = state(0), np.array([0, 1, 2])

    def part(host: int) -> ShardedState:
        call = {PAGED: Shards(whole[PAGED].shape, {tuple((0, n) for n in whole[PAGED].shape): whole[PAGED]})}
        for name in ("kda_recurrent", "kda_conv"):
            ends = [(0, n) for n in whole[name].shape]
            ends[1] = (2 * host, 2 * host + 2)
            call[name] = Shards(whole[name].shape, {tuple(ends): whole[name][:, 2 * host : 2 * host + 2]})
        return ShardedState((call,), (places,))

    message = part(1).split()
    assert len(message) < sum(array.nbytes for array in whole.values()) / 2
    joined = part(0).joined([part(0).split(), message]).arrays()
    for name, array in whole.items():
        assert np.array_equal(joined[name], array)


def test_ffn_workers_refuse_what_moves_states(tmp_path):
    """FFN workers still refuse these options; several hosts no longer do."""
    for option in ({"transfer": Transfer("shm")}, {"prefix_store": PrefixFolder(tmp_path)}):
        with pytest.raises(RequestError, match="expected an engine that computes its own experts, found an FFN worker"):
            Engine(tmp_path, ffn="a", **option)


class Hosts:
    """Two hosts that answer JSON lines."""

    def __init__(self, processes):
        self.processes = processes

    def __call__(self, **asked):
        with suppress(BrokenPipeError):  # a host that has ended does not answer
            os.write(self.processes[0].stdin.fileno(), f"{json.dumps(asked, default=asdict)}\n".encode())
        return json.loads(self.processes[0].stdout.readline() or "null")


@pytest.mark.extras
@pytest.mark.hosts
def test_two_hosts_give_and_take_what_one_does(artifact, tmp_path):
    """Also: if one of them is killed while a state is sent, both end and print the reason."""
    command = [artifact("micro-2x1-snapshots"), tmp_path]
    how = Transfer("file", folder=tmp_path / "states", deadline=60.0)
    told = {"check": "programs", "report": lambda text: None}
    asked = Request(PROMPT, 20, Sampling(1.0, seed=3), ignore_eos=True, logprobs=2)
    with (
        hosting([command] * 2, programs=[HOST] * 2) as processes,
        Engine(artifact("micro-tp1-snapshots"), transfer=how, prefix_cache=False, **told) as one,
    ):
        two = Hosts(processes)
        (alone,) = one.complete([asked])
        assert processes[0].stdout.readline() == "ready\n", processes[0].stderr.read()
        first = two(complete=asked)
        assert (first["token_ids"], first["cached_tokens"]) == (alone.token_ids, 0)

        away = replace(asked, max_tokens=1, cache_salt="b", kv_transfer_params=AWAY)
        (taken,) = one.complete(
            [replace(away, max_tokens=20, kv_transfer_params=two(complete=away)["kv_transfer_params"])]
        )
        assert (taken.token_ids, taken.cached_tokens) == (alone.token_ids, len(PROMPT))
        (given,) = one.complete([away])
        taking = replace(away, max_tokens=20, kv_transfer_params=given.kv_transfer_params)
        taken = two(complete=taking)
        assert (taken["token_ids"], taken["cached_tokens"]) == (alone.token_ids, len(PROMPT))
        taken = two(complete=replace(taking, cache_salt="b"))  # its id is used up, and the cache knows the prompt
        assert taken["token_ids"] == alone.token_ids

        assert taken["free"]["slots"] == 4

        (given,) = one.complete([replace(away, cache_salt="c")])
        processes[1].send_signal(signal.SIGKILL)
        two_more = replace(away, max_tokens=20, cache_salt="c", kv_transfer_params=given.kv_transfer_params)
        assert two(complete=two_more) is None, "no answer"
        assert processes[0].wait(60) == 1
        assert "error: host 1: expected its process to run, found that it ended" in processes[0].stderr.read()


@pytest.mark.hosts
@pytest.mark.parametrize("victim", [0, 1])
def test_a_host_killed_while_a_state_is_gathered_ends_the_other_and_leaves_no_file(artifact, tmp_path, victim):
    """Host 1 has sent half of its part of a state to host 0, and sends no more before the kill."""
    command, slow = [artifact("micro-2x1-snapshots"), tmp_path], (sys.executable, "-c", HALF)
    ask = {"complete": Request(PROMPT, 1, Sampling(1.0, seed=3), ignore_eos=True, kv_transfer_params=AWAY)}
    with hosting([command] * 2, programs=[HOST, slow]) as processes:
        assert processes[0].stdout.readline() == "ready\n", processes[0].stderr.read()
        processes[0].stdin.write(json.dumps(ask, default=asdict) + "\n")
        processes[0].stdin.flush()
        assert processes[1].stdout.readline() == "half\n", processes[1].stderr.read()
        processes[victim].send_signal(signal.SIGKILL)
        out, said = processes[1 - victim].communicate(timeout=STATED)
        assert (processes[1 - victim].returncode, out) == (1, ""), said
    assert said.endswith(ENDED.format(victim)), said
    assert [path for path in tmp_path.rglob("*") if not path.is_dir()] == []
