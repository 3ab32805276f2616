"""The division of a decode step into micro batches, and those in flight, with a runner and an exchange in numpy."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ling3export.runners.ffn.split import decode

LAYERS, DENSE, TOKENS, VOCABULARY = 3, 1, 4, 5
SIZES: Any = SimpleNamespace(layers=LAYERS, dense=DENSE, returned=np.dtype((np.float32, (2,))))


class Runner:
    """A model: the hidden state counts layers, experts add 10, and the logits encode slot and sum."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def call(self, name: str, fields: Mapping[str, np.ndarray], batch: Mapping[str, Any]) -> dict[str, np.ndarray]:
        phase, _, size = name.partition("@")
        self.calls.append(phase)
        assert int(size) == TOKENS
        if phase == "attend":
            if fields["layer"][0] == 0:
                batch = {"hidden": np.repeat(fields["slot"][:, None], 2, axis=1).astype(np.float32)}
            out = batch["hidden"] + 1
            chosen = np.where(fields["slot"] > 0, 0, 1_000_000)[:, None].astype(np.int32)
            return {"residual": out, "tokens": out, "expert_ids": chosen, "weights": np.ones((TOKENS, 1), "f4")}
        if phase == "combine":
            return {"hidden": batch["residual"] + batch["results"][:, 0]}
        return {"logits": np.repeat(batch["hidden"][:, :1], VOCABULARY, axis=1)}

    def read(self, array: np.ndarray) -> np.ndarray:
        return array


class Exchange:
    """Counts micro batches that are in flight."""

    tokens = TOKENS

    def __init__(self, micro_batches: int) -> None:
        self.micro_batches = micro_batches
        self.away: dict[int, np.ndarray] = {}
        self.most = 0

    def send_attn_output(self, micro_batch: int, layer: int, tokens: np.ndarray, expert_ids: np.ndarray) -> None:
        assert micro_batch not in self.away and 0 <= layer < LAYERS - DENSE
        self.away[micro_batch] = np.full((*expert_ids.shape, 2), 10, np.float32)
        self.most = max(self.most, len(self.away))

    def recv_ffn_output(self, micro_batch: int) -> np.ndarray:
        return self.away.pop(micro_batch)


@pytest.mark.parametrize("rows", [0, 1, 2, 5, 8, 11])
@pytest.mark.parametrize("in_flight", [1, 2, 3, 8])
def test_every_row_gets_its_logits_whatever_is_in_flight(rows: int, in_flight: int):
    padding = 12
    slots = np.zeros(padding, np.int32)
    slots[:rows] = np.arange(1, rows + 1)
    fields = {"slot": slots, "page_table": np.zeros((padding, 3), np.int32)}
    runner, exchange = Runner(), Exchange(in_flight)
    logits = decode(runner, SIZES, exchange, fields)  # type: ignore[arg-type]
    assert logits.shape == (padding, VOCABULARY)
    assert (logits[:rows] == (slots[:rows] + LAYERS + 10 * (LAYERS - DENSE))[:, None]).all()
    assert exchange.away == {}
    parts = runner.calls.count("head")
    assert parts == -(-max(rows, 1) // min(TOKENS, -(-max(rows, 1) // in_flight)))
    assert exchange.most == min(in_flight, parts)
