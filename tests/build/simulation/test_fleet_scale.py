"""The simulation of a thousand chips, small: what it draws and prints."""

import json
from xml.etree import ElementTree

from bench import fleet_scale


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
