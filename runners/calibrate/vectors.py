"""An artifact's vectors, run through every cell of a loaded target: its receipts. Slots and pages are fixed."""

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from ling3export.artifacts.manifest import read_checked
from ling3export.artifacts.schema import Cell, Manifest, Receipts, SequenceRecord, State, Target
from ling3export.foundation.errors import ArtifactError
from ling3export.foundation.phases import GIVERS, MOVING, SPLIT
from ling3export.runners.calibrate.receipts import (
    TOLERANCES,
    Logits,
    ScoredSequence,
    agreement,
    exact_receipt,
    log_softmax,
    logits_receipt,
    score_receipt,
)
from ling3export.runners.engine.inputs import Fields, Span, decode_fields, prefill_fields, sample_fields
from ling3export.runners.ffn import split

if TYPE_CHECKING:
    from ling3export.runners.load.loader import Loaded
    from ling3export.runners.load.sharded import ShardedState


def measured(loaded: "Loaded") -> Receipts:
    """Runs every vector through each cell. On several hosts every process calls it; the first one's result counts.

    Raises:
        ArtifactError: The expectations are damaged, or hold nothing that a cell gives.
    """
    from safetensors.numpy import load

    manifest, target = loaded.manifest, loaded.record
    vectors, tolerance = manifest.vectors, TOLERANCES[manifest.plan.dtype]
    assert vectors.expected is not None  # where there are weights, as the loader found
    stored = load(read_checked(loaded.folder, vectors.expected))
    expected: Logits = {
        (index, position): stored[sequence.logits][row]
        for index, sequence in enumerate(vectors.sequences)
        for row, position in enumerate(sequence.positions)
    }
    through = VectorRunner(loaded, target, vectors.sequences)
    logits_by_cell: dict[str, Logits] = {}
    cut: dict[tuple[int, int], Logits] = {}  # by the paddings of attend and dispatch
    receipts = {}
    for cell in sorted(target.cells.values(), key=lambda cell: cell.padding):
        if cell.phase == "sample":
            receipts[cell.name] = exact_receipt(*through.sample(cell.padding))
        elif cell.phase == "logits_processor":
            receipts[cell.name] = exact_receipt(*through.adjust(cell.padding))
        elif cell.phase in MOVING:
            receipts[cell.name] = exact_receipt(*through.moved(cell.phase))
        elif cell.phase == "score":
            scored = [through.score(cell.padding, number) for number in range(len(vectors.sequences))]
            receipts[cell.name] = score_receipt(scored, vectors.sequences, expected, tolerance)
        elif cell.phase in SPLIT:
            at = split_of(target, cell)
            if at not in cut:
                cut[at] = through.split(manifest, *at)
            receipts[cell.name] = logits_receipt(cut[at], expected, tolerance)
        else:
            logits = through.prompts(cell.padding) if cell.phase == "prefill" else through.decode(cell.padding)
            logits_by_cell[cell.name] = logits
            receipts[cell.name] = logits_receipt(logits, expected, tolerance)
    return Receipts(tolerance, receipts, agreement(logits_by_cell, cut))


def split_of(target: Target, cell: Cell) -> tuple[int, int]:
    """The paddings of attend and dispatch that a split cell is run with: its own, and the nearest other that fits."""
    sizes, pairs = target.paddings("attend"), target.paddings("dispatch")
    chosen = next(leaf.shape[1] for leaf in target.cells[f"attend@{sizes[0]}"].outputs if leaf.name == "expert_ids")
    if cell.phase in ("dispatch", "experts"):
        return max(size for size in sizes if size * chosen <= cell.padding), cell.padding
    return cell.padding, min(count for count in pairs if cell.padding * chosen <= count)


def page_table(state: State, rows: int, pages: int) -> np.ndarray:
    """The page table of the first ``rows`` state slots, each with ``pages`` pages: int32 ``[slots + 1, max_pages]``.

    Raises:
        ArtifactError: The state has fewer pages.
    """
    if rows * pages > state.pages:
        raise ArtifactError(f"vectors: expected {rows * pages} latent pages, found {state.pages}")
    table = np.zeros((state.slots + 1, state.max_pages), np.int32)
    table[1 : rows + 1, :pages] = np.arange(1, rows * pages + 1).reshape(rows, pages)
    return table


