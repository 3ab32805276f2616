"""Prompts that begin alike are stored once: a tree of blocks of latents, with snapshots of the recurrent state in it.

A block has the tokens of one page. A node of the tree is one block after those of its parent: it holds the page
of the block's latents, and maybe a *snapshot*, the recurrent and conv state after its last token. A sequence can go on
only from a snapshot: the latents before it are worth nothing to KDA without the state, which no latent tells.

Pages in the tree are read and never written again, so any number of sequences share them. A node is named by a chain
of digests: of the root's name and the tokens of each block up to its own. Only tokens and the order of the calls
decide, no clock: hosts that take the same steps have the same tree.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ling3export.artifacts.schema import Target
from ling3export.runners.state.block_manager import BlockManager
from ling3export.runners.state.layout import layout_of, nbytes

EVERY = 512  # tokens between snapshots of a prompt
REMEMBERED = 4096  # names of nodes and snapshots that were evicted, to tell why a request hit nothing


class Stored(NamedTuple):
    """Blocks of a sequence can be found by others now.

    Attributes:
        hashes: Their names, one after the other.
        parent: The name before them; None for the first blocks of a sequence.
        block: Tokens a block.
        salt: Requests with another salt cannot find them.
        state: Whether the recurrent state after each is meant, and not its latents.
    """

    hashes: tuple[bytes, ...]
    parent: bytes | None
    tokens: tuple[int, ...]
    block: int
    salt: str = ""
    state: bool = False


class Removed(NamedTuple):
    """Blocks cannot be found any more; with ``state`` it is the recurrent states after them."""

    hashes: tuple[bytes, ...]
    state: bool = False


class Cleared(NamedTuple):
    """Nothing can be found any more."""


Event = Stored | Removed | Cleared


@dataclass(eq=False)
class Node:
    """A block of tokens after the blocks of its parents.

    Attributes:
        name: The digest of all tokens up to the block's end.
        parent: The block before it; None for a first one.
        depth: Blocks up to its end.
        snapshot: The slot of the state after it, if one is kept.
        transient: Whether the snapshot is the latest one of a decode. It is evicted before snapshots of prompts, and
            the next one of the same decode replaces it.
        through: How many snapshots this node and its descendants have: while there is one, a prompt can hit the block.
    """

    name: bytes
    parent: "Node | None"
    page: int
    depth: int
    snapshot: int | None = None
    transient: bool = False
    children: int = 0
    through: int = 0


class Text(NamedTuple):
    """A sequence's salt, and what gives its tokens from one position to another."""

    salt: str
    tokens: Callable[[int, int], Sequence[int]]


@dataclass(frozen=True)
class Hit:
    """The longest beginning of a prompt that is in the tree.

    Attributes:
        tokens: From here on the prompt must be computed.
        snapshot: The slot of the state after them.
        matched: Tokens of the longest known path, in whole blocks.
        reason: Why nothing was hit: ``no_match``, ``no_snapshot``, ``shorter_than_block`` or ``evicted``; else empty.
    """

    tokens: int
    pages: tuple[int, ...]
    snapshot: int | None
    matched: int
    reason: str


class SnapshotCost(NamedTuple):
    """Both sides of whether a snapshot is kept. It is where ``keep < tokens before it · token``.

    Attributes:
        keep: Cost of copying one state.
        token: Cost of prefilling one token.
        unit: The unit of both: ``s``, measured or estimated, or ``bytes`` that are moved, where no times are known. The
            bytes of prefill leave out what its products compute, and loops count once, so a snapshot is kept too rarely
            rather than too often.
    """

    keep: float
    token: float
    unit: str

    @property
    def least(self) -> int:
        """The fewest tokens after which a snapshot is kept."""
        return int(self.keep / self.token) + 1

    def record(self) -> dict[str, float | str]:
        """Both costs and the fewest tokens that follow from them, as JSON."""
        return {"keep": self.keep, "prefill_token": self.token, "unit": self.unit, "least_tokens": self.least}


