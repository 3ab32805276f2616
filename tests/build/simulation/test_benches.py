"""The benches of fleets, small: what they draw and print, and that the comparison compares like with like."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest

import toy_artifact
from bench import fleet, fleet_ours, fleet_scale
from ling3export.runners.engine.engine import Engine
from ling3export.simulation.fleet import Fleet, simulate
from ling3export.simulation.replica import Times


def test_a_thousand_chips_are_drawn_and_told(monkeypatch, tmp_path, capsys):
    """With fewer replicas, loads, paddings and requests than the page has."""
    for name, value in (("GROUP", 6), ("LOADS", (0.5, 0.9)), ("ASKED", 300)):
        monkeypatch.setattr(fleet_scale, name, value)
    monkeypatch.setattr(fleet_scale, "PREFILL", (16, 512))
    monkeypatch.setattr(fleet_scale, "DECODE", (1, 16))
    told = fleet_scale.main(tmp_path, 400)
    plots = {path.name: ElementTree.parse(path).getroot() for path in tmp_path.iterdir()}
    assert sorted(plots) == ["each-token.svg", "first-token.svg", "paddings.svg", "ratio.svg"]
    assert all(root.tag.endswith("svg") and len(root) > 10 for root in plots.values())
    assert [*told["divisions"]] == ["62", "21P41D"]
    for rows in told["loads"].values():
        (low, *slow), (high, *fast) = rows
        assert low < high and fast[1] > slow[1]  # p99 of the first token grows with the load
    assert 700 < told["router_passes"] < 800
    (one, _, _, late, *_), (several, _, _, soon, *_) = told["routers"]
    assert one == 1 < several and late > soon  # behind one router they queue
    printed = capsys.readouterr().out.strip().splitlines()
    assert printed[0].startswith("1000 chips as 62 replicas; one router passes 7")
    assert json.loads(printed[-1])["benchmark"] == "fleet-scale"


class Itself:
    """Replicas of one machine that answer as their simulation does: calls take longer where more of them run."""

    slots, prefill, decode = 4, {16: 2e-3, 128: 9e-3}, {1: 1e-3, 2: 1.5e-3, 4: 2e-3}
    tokens, page = 4096, 64

    def times(self, busy: int) -> Times:
        slower = 1 + 0.7 * (busy - 1)
        prefill, decode = ({size: slower * each for size, each in row.items()} for row in (self.prefill, self.decode))
        return Times(prefill, decode, self.slots, self.tokens, interpolated=True)

    def order(self, count: int, what: Callable[[int, float], dict[str, Any]]) -> list[Any]:
        orders = [what(number, 0.0) for number in range(count)]
        if "cell" in orders[0]:
            phase, size = orders[0]["cell"]
            times = self.times(count)
            return [times.prefill[size] if phase == "prefill" else times.steps[size]] * count
        trace = sorted(ask for order in orders for ask in order["trace"])
        asks = fleet.asked(trace)
        simulate(Fleet(tuple(self.times(busy) for busy in range(1, count + 1)), both=count), asks)
        return [[[ask.first, ask.last] for ask in asks[number::count]] for number in range(count)]


def test_replicas_that_are_their_simulation_have_the_ratio_1(monkeypatch, capsys):
    replicas = Itself()
    paddings = {"prefill": (16, 128), "decode": (1, 2, 4)}
    state = SimpleNamespace(slots=replicas.slots, pages=replicas.tokens // replicas.page, chunk=16)
    target = SimpleNamespace(paddings=paddings.__getitem__, state=state)
    manifest = SimpleNamespace(targets={"one": target}, plan=SimpleNamespace(page_size=replicas.page))

    @contextmanager
    def started(folder: Path, count: int) -> Iterator[Itself]:
        yield replicas

    monkeypatch.setattr(fleet, "started", started)
    monkeypatch.setattr(fleet, "read_manifest", lambda _: manifest)
    told = fleet.main(Path("artifact"), [1, 3], 0.1)
    assert [(run["replicas"], run["share"]) for run in told["runs"]] == [(n, s) for n in (1, 3) for s in fleet.SHARES]
    for run in told["runs"]:
        assert run["simulated"] == pytest.approx(run["real"], rel=1e-9)
        assert min(run["real"]) > 0
    assert json.loads(capsys.readouterr().out.strip().splitlines()[-1])["benchmark"] == "fleet"


@pytest.mark.jit
def test_a_replica_times_its_calls_and_answers_at_their_times():
    with Engine(toy_artifact.shared(), prefix_cache=False, report=lambda text: None) as engine:
        assert fleet_ours.timed(engine, "decode", 2, 0.0) > 0
        assert fleet_ours.timed(engine, "prefill", 16, 0.0) > 0
        start = time.monotonic()
        (first, last), (later, end) = fleet_ours.traced(engine, [[0.0, 5, 3], [0.2, 20, 4]], start)
        assert 0 < first < last and 0.2 < later < end <= time.monotonic() - start
