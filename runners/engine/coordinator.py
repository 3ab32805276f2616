"""State that sequences share and keep: hits in the prefix cache, snapshots after their blocks, their state while they
wait.

The scheduler asks when a sequence gets its slot and where a prefill call has to end, and says what was scheduled and
who leaves. How states move for that goes into ``moves``, which the scheduler hands on with its next call.
"""

from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ling3export.runners.engine.counters import Counters
from ling3export.runners.engine.outputs import CopyStates, HostCopy, OffloadState, OnloadState, StateMove
from ling3export.runners.engine.sequence import Sequence
from ling3export.runners.state.block_manager import BlockManager
from ling3export.runners.state.prefix_cache import Node, PrefixCache, Text
from ling3export.runners.state.sequence_state import SequenceState

if TYPE_CHECKING:
    from ling3export.runners.engine.executor import Executor
    from ling3export.runners.transfer.prefix_store import PrefixStore


@dataclass(slots=True, eq=False)
class CachedPrefix:
    """The coordinator's record of a sequence.

    Attributes:
        copy: Its state in host memory, while it waits and has one.
        start: The prefix cache's name for the place before the first block.
        names: The digests of the known blocks, as far as they were needed.
        stops: Where prefill calls end, so that the state there can be kept.
        permanent: Those of the stops that others may begin from, too; the rest is this turn's end so far.
        turn: The node with the state at this turn's end so far.
        pending: A position whose state was copied, before its tokens were read, and the snapshot's slot.
    """

    copy: HostCopy | None = None
    start: bytes = b""
    names: list[bytes] = field(default_factory=list)
    stops: list[int] = field(default_factory=list)
    permanent: set[int] = field(default_factory=set)
    turn: Node | None = None
    pending: tuple[int, int] | None = None