class PrefixCache:
    """A tree of blocks.

    Args:
        root: Prefix of the names of nodes: artifacts whose states differ have different ones.
        cost: Cost and gain of a snapshot; None keeps all.
        tell: Told at once what prompts can hit and what not any more: the blocks that lead to a snapshot, and the
            states after blocks. Pages that lead to no snapshot are worth nothing to a prompt. None tells nobody.

    Attributes:
        least: The fewest tokens after which a snapshot is kept.
    """

    def __init__(
        self,
        pools: BlockManager,
        block: int,
        root: str = "",
        every: int = EVERY,
        cost: SnapshotCost | None = None,
        tell: Callable[[Event], None] | None = None,
    ) -> None:
        self._pools, self._root, self._cost, self._tell = pools, root, cost, tell
        self.block, self.every = block, -(-every // block) * block
        self.least = 0 if cost is None else cost.least
        self.reset()

    def reset(self) -> None:
        """Forgets everything; the pools are reset, too."""
        self._nodes: OrderedDict[bytes, Node] = OrderedDict()  # the least recently used first, children before parents
        self._kept: OrderedDict[bytes, Node] = OrderedDict()  # those with snapshots, the least recently used first
        self._gone: OrderedDict[bytes, None] = OrderedDict()
        self.evicted_pages = self.evicted_snapshots = 0
        if self._tell is not None:
            self._tell(Cleared())

    def __len__(self) -> int:
        return len(self._nodes)

    def record(self) -> dict[str, Any]:
        """Counts of its entries and of evicted ones, and the cost of a snapshot, as JSON."""
        return {
            "pages": len(self._nodes),
            "snapshots": len(self._kept),
            "evicted_pages": self.evicted_pages,
            "evicted_snapshots": self.evicted_snapshots,
            "worth": self._cost and self._cost.record(),
        }

    def start(self, salt: str) -> bytes:
        """The name before the first block of a sequence; another for each ``salt``."""
        return chain_start(self._root, salt)

    def names(self, before: bytes, tokens: Sequence[int]) -> Iterator[bytes]:
        """The name of each whole block of ``tokens`` after the block that is called ``before``."""
        yield from chained(before, tokens[: len(tokens) // self.block * self.block], self.block)

    def look_up(self, names: Sequence[bytes], most: int) -> Hit:
        """The longest known beginning of a prompt from which a sequence can continue; nothing changes.

        Args:
            names: The names of the prompt's blocks.
            most: The most tokens that may be hit: the last one has to be computed, for its logits.
        """
        path = self.path(names)
        usable = path[: most // self.block]
        last = next((node for node in reversed(usable) if node.snapshot is not None), None)
        matched = len(path) * self.block
        if last is not None:
            pages = tuple(node.page for node in path[: last.depth])
            return Hit(last.depth * self.block, pages, last.snapshot, matched, "")
        if most < self.block:
            reason = "shorter_than_block"
        elif any(name in self._gone for name in names[: most // self.block]):
            reason = "evicted"
        else:
            reason = "no_snapshot" if path else "no_match"
        return Hit(0, (), None, matched, reason)

    def path(self, names: Sequence[bytes]) -> list[Node]:
        """The nodes of a sequence's blocks, from the first one on, as far as there are any."""
        nodes: list[Node] = []
        for name in names:
            node = self._nodes.get(name)
            if node is None:
                break
            nodes.append(node)
        return nodes

    def use(self, names: Sequence[bytes], hit: Hit) -> None:
        """Notes that a sequence continues from ``hit``: its blocks and its snapshot are now the most recently used."""
        count = hit.tokens // self.block
        if count:
            self._kept[names[count - 1]].transient = False
            self._kept.move_to_end(names[count - 1])
        self._touch(names[: max(count, hit.matched // self.block)])

    def insert(self, names: Sequence[bytes], pages: Sequence[int]) -> Node:
        """Makes the nodes of a sequence's first blocks, at least one, where there are none yet.

        Args:
            names: The names of the blocks; all are stored.
            pages: The pages of the blocks; the tree holds those of its new nodes from now on.

        Returns:
            The node of the last block.
        """
        node: Node | None = None
        for depth, (name, page) in enumerate(zip(names, pages, strict=False), 1):
            parent, node = node, self._nodes.get(name)
            if node is None:
                node = self._nodes[name] = Node(name, parent, page, depth)
                self._pools.incref([page])
                if parent is not None:
                    parent.children += 1
        assert node is not None
        self._touch(names)
        return node

    def room(self, *, transient: bool) -> int | None:
        """A slot for a snapshot. If none is free, one is evicted: for a ``transient`` snapshot only a transient one."""
        slot = self._pools.take_snapshot()
        if slot is None and (node := self._stalest(transient)) is not None:
            self._give_up(node)
            slot = self._pools.take_snapshot()
        return slot

    def keep(self, node: Node, slot: int, *, transient: bool, text: Text) -> None:
        """Gives a node the snapshot in ``slot``; if it has one, that one stays. ``text`` leads to the node."""
        if node.snapshot is None:
            node.snapshot, node.transient = slot, transient
            self._lead(node, text)
        else:
            self._pools.free_snapshot(slot)
            node.transient &= transient
        self._kept[node.name] = node
        self._kept.move_to_end(node.name)

    def forget(self, node: Node) -> None:
        assert node.snapshot is not None
        self._pools.free_snapshot(node.snapshot)
        node.snapshot = None
        del self._kept[node.name]
        self._lead_no_more(node)

    def _lead(self, node: Node, text: Text) -> None:
        """Counts a new snapshot on the path to it, and tells what can be hit now."""
        new: list[Node] = []
        ancestor: Node | None = node
        while ancestor is not None:
            ancestor.through += 1
            if ancestor.through == 1:
                new.append(ancestor)
            ancestor = ancestor.parent
        if self._tell is None:
            return
        for nodes, state in ((new[::-1], False), ([node], True)):
            if nodes:
                first, before = nodes[0].depth - 1, nodes[0].parent
                tokens = tuple(text.tokens(first * self.block, nodes[-1].depth * self.block))
                names = tuple(ancestor.name for ancestor in nodes)
                parent = None if before is None else before.name
                self._tell(Stored(names, parent, tokens, self.block, text.salt, state))

    def _lead_no_more(self, node: Node) -> None:
        """Takes a snapshot's count back, and tells what cannot be hit any more."""
        gone: list[bytes] = []
        ancestor: Node | None = node
        while ancestor is not None:
            ancestor.through -= 1
            if not ancestor.through:
                gone.append(ancestor.name)  # children before parents
            ancestor = ancestor.parent
        if self._tell is not None:
            self._tell(Removed((node.name,), state=True))
            if gone:
                self._tell(Removed(tuple(gone)))

    def evict(self) -> bool:
        """Gives up one page that no sequence holds, and whatever snapshot it has; False if there is none."""
        leaves = (node for node in self._nodes.values() if not node.children and self._pools.is_unshared(node.page))
        node = next(leaves, None)
        if node is None:
            return False
        self._remove(node)
        return True

    def discard(self, names: Sequence[bytes]) -> None:
        """Removes the blocks of a sequence and all that begins with one: its numbers are not to be used again."""
        gone = {name: node for name in names if (node := self._nodes.get(name)) is not None}
        for node in sorted(self._nodes.values(), key=lambda node: node.depth):
            if node.parent is not None and node.parent.name in gone:
                gone[node.name] = node
        for node in sorted(gone.values(), key=lambda node: -node.depth):
            self._remove(node)

    def _remove(self, node: Node) -> None:
        """Gives up the page of a node without children, and whatever snapshot it has."""
        if node.snapshot is not None:
            self._give_up(node)
        del self._nodes[node.name]
        self._remember(node.name)
        if node.parent is not None:
            node.parent.children -= 1
        self._pools.decref([node.page])
        self.evicted_pages += 1

    def _give_up(self, node: Node) -> None:
        self.forget(node)
        self.evicted_snapshots += 1
        self._remember(node.name)

    def _stalest(self, transient: bool) -> Node | None:
        return next((node for node in self._kept.values() if node.transient or not transient), None)

    def _touch(self, names: Sequence[bytes]) -> None:
        for name in reversed(names):
            if name in self._nodes:  # what is after a hit may be gone
                self._nodes.move_to_end(name)

    def _remember(self, name: bytes) -> None:
        self._gone[name] = None
        if len(self._gone) > REMEMBERED:
            self._gone.popitem(last=False)


def chain_start(root: str, salt: str) -> bytes:
    """The name before the first block of a sequence: another for each ``salt``, so that two salts share nothing."""
    return hashlib.sha256(root.encode() + salt.encode("utf-8", "surrogatepass")).digest()


def chained(before: bytes, tokens: Sequence[int], block: int) -> Iterator[bytes]:
    """The names of the blocks of ``tokens``, which follow the block with the name ``before``."""
    ids = np.asarray(tokens, "<i4")
    for at in range(0, len(ids), block):
        before = hashlib.sha256(before + ids[at : at + block].tobytes()).digest()
        yield before


def snapshot_cost(target: Target, measured: Mapping[str, float]) -> SnapshotCost | None:
    """The cost of a snapshot of a target with programs that move states; None where nothing tells it.

    Args:
        target: The manifest's.
        measured: Seconds of a call, by cell: the same on all hosts, which decide alike.
    """
    copy, prefill = (target.cells[f"{phase}@{target.paddings(phase)[-1]}"] for phase in ("copy", "prefill"))
    seconds = (
        (measured.get(copy.name), measured.get(prefill.name)),
        (copy.estimated_seconds, prefill.estimated_seconds),
    )
    for keep, whole in seconds:
        if keep and whole:
            return SnapshotCost(keep, whole / prefill.padding, "s")
    if not prefill.bytes_accessed:
        return None
    layout = layout_of(target)
    state = nbytes(layout.recurrent) + nbytes(layout.conv)
    keep = 2 * state / target.tp  # it is read and written
    return SnapshotCost(keep, prefill.bytes_accessed / prefill.padding, "bytes")
