"""Prefill cut at groups of layers: the same tokens, and states that leave group by group while it computes."""

import time
from dataclasses import replace

import numpy as np
import pytest

from ling3export.foundation.errors import Ling3Error
from ling3export.runners.engine.engine import Engine
from ling3export.runners.engine.request import Request, Sampling
from ling3export.runners.load.segments import PendingSave, SegmentedRunner, groups_of
from ling3export.runners.transfer import connector, manager
from ling3export.runners.transfer.options import Transfer
from tests.support.tolerances import BFLOAT16_MEDIAN, FLOAT32
from tests.support.transfers import AWAY, moved
from tests.support.waiting import until

pytestmark = pytest.mark.build

PROMPT = tuple(range(20, 90))
GROUPS = 2
QUIET = {"check": "programs", "report": lambda text: None, "prefix_cache": False}


def asked(length: int, salt: str = "") -> Request:
    return Request(PROMPT[:length], 9, Sampling(1.0, seed=length), ignore_eos=True, cache_salt=salt)


@pytest.fixture(autouse=True)
def told(monkeypatch):
    """What connectors of engines were told, in order."""
    calls = []

    class Told(connector.Connector):
        def wait_for_layer_load(self, group):
            calls.append(("wait", group))
            super().wait_for_layer_load(group)

        def save_kv_layer(self, group, states):
            calls.append(("save", group))
            super().save_kv_layer(group, states)

    monkeypatch.setattr(manager, "Connector", Told)
    return calls


def test_receipts_and_programs_beside_are_those_of_a_build_without(artifact):
    """Programs that are not segments have the digests that they have in a build without."""
    manifest, whole = artifact.manifest("micro-tp1-segments"), artifact.manifest("micro-tp1-snapshots")
    (target,), (other,) = manifest.targets.values(), whole.targets.values()
    assert (target.segments, other.segments) == ("group", "none")
    assert target.cells.keys() - other.cells.keys() == {"offload_group@8", "embed@64", "group@64", "unembed@64"}
    for name, cell in other.cells.items():
        assert target.cells[name].stablehlo.sha256 == cell.stablehlo.sha256, name
    assert target.state_abi == other.state_abi
    receipts = manifest.vectors.receipts["cpu-tp1"]
    assert receipts.passed and receipts.agreement["segments_against_prefill"] < FLOAT32
    sizes = {leaf.name: np.prod(leaf.shape) for leaf in other.cells["offload@8"].outputs if leaf.group == "out"}
    assert receipts.cells["offload_group@8"].positions == sum(sizes.values()) + sizes["mla_latent"], (
        "a slot and sixteen pages"
    )


def test_groups_together_take_the_bytes_and_no_more_calls_than_each_needs(artifact):
    (target,) = artifact.manifest("micro-tp1-segments").targets.values()
    sizes = {
        name: sum(leaf.nbytes for leaf in target.cells[name].outputs if leaf.group == "out")
        for name in ("offload@8", "offload_group@8")
    }
    assert GROUPS * sizes["offload_group@8"] == sizes["offload@8"]
    layers = [(range(n, n + 1), range(3 * n, 3 * n + 3)) for n in range(GROUPS)]
    assert groups_of(artifact.manifest("micro-tp1-segments"), target) == tuple(
        {"mla_latent": mla, "kda_recurrent": kda, "kda_conv": kda} for mla, kda in layers
    )


def test_in_bfloat16_and_with_native_kernels_receipts_are_within_the_tolerance(artifact):
    receipts = artifact.manifest("micro-tp1-segments-kernels").vectors.receipts["cpu-tp1"]
    assert receipts.passed
    assert {receipts.cells[f"{phase}@16"].status for phase in ("embed", "group", "unembed")} == {"passed"}
    assert max(receipts.cells[f"{phase}@16"].median for phase in ("group", "prefill")) < BFLOAT16_MEDIAN


@pytest.mark.parametrize("tp", [1, 2])
def test_tokens_and_hits_are_those_of_one_program(artifact, tp):
    """Prompts of several calls, packed calls, and beginnings that the prefix cache knows."""
    rng, found = np.random.default_rng(0), {}
    asks = [Request(tuple(rng.integers(0, 160, n).tolist()), 8, ignore_eos=True) for n in (1, 5, 70, 33, 130, 64)]
    asks += [replace(asks[4], prompt_ids=(*asks[4].prompt_ids[:100], 7, 8, 9))]
    for name in (f"micro-tp{tp}-segments", f"micro-tp{tp}-snapshots"):
        with Engine(artifact(name), **QUIET | {"prefix_cache": True}) as engine:
            done = [engine.complete(each) for each in (asks, asks[4:5], asks[4:5])]
            found[name] = [[(each.token_ids, each.cached_tokens) for each in turn] for turn in done]
    one, other = found.values()
    assert one == other and one[2][0][1] > 0, "which the second made, if not the first"


