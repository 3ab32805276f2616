"""Small states for tests: two layers of latents, three of recurrent and conv state, four heads.

Segments are in a folder of the tests' own, which child processes share. So the shared memory of a user or of another
test run is neither counted nor removed.
"""

import atexit
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
from starlette.applications import Starlette

from ling3export.foundation.dtypes import BY_NAME
from ling3export.runners.engine.engine import Engine
from ling3export.runners.engine.request import Completion, Request
from ling3export.runners.serve.app import state_routes
from ling3export.runners.state.layout import CONV, FORMAT, LATENT, RECURRENT, TOKENS, StateLayout
from ling3export.runners.state.sequence_state import SequenceState, StateBytes, fill
from ling3export.runners.transfer import folder as folders
from ling3export.runners.transfer.folder import FolderStore
from ling3export.runners.transfer.http import HttpStore
from ling3export.runners.transfer.options import Transfer
from ling3export.runners.transfer.store import StateAddress, StateStore
from tests.support.serving import serving

SHARED = "LING3_TEST_SHM"
if SHARED not in os.environ:
    os.environ[SHARED] = tempfile.mkdtemp(prefix="ling3-test-", dir=folders.SHM)
    atexit.register(shutil.rmtree, os.environ[SHARED], ignore_errors=True)
SHM = folders.SHM = Path(os.environ[SHARED])
DESCRIPTION = {"config": {"heads": 4, "theta": 10000.0}, "weights": "a" * 64, "format": FORMAT}
LAYOUT = StateLayout(
    (LATENT, (2, 6), "bfloat16"), (RECURRENT, (3, 4, 3, 2), "float32"), (CONV, (3, 3, 4, 3, 3), "bfloat16"), page=8
)
LIMIT = 1 << 20
AWAY = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None}
STORES = ("shm", "file", "http")
LEASE = 60.0


def store(
    kind: str,
    folder: Path,
    limit: int = LIMIT,
    lease: float = LEASE,
    clock: Callable[[], float] | None = None,
    description: dict = DESCRIPTION,
    layout: StateLayout = LAYOUT,
    secret: str = "",
    deadline: float = 5.0,
) -> StateStore:
    """A store of leased states."""
    told = {} if clock is None else {"clock": clock}
    if kind == "shm":
        return FolderStore(layout, description, None, lease, limit, **told)
    if kind == "file":
        return FolderStore(layout, description, folder, lease, **told)
    return served(HttpStore(layout, description, options_of(limit, lease, secret, deadline), **told))


def options_of(limit: int, lease: float, secret: str, deadline: float) -> Transfer:
    """Options of a store over HTTP."""
    return Transfer("http", limit=limit, lease=lease, deadline=deadline, secret=secret)


def served(store: HttpStore) -> HttpStore:
    """Serves a store's states over HTTP until the store is closed."""
    stack, close = ExitStack(), store.close
    app = Starlette(routes=state_routes(store))
    store.address = stack.enter_context(serving(app))

    def closed() -> None:
        close()
        stack.close()

    store.close = closed  # type: ignore[method-assign]
    return store


def bytes_of(state: SequenceState, descriptor: dict) -> bytes:
    """A state as its bytes."""
    data = StateBytes(LAYOUT, descriptor, state.tokens, state.first)
    fill(data.state, state)
    return data.seal().tobytes()


def put(store: StateStore, name: str, state: SequenceState) -> bool:
    """Writes a state; returns whether others can read it now."""
    return store.put(name, state.descriptor, state.tokens, lambda new: fill(new, state), state.first)


def name_of(number: int) -> str:
    """A name that no other process of the tests uses."""
    return f"{os.getpid():08x}{number:024x}"


def random_state(tokens: int = 20, seed: int = 0, first: int = 0, layout: StateLayout = LAYOUT) -> SequenceState:
    """A state of random bits."""
    rng, arrays = np.random.default_rng(seed), {}
    for name, shape, dtype in layout.forms(tokens):
        if name != TOKENS:
            *outer, last = shape
            kind = BY_NAME[dtype].numpy
            arrays[name] = rng.integers(0, 256, (*outer, last * kind.itemsize), np.uint8).view(kind)
    return SequenceState({"state": DESCRIPTION}, np.arange(seed, seed + tokens, dtype=np.int32), arrays, first)


def same(found: SequenceState | None, wanted: SequenceState) -> bool:
    """Whether a state has the same tokens and the same bits."""
    if found is None or (found.first, found.tokens.tolist()) != (wanted.first, wanted.tokens.tolist()):
        return False
    return found.arrays.keys() == wanted.arrays.keys() and all(
        np.ascontiguousarray(found.arrays[name]).tobytes() == np.ascontiguousarray(array).tobytes()
        for name, array in wanted.arrays.items()
    )


def address(where: StateStore, name: str, tokens: int = 20) -> StateAddress:
    """The address at which others find a state of a store."""
    return StateAddress(name, *where.address, tokens)


def file_of(kind: str, folder: Path, name: str) -> Path:
    """The file of a leased state."""
    folder = SHM if kind == "shm" else folder
    return folder / f"{folders.prefix_of(folder)}{name}{folders.LEASED}{folders.SUFFIX}"


def remove_all() -> None:
    """Empties the tests' shared memory."""
    for path in SHM.iterdir():
        path.unlink(missing_ok=True)


def moved(engine: Engine, asked: Request, **changes: object) -> tuple[Completion, Request]:
    """Runs a prompt with a remote decode.

    Returns its completion, and the request with the ``kv_transfer_params`` as JSON.
    """
    (given,) = engine.complete([replace(asked, max_tokens=1, kv_transfer_params=AWAY)])
    params = json.loads(json.dumps(given.kv_transfer_params))
    return given, replace(asked, kv_transfer_params=params | changes)
