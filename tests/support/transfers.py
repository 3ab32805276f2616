"""Objects small enough for many tests: two layers of latents, three of recurrent and conv state, four heads.

Segments lie in a folder of the tests' own, which the processes that they start share: what a user or another test has
in shared memory is neither evicted nor removed.
"""

import atexit
import itertools
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from ling3export.foundation.dtypes import BY_NAME
from ling3export.runners.engine.engine import Engine
from ling3export.runners.engine.request import Completion, Request
from ling3export.runners.transfer import shm
from ling3export.runners.transfer.backend import Backend
from ling3export.runners.transfer.folder import Folder
from ling3export.runners.transfer.objects import Key, Kind, Layout, Piece, prefix_hashes, state_abi
from ling3export.runners.transfer.shm import Shm, own_prefix
from ling3export.runners.transfer.tcp import Tcp

SHARED = "LING3_TEST_SHM"
if SHARED not in os.environ:
    os.environ[SHARED] = tempfile.mkdtemp(prefix="ling3-test-", dir=shm.FOLDER)
    atexit.register(shutil.rmtree, os.environ[SHARED], ignore_errors=True)
FOLDER = shm.FOLDER = Path(os.environ[SHARED])
DESCRIPTION = {"config": {"heads": 4, "theta": 10000.0}, "weights": "a" * 64, "format": 2}
ABI = state_abi(DESCRIPTION)
LAYOUT = Layout(
    (
        Piece("mla.latent", Kind.BLOCK, (6,), "bfloat16"),
        Piece("kda.recurrent", Kind.SNAPSHOT, (4, 3, 2), "float32", 0),
        Piece("kda.conv", Kind.SNAPSHOT, (3, 4, 5), "bfloat16", 1),
    ),
    {Kind.BLOCK: 2, Kind.SNAPSHOT: 3},
    heads=4,
    block=8,
)
# With the axes of a target: the conv state has the width of a key and as many taps.
TARGET_LAYOUT = replace(
    LAYOUT, pieces=(*LAYOUT.pieces[:2], Piece("kda.conv", Kind.SNAPSHOT, (3, 4, 3, 3), "bfloat16", 1))
)
LIMIT = 1 << 20
AWAY = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None}
BACKENDS = ("shm", "file", "tcp")
_SALTS = itertools.count()


def backend(
    name: str,
    folder: Path,
    limit: int = LIMIT,
    deadline: float = 5.0,
    lease: float | None = None,
    clock: Callable[[], float] | None = None,
) -> Backend:
    told = {} if clock is None else {"clock": clock}
    if name == "shm":
        return Shm(LAYOUT, limit, deadline, lease, **told)
    if name == "file":
        return Folder(LAYOUT, folder, lease, **told)
    return Tcp(LAYOUT, limit, deadline, ("127.0.0.1", 0), "", lease or 60.0, **told)


def fresh_salt() -> str:
    """Another one in each call and process, so that tests in two processes never share names in shared memory."""
    return f"{os.getpid()} {next(_SALTS)}"


def keys(tokens: int = 20, salt: str | None = None, heads: tuple[int, int] = (0, 4)) -> list[Key]:
    """One for each block of a prompt, and one for the snapshot behind it."""
    hashes = prefix_hashes(ABI, fresh_salt() if salt is None else salt, range(tokens), LAYOUT.block)
    sizes = [min(LAYOUT.block, tokens - at) for at in range(0, tokens, LAYOUT.block)]
    blocks = [Key(ABI, Kind.BLOCK, each, (0, 1), size) for each, size in zip(hashes, sizes, strict=True)]
    return [*blocks, Key(ABI, Kind.SNAPSHOT, hashes[-1], heads)]


def random_arrays(key: Key, seed: int = 0) -> dict[str, np.ndarray]:
    """[layers, ...] by name: any bits."""
    rng, found = np.random.default_rng(seed), {}
    for piece in LAYOUT.of(key.kind):
        *shape, last = LAYOUT.shape(piece, key.heads, key.tokens)
        dtype = BY_NAME[piece.dtype].numpy
        whole = (LAYOUT.layers[key.kind], *shape, last * dtype.itemsize)
        found[piece.name] = rng.integers(0, 256, whole, np.uint8).view(dtype)
    return found


def write(where: Backend, key: Key, seed: int = 0) -> bool:
    """Writes an object of random bits; whether it was taken."""
    writer = where.create(key)
    if writer is None:
        return False
    arrays = random_arrays(key, seed)
    for layer in range(LAYOUT.layers[key.kind]):
        writer.write(layer, {name: array[layer] for name, array in arrays.items()})
    return writer.finish()


def same(key: Key, payload: np.ndarray | None, seed: int = 0) -> bool:
    """Whether a payload holds the bits that :func:`write` wrote."""
    if payload is None:
        return False
    found, wanted = LAYOUT.arrays(key, payload), random_arrays(key, seed)
    return all(np.array_equal(found[name].view(np.uint8), wanted[name].view(np.uint8)) for name in wanted)


def segment(key: Key) -> Path:
    """Where an object lies in shared memory."""
    return FOLDER / f"{own_prefix().removesuffix('l3x_')}{key.name}"


def remove(keys: Sequence[Key]) -> None:
    for key in keys:
        segment(key).unlink(missing_ok=True)


def remove_all() -> None:
    """Empties the tests' shared memory."""
    for path in FOLDER.iterdir():
        path.unlink(missing_ok=True)


def moved(engine: Engine, asked: Request, **changes: object) -> tuple[Completion, Request]:
    """A request whose prompt was computed in one place, with what the wire makes of its ``kv_transfer_params``."""
    (given,) = engine.complete([replace(asked, max_tokens=1, kv_transfer_params=AWAY)])
    params = json.loads(json.dumps(given.kv_transfer_params))
    return given, replace(asked, kv_transfer_params=params | changes)
