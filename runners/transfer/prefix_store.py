"""The entries of a prefix cache in a folder: they outlive the process, and several servers share them.

A thread of its own reads and writes. A request whose beginning is longer in the folder than in the cache arrives with
that state. When a sequence ends, the snapshots of its path are written, each with the latents since the snapshot before
it. Files are there whole or not at all, and each is checked when it is read: a process may be killed at any time, and
two may write one file. A file whose predecessor is gone is removed, too, and written again with the next such prompt.
"""

import hashlib
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ling3export.artifacts.schema import Manifest, Target
from ling3export.foundation.errors import Ling3Error
from ling3export.foundation.threads import JobThread
from ling3export.runners.load.sharded import ShardedState
from ling3export.runners.state.layout import LATENT, description_of, layout_of, root_of
from ling3export.runners.state.prefix_cache import Node, PrefixCache
from ling3export.runners.state.sequence_state import SequenceState, TransferredState, fill
from ling3export.runners.transfer.folder import FolderStore
from ling3export.runners.transfer.options import PrefixFolder

QUEUE = 8  # jobs; while there are more, what could be written is not
LOADED = 16  # states in host memory that wait for a slot; while there are more, prompts are computed
DEADLINE = 30.0  # seconds to read one
CLOSING = 60.0  # and to write what waits when the engine is closed
Fetching = Callable[[int, Sequence[int]], Callable[[], ShardedState]]


class _Piece(NamedTuple):
    """The end of a path's snapshot, and the first block that is written with it."""

    last: int
    first: int


