"""Damaged files of the build side: a checkpoint's config, index and shards, the build cache, a histogram of lengths."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

import numpy as np

from ling3export.checkpoint.reader import INDEX, Checkpoint
from ling3export.model.config import Config
from ling3export.model.parameters import expected_tensors
from ling3export.plan.options import Options
from ling3export.plan.paddings import read_lengths
from ling3export.plan.pricing import described, priced
from tests.fuzz.harness import Case, WrongResultError
from tests.fuzz.mutations import json_text, mutated, mutated_bytes
from tests.support.tiny import tiny_fields, tiny_weights, write_tiny

SMALL = {"num_hidden_layers": 2, "layer_group_size": 2, "num_experts": 4, "n_group": 2, "topk_group": 2}
OPTIONS = Options(paddings=(16, 32), decode_paddings=(4,), tp=2, max_running=4, page_size=16, context=128)


@contextmanager
def configs(folder: Path) -> Iterator[Case]:
    """config.json: read, and the plan of what it takes."""
    path, original = folder / "config.json", tiny_fields()

    def case(rng: Random) -> None:
        data = json_text(mutated(rng, original), 1)
        path.write_bytes(mutated_bytes(rng, data) if rng.random() < 0.1 else data)
        look()

    def look() -> None:
        printable(described(priced(Config.from_path(path, ()), OPTIONS, [], None, ()), wide=True))

    path.write_bytes(json_text(original))
    look()
    yield case


@contextmanager
def shards(folder: Path) -> Iterator[Case]:
    """A safetensors file of a checkpoint: its header as JSON of the right length, or any of its bytes."""
    path = next(_checkpoint(folder).glob("*00001-of*.safetensors"))
    data = path.read_bytes()
    size = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:size])

    def case(rng: Random) -> None:
        if rng.random() < 0.7:
            text = json_text(mutated(rng, header))
            path.write_bytes(len(text).to_bytes(8, "little") + text + data[size:])
        else:
            path.write_bytes(mutated_bytes(rng, data[: size + 64]) + data[size + 64 :])
        read_checkpoint(folder)

    read_checkpoint(folder)
    yield case


@contextmanager
def indexes(folder: Path) -> Iterator[Case]:
    """The index of a checkpoint; what it takes must be read as it was written."""
    path = _checkpoint(folder) / INDEX
    original, wanted = json.loads(path.read_text()), read_checkpoint(folder)

    def case(rng: Random) -> None:
        data = json_text(mutated(rng, original), 1)
        path.write_bytes(mutated_bytes(rng, data) if rng.random() < 0.2 else data)
        if (found := read_checkpoint(folder)) != wanted:
            raise WrongResultError(f"weights of sum {found} instead of {wanted}")

    yield case


@contextmanager
def lengths(folder: Path) -> Iterator[Case]:
    """A histogram of requests: read, and what the runner would pad on it."""
    path = folder / "lengths.jsonl"
    config = Config.from_path(_checkpoint(folder), ())
    rows = [{"prompt_tokens": 17 * n, "output_tokens": 5 + n, "count": n} for n in range(1, 5)]

    def case(rng: Random) -> None:
        lines = [json_text(each) for each in rows]
        at = rng.randrange(len(lines))
        lines[at] = json_text(mutated(rng, rows[at], 1))
        data = rng.choice((b"\n", b"\n", b"\r\n", b"\n\n")).join(lines)
        path.write_bytes(mutated_bytes(rng, data) if rng.random() < 0.2 else data)
        look()

    def look() -> None:
        printable(described(priced(config, OPTIONS, read_lengths(path), None, ()), wide=True))

    path.write_bytes(b"\n".join(map(json_text, rows)))
    look()
    yield case


def printable(text: str) -> None:
    """Refuses what a terminal would not show as it stands."""
    if not all(line.isprintable() for line in text.split("\n")):
        raise WrongResultError(f"control characters: {text!r}")


def read_checkpoint(folder: Path) -> float:
    """Opens a checkpoint and reads every tensor; their sum."""
    checkpoint = Checkpoint.open(folder)
    checkpoint.digests()
    with np.errstate(all="ignore"):
        return sum(
            float(np.sum(checkpoint.tensor(name), dtype=np.float64)) for name in expected_tensors(checkpoint.config)
        )


def _checkpoint(folder: Path) -> Path:
    fields = tiny_fields(**SMALL)
    return write_tiny(folder, fields, tiny_weights(fields))
