"""What sequences share and keep: hits in the prefix cache, snapshots behind their blocks, their state while they wait.

The scheduler asks when a sequence gets its slot, where a prefill call has to end, and tells what was stored, read and
left. Copies of states are dispatched between the calls that read and write them, so the devices keep them in order.
"""

from collections.abc import Callable
from collections.abc import Sequence as Many
from typing import TYPE_CHECKING, Any, Protocol

from ling3export.runners.engine.block_manager import BlockManager, BlockTable
from ling3export.runners.engine.counters import Counters
from ling3export.runners.engine.sequence import Sequence
from ling3export.runners.state.prefix_cache import Node, PrefixCache, Text
from ling3export.runners.state.sequence_state import SequenceState

if TYPE_CHECKING:
    from ling3export.runners.transfer.prefix_store import FollowingStore, PrefixStore


class StateTransfer(Protocol):
    """What moves states: a model runner."""

    def copy(self, sources: Many[int], targets: Many[int]) -> None:
        """Copies the recurrent and conv state of slots over that of others."""

    def fetch(self, slot: int, pages: Many[int]) -> Any:
        """The state of a slot and the latents of pages, in host memory."""

    def fetching(self, slot: int, pages: Many[int]) -> Callable[[], Any]:
        """The state as it is now, of several hosts on the first one; any thread may wait for it."""

    def gathered(self, kept: Any) -> Any:
        """What ``offload`` gave, of several hosts on the first one."""

    def store(self, slot: int, pages: Many[int], kept: Any) -> None:
        """Writes what ``offload`` gave, or a whole state that came from elsewhere."""


