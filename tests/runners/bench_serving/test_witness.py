"""The comparison with other clients: all generated tokens have text, and figures count tokens or pieces."""

import json
import struct
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from bench import witness
from ling3export.checkpoint.synth import synthesize
from ling3export.runners.bench_serving.measure import open_tokenizer
from ling3export.runners.bench_serving.metrics import RequestResult, figures


def test_tokens_without_text_of_their_own_are_never_the_likeliest(tmp_path):
    """Regression: with random weights, less than half of the tokens had text, and aiperf saw its first one late."""

    def head():
        index = json.loads((tmp_path / "micro" / "model.safetensors.index.json").read_text())
        data = (tmp_path / "micro" / index["weight_map"]["lm_head.weight"]).read_bytes()
        (size,) = struct.unpack("<Q", data[:8])
        info = json.loads(data[8 : 8 + size])["lm_head.weight"]
        start, end = info["data_offsets"]
        rows = np.frombuffer(data[8 + size :][start:end], np.uint16).reshape(info["shape"])
        return rows, data[: 8 + size + start] + data[8 + size + end :]

    synthesize(tmp_path / "micro", "micro", 0)
    before, others = head()
    witness.silence(tmp_path / "micro")
    after, still = head()
    silent = {token for token, row in enumerate(after) if not row.any()}
    tokenizer = open_tokenizer(tmp_path / "micro")
    texts = [tokenizer.decode([token]) for token in range(len(after))]
    assert silent == {token for token, text in enumerate(texts) if text in ("", "\N{REPLACEMENT CHARACTER}")}
    assert {128, 255, 316, 319} <= silent and not silent & {0, 65, 127, 256, 314}
    kept = [token for token in range(len(after)) if token not in silent]
    assert np.array_equal(before[kept], after[kept]) and others == still


def test_figures_count_tokens_and_pieces_with_text(monkeypatch):
    """Six tokens 20 ms apart; the first, the third and the last came without text."""
    times = [10.1, 10.12, 10.14, 10.16, 10.18, 10.2]
    result = RequestResult(10.0, times, 2, 6, "abc", pieces=[times[1], times[3], times[4]])

    def measured(command):
        record = {"figures": asdict(figures([result], 0.25)), "requests": [asdict(result)]}
        command[command.index("--output") + 1].write_text(json.dumps(record) + "\n")

    monkeypatch.setattr(witness, "run", measured)
    by_ids, by_text = witness.ours("http://127.0.0.1:1", Path("asked"), Path("tokens"), 1)
    names = ["first token, mean ms", "gap, mean ms", "time of a token, mean ms", "request, mean ms"]
    assert [by_ids[name] for name in names] == pytest.approx([100, 20, 20, 200])
    assert [by_text[name] for name in names] == pytest.approx([120, 30, 12, 180])
    for each in (by_ids, by_text):
        assert (each["tokens"], each["pieces"], each["requests/s"], each["tokens/s"]) == (6, 3, 4, 24)
