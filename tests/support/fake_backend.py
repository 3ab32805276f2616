"""A backend without jax whose tokens depend on every byte that the step contract moves.

Its "model" keeps a sequence only in the pools: a call writes each position's token to the page in the block table, and
the next token is a hash of the tokens in the sequence's pages. A wrong page, slot, position or order, or a page that
two sequences share, changes the tokens.
"""

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

VOCAB = 97


def next_token(tokens: list[int], seed: int = 0, temperature: float = 0.0) -> int:
    """The token that the fake model samples after ``tokens``."""
    key = repr((tokens, seed if temperature > 0 else 0)).encode()
    return int.from_bytes(hashlib.sha256(key).digest()[:4], "little") % VOCAB


def answer(
    prompt: list[int], count: int, eos: frozenset[int] = frozenset(), seed: int = 0, temperature: float = 0.0
) -> list[int]:
    """The expected tokens: one sequence, one token at a time, without pools."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + count:
        tokens.append(next_token(tokens, seed, temperature))
        if tokens[-1] in eos:
            break
    return tokens[len(prompt) :]


class FakeBackend:
    """Checks each call against the step contract, and keeps state only where the contract allows it.

    Attributes:
        poison: The logits of a sequence that has this token are not finite, and ``marked`` is sampled.
    """

    poison: int | None = None
    marked = -1

    def __init__(self, slots: int, pages: int, page_size: int, chunk: int, snapshots: int = 0) -> None:
        self.page_size, self.chunk = page_size, chunk
        self.pool = np.full((pages + 1, page_size), -7, np.int64)
        self.recurrent: list[list[int] | None] = [None] * (slots + snapshots + 1)
        self.last_token = np.full(slots + 1, -7, np.int64)
        self.calls: list[tuple[str, int]] = []
        self.waited = 0
        self.moved = {"copy": 0, "fetch": 0, "store": 0}

    def _store(self, table: np.ndarray, position: int, token: int) -> None:
        page = int(table[position // self.page_size])
        assert page > 0, "a position without a page"
        self.pool[page, position % self.page_size] = token

    def _held(self, table: np.ndarray, length: int) -> list[int]:
        places = np.arange(length)
        return list(self.pool[np.asarray(table)[places // self.page_size], places % self.page_size].tolist())

    def step(self, phase: str, padding: int, fields: Mapping[str, np.ndarray]) -> list[list[int] | None]:
        self.calls.append((phase, padding))
        assert all(value.dtype in (np.int32, np.float32) for value in fields.values())
        return self._prefill(padding, fields) if phase == "prefill" else self._decode(padding, fields)

    def _prefill(self, padding: int, fields: Mapping[str, np.ndarray]) -> list[list[int] | None]:
        assert fields["tokens"].shape == (padding,)
        slots = [int(slot) for slot in fields["chunk_slot"]]
        used = [slot for slot in slots if slot]
        assert slots == used + [0] * (len(slots) - len(used))
        assert len(list(dict.fromkeys(used))) == sum(a != b for a, b in zip(used, [0, *used], strict=False))
        rows: list[list[int] | None] = []
        for n, slot in enumerate(slots):
            start, length = int(fields["chunk_start"][n]), int(fields["chunk_len"][n])
            if slot == 0:
                assert length == 0
                rows.append(None)
                continue
            assert 1 <= length <= self.chunk
            if n + 1 < len(slots) and slots[n + 1] == slot:
                assert length == self.chunk
            assert fields["fresh"][n] == (start == 0)
            state = [] if fields["fresh"][n] else self.recurrent[slot]
            assert state is not None and len(state) == start, "the slot's state is not that of the sequence"
            tokens = [int(t) for t in fields["tokens"][n * self.chunk : n * self.chunk + length]]
            for offset, token in enumerate(tokens):
                self._store(fields["page_table"][n], start + offset, token)
            self.recurrent[slot] = state = [*state, *tokens]
            assert self._held(fields["page_table"][n], len(state)) == state
            rows.append(state)
        return rows

    def _decode(self, padding: int, fields: Mapping[str, np.ndarray]) -> list[list[int] | None]:
        slots = [int(slot) for slot in fields["slot"]]
        assert len(slots) == padding
        used = [slot for slot in slots if slot]
        assert len(set(used)) == len(used)
        rows: list[list[int] | None] = []
        for n, slot in enumerate(slots):
            if slot == 0:
                rows.append(None)
                continue
            token = int(fields["token"][n])
            token = int(self.last_token[slot]) if token < 0 else token
            state, position = self.recurrent[slot], int(fields["position"][n])
            assert state is not None and len(state) == position
            self._store(fields["page_table"][n], position, token)
            self.recurrent[slot] = state = [*state, token]
            assert self._held(fields["page_table"][n], len(state)) == state
            rows.append(state)
        return rows

    def sample(self, logits: list[list[int] | None], rows: int, fields: Mapping[str, np.ndarray]) -> np.ndarray:
        assert len(logits) == rows
        self.calls.append(("sample", rows))
        tokens = np.zeros(rows, np.int32)
        for n, state in enumerate(logits):
            slot = int(fields["slot"][n])
            if slot:
                assert state is not None and int(fields["position"][n]) == len(state)
                tokens[n] = next_token(state, int(fields["seed"].view(np.uint32)[n]), float(fields["temperature"][n]))
                if self.poison in state:
                    tokens[n] = self.marked
                self.last_token[slot] = tokens[n]
        return tokens

    def copy(self, sources: list[int], targets: list[int]) -> None:
        for source, target in zip(sources, targets, strict=True):
            assert self.recurrent[source] is not None and source != target
            self.recurrent[target] = self.recurrent[source]
            self.moved["copy"] += 1

    def fetch(self, slot: int, pages: list[int]) -> Callable[[], Any]:
        self.moved["fetch"] += 1
        state = self.recurrent[slot], self.pool[pages].copy()
        return lambda: state

    def store(self, slot: int, pages: list[int], kept: Any) -> None:
        self.moved["store"] += 1
        self.recurrent[slot], self.pool[pages] = kept
        self.last_token[slot] = -7

    def read(self, handle: Any) -> np.ndarray:
        if isinstance(handle, np.ndarray):
            return handle
        rows = [[0.0, 0.0] if row is None else [len(row), sum(row)] for row in handle]
        return np.asarray(rows, np.float32)

    def wait(self, handle: Any) -> None:
        self.waited += 1
