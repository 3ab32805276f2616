"""A sequence's state from one process to another through each backend: ``python -m bench transfer``.

The shapes are those of Ling3-Tiny. One process writes the objects of all prefill ranks, as a prefill instance would
save them; another one reads them and puts them into the arrays of all decode ranks. Reading checks each crc32. Beside
it stand a copy of as many bytes within one process, and the crc32 alone.
"""

import statistics
import tempfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from bench.report import machine, medians, say, show, table
from ling3export.foundation.dtypes import BY_NAME
from ling3export.foundation.processes import LOOPBACK, Child, Parent
from ling3export.runners.transfer.backend import DEADLINE, Backend, Source
from ling3export.runners.transfer.folder import Folder
from ling3export.runners.transfer.objects import Key, Kind, Layout, Piece, prefix_hashes
from ling3export.runners.transfer.plan import carry_heads, head_plan, heads_of
from ling3export.runners.transfer.shm import Shm
from ling3export.runners.transfer.tcp import Tcp

TINY = Layout(
    (
        Piece("mla.latent", Kind.BLOCK, (576,), "bfloat16"),
        Piece("kda.recurrent", Kind.SNAPSHOT, (16, 128, 128), "float32", 0),
        Piece("kda.conv", Kind.SNAPSHOT, (3, 16, 128, 3), "bfloat16", 1),
    ),
    {Kind.BLOCK: 6, Kind.SNAPSHOT: 18},
    heads=16,
    block=256,
)
BACKENDS = ("shm", "tcp", "file")
LIMIT = 1 << 30
TRANSFER = "0" * 32
ABI = "0" * 64


def backend(name: str, folder: Path) -> Backend:
    if name == "shm":
        return Shm(TINY, LIMIT, DEADLINE)
    if name == "file":
        return Folder(TINY, folder)
    return Tcp(TINY, LIMIT, DEADLINE, (LOOPBACK, 0), "", DEADLINE)


def keys(salt: str, tokens: int, tp: int) -> list[Key]:
    """Blocks, then the snapshot of each of ``tp`` ranks."""
    hashes = prefix_hashes(ABI, salt, range(tokens), TINY.block)
    sizes = [min(TINY.block, tokens - at) for at in range(0, tokens, TINY.block)]
    blocks = [Key(ABI, Kind.BLOCK, each, (0, 1), size) for each, size in zip(hashes, sizes, strict=True)]
    return [*blocks, *(Key(ABI, Kind.SNAPSHOT, hashes[-1], heads_of(rank, TINY.heads, tp)) for rank in range(tp))]


def arrays(key: Key, seed: int) -> dict[str, np.ndarray]:
    """[layers, ...] by name."""
    rng, found = np.random.default_rng(seed), {}
    for piece in TINY.of(key.kind):
        shape = (TINY.layers[key.kind], *TINY.shape(piece, key.heads, key.tokens))
        found[piece.name] = rng.standard_normal(shape, np.float32).astype(BY_NAME[piece.dtype].numpy)
    return found


def write(where: Backend, wanted: list[Key], source: list[dict[str, np.ndarray]]) -> float:
    """Writes every object; the seconds."""
    begun = time.perf_counter()
    for key, given in zip(wanted, source, strict=True):
        writer = where.create(key)
        assert writer is not None
        for layer in range(TINY.layers[key.kind]):
            writer.write(layer, {name: array[layer] for name, array in given.items()})
        assert writer.finish()
    where.offer(TRANSFER, wanted)
    return time.perf_counter() - begun