class VectorRunner:
    """Feeds the vectors to one loaded target, with slots and pages handed out by hand."""

    def __init__(self, loaded: "Loaded", target: Target, sequences: tuple[SequenceRecord, ...]) -> None:
        self._runner, self._read = loaded.runner, loaded.read
        self._target, self._state, self._sequences = target, target.state, sequences
        self._chunk = target.state.chunk
        # Pages are few, and every sequence gets the same number.
        self._pages = math.ceil(max(len(sequence.ids) for sequence in sequences) / target.state.page_size)

    def prefill(self, padding: int, sequence: int, slot: int) -> Iterator[tuple[tuple[int, int], np.ndarray]]:
        """Prefills one prompt in calls of ``padding``; yields the logits at every chunk's end."""
        entry = self._sequences[sequence]
        prompt = entry.ids[: entry.prompt]
        for at in range(0, len(prompt), padding):
            fields, ends = self._prefill_fields(padding, prompt[at : at + padding], at, slot)
            logits = self._read(self._runner.step("prefill", padding, fields))
            for row, end in enumerate(ends):
                yield (sequence, end), logits[row]

    def prompts(self, padding: int) -> Logits:
        """Prefills every prompt, one after the other; returns the logits at the ends of their chunks."""
        return {at: row for number in range(len(self._sequences)) for at, row in self.prefill(padding, number, 1)}

    def score(self, padding: int, sequence: int) -> ScoredSequence:
        """Scores each token of one sequence after the earlier ones, in calls of ``padding``."""
        ids = self._sequences[sequence].ids
        logits: dict[int, np.ndarray] = {}
        logprob, best = [np.zeros(0, np.float32)], [np.zeros(0, np.int32)]
        for at in range(0, len(ids) - 1, padding):
            after = ids[at + 1 : at + 1 + padding]
            fields, ends = self._prefill_fields(padding, ids[at : min(at + padding, len(ids) - 1)], at, 1, after)
            out = {name: self._read(value) for name, value in self._runner.score(padding, fields).items()}
            logits |= dict(zip(ends, out["logits"], strict=False))
            logprob.append(out["logprob"][: len(after)])
            best.append(out["best"][: len(after)])
        return ScoredSequence(logits, np.concatenate(logprob), np.concatenate(best))

    def _prefill_fields(
        self, padding: int, tokens: tuple[int, ...], start: int, slot: int, following: tuple[int, ...] | None = None
    ) -> tuple[Fields, list[int]]:
        """The fields of one call, and the position that each of its filled chunks ends at."""
        span = Span(slot, start, tokens, following or ())
        fields = prefill_fields(
            padding, [span], self._chunk, page_table(self._state, slot, self._pages), score=following is not None
        )
        stops = range(self._chunk, len(tokens) + self._chunk, self._chunk)
        return fields, [start + min(stop, len(tokens)) - 1 for stop in stops]

    def split(self, manifest: Manifest, padding: int, pairs: int) -> Logits:
        """:meth:`decode` through ``attend@padding``, ``dispatch@pairs`` and their like."""
        sizes = split.Sizes(manifest, self._target)
        exchange = split.LocalExperts(split.ExpertPrograms(self._runner, sizes, (pairs,)), padding)
        return self.decode(padding, lambda fields: split.decode(self._runner, sizes, exchange, fields))

    def decode(self, padding: int, step: Callable[[Fields], np.ndarray] | None = None) -> Logits:
        """Prefills every prompt at the smallest padding, then decodes the given tokens, as many rows a step as fit."""
        step = step or (lambda fields: self._read(self._runner.step("decode", padding, fields)))
        prefill = self._target.paddings("prefill")[0]
        logits: Logits = {}
        together = min(padding, self._state.slots, self._state.pages // self._pages, len(self._sequences))
        for first in range(0, len(self._sequences), together):
            group = list(range(first, min(first + together, len(self._sequences))))
            for slot, sequence in enumerate(group, 1):
                for _ in self.prefill(prefill, sequence, slot):
                    pass
            logits |= self._decode_group(padding, group, step)
        return logits

    def _decode_group(self, padding: int, group: list[int], step_of: Callable[[Fields], np.ndarray]) -> Logits:
        rows_of_logits: Logits = {}
        steps = max(len(self._sequences[s].ids) - self._sequences[s].prompt for s in group)
        for step in range(steps):
            entries = [self._sequences[sequence] for sequence in group]
            at = [entry.prompt + step for entry in entries]
            live = [row for row, entry in enumerate(entries) if at[row] < len(entry.ids)]
            rows = np.zeros((3, len(group)), np.int32)
            for row in live:
                rows[:, row] = row + 1, at[row], entries[row].ids[at[row]]
            slots, positions, tokens = rows.tolist()
            fields = decode_fields(padding, slots, positions, page_table(self._state, len(group), self._pages), tokens)
            logits = step_of(fields)
            rows_of_logits |= {(group[row], at[row]): logits[row] for row in live}
        return rows_of_logits

    def sample(self, rows: int) -> tuple[int, int]:
        """Greedy tokens of one call through ``sample``: (how many were compared, how many were wrong)."""
        handle = self._logits(rows)
        logits = self._read(handle)
        tokens = self._read(self._runner.sample(handle, rows, sample_fields(rows, [], [], [])))
        return rows, int(np.sum(tokens != np.argmax(logits, axis=1)))

    def adjust(self, rows: int) -> tuple[int, int]:
        """One call of ``logits_processor`` against numpy: (how many rows were compared, how many were wrong).

        Every row has edits of its own and every third token forbidden, and returns its most likely tokens.
        """
        handle = self._logits(rows)
        logits = self._read(handle)
        vocab, numbers = logits.shape[1], np.arange(rows)
        ids = (np.arange(min(4, vocab))[None] + 5 * numbers[:, None]) % vocab
        edits = np.empty((3, *ids.shape), np.int32)
        edits[0], edits[1:] = ids, np.array([2, -0.5], np.float32).view(np.int32)[:, None, None]
        allowed = np.arange(-(-vocab // 32) * 32) % 3 > 0
        mask = np.tile(np.packbits(allowed, bitorder="little").view(np.int32), (rows, 1))
        settings = {"edited": ids.shape[1], "masked": 1, "top": vocab}
        fields = {name: np.full(rows, value, np.int32) for name, value in settings.items()}
        token = (numbers % vocab).astype(np.int32)
        out = self._runner.adjust(handle, rows, fields, edits, mask, token)
        actual = {name: self._read(value) for name, value in out.items()}
        wanted = logits.copy()
        old = np.take_along_axis(logits, ids, axis=1)
        np.put_along_axis(wanted, ids, np.where(old > 0, old / 2, old * 2) - np.float32(0.5), axis=1)
        wanted[:, ~allowed[:vocab]] = -np.inf
        wrong = ~np.isclose(actual["logits"], wanted, rtol=1e-6).all(axis=1)
        best = np.argsort(-logits, axis=1, kind="stable")[:, : actual["top_token"].shape[1]]
        wrong |= (actual["top_token"][:, : best.shape[1]] != best).any(axis=1)
        shifted = np.stack([log_softmax(row) for row in logits])
        for name, place in (("top_logprob", best), ("logprob", token[:, None])):
            values = actual[name].reshape(rows, -1)[:, : place.shape[1]]
            wrong |= ~np.isclose(values, np.take_along_axis(shifted, place, axis=1), rtol=1e-4, atol=1e-4).all(axis=1)
        return rows, int(np.sum(wrong))

    def _logits(self, rows: int) -> Any:
        """Logits of ``rows`` rows on the devices, from any program that gives them."""
        giver = next(cell for cell in self._target.cells.values() if cell.phase in GIVERS and cell.rows == rows)
        phase, padding = giver.phase, giver.padding
        if phase == "decode":
            fields = decode_fields(padding, [], [], page_table(self._state, 1, self._pages))
        else:
            ids = self._sequences[0].ids[:padding]
            fields, _ = self._prefill_fields(padding, ids, 0, 1, (-1,) * len(ids) if phase == "score" else None)
        return self._runner.step(phase, padding, fields)

    def _filled(self, slot: int) -> tuple[list[int], "ShardedState"]:
        """Pages that hold numbers that no model gave, as the slot does, and those numbers."""
        rng, pages = np.random.default_rng(0), list(range(1, min(self._state.pages, self._state.max_pages) + 1))
        filled = self._runner.fetch(slot, pages)().replaced(lambda shape: rng.standard_normal(shape, np.float32))
        self._runner.store(slot, pages, filled)
        return pages, filled

    def moved(self, phase: str) -> tuple[int, int]:
        """Stores numbers that no model gave and fetches them again, of another slot where ``phase`` is ``copy``.

        Returns:
            How many were compared, and how many were wrong. Another slot, which nobody may touch, counts, too.
        """
        runner, state = self._runner, self._state
        slot, end = state.slots + 1, 1 if phase == "copy" else state.slots + 1
        others = {*range(1, state.slots + (state.snapshots or 0) + 1)} - {slot, end}
        beside = {other: runner.fetch(other, [])() for other in sorted(others)[-1:]}
        pages, filled = self._filled(slot)
        if phase == "copy":
            runner.copy([slot], [end])
        counts = [runner.fetch(end, pages)().compared(filled)]
        counts += [runner.fetch(other, [])().compared(before) for other, before in beside.items()]
        return sum(total for total, _ in counts), sum(wrong for _, wrong in counts)
