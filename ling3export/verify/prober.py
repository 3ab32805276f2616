"""Feeds test vectors to a loaded target, with slots and pages handed out by hand."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from ling3export.errors import ArtifactError
from ling3export.verify.receipts import Logits, Scored

if TYPE_CHECKING:
    from ling3export.runners.load.model_runner import Device


class Prober:
    """Feeds the vectors to one loaded target, with slots and pages handed out by hand.

    Args:
        device: The loaded programs.
        target: The manifest's record of the target.
        sequences: The manifest's vectors.
    """

    def __init__(self, device: "Device", target: dict[str, Any], sequences: list[dict[str, Any]]) -> None:
        self._device, self._state, self._sequences = device, target["state"], sequences
        self._chunk = target["state"]["chunk"]

    @property
    def _pages(self) -> int:
        """Pages of a sequence; they are few, and every sequence gets the same number."""
        longest = max(len(sequence["ids"]) for sequence in self._sequences)
        return int(-(-longest // self._state["page_size"]))

    def _table(self, slot: int) -> np.ndarray:
        pages = self._pages
        table = np.zeros(self._state["max_pages"], np.int32)
        if slot and slot * pages <= self._state["pages"]:
            table[:pages] = np.arange((slot - 1) * pages, slot * pages, dtype=np.int32) + 1
        elif slot:
            raise ArtifactError(f"vectors: expected {slot * pages} latent pages, found {self._state['pages']}")
        return table

    def prefill(self, padding: int, sequence: int, slot: int) -> Iterator[tuple[tuple[int, int], np.ndarray]]:
        """Prefills one prompt in calls of ``padding``; yields the logits at every chunk's end."""
        entry = self._sequences[sequence]
        prompt = entry["ids"][: entry["prompt"]]
        for at in range(0, len(prompt), padding):
            fields, ends = self._prefill_fields(padding, prompt[at : at + padding], at, slot)
            logits = self._device.read(self._device.step("prefill", padding, fields))
            for row, end in enumerate(ends):
                yield (sequence, end), logits[row]

    def score(self, padding: int, sequence: int) -> Scored:
        """Scores each token of one sequence behind those before it, in calls of ``padding``."""
        ids = self._sequences[sequence]["ids"]
        logits: dict[int, np.ndarray] = {}
        logprob, best = [np.zeros(0, np.float32)], [np.zeros(0, np.int32)]
        for at in range(0, len(ids) - 1, padding):
            fields, ends = self._prefill_fields(padding, ids[at : min(at + padding, len(ids) - 1)], at, 1)
            after = ids[at + 1 : at + 1 + padding]
            fields["next_token"] = np.pad(np.array(after, np.int32), (0, padding - len(after)), constant_values=-1)
            out = {name: self._device.read(value) for name, value in self._device.score(padding, fields).items()}
            logits |= dict(zip(ends, out["logits"], strict=False))
            logprob.append(out["logprob"][: len(after)])
            best.append(out["best"][: len(after)])
        return Scored(logits, np.concatenate(logprob), np.concatenate(best))

    def _prefill_fields(
        self, padding: int, tokens: list[int], start: int, slot: int
    ) -> tuple[dict[str, np.ndarray], list[int]]:
        count, size = padding // self._chunk, self._chunk
        fields = {
            "tokens": np.zeros(padding, np.int32),
            "chunk_slot": np.zeros(count, np.int32),
            "chunk_start": np.zeros(count, np.int32),
            "chunk_len": np.zeros(count, np.int32),
            "fresh": np.zeros(count, np.int32),
            "page_table": np.zeros((count, self._state["max_pages"]), np.int32),
        }
        fields["tokens"][: len(tokens)] = tokens
        ends = []
        for n, at in enumerate(range(0, len(tokens), size)):
            length = min(size, len(tokens) - at)
            fields["chunk_slot"][n], fields["chunk_start"][n], fields["chunk_len"][n] = slot, start + at, length
            fields["fresh"][n] = start + at == 0
            fields["page_table"][n] = self._table(slot)
            ends.append(start + at + length - 1)
        return fields, ends

    def decode(self, padding: int, prefill: int) -> Logits:
        """Prefills every prompt at ``prefill``, then decodes the given tokens, as many sequences a step as fit."""
        found: Logits = {}
        together = min(padding, self._state["slots"], self._state["pages"] // self._pages, len(self._sequences))
        for first in range(0, len(self._sequences), together):
            group = list(range(first, min(first + together, len(self._sequences))))
            for slot, sequence in enumerate(group, 1):
                for _ in self.prefill(prefill, sequence, slot):
                    pass
            found |= self._decode_group(padding, group)
        return found

    def _decode_group(self, padding: int, group: list[int]) -> Logits:
        found: Logits = {}
        steps = max(len(self._sequences[s]["ids"]) - self._sequences[s]["prompt"] for s in group)
        for step in range(steps):
            fields = {name: np.zeros(padding, np.int32) for name in ("slot", "position", "token")}
            fields["page_table"] = np.zeros((padding, self._state["max_pages"]), np.int32)
            live = []
            for row, sequence in enumerate(group):
                entry = self._sequences[sequence]
                position = entry["prompt"] + step
                if position < len(entry["ids"]):
                    fields["slot"][row], fields["position"][row] = row + 1, position
                    fields["token"][row] = entry["ids"][position]
                    fields["page_table"][row] = self._table(row + 1)
                    live.append((row, (sequence, position)))
            logits = self._device.read(self._device.step("decode", padding, fields))
            found |= {key: logits[row] for row, key in live}
        return found

    def sample(self, phase: str, padding: int, rows: int) -> tuple[int, int]:
        """Greedy tokens of one call through ``sample``: (how many were compared, how many were wrong)."""
        if phase in ("prefill", "score"):
            fields, _ = self._prefill_fields(padding, self._sequences[0]["ids"][:padding], 0, 1)
            fields |= {"next_token": np.full(padding, -1, np.int32)} if phase == "score" else {}
        else:
            fields = {name: np.zeros(padding, np.int32) for name in ("slot", "position", "token")}
            fields["page_table"] = np.zeros((padding, self._state["max_pages"]), np.int32)
        handle = self._device.step(phase, padding, fields)
        logits = self._device.read(handle)
        zeros = {name: np.zeros(rows, np.int32) for name in ("slot", "position", "top_k", "seed")}
        floats = {"temperature": np.zeros(rows, np.float32), "top_p": np.ones(rows, np.float32)}
        tokens = self._device.read(self._device.sample(handle, rows, zeros | floats))
        return rows, int(np.sum(tokens != np.argmax(logits, axis=1)))