def read(where: Backend, wanted: list[Key], source: Source, targets: list[dict[str, np.ndarray]], ptp: int) -> float:
    """Reads every object into the decode ranks' arrays; the seconds."""
    begun = time.perf_counter()
    payloads = where.fetch(wanted, source, time.monotonic() + DEADLINE)
    assert all(payload is not None for payload in payloads), where.counts
    found = [TINY.arrays(key, payload) for key, payload in zip(wanted, payloads, strict=True) if payload is not None]
    blocks = len(found) - ptp
    for target in targets:
        at = 0
        for each in found[:blocks]:
            latent = each["mla.latent"]
            target["mla.latent"][:, at : at + latent.shape[1]] = latent
            at += latent.shape[1]
    plan = head_plan(TINY.heads, ptp, len(targets))
    for piece in TINY.of(Kind.SNAPSHOT):
        assert piece.axis is not None
        given, taken = ([each[piece.name] for each in part] for part in (found[blocks:], targets))
        carry_heads(plan, given, taken, piece.axis + 1)
    return time.perf_counter() - begun


def child() -> None:
    """Reads what the parent process has written, in each round."""
    parent = Parent()
    job = parent.receive()
    targets = []
    for rank in range(job["dtp"]):
        heads = heads_of(rank, TINY.heads, job["dtp"])
        shapes = {piece.name: TINY.shape(piece, heads, job["tokens"]) for piece in TINY.pieces}
        targets.append(
            {
                piece.name: np.ones((TINY.layers[piece.kind], *shapes[piece.name]), BY_NAME[piece.dtype].numpy)
                for piece in TINY.pieces
            }
        )
    ends = {name: backend(name, Path(job["folder"])) for name in BACKENDS}
    parent.send({})
    while True:
        asked = parent.receive()
        wanted = keys(asked["salt"], job["tokens"], job["ptp"])
        source = Source(LOOPBACK, asked["port"], TRANSFER)
        parent.send({"seconds": read(ends[asked["backend"]], wanted, source, targets, job["ptp"])})


def timed(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def main(rounds: int, tokens: int, ptp: int, dtp: int) -> dict[str, Any]:
    """Measures and prints."""
    wanted = keys("", tokens, ptp)
    source = [arrays(key, seed) for seed, key in enumerate(wanted)]
    size = sum(TINY.nbytes(key) for key in wanted)
    plain = np.ones(size, np.uint8)
    target = np.zeros_like(plain)
    runs: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory(prefix="transfer-") as folder, Child("bench.transfer", shown=True) as reader:
        reader.send({"folder": folder, "tokens": tokens, "ptp": ptp, "dtp": dtp})
        assert reader.receive() is not None
        ends = {name: backend(name, Path(folder)) for name in BACKENDS}
        try:
            for number in range(rounds + 1):  # the first warms up and is dropped
                seconds = {"memcpy": timed(lambda: np.copyto(target, plain)), "crc32": timed(lambda: zlib.crc32(plain))}
                for name, end in ends.items():
                    salt = f"{time.time_ns()} {number}"
                    seconds[f"{name} write"] = write(end, keys(salt, tokens, ptp), source)
                    reader.send({"backend": name, "salt": salt, "port": getattr(end, "port", 0)})
                    reply = reader.receive()
                    assert reply is not None, reader.ended()
                    seconds[f"{name} read"] = reply["seconds"]
                say(f"round {number}: {seconds}")
                runs.append(seconds)
        finally:
            for end in ends.values():
                end.close()
    found = medians(runs[1:])
    for name in BACKENDS:
        found[f"{name} both"] = statistics.median(each[f"{name} write"] + each[f"{name} read"] for each in runs[1:])
    ratios = {name: found[f"{name} both"] / found["memcpy"] for name in BACKENDS}
    result: dict[str, Any] = {
        "benchmark": "transfer",
        "machine": machine(),
        "bytes": size,
        "tokens": tokens,
        "ptp": ptp,
        "dtp": dtp,
        "rounds": rounds,
        "seconds": found,
        "ratios": ratios,
    }
    rows = [[name, seconds, size / 1e9 / seconds] for name, seconds in found.items()]
    show(
        f"A sequence of {tokens} tokens, {size / 1e6:.1f} MB, from {ptp} ranks to {dtp}, medians of {rounds}, load "
        f"average {result['machine']['load_average'][0]}",
        [table(["", "s", "GB/s"], rows), table(["write and read", "/ memcpy"], list(ratios.items()))],
        result,
    )
    return result


if __name__ == "__main__":
    child()
