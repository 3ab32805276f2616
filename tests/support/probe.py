"""Loads an artifact as the runner does, in a process of its own; the test assigns slots, pages and chunks.

The program serves one artifact: it reads calls from stdin and writes results to stdout, each as the length of an npz
file and the file.
"""

import io
import os
import struct
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import IO

import numpy as np

from ling3export.artifacts.schema import Manifest
from ling3export.runners.engine.inputs import Span, decode_fields, prefill_fields

ROOT = Path(__file__).resolve().parents[2]
Part = tuple[int, int, Sequence[int]]  # slot, position of the first token, tokens
Rows = dict[tuple[int, int], np.ndarray]  # (slot, position of the last token read) → logits [V]


def send(pipe: IO[bytes], arrays: Mapping[str, np.ndarray]) -> None:
    file = io.BytesIO()
    np.savez(file, allow_pickle=False, **arrays)
    pipe.write(struct.pack("<q", file.tell()) + file.getvalue())
    pipe.flush()


def receive(pipe: IO[bytes]) -> dict[str, np.ndarray] | None:
    """Reads an npz file; None at the end of the pipe."""
    header = pipe.read(8)
    if len(header) < 8:
        return None
    with np.load(io.BytesIO(pipe.read(struct.unpack("<q", header)[0]))) as arrays:
        return dict(arrays)


class Probe:
    """Runs steps of an artifact that has one target.

    Attributes:
        manifest: The artifact's manifest.
        target: Its target.
        compiled: Number of programs that jax has compiled in the process so far.
    """

    def __init__(self, artifact: Path, manifest: Manifest) -> None:
        self.manifest = manifest
        (self.target,) = manifest.targets.values()
        self.state = self.target.state
        self.chunk: int = self.state.chunk
        self.compiled = 0
        command = [sys.executable, str(Path(__file__).resolve()), str(artifact)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(ROOT)}
        )

    def __enter__(self) -> "Probe":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait(60)

    def step(self, phase: str, padding: int, **fields: np.ndarray) -> np.ndarray:
        """Logits [rows, V] of one call. The fields are those of the step contract."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            send(self._process.stdin, {"phase": np.array(phase), "padding": np.array(padding), **fields})
            reply = receive(self._process.stdout)
        except BrokenPipeError:
            reply = None
        if reply is None:
            raise AssertionError(f"the probe ended with code {self._process.wait(60)}; stderr says why")
        self.compiled = int(reply["compiled"])
        return reply["logits"]

    @property
    def tables(self) -> np.ndarray:
        """Block table of the longest sequence for each slot, with pages in a shuffled order; slot 0 has none."""
        count = self.state.max_pages
        slots = self.state.pages // count
        tables = np.arange(1, slots * count + 1, dtype=np.int32).reshape(slots, count)[:, ::-1]
        return np.concatenate([np.zeros((1, count), np.int32), tables])

    def prefill(self, padding: int, parts: Sequence[Part]) -> Rows:
        """Runs one call; returns the logits at the end of every chunk."""
        spans = [Span(*part) for part in parts]
        fields = prefill_fields(padding, spans, self.chunk, self.tables)
        inside = np.arange(self.chunk) < fields["chunk_len"][:, None]
        fields["tokens"] = np.where(inside.reshape(-1), fields["tokens"], self.manifest.vocab_size - 1)
        ends = [
            (slot, position + min(cut + self.chunk, len(ids)) - 1)
            for slot, position, ids in parts
            for cut in range(0, len(ids), self.chunk)
        ]
        return dict(zip(ends, self.step("prefill", padding, **fields), strict=False))

    def decode(self, padding: int, rows: Sequence[tuple[int, int, int]]) -> np.ndarray:
        """Runs one step of (slot, position, token) each; returns logits [len(rows), V]."""
        slots, positions, tokens = zip(*rows, strict=True)
        fields = decode_fields(padding, slots, positions, self.tables, tokens)
        return self.step("decode", padding, **fields)[: len(rows)]

    def prompt(
        self, padding: int, ids: Sequence[int], *, slot: int = 1, cuts: Sequence[int] = ()
    ) -> Iterator[tuple[int, np.ndarray]]:
        """Prefills a prompt, cut at ``cuts`` and at full calls; yields (position, logits) at every chunk's end."""
        for low, high in pairwise([0, *cuts, len(ids)]):
            for at in range(low, high, padding):
                found = self.prefill(padding, [(slot, at, ids[at : min(at + padding, high)])])
                yield from ((position, logits) for (_, position), logits in found.items())


def serve(artifact: str) -> None:
    """Serves calls until stdin ends."""
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    from ling3export.runners.load.loader import load

    loaded = load(artifact)
    while (fields := receive(sys.stdin.buffer)) is not None:
        phase, padding = str(fields.pop("phase")), int(fields.pop("padding"))
        logits = loaded.runner.read(loaded.runner.step(phase, padding, fields))
        send(replies, {"logits": logits, "compiled": np.array(loaded.compiles.count)})


if __name__ == "__main__":
    serve(sys.argv[1])
