"""The benches of fleets, small: what they draw and print, and that the comparison compares like with like."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock
from xml.etree import ElementTree

import pytest

from bench import fleet, fleet_ours, fleet_scale
from ling3export.runners.engine import scheduler
from ling3export.runners.engine.engine import Engine
from ling3export.simulation.fleet import Fleet, simulate
from ling3export.simulation.replica import Ask, Times
from tests.support import toy_artifact


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
    """Replicas that answer as their simulation does: calls take longer, by ``slower``, for each more that runs."""

    slots, prefill, decode = 4, {16: 2e-3, 128: 9e-3}, {1: 1e-3, 2: 1.5e-3, 4: 2e-3}
    tokens, page = 4096, 64

    def __init__(self, slower: float) -> None:
        self.slower = slower
        self.measured: list[int] = []

    def times(self, busy: int) -> Times:
        slower = 1 + self.slower * (busy - 1)
        prefill, decode = ({size: slower * each for size, each in row.items()} for row in (self.prefill, self.decode))
        spared = {16: 1e-5 * slower, 128: 5e-5 * slower}
        return Times(prefill, decode, self.slots, self.tokens, spared=spared, interpolated=True)

    def calls(self, count: int) -> list[tuple[str, int, float]]:
        times = self.times(count)
        found = [(f"prefill@{size}", used, times.prefilled(size, used)) for size in (16, 128) for used in (9, 12, size)]
        return found + [(f"decode@{1 if n == 1 else 2 if n == 2 else 4}", n, times.steps[n]) for n in range(1, 5)]

    def order(self, count: int, what: Callable[[int, float], dict[str, Any]]) -> list[Any]:
        orders = [what(number, 0.0) for number in range(count)]
        if "at_once" in orders[0]:
            self.measured.append(count)
            return [4 * self.calls(count)] * count
        trace = sorted(ask for order in orders for ask in order["trace"])
        asks = [Ask(*ask) for ask in trace]
        simulate(Fleet(tuple(self.times(busy) for busy in range(1, count + 1)), both=count), asks)
        return [[[[ask.first, ask.last] for ask in asks[number::count]], self.calls(1)] for number in range(count)]


def stands_in(monkeypatch: pytest.MonkeyPatch, replicas: Itself, speed: fleet_ours.Speed | None) -> None:
    """Has the bench find ``replicas`` where it starts processes, and an artifact like theirs."""
    paddings = {"prefill": (16, 128), "decode": (1, 2, 4)}
    state = SimpleNamespace(slots=replicas.slots, pages=replicas.tokens // replicas.page, chunk=16)
    target = SimpleNamespace(paddings=paddings.__getitem__, state=state)
    manifest = SimpleNamespace(targets={"one": target}, plan=SimpleNamespace(page_size=replicas.page))

    @contextmanager
    def started(folder: Path, count: int, cores: int | None, device: fleet_ours.Speed | None) -> Iterator[Itself]:
        assert (cores, device) == (None, speed)
        yield replicas

    monkeypatch.setattr(fleet, "started", started)
    monkeypatch.setattr(fleet, "read_manifest", lambda _: manifest)


def test_replicas_with_a_device_each_are_simulated_by_the_times_of_one(monkeypatch, tmp_path):
    """And runs have as many requests as were asked for."""
    replicas, speed = Itself(slower=0), fleet_ours.Speed(20, 0.25, 0.5)
    stands_in(monkeypatch, replicas, speed)
    parts = ["times-1", "1@0.8", "3@0.5", "3@0.8"]
    with pytest.raises(ValueError, match=r"expected parts among times-1, 1@0\.5, .*, found times-2"):
        fleet.main(Path("artifact"), [1, 3], 0.1, tmp_path, ["times-2"], device=speed)
    told = fleet.main(Path("artifact"), [1, 3], 0.1, tmp_path, parts, device=speed, fewest=300)
    assert replicas.measured == [1] * 3 and told["device_ms"] == speed
    assert sorted(path.stem for path in tmp_path.iterdir()) == ["1@0.8", "3@0.5", "3@0.8", "times-1"]
    assert [(run["replicas"], run["share"]) for run in told["runs"]] == [(1, 0.8), (3, 0.5), (3, 0.8)]
    for run in told["runs"]:
        assert run["simulated"] == pytest.approx(run["real"], rel=1e-9)
        kept = json.loads((tmp_path / f"{run['replicas']}@{run['share']}.json").read_text())
        assert kept["requests"] >= 300 and run["load"] == pytest.approx(run["share"])


def test_replicas_that_are_their_simulation_have_the_ratio_1(monkeypatch, tmp_path, capsys):
    replicas = Itself(slower=0.7)
    stands_in(monkeypatch, replicas, None)
    with pytest.raises(ValueError, match="expected the part times-1 measured before the runs"):
        fleet.main(Path("artifact"), [1, 3], 0.1, tmp_path, ["3@0.5"])
    with pytest.raises(ValueError, match=r"expected parts among times-1, .*, found 2@0\.5"):
        fleet.main(Path("artifact"), [1, 3], 0.1, tmp_path, ["2@0.5"])
    parts = ["times-1", "1@0.8", "times-2", "times-3"]
    (early,) = fleet.main(Path("artifact"), [1, 3], 0.1, tmp_path, parts)["runs"]
    assert (early["replicas"], early["share"], early["load"]) == (1, 0.8, pytest.approx(0.8))
    told = fleet.main(Path("artifact"), [1, 3], 0.1, tmp_path)
    levels = 3  # 1, 2 and 4 requests at once
    assert replicas.measured == [1] * levels + [2] * levels + [3] * levels  # what is kept is not measured again
    fleet.main(Path("artifact"), [1, 3], 0.1, tmp_path, ["1@0.8"])
    assert len(json.loads((tmp_path / "1@0.8.json").read_text())["real"]) == 2
    assert [(run["replicas"], run["share"]) for run in told["runs"]] == [(n, s) for n in (1, 3) for s in fleet.SHARES]
    for run in told["runs"]:
        assert run["simulated"] == pytest.approx(run["real"], rel=1e-9)
        assert min(run["real"]) > 0 and run["calls"] == pytest.approx(1)
    assert json.loads(capsys.readouterr().out.strip().splitlines()[-1])["benchmark"] == "fleet"


def test_times_of_calls_are_fitted_to_those_that_were_made():
    """A line over what the calls of a padding held; what no call had follows from its neighbour."""
    paddings = {"prefill": (16, 128, 512), "decode": (1, 4, 16)}
    target = SimpleNamespace(paddings=paddings.__getitem__, state=SimpleNamespace(slots=16, pages=10, chunk=16))
    notes = [("prefill@128", held, 0.01 + 1e-4 * held) for held in range(90, 100)]
    notes += [("decode@4", 2 + n % 3, 0.004 + 0.001 * (n % 3)) for n in range(9)]
    found = fleet.fitted(notes, target, 64)
    assert found.prefill == {16: pytest.approx(0.0228), 128: pytest.approx(0.0228), 512: pytest.approx(0.0912)}
    assert found.prefilled(128, 95) == pytest.approx(0.0195)
    assert found.prefilled(128, 17) == pytest.approx(0.0117)
    assert found.prefilled(512, 100) == pytest.approx(0.0912)
    assert found.decode[2] == pytest.approx(0.004) and found.decode[4] == pytest.approx(0.006)
    assert found.decode[1] == found.decode[2] and found.decode[16] == pytest.approx(0.024)
    assert (found.slots, found.tokens, found.chunk) == (16, 640, 16)
    assert fleet.read_times(json.loads(json.dumps(asdict(found)))) == found


def test_calls_beyond_those_of_random_arrivals_are_timed_where_the_engine_is_busy():
    """A line through calls of nearly as many rows, drawn on to 64, once gave a step of 64 twice its time."""
    found = [("decode@64", 17 + n % 4, 0.031) for n in range(fleet.ENOUGH)] + [("decode@64", 20, 0.061)]
    busy = [("decode@64", rows, 0.0312) for rows in (*range(17, 65), 64, 64)] + [("decode@16", 9, 0.017)]
    left = fleet.unseen(busy, found)
    assert [held for cell, held, _ in left if cell == "decode@64"] == [*range(21, 65), 64, 64]
    assert ("decode@16", 9, 0.017) in left
    target = SimpleNamespace(
        paddings={"prefill": (16,), "decode": (1, 64)}.__getitem__, state=SimpleNamespace(slots=64, pages=9, chunk=16)
    )
    prefill = [("prefill@16", 16, 0.01)] * fleet.FEWEST
    assert fleet.fitted(found + prefill, target, 64).decode[64] > 0.05
    assert fleet.fitted(found + left + prefill, target, 64).decode[64] == pytest.approx(0.031, rel=0.02)
    assert fleet.unseen(busy, found[1:]) == left and fleet.unseen(busy, found[2:]) == busy


class Clock:
    """A clock that goes on where somebody sleeps, and a runner whose processor takes ``seconds`` for a call."""

    def __init__(self, seconds: float) -> None:
        self.now, self.seconds = 0.0, seconds

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def step(self, phase: str, padding: int, fields: object) -> list[float]:
        return [self.now + self.seconds]

    def sample(self, logits: list[float], rows: int, fields: object) -> list[float]:
        return [*logits]

    def read(self, array: list[float]) -> list[float]:
        self.wait(array)
        return array

    def wait(self, array: list[float]) -> None:
        self.now = max(self.now, *array)


def test_a_device_takes_its_time_for_each_call_behind_the_one_before(monkeypatch):
    """The host's time is hidden while a call runs; a call that takes the processor longer delays none behind it."""
    clock = Clock(0.003)
    monkeypatch.setattr(fleet_ours, "now", lambda: clock.now)
    monkeypatch.setattr(fleet_ours.time, "sleep", clock.sleep)
    device = fleet_ours.Device(clock, fleet_ours.Speed(20, 0.25, 0.5))

    def dispatched(phase: str, padding: int) -> list[float]:
        found: list[float] = device.sample(device.step(phase, padding, {}), padding, {})
        return found

    first = dispatched("prefill", 128)
    clock.now = 0.010
    second = dispatched("decode", 16)  # behind it
    device.read(first)
    assert clock.now == pytest.approx(0.052)
    clock.now += 0.005  # the host takes the tokens
    device.read(second)
    assert clock.now == pytest.approx(0.052 + 0.028)
    clock.now = 1.0
    middle = device.step("prefill", 512, {})  # of a prompt: nothing is sampled
    clock.now = 1.1
    device.wait(middle)
    assert clock.now == pytest.approx(1.148)
    clock.now, clock.seconds = 2.0, 0.5
    late, after = dispatched("decode", 1), dispatched("decode", 1)
    device.read(late)
    assert clock.now == pytest.approx(2.5)
    device.read(after)
    assert clock.now == pytest.approx(2.5)
    assert device.seconds == 0.5  # what else the scheduler asks the runner for


