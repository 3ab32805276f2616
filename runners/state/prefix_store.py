"""What a prefix cache knows, in a folder: it outlives its process, and several servers share it.

A thread of its own reads and writes. A request whose beginning is longer in the folder than in the cache arrives with
that state. When a sequence ends, the snapshots of its path are written, each behind the blocks before it: a snapshot
that can be found has all of its blocks, unless they were evicted. Files are there whole or not at all, and whoever
reads one checks it: a process may be killed at any time, and two may write one file.
"""

import json
import queue
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from ling3export.artifacts.schema import Manifest, Target
from ling3export.foundation.errors import Ling3Error
from ling3export.runners.hosts.channel import Channel
from ling3export.runners.load.kept import Kept, Whole
from ling3export.runners.state.form import Carried, canonical, empty, layout_of, root_of, storable
from ling3export.runners.state.prefix_cache import Node, PrefixCache
from ling3export.runners.transfer.backend import Presence
from ling3export.runners.transfer.folder import Folder, left_behind
from ling3export.runners.transfer.objects import Key, Kind, chain_start, chained
from ling3export.runners.transfer.options import PrefixFolder

if TYPE_CHECKING:
    from ling3export.runners.state.exchange import Asked

QUEUE = 8  # jobs; while there are more, what could be written is not
LOADED = 16  # states in host memory that wait for a slot; while there are more, prompts are computed
DEADLINE = 30.0  # seconds to read one
CLOSING = 60.0  # and to write what waits when the engine is closed


Fetching = Callable[[int, Sequence[int]], Callable[[], Kept]]


