"""``python -m bench peers``: which forms of weights are compared with which of llama.cpp's."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from bench import peers, peers_ours
from bench.plot import ratios
from ling3export.checkpoint.synth import config_fields


def test_each_form_is_compared_with_its_peers_and_with_bf16(monkeypatch, tmp_path, capsys):
    """A form of llama.cpp that fails is left out; the others stay."""
    made = []

    def artifact(source, name, options):
        made.append(options)
        (tmp_path / name / "weights").mkdir(parents=True)
        (tmp_path / name / "weights/all").write_bytes(bytes(len(name)))
        return tmp_path / name

    def quantized(file, sources, form):
        (tmp_path / form).write_bytes(b"")
        return tmp_path / form

    speed = dict.fromkeys(peers.STEPS, 1.0)
    (tmp_path / "full-12").mkdir()
    (tmp_path / "full-12/config.json").write_text(json.dumps(config_fields("full", {"num_hidden_layers": 12})))
    monkeypatch.setattr(peers, "checkpoint", lambda given, preset, layers: tmp_path / f"{preset}-{layers}")
    monkeypatch.setattr(peers, "artifact", artifact)
    monkeypatch.setattr(peers, "gguf", lambda source, sources: tmp_path / "gguf")
    monkeypatch.setattr(peers, "quantized", quantized)
    monkeypatch.setattr(
        peers, "ours", lambda folder: {step: len(folder.name) * 2.0 for step in speed} | {peers.READ: 50}
    )
    monkeypatch.setattr(peers, "llama", lambda file, *_: None if file.name == "Q4_0" else speed)
    found = peers.report(peers.measure(None, 12, 1, tmp_path, ["auto"], False, ["bf16", "int8", "int4"]))
    assert [options[4:] for options in made] == [[], ["--weights", "int8"], ["--weights", "int4"]]
    said = capsys.readouterr().out
    (head,) = (line for line in said.splitlines() if line.startswith("ratio"))
    assert head.split("  ")[-5:] == [
        "ling3export bf16, kernels auto / llama.cpp bf16",
        "ling3export int8, kernels auto / llama.cpp Q8_0",
        "ling3export int8, kernels auto / ling3export bf16, kernels auto",
        "ling3export int4, kernels auto / llama.cpp Q4_K_M",
        "ling3export int4, kernels auto / ling3export bf16, kernels auto",
    ]
    assert found["gigabytes"]["ling3export int8, kernels auto"] == pytest.approx(15e-9)
    steps = found["gigabytes_of_a_step"]
    bf16, int8, int4 = (steps[f"ling3export {form}, kernels auto"] for form in ("bf16", "int8", "int4"))
    assert bf16 > 1.5 * int8 > 1.5 * int4 > 0.1
    shares = next(line for line in said.splitlines() if line.startswith("of a plain read")).split()[4:]
    assert [float(each) for each in shares if each != "-"] == pytest.approx(
        [each * 2 * size / 50 for each, size in ((bf16, 10), (int8, 15), (int4, 15))], rel=1e-2
    )


def test_a_plain_read_goes_through_files(tmp_path, monkeypatch):
    monkeypatch.setattr(peers_ours, "PART", 1 << 12)
    (tmp_path / "weights").write_bytes(np.arange(5000, dtype=np.uint8).tobytes())
    assert 0 < peers_ours.plain_read([tmp_path / "weights"]) < 1e4


def test_the_picture_shows_the_ratios_of_its_records():
    pictures = Path(__file__).parents[2] / "docs/pictures"
    drawn = re.findall(r"<text[^>]*>(\d+\.\d+)</text>", (pictures / "speed.svg").read_text())
    records = [json.loads(line) for line in (pictures / "peers.jsonl").read_text().splitlines()]
    values = [value for record in records for row in ratios(record).values() for value in row.values()]
    assert len(values) == 16 and min(values) == pytest.approx(0.78, abs=0.005)
    assert sorted(f"{value:.2g}" for value in values) == sorted(f"{float(text):.2g}" for text in drawn)