class PrefixCacheCoordinator:
    """Shares and keeps states for a scheduler.

    Args:
        transfer: Moves states.
        blocks: Slots, pages and snapshots.
        counters: Told of hits and misses.
        cache: Keeps beginnings of sequences; None where nothing is shared.
        supports_state_copy: Whether the artifact has the programs that move states: then a sequence that gives its
            pages back keeps its state in host memory.
        store: Keeps what the cache knows in a folder; None where nothing does.
    """

    def __init__(
        self,
        transfer: StateTransfer,
        blocks: BlockManager,
        counters: Counters,
        cache: PrefixCache | None,
        *,
        supports_state_copy: bool,
        store: "PrefixStore | FollowingStore | None" = None,
    ) -> None:
        self._store = store
        self._transfer, self._blocks, self._counters, self._cache = transfer, blocks, counters, cache
        self._supports_state_copy = supports_state_copy

    def admit(self, sequence: Sequence) -> bool:
        """Gives a sequence its slot and pages, and the state that is known of it; False if there is no room."""
        tokens = min(sequence.known + 1, sequence.stored_in_the_end)
        if sequence.kept is not None:
            home, state = sequence.kept
            if not self._take(sequence, tokens, home=home):
                return False
            size = self._blocks.page_size
            given = state.pool_arrays(size) if isinstance(state, SequenceState) else state
            self._transfer.store(sequence.slot, sequence.stored_pages(size), given)
            sequence.kept = None
            if self._cache is not None and not sequence.start:
                sequence.start = self._cache.start(sequence.request.cache_salt)
                if not sequence.generated:
                    self._begun_elsewhere(sequence, self._cache)
            return True
        if self._cache is None:
            if not self._take(sequence, tokens):
                return False
            self._counters.missed("off")
            return True
        return self._admit_cached(sequence, self._cache, tokens)

    def _admit_cached(self, sequence: Sequence, cache: PrefixCache, tokens: int) -> bool:
        if not sequence.names:
            sequence.start = cache.start(sequence.request.cache_salt)
            sequence.names = list(cache.names(sequence.start, sequence.request.prompt_ids))
        first = sequence.request.score_from
        hit = cache.look_up(sequence.names, (sequence.length if first is None else first) - 1)
        self._blocks.hold(hit.pages)  # none of them may be evicted for the rest
        taken = self._take(sequence, tokens, hit.pages)
        self._blocks.drop(hit.pages)
        if not taken:
            return False
        cache.use(sequence.names, hit)
        sequence.stored = sequence.prefilled = sequence.cached = hit.tokens
        if hit.snapshot is not None:
            self._transfer.copy([hit.snapshot], [sequence.slot])
            self._counters.hit(hit.tokens)
        else:
            self._counters.missed(hit.reason)
        self._plan(sequence, cache, hit.matched)
        return True

    @staticmethod
    def _plan(sequence: Sequence, cache: PrefixCache, matched: int) -> None:
        """Where the calls of a prompt end, of which so many tokens are known."""
        last = sequence.length // cache.block * cache.block
        stops = {*range(cache.every, sequence.length + 1, cache.every), min(matched, last), last}
        sequence.stops = sorted(stop for stop in stops if stop >= cache.least)
        sequence.permanent_checkpoints = {*range(cache.every, sequence.length + 1, cache.every), matched}

    def _begun_elsewhere(self, sequence: Sequence, cache: PrefixCache) -> None:
        """A sequence came with the state of a part of its prompt: others may begin from that, too."""
        sequence.names = list(cache.names(sequence.start, sequence.request.prompt_ids))
        self._plan(sequence, cache, sequence.stored // cache.block * cache.block)
        self._counters.hit(sequence.stored)
        self.prefilled([sequence])

    def _take(self, sequence: Sequence, tokens: int, shared: Many[int] = (), home: int | None = None) -> bool:
        while (table := self._blocks.admit(tokens, shared, home)) is None:
            if not self._blocks.free_slots or not self.evict():
                return False
        sequence.table = table
        return True

    def evict(self) -> bool:
        """Has the cache give up a page; False if it has none that nobody else holds."""
        return self._cache is not None and self._cache.evict()

    def reach(self, sequence: Sequence) -> int:
        """How many tokens the next prefill call may store of a sequence at most."""
        stop = next((stop for stop in sequence.stops if stop > sequence.stored), None)
        return sequence.unstored if stop is None else min(sequence.unstored, stop - sequence.stored)

    def prefilled(self, sequences: Many[Sequence]) -> None:
        """A call that stores tokens of these prompts was dispatched: shares whole blocks, keeps states behind them."""
        if self._cache is None:
            return
        sources, targets = [], []
        for sequence in sequences:
            count = min(sequence.stored, sequence.length) // self._cache.block
            if not count:
                continue
            node = self._insert(sequence, self._cache, count)
            transient = sequence.stored not in sequence.permanent_checkpoints
            if sequence.stored not in sequence.stops:
                continue
            if node.snapshot is not None:
                node.transient &= transient
                continue
            slot = self._cache.room(transient=transient)
            if slot is not None:
                self._cache.keep(node, slot, transient=transient, text=_text(sequence))
                sequence.turn = node if transient else None
                sources.append(sequence.slot)
                targets.append(slot)
        self._copy(sources, targets)

    def decoded(self, sequences: Many[Sequence]) -> None:
        """A call that stores a token of each was dispatched: keeps the states that are now behind whole blocks.

        The tokens may not have been read yet, so that the blocks have no names; see :meth:`read`.
        """
        if self._cache is None:
            return
        sources, targets = [], []
        for sequence in sequences:
            if sequence.stored % self._cache.block or sequence.stored < self._cache.least or sequence.pending:
                continue
            slot = self._cache.room(transient=True)
            if slot is not None:
                sequence.pending = sequence.stored, slot
                sources.append(sequence.slot)
                targets.append(slot)
        self._copy(sources, targets)

    def _copy(self, sources: list[int], targets: list[int]) -> None:
        if sources:
            self._transfer.copy(sources, targets)
            self._counters.snapshots += len(sources)

    def read(self, sequence: Sequence) -> None:
        """Tokens of a sequence were read: its turn ends for now behind the blocks whose state was kept."""
        if sequence.pending is None or sequence.known < sequence.pending[0]:
            return
        cache, (position, slot) = self._cache, sequence.pending
        assert cache is not None
        sequence.pending = None
        node = self._insert(sequence, cache, position // cache.block)
        before, sequence.turn = sequence.turn, node
        cache.keep(node, slot, transient=True, text=_text(sequence))
        if before is not None and before.snapshot is not None and before.transient:
            cache.forget(before)

    def _insert(self, sequence: Sequence, cache: PrefixCache, count: int) -> Node:
        have = len(sequence.names)
        if have < count:
            before = sequence.names[-1] if have else sequence.start
            sequence.names += cache.names(before, sequence.tokens(have * cache.block, count * cache.block))
        assert sequence.table is not None
        return cache.insert(sequence.names[:count], sequence.table.pages)

    def leave(self, sequence: Sequence) -> None:
        """Takes back what a sequence holds; what others may share of it stays in the cache."""
        sequence.kept = None
        if sequence.pending is not None:
            self.read(sequence)
        if sequence.pending is not None and self._cache is not None:  # a token of it was never read
            self._blocks.free_snapshot(sequence.pending[1])
            sequence.pending = None
        if sequence.table is not None:
            self._blocks.release(sequence.table)
            sequence.table = None

    def publish(self, sequence: Sequence) -> None:
        """Before a sequence that ended well gives its pages back: what others may share of it goes into the folder."""
        if self._store is not None and self._cache is not None:
            path = self._cache.path(sequence.names)
            tokens = sequence.tokens(0, len(path) * self._cache.block)
            self._store.keep(path, tokens, self._transfer.fetching)

    def take(self, sequence: Sequence) -> None:
        """Before a sequence leaves for another engine: takes its state along, wherever that is."""
        if sequence.table is not None:
            sequence.exported_state = self._transfer.fetching(
                sequence.slot, sequence.stored_pages(self._blocks.page_size)
            )
        elif sequence.kept is not None:
            _, state = sequence.kept
            whole = state if isinstance(state, SequenceState) else self._transfer.gathered(state)
            sequence.exported_state = lambda: whole

    def keep(self, sequence: Sequence) -> None:
        """Before a sequence gives its pages back: fetches its state, or has it begin again where that cannot be."""
        table: BlockTable | None = sequence.table
        assert table is not None
        if self._supports_state_copy:
            pages = sequence.stored_pages(self._blocks.page_size)
            kept = table.home, self._transfer.fetch(sequence.slot, pages)
            self.leave(sequence)
            sequence.kept = kept
        else:
            self.leave(sequence)
            sequence.stored = 0


def _text(sequence: Sequence) -> Text:
    return Text(sequence.request.cache_salt, sequence.tokens)
