"""Writing the weight store against copying the same bytes: ``python -m bench store [--layers N] [--folder DIR]``.

The shapes are the full size's, a few layers of them: experts as contiguous matrices spread over 16 slabs, the output
head in slabs of 30 MB, output projections as transposed column cuts. The source is mapped and warm, as for a copy.
"""

import hashlib
import os
import shutil
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from bench.report import anonymous, machine, show, table
from ling3export.artifacts.store import Store, StoreWriter, TensorSpec

SLABS, HIDDEN, EXPERTS, WIDTH, HEADS_WIDTH, VOCAB = 16, 1536, 128, 512, 2048, 157184
Piece = tuple[int, np.ndarray]


def specs(layers: int) -> list[TensorSpec]:
    each = EXPERTS // SLABS
    return [
        TensorSpec("experts_gate_up", (SLABS, layers, each, 2 * WIDTH, HIDDEN), "BF16", SLABS),
        TensorSpec("experts_down", (SLABS, layers, each, HIDDEN, WIDTH), "BF16", SLABS),
        TensorSpec("lm_head", (SLABS, VOCAB // SLABS, HIDDEN), "BF16", SLABS),
        TensorSpec("o_proj", (SLABS, 12 * layers, HEADS_WIDTH // SLABS, HIDDEN), "BF16", SLABS),
    ]


def pieces(spec: TensorSpec, source: np.ndarray) -> Iterator[Piece]:
    """What a conversion writes for ``spec``, from views of ``source`` [elements] uint16, in its order."""
    if spec.name == "o_proj":
        for matrix in source.reshape(-1, HIDDEN, HEADS_WIDTH):
            for slab, cut in enumerate(np.split(matrix, SLABS, axis=1)):
                yield slab, cut.T
    elif spec.name == "lm_head":
        yield from enumerate(source.reshape(SLABS, -1))
    else:
        for layer in source.reshape(-1, EXPERTS, WIDTH * HIDDEN * (2 if spec.name == "experts_gate_up" else 1)):
            for expert, matrix in enumerate(layer):
                for half in matrix.reshape(-1, WIDTH * HIDDEN):
                    yield expert * SLABS // EXPERTS, half


def write(folder: Path, plan: list[TensorSpec], source: np.ndarray, threads: int) -> Store:
    """The store written as a build does."""

    def one(spec: TensorSpec, first: int) -> None:
        offsets = [0] * SLABS
        for slab, value in pieces(spec, source[first : first + spec.nbytes // 2]):
            writer.write(spec.name, value, slab=slab, offset=offsets[slab])
            offsets[slab] += value.nbytes

    writer = StoreWriter(folder, {"weights.safetensors": plan})
    starts = np.cumsum([0] + [spec.nbytes // 2 for spec in plan])
    with ThreadPoolExecutor(threads) as pool:
        for job in [pool.submit(one, spec, int(start)) for spec, start in zip(plan, starts, strict=False)]:
            job.result()
    return Store(folder, writer.finish())


def clocks() -> tuple[float, float]:
    """Wall and processor seconds, of this process and its children, since some fixed moment."""
    return time.perf_counter(), sum(os.times()[:4])


def since(start: tuple[float, float]) -> tuple[float, float]:
    wall, cpu = clocks()
    return wall - start[0], cpu - start[1]


def measure(folder: Path, layers: int, rounds: int, threads: int) -> dict[str, Any]:
    plan = specs(layers)
    total = sum(spec.nbytes for spec in plan)
    with open(folder / "source", "wb") as file:
        for _ in range(total >> 24):
            file.write(os.urandom(1 << 24))
        file.truncate(total)
        os.fsync(file.fileno())
    source = np.memmap(folder / "source", np.uint16, "r")
    hashlib.sha256(source).digest()  # warm
    peak, done = anonymous(), threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.01):
            peak = max(peak, anonymous())

    watcher = threading.Thread(target=watch)
    watcher.start()
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in ("copy", "copy + fsync", "write", "check")}
    for _ in range(rounds + 1):  # the first warms up and is dropped
        start = clocks()
        subprocess.run(["cp", folder / "source", folder / "copy"], check=True)
        seconds["copy"].append(since(start))
        with open(folder / "copy", "rb") as copied:
            os.fsync(copied.fileno())
        seconds["copy + fsync"].append(since(start))
        (folder / "copy").unlink()
        start = clocks()
        store = write(folder, plan, source, threads)
        seconds["write"].append(since(start))
        start = clocks()
        store.check_many([(spec.name, 0, None) for spec in plan], threads=threads)
        seconds["check"].append(since(start))
        (folder / "weights.safetensors").unlink()
    done.set()
    watcher.join()
    medians = {
        name: tuple(statistics.median(column) for column in zip(*values[1:], strict=True))
        for name, values in seconds.items()
    }
    return {
        "benchmark": "store",
        "machine": machine(),
        "bytes": total,
        "threads": threads,
        "rounds": rounds,
        "seconds": {name: wall for name, (wall, _) in medians.items()},
        "cpu_seconds": {name: cpu for name, (_, cpu) in medians.items()},
        "ratios": {name: medians["write"][0] / medians[name][0] for name in ("copy", "copy + fsync")},
        "peak_anonymous_bytes": peak,
    }


def main(folder: Path | None, layers: int, rounds: int, threads: int) -> dict[str, Any]:
    """Measures and prints."""
    scratch = Path(tempfile.mkdtemp(prefix="store-copy-", dir=folder))
    try:
        result = measure(scratch, layers, rounds, threads)
    finally:
        shutil.rmtree(scratch)
    total, seconds = result["bytes"], result["seconds"]
    rows = [[name, wall, result["cpu_seconds"][name], total / 1e9 / wall] for name, wall in seconds.items()]
    show(
        f"Writing the weight store (to the end of its fsync), {total / 1e9:.2f} GB, {threads} threads, "
        f"medians of {rounds}, load average {result['machine']['load_average'][0]}",
        [
            table(["", "s", "cpu s", "GB/s"], rows),
            table(["ratio", "write /"], list(result["ratios"].items())),
            f"peak anonymous memory {result['peak_anonymous_bytes'] / 1e6:.0f} MB",
        ],
        result,
    )
    return result