class PrefixCacheCoordinator:
    """Shares and keeps states for a scheduler.

    Args:
        supports_state_copy: Whether the artifact has the programs that move states: then a sequence that gives its
            pages back keeps its state in host memory.
    """

    def __init__(
        self,
        executor: "Executor",
        blocks: BlockManager,
        counters: Counters,
        cache: PrefixCache | None,
        *,
        supports_state_copy: bool,
        store: "PrefixStore | None" = None,
    ) -> None:
        self._executor, self._blocks, self._counters = executor, blocks, counters
        self._cache, self._store = cache, store
        self._supports_state_copy = supports_state_copy
        self._prefixes: dict[int, CachedPrefix] = {}  # of sequences that have not left, by number
        self._moves: list[StateMove] = []

    def take_moves(self) -> Many[StateMove]:
        """How states have to move now, in order; each is said once."""
        if not self._moves:
            return ()
        moves, self._moves = self._moves, []
        return moves

    def enter(self, sequence: Sequence) -> None:
        """A sequence waits from now on, maybe with a state that came with it."""
        prefix = self._prefixes[sequence.number] = CachedPrefix()
        transferred = sequence.transferred
        if transferred is not None and transferred.state is not None:
            prefix.copy = HostCopy(None, transferred.state)
            sequence.transferred = transferred._replace(state=None)  # else it would be kept until the end

    def admit(self, sequence: Sequence) -> bool:
        """Gives a sequence its slot and pages, and its cached state; False if there is no room."""
        prefix, cache = self._prefixes[sequence.number], self._cache
        tokens = min(sequence.num_tokens + 1, sequence.max_num_tokens)
        if prefix.copy is not None:
            if not self._allocate(sequence, tokens, home=prefix.copy.home):
                return False
            pages = sequence.computed_pages(self._blocks.page_size)
            self._moves.append(OnloadState(sequence.slot, pages, prefix.copy))
            prefix.copy = None
            if cache is not None and not prefix.start:
                prefix.start = cache.start(sequence.request.cache_salt)
                if not sequence.generated:
                    self._begun_elsewhere(sequence, prefix, cache)
            return True
        if cache is None:
            if not self._allocate(sequence, tokens):
                return False
            self._counters.missed("off")
            return True
        return self._admit_cached(sequence, prefix, cache, tokens)

    def _admit_cached(self, sequence: Sequence, prefix: CachedPrefix, cache: PrefixCache, tokens: int) -> bool:
        if not prefix.names:
            prefix.start = cache.start(sequence.request.cache_salt)
            prefix.names = list(cache.names(prefix.start, sequence.request.prompt_ids))
        first = sequence.request.score_from
        hit = cache.look_up(prefix.names, (sequence.num_prompt_tokens if first is None else first) - 1)
        self._blocks.incref(hit.pages)  # none of them may be evicted for the rest
        allocated = self._allocate(sequence, tokens, hit.pages)
        self._blocks.decref(hit.pages)
        if not allocated:
            return False
        cache.use(prefix.names, hit)
        sequence.num_computed_tokens = sequence.num_prefilled = sequence.num_cached_tokens = hit.tokens
        if hit.snapshot is not None:
            self._moves.append(CopyStates([hit.snapshot], [sequence.slot]))
            self._counters.hit(hit.tokens)
        else:
            self._counters.missed(hit.reason)
        self._plan(sequence, prefix, cache, hit.matched)
        return True

    @staticmethod
    def _plan(sequence: Sequence, prefix: CachedPrefix, cache: PrefixCache, matched: int) -> None:
        """Places at which the calls of a prompt end, given its number of cached tokens."""
        length = sequence.num_prompt_tokens
        last = length // cache.block * cache.block
        multiples = {*range(cache.every, length + 1, cache.every)}
        prefix.stops = sorted(stop for stop in {*multiples, min(matched, last), last} if stop >= cache.least)
        prefix.permanent = {*multiples, matched}

    def _begun_elsewhere(self, sequence: Sequence, prefix: CachedPrefix, cache: PrefixCache) -> None:
        """A sequence came with the state of a part of its prompt: others may begin from that, too."""
        prefix.names = list(cache.names(prefix.start, sequence.request.prompt_ids))
        self._plan(sequence, prefix, cache, sequence.num_computed_tokens // cache.block * cache.block)
        self._counters.hit(sequence.num_computed_tokens)
        self.prefilled([sequence])

    def _allocate(self, sequence: Sequence, tokens: int, shared: Many[int] = (), home: int | None = None) -> bool:
        while (table := self._blocks.admit(tokens, shared, home)) is None:
            if not self._blocks.free_slots or not self.evict():
                return False
        sequence.table = table
        return True

    def evict(self) -> bool:
        """Has the cache give up a page; False if it has none that nobody else holds."""
        return self._cache is not None and self._cache.evict()

    def reach(self, sequence: Sequence) -> int:
        """How many tokens the next prefill call may compute of a sequence at most."""
        most, computed = sequence.num_tokens_to_prefill, sequence.num_computed_tokens
        stops = self._prefixes[sequence.number].stops
        return next((min(most, stop - computed) for stop in stops if stop > computed), most)

    def prefilled(self, sequences: Many[Sequence]) -> None:
        """A call computes tokens of these prompts: shares whole blocks, keeps states after them."""
        if self._cache is None:
            return
        copies = []
        for sequence in sequences:
            prefix, computed = self._prefixes[sequence.number], sequence.num_computed_tokens
            count = min(computed, sequence.num_prompt_tokens) // self._cache.block
            if not count:
                continue
            node = self._insert(sequence, prefix, self._cache, count)
            transient = computed not in prefix.permanent
            if computed not in prefix.stops:
                continue
            if node.snapshot is not None:
                node.transient &= transient
                continue
            slot = self._cache.room(transient=transient)
            if slot is not None:
                self._cache.keep(node, slot, transient=transient, text=_text(sequence))
                prefix.turn = node if transient else None
                copies.append((sequence.slot, slot))
        self._snapshot(copies)

    def decoded(self, sequences: Many[Sequence]) -> None:
        """A call computes a token of each: keeps the states that are then after whole blocks.

        The tokens may not have been read yet, so that the blocks have no names; see :meth:`read`.
        """
        if self._cache is None:
            return
        copies = []
        for sequence in sequences:
            computed = sequence.num_computed_tokens
            if computed % self._cache.block or computed < self._cache.least:
                continue
            prefix = self._prefixes[sequence.number]
            slot = None if prefix.pending else self._cache.room(transient=True)
            if slot is not None:
                prefix.pending = computed, slot
                copies.append((sequence.slot, slot))
        self._snapshot(copies)

    def _snapshot(self, pairs: list[tuple[int, int]]) -> None:
        if pairs:
            self._moves.append(CopyStates([source for source, _ in pairs], [target for _, target in pairs]))
            self._counters.snapshots += len(pairs)

    def read(self, sequence: Sequence) -> None:
        """Tokens of a sequence were read: its turn ends for now after the blocks whose state was kept."""
        if (cache := self._cache) is None:
            return
        prefix = self._prefixes[sequence.number]
        if prefix.pending is None or sequence.num_tokens < prefix.pending[0]:
            return
        (position, slot), prefix.pending = prefix.pending, None
        node = self._insert(sequence, prefix, cache, position // cache.block)
        before, prefix.turn = prefix.turn, node
        cache.keep(node, slot, transient=True, text=_text(sequence))
        if before is not None and before.snapshot is not None and before.transient:
            cache.forget(before)

    @staticmethod
    def _insert(sequence: Sequence, prefix: CachedPrefix, cache: PrefixCache, count: int) -> Node:
        have = len(prefix.names)
        if have < count:
            before = prefix.names[-1] if have else prefix.start
            prefix.names += cache.names(before, sequence.tokens(have * cache.block, count * cache.block))
        assert sequence.table is not None
        return cache.insert(prefix.names[:count], sequence.table.pages)

    def publish(self, sequence: Sequence) -> None:
        """Before a sequence that ended well gives its pages back: what others may share of it goes into the folder."""
        if self._store is not None and self._cache is not None and (prefix := self._prefixes.get(sequence.number)):
            path = self._cache.path(prefix.names)
            tokens = sequence.tokens(0, len(path) * self._cache.block)
            self._store.keep(path, tokens, self._executor.export)

    def discard(self, sequence: Sequence) -> None:
        """Before a sequence ends whose state is not finite: nobody else begins from it."""
        if self._cache is not None and (prefix := self._prefixes.get(sequence.number)):
            if prefix.pending is not None:
                self._blocks.free_snapshot(prefix.pending[1])
                prefix.pending = None
            self._cache.discard(prefix.names)

    def export(self, sequence: Sequence) -> None:
        """Before a sequence leaves for another engine: takes its state along, wherever that is."""
        prefix = self._prefixes.get(sequence.number)
        if sequence.table is not None:
            pages = sequence.computed_pages(self._blocks.page_size)
            sequence.exported_state = self._executor.export(sequence.slot, pages)
        elif prefix is not None and prefix.copy is not None:
            state = prefix.copy.state
            whole = state if isinstance(state, SequenceState) else self._executor.gathered(state)
            sequence.exported_state = lambda: whole

    def preempt(self, sequence: Sequence) -> None:
        """Takes slot and pages of a sequence: its state is offloaded, or it begins again where that cannot be."""
        prefix, table = self._prefixes[sequence.number], sequence.table
        assert table is not None
        if self._supports_state_copy:
            prefix.copy = HostCopy(table.home)
            pages = sequence.computed_pages(self._blocks.page_size)
            self._moves.append(OffloadState(sequence.slot, pages, prefix.copy))
        else:
            sequence.num_computed_tokens = 0
        self._release(sequence, prefix)

    def leave(self, sequence: Sequence) -> None:
        """Takes back what a sequence that ended holds; what others may share of it stays in the cache."""
        if (prefix := self._prefixes.get(sequence.number)) is not None:
            self._release(sequence, prefix)
            del self._prefixes[sequence.number]

    def _release(self, sequence: Sequence, prefix: CachedPrefix) -> None:
        if prefix.pending is not None:
            self.read(sequence)
        if prefix.pending is not None:  # a token of it was never read
            self._blocks.free_snapshot(prefix.pending[1])
            prefix.pending = None
        if sequence.table is not None:
            self._blocks.release(sequence.table)
            sequence.table = None


def _text(sequence: Sequence) -> Text:
    return Text(sequence.request.cache_salt, sequence.tokens)
