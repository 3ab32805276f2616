"""What the machine could do: read bandwidth, and the bytes of weights that a step has to read."""

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from ling3export.artifacts.schema import Manifest, Target

MIB = 1 << 20


def read_bandwidth(size: int = 768 * MIB, repeats: int = 5) -> float:
    """Bytes a second that all cores together read from memory: the best of several ways to sum a large array."""
    import jax
    import jax.numpy as jnp

    array = np.ones(size // 4, np.float32)
    parts = np.array_split(array, os.cpu_count() or 1)
    on_device = jnp.asarray(array)
    total = jax.jit(jnp.sum)
    total(on_device).block_until_ready()
    with ThreadPoolExecutor(len(parts)) as pool:
        ways: list[Callable[[], Any]] = [
            lambda: list(pool.map(np.sum, parts)),
            lambda: list(pool.map(lambda part: np.max(part.view(np.int32)), parts)),
            lambda: np.dot(array, array),
            lambda: total(on_device).block_until_ready(),
        ]
        return size / min(_seconds(way) for way in ways for _ in range(repeats))


def _seconds(work: Callable[[], Any]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def bytes_touched(manifest: Manifest, target: Target, tokens: int) -> float:
    """Bytes of weights that a step over ``tokens`` tokens reads once.

    All but: of the word embeddings a row a token; of the experts those that some token chose, where the expectation
    for choices that are independent and even is taken.
    """
    config: Any = manifest.config
    chosen = 1 - (1 - config["num_experts_per_tok"] / config["num_experts"]) ** tokens
    rows = min(1.0, tokens / config["vocab_size"])
    total = 0.0
    for parameter in target.parameters:
        size = float(np.prod(parameter.shape)) * (2 if parameter.dtype == "bfloat16" else 4)
        name = parameter.argument
        total += size * (chosen if ".experts_" in name else rows if name == "embeddings.word_embeddings" else 1.0)
    return total