class FollowingStore:
    """A prefix store on the hosts beside host 0: it fetches what host 0 writes, so that all make the same calls.

    Args:
        channel: To host 0.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def keep(self, path: Sequence[Node], fetching: Fetching) -> None:
        """Takes part in ``PrefixStore.keep``."""
        for at, blocks in json.loads(self._channel.shared()) if path else ():
            _fetched(path, at, blocks, fetching)


class PrefixStore:
    """A folder of blocks and snapshots behind a prefix cache.

    Args:
        manifest: The artifact's.
        target: Whose states they are.
        where: The folder, and how large it may become.
        cache: What need not be read; only asked here what it knows.
        report: Told of what failed.
        channel: To the other hosts, each of which has a ``FollowingStore``; None where this host runs alone.

    Attributes:
        counts: What happened how often, by name.

    Raises:
        Ling3Error: The folder may not hold a single state.
        TransferError: It cannot be made, or is something else.
    """

    def __init__(
        self,
        manifest: Manifest,
        target: Target,
        where: PrefixFolder,
        cache: PrefixCache,
        report: Callable[[str], None],
        channel: Channel | None = None,
    ) -> None:
        self._channel = channel
        self._layout, self._root = layout_of(target, "prefix store"), root_of(manifest, target)
        self._limit, self._cache, self._report = where.limit, cache, report
        needed = self._layout.nbytes(self._block(bytes(32))) + self._layout.nbytes(self._snapshot(bytes(32)))
        if where.limit < needed:
            raise Ling3Error(
                f"--prefix-store-bytes: expected at least {needed:,}, a block and a snapshot, found {where.limit:,}"
            )
        self._folder = Folder(self._layout, where.folder)
        list(left_behind(where.folder, dry_run=False))
        self.counts: Counter[str] = Counter()
        self._there: set[str] = set()  # names of files, as far as they are known
        self._loaded: list[weakref.ref[Whole]] = []
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="ling3-prefixes", daemon=True)
        self._thread.start()

    def load(self, number: int, request: "Asked", done: Callable[[Carried | None], None]) -> None:
        """Tells ``done`` the state of the request's longest beginning, None where the cache knows as much."""
        del number  # a read is short: nobody gives it up
        self._jobs.put(partial(self._load, request, done))

    def keep(self, path: Sequence[Node], fetching: Fetching) -> None:
        """Writes the snapshots of a path that are not there, and notes that the path was used; only dispatches here.

        Args:
            path: From the tree's root on.
            fetching: ``ModelRunner.fetching``.
        """
        chosen = self._chosen(path)
        if self._channel is not None and path:
            self._channel.shared(json.dumps([each[:2] for each in chosen]).encode())
        for at, blocks, keys in chosen:
            self._jobs.put(partial(self._write, keys, _fetched(path, at, blocks, fetching)))
        kept = [self._snapshot(node.name) for node in path if node.snapshot is not None]
        if kept and self._jobs.qsize() < QUEUE:
            self._jobs.put(partial(self._used, [*(self._block(node.name) for node in path), *kept]))

    def _chosen(self, path: Sequence[Node]) -> list[tuple[int, list[int], list[Key]]]:
        """The places in a path of each snapshot that is to be written and of the blocks with it, and their objects."""
        chosen: list[tuple[int, list[int], list[Key]]] = []
        for at, node in enumerate(path):
            if node.snapshot is None or self._snapshot(node.name).name in self._there:
                continue
            if self._jobs.qsize() + len(chosen) >= QUEUE:
                self.counts["skipped"] += 1
                break
            blocks = [place for place in range(at + 1) if self._block(path[place].name).name not in self._there]
            keys = [*(self._block(path[place].name) for place in blocks), self._snapshot(node.name)]
            self._there.update(key.name for key in keys)
            chosen.append((at, blocks, keys))
        return chosen

    def record(self) -> dict[str, int]:
        """All counts, as JSON."""
        return dict(sorted((self.counts + self._folder.counts).items()))

    def close(self) -> None:
        """Writes what waits, and ends the thread. May be called again."""
        self._jobs.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(CLOSING)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception as error:
                self.counts["failed"] += 1
                self._report(f"prefix store: expected its folder to be read and written, found {error}")

    def _block(self, name: bytes) -> Key:
        return Key(self._root, Kind.BLOCK, name, (0, 1), self._layout.block)

    def _snapshot(self, name: bytes) -> Key:
        return Key(self._root, Kind.SNAPSHOT, name, (0, self._layout.heads))

    def _load(self, request: "Asked", done: Callable[[Carried | None], None]) -> None:
        found = None
        try:
            found = self._found(request)
        finally:
            done(found)

    def _found(self, request: "Asked") -> Carried | None:
        size, prompt = self._layout.block, request.prompt_ids
        most = (len(prompt) - 1) // size
        names = list(chained(chain_start(self._root, request.cache_salt), prompt[: most * size], size))
        known = self._cache.look_up(names, len(prompt) - 1).tokens // size
        self._loaded = [each for each in self._loaded if each() is not None]
        for count in range(most, known, -1):
            if self._folder.look(self._snapshot(names[count - 1])) is not Presence.READY:
                continue
            if len(self._loaded) >= LOADED:
                self.counts["busy"] += 1
                return None
            if (state := self._read(names[:count])) is not None:
                self._loaded.append(weakref.ref(state))
                self.counts["loaded"] += 1
                return Carried((), count * size, state)
        return None

    def _read(self, names: Sequence[bytes]) -> Whole | None:
        keys = [*(self._block(name) for name in names), self._snapshot(names[-1])]
        payloads = self._folder.fetch(keys, None, time.monotonic() + DEADLINE)
        own = empty(self._layout, len(names))
        for row, (key, payload) in enumerate(zip(keys, payloads, strict=True), 1):
            if payload is None:
                self._there.difference_update(each.name for each in keys)
                return None
            for name, array in self._layout.arrays(key, payload).items():
                own[name][:, row if key.kind == Kind.BLOCK else 0] = array
        self._there.update(key.name for key in keys)
        return storable(own)

    def _write(self, keys: Sequence[Key], fetched: Callable[[], Kept]) -> None:
        """Writes blocks and the snapshot behind them, as far as they are not there."""
        left = {key.name for key in keys}
        try:
            needed = sum(self._layout.nbytes(key) for key in keys)
            if needed > self._limit:
                self.counts["too_large"] += 1
                return
            own: dict[str, Any] = canonical(self._layout, fetched().whole())
            self._folder.trim(self._limit - needed)
            for row, key in enumerate(keys, 1):
                writer = self._folder.create(key)
                if writer is not None:
                    place = row if key.kind == Kind.BLOCK else 0
                    for layer in range(self._layout.layers[key.kind]):
                        writer.write(
                            layer, {each.name: own[each.name][layer, place] for each in self._layout.of(key.kind)}
                        )
                    if not writer.finish():
                        return  # the folder is full, or cannot be written
                left.discard(key.name)
        finally:
            self._forget(left)

    def _used(self, keys: Sequence[Key]) -> None:
        self._forget(key.name for key in self._folder.touch(keys))

    def _forget(self, names: "Any") -> None:
        removed, self._folder.removed = self._folder.removed, []
        self._there.difference_update(names, removed)


def _fetched(path: Sequence[Node], at: int, blocks: Sequence[int], fetching: Fetching) -> Callable[[], Kept]:
    snapshot = path[at].snapshot
    assert snapshot is not None
    return fetching(snapshot, [path[place].page for place in blocks])