@pytest.mark.jit
def test_a_replica_with_a_device_gives_the_same_tokens_at_the_devices_times(monkeypatch):
    """A prefill call and three decode calls of one request, each as long as the device takes."""
    speed, answers = fleet_ours.Speed(40, 1, 5), []
    for device in (None, speed):
        monkeypatch.setattr(fleet_ours.Watched, "speed", device)
        with (
            mock.patch.object(scheduler, "Scheduler", fleet_ours.Watched),
            Engine(toy_artifact.shared(), prefix_cache=False, report=lambda text: None) as engine,
        ):
            answers.append(engine.generate([[1, 2, 3]], max_tokens=4)[0].token_ids)
            ((first, last),), calls = fleet_ours.traced(engine, [[0.0, 5, 4]], time.monotonic())
    cells = [cell.partition("@") for cell, _, _ in calls]
    assert [phase for phase, _, _ in cells] == ["prefill", "decode", "decode", "decode"]
    due = [speed.seconds(phase, int(padding)) for phase, _, padding in cells]
    assert due[0] <= first and sum(due) <= last
    assert sum(seconds for _, _, seconds in calls) >= sum(due)
    assert answers[0] == answers[1]


@pytest.mark.jit
def test_a_replica_notes_its_calls_and_answers_at_their_times(monkeypatch):
    """Each call is noted once, with what it held; their times do not overlap."""
    monkeypatch.setattr(fleet_ours, "PROMPT", (5, 20))
    monkeypatch.setattr(fleet_ours, "ANSWER", (3, 9))
    with (
        mock.patch.object(scheduler, "Scheduler", fleet_ours.Watched),
        Engine(toy_artifact.shared(), prefix_cache=False, report=lambda text: None) as engine,
    ):
        began = time.monotonic()
        notes = fleet_ours.obeyed(engine, {"start": began, "at_once": 3, "until": began + 0.3, "seed": 1})
        took = time.monotonic() - began
        ends, calls = fleet_ours.traced(engine, [[0.0, 5, 3], [0.2, 20, 4]], time.monotonic())
        (first, last), (later, end) = ends
        assert sum(held for _, held, _ in calls) == 5 + 2 + 20 + 3
        assert 0 < first < last and 0.2 < later < end
        cells = engine.stats()["cells"]
    held = {phase: [held for cell, held, _ in notes if cell.startswith(phase)] for phase in ("prefill", "decode")}
    assert 0 < len(held["decode"]) <= sum(cells[name]["calls"] for name in ("decode@2", "decode@4") if name in cells)
    assert min(held["decode"]) >= 1 and max(held["decode"]) <= 3 and min(held["prefill"]) >= 1
    assert all(seconds > 0 for _, _, seconds in notes)
    assert sum(seconds for _, _, seconds in notes) <= took