@pytest.mark.parametrize(
    ("carrier", "p", "d"),
    [
        ("shm", "tp1-segments", "tp1-snapshots"),
        ("tcp", "tp1-segments", "tp1-segments"),
        ("file", "tp1-segments", "tp1-snapshots"),
        ("tcp", "tp2-segments", "tp1-segments"),
        ("tcp", "tp1-snapshots", "tp1-segments"),
    ],
)
def test_who_takes_a_state_goes_on_with_the_same_tokens(artifact, tmp_path, told, carrier, p, d):
    """Prompts of less than a page, of a call, and of two calls of which the last gives the state."""
    how = Transfer(carrier, folder=tmp_path / "states" if carrier == "file" else None, deadline=60.0)
    with (
        Engine(artifact("micro-tp1-snapshots"), **QUIET) as one,
        Engine(artifact(f"micro-{p}"), transfer=how, **QUIET) as give,
        Engine(artifact(f"micro-{d}"), transfer=how, **QUIET) as take,
    ):
        salt = "salt"
        for length in (1, 64, 70):
            (alone,) = one.complete([asked(length, salt)])
            _, taking = moved(give, asked(length, salt))
            (done,) = take.complete([taking])
            assert (done.token_ids, done.cached_tokens) == (alone.token_ids, length)
        many = [replace(asked(20 + n, f"{salt} {n}"), max_tokens=1, kv_transfer_params=AWAY) for n in range(3)]
        given = give.complete(many)  # of which several end in one call
        assert all(each.kv_transfer_params["tail"]["token"] == each.token_ids[0] for each in given)
        said = give.stats()["transfer"]
        assert said["saved"] == 6 and take.stats()["transfer"]["loaded"] == 3
        segmented = "segments" in p
        assert said.get("groups_saved", 0) == (6 * GROUPS if segmented else 0)
        assert give.stats()["free"] == give.stats()["pools"]
    order = [("wait", 0), ("save", 0), ("wait", 1), ("save", 1)] if segmented else [("wait", 0), ("save", 0)]
    assert any(told[at : at + len(order)] == order for at in range(len(told)))


def test_a_group_is_handed_on_before_the_next_is_called(artifact):
    """And whoever waits is told of the end, also where a call fails."""
    manifest, said = artifact.manifest("micro-tp1-segments"), []
    (target,) = manifest.targets.values()

    class Runner:
        def call(self, name, fields, batch):
            number = int(fields["group"][0]) if "group" in fields else None
            said.append((name, number))
            if (name, number) == failing:
                raise RuntimeError("a device is gone")
            return {"hidden": None, "logits": "logits"}

        def slicing(self, slot, pages, group):
            said.append(("offload_group", group))
            return (slot, pages, group)

    fields = {each.name: np.zeros(each.shape, each.dtype) for each in target.cells["prefill@64"].fields}
    runner = SegmentedRunner(Runner(), manifest, target)
    assert not runner.save_async(PendingSave(1, None, 2, [3]))
    runner.begin = lambda leaving: lambda parts: said.append(("hand", parts))
    for failing in (None, ("group@64", 1)):
        said.clear()
        assert runner.save_async(PendingSave(1, None, 2, [3]))
        if failing is None:
            assert runner.step("prefill", 64, fields) == "logits"
        else:
            with pytest.raises(RuntimeError, match="a device is gone"):
                runner.step("prefill", 64, fields)
        groups = [
            [("group@64", n), ("offload_group", n), ("hand", [(2, [3], n)])]
            if failing is None or n == 0
            else [("group@64", n)]
            for n in range(GROUPS)
        ]
        last = [("unembed@64", None)] if failing is None else []
        assert said == [("embed@64", None), *groups[0], *groups[1], *last, ("hand", None)]


def test_a_save_that_fails_is_an_answer_without_a_state(artifact, monkeypatch):
    """In the second group of the first request; those behind it are saved."""
    right, turns = connector.fill, iter([0, 1])

    def fill(*given):
        if next(turns, None) == 1:
            raise Ling3Error("a copy failed")
        right(*given)

    monkeypatch.setattr(connector, "fill", fill)
    with Engine(artifact("micro-tp1-segments"), transfer=Transfer("shm", deadline=60.0), **QUIET) as engine:
        salt = "salt"
        given, again = (
            engine.complete([replace(asked(30, f"{salt} {n}"), max_tokens=1, kv_transfer_params=AWAY)])[0]
            for n in range(2)
        )
        assert given.kv_transfer_params is None and again.kv_transfer_params is not None
        assert given.token_ids == again.token_ids
        said = engine.stats()["transfer"]
        assert (said["save_failed"], said["saved"], said["abandoned"]) == (1, 1, 1)
        assert engine.stats()["free"] == engine.stats()["pools"]


@pytest.mark.parametrize("name", ["micro-tp1-segments", "micro-tp1-snapshots"])
def test_what_nobody_will_take_is_freed_at_once(artifact, name):
    """Cancelled before the call, while it runs, while its state is saved, or behind it; no lease has to end."""
    with Engine(artifact(name), transfer=Transfer("shm", lease=600.0), **QUIET) as engine:
        salt, kept = "salt", 0
        for number in range(12):
            (handle,) = engine.submit(replace(asked(30, f"{salt} {number}"), max_tokens=1, kv_transfer_params=AWAY))
            time.sleep(0.002 * number)
            handle.cancel()
            kept += handle.result(60).kv_transfer_params is not None

        def left() -> int:
            said = engine.stats()["transfer"]
            return said.get("stored", 0) - said.get("pulled", 0) - said.get("expired", 0)

        until(lambda: left() == kept)
        assert engine.stats()["free"] == engine.stats()["pools"] and engine.stats()["live"] == 0