class PrefixStore:
    """A folder of states after a prefix cache.

    Raises:
        Ling3Error: The folder may not hold a single state.
        TransferError: It cannot be made, is something else, or others can write to it.
    """

    def __init__(
        self, manifest: Manifest, target: Target, where: PrefixFolder, cache: PrefixCache, report: Callable[[str], None]
    ) -> None:
        self._description = description_of(manifest, target)
        self._layout, self._root = layout_of(target, "prefix store"), root_of(manifest, target)
        self._limit, self._cache, self._report = where.limit, cache, report
        if where.limit < (needed := self._layout.nbytes(self._layout.page)):
            raise Ling3Error(
                f"prefix store: expected a limit of at least {needed:,}, a block and a snapshot, found {where.limit:,}"
            )
        self._folder = FolderStore(self._layout, self._description, where.folder)
        self.counts: Counter[str] = Counter()
        self._there: set[str] = set()  # names of files, as far as they are known
        self._loaded: list[weakref.ref[SequenceState]] = []
        self._jobs = JobThread("ling3-prefixes", self._failed)

    def load(self, number: int, request: Any, done: Callable[[TransferredState | None], None]) -> None:
        """Tells ``done`` the state of the request's longest beginning, None where the cache knows as much.

        The request's number counts for nothing here: a read is short, and nobody gives it up.
        """
        self._jobs.put("load prefix", lambda: done(self._loaded_state(request)), lambda error: done(None))

    def keep(self, path: Sequence[Node], tokens: Sequence[int], fetching: Fetching) -> None:
        """Writes the snapshots of a path that are not there, and notes that the path was used; only dispatches here."""
        pieces = self._pieces(path)
        size = self._layout.page
        for piece in pieces:
            ids = tokens[piece.first * size : (piece.last + 1) * size]
            name = self._name(path[piece.last].name)
            write = partial(self._write, name, ids, piece.first * size, _fetched(path, piece, fetching))
            self._jobs.put("write prefix", write, partial(self._unwritten, name))
        kept = [self._name(node.name) for node in path if node.snapshot is not None]
        if kept:
            self._jobs.put("touch prefix", lambda: self._forget(self._folder.touch(kept)))

    def _pieces(self, path: Sequence[Node]) -> list[_Piece]:
        """The pieces of a path that are not in the folder yet."""
        pieces: list[_Piece] = []
        first = 0
        for at, node in enumerate(path):
            if node.snapshot is None:
                continue
            if (name := self._name(node.name)) not in self._there:
                if self._jobs.waiting + len(pieces) >= QUEUE:
                    self.counts["skipped"] += 1
                    break
                pieces.append(_Piece(at, first))
                self._there.add(name)
            first = at + 1
        return pieces

    def record(self) -> dict[str, int]:
        return dict(sorted((self.counts + self._folder.counts).items()))

    def close(self) -> None:
        """Writes what waits, and ends the thread. May be called again."""
        self._jobs.close(CLOSING)

    def _failed(self, text: str) -> None:
        self.counts["failed"] += 1
        self._report(f"prefix store: {text}")

    @staticmethod
    def _name(block: bytes) -> str:
        return hashlib.blake2b(block, digest_size=16).hexdigest()

    def _loaded_state(self, request: Any) -> TransferredState | None:
        size, prompt = self._layout.page, request.prompt_ids
        most = (len(prompt) - 1) // size
        names = list(self._cache.names(self._cache.start(request.cache_salt), prompt[: most * size]))
        known = self._cache.look_up(names, len(prompt) - 1).tokens // size
        self._loaded = [loaded for loaded in self._loaded if loaded() is not None]
        for count in range(most, known, -1):
            if not self._folder.has(self._name(names[count - 1])):
                continue
            if len(self._loaded) >= LOADED:
                self.counts["busy"] += 1
                return None
            if (state := self._read(names[:count], prompt)) is not None:
                self._loaded.append(weakref.ref(state))
                self.counts["loaded"] += 1
                return TransferredState((), state)
        return None

    def _read(self, names: Sequence[bytes], prompt: Sequence[int]) -> SequenceState | None:
        """The state after some blocks, from one or more files.

        Where one is gone or has wrong content, those that need it are removed. One that cannot be read now is a miss.
        """
        size, until = self._layout.page, time.monotonic() + DEADLINE
        count, files, read = len(names), list[str](), list[SequenceState]()
        while count:
            files.append(self._name(names[count - 1]))
            if time.monotonic() > until:
                return None
            state, reason = self._folder.read(files[-1])
            if reason == "unreadable":
                return None
            if state is None or not self._fits(state, count, prompt):
                for name in files:  # wrong content, or without the file before it
                    self._folder.remove(name)
                self._forget(files)
                return None
            read.append(state)
            count = state.first // size
        self._there.update(files)
        last, parts = read[0], [part.arrays[LATENT] for part in reversed(read)]
        latents = parts[0] if len(parts) == 1 else np.concatenate(parts, 1)
        tokens = np.concatenate([part.tokens for part in reversed(read)])
        return SequenceState(last.descriptor, tokens, {**last.arrays, LATENT: latents})

    def _fits(self, state: SequenceState, count: int, prompt: Sequence[int]) -> bool:
        """Whether a state ends after ``count`` blocks of a prompt and has its tokens."""
        size = self._layout.page
        whole = state.stop == count * size and state.first < state.stop and not state.first % size
        return whole and state.tokens.tolist() == [*prompt[state.first : state.stop]]

    def _write(self, name: str, tokens: Sequence[int], first: int, fetched: Callable[[], ShardedState]) -> None:
        """Writes a snapshot and the latents before it, if it is not there."""
        if (needed := self._layout.nbytes(len(tokens))) > self._limit:
            self.counts["too_large"] += 1
            return self._forget([name])
        copying, ids = partial(fill, source=fetched()), np.asarray(tokens, np.int32)
        self._forget(self._folder.trim(self._limit - needed))
        stored = self._folder.put(name, {"state": self._description}, ids, copying, first)
        if not (stored or self._folder.has(name)):
            self._forget([name])

    def _unwritten(self, name: str, error: BaseException) -> None:
        self._forget([name])

    def _forget(self, names: Iterable[str]) -> None:
        self._there.difference_update(names)


def _fetched(path: Sequence[Node], piece: _Piece, fetching: Fetching) -> Callable[[], ShardedState]:
    snapshot = path[piece.last].snapshot
    assert snapshot is not None
    return fetching(snapshot, [node.page for node in path[piece.first : piece.last + 1]])
