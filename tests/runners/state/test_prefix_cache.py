"""The tree of blocks: hits of a prompt, reasons for misses, the order of eviction, and the value of a snapshot."""

import pytest
from msgspec.structs import replace

from ling3export.artifacts.manifest import read_manifest
from ling3export.runners.engine.engine import Engine
from ling3export.runners.state.block_manager import BlockManager
from ling3export.runners.state.prefix_cache import PrefixCache, SnapshotCost, Text, snapshot_cost

BLOCK = 256


class Tree:
    """A cache whose prompts are ranges of numbers, so that equal lengths begin alike."""

    def __init__(self, snapshots=8, pages=64, block=BLOCK):
        self.blocks = BlockManager(2, pages, block, snapshots=snapshots)
        self.cache = PrefixCache(self.blocks, block, "abi")

    def names(self, tokens, salt=""):
        return list(self.cache.names(self.cache.start(salt), tokens))

    def add(self, tokens, *snapshots, salt="", transient=False):
        """Stores a sequence with snapshots at these lengths."""
        names, table = self.names(tokens, salt), self.blocks.admit(len(tokens))
        node = self.cache.insert(names, table.pages)
        for at in snapshots:
            count = at // self.cache.block
            node = self.cache.insert(names[:count], table.pages)
            text = Text(salt, lambda start, stop: tokens[start:stop])
            self.cache.keep(node, self.cache.room(transient=transient), transient=transient, text=text)
        self.blocks.release(table)
        return node

    def look_up(self, tokens, salt=""):
        return self.cache.look_up(self.names(tokens, salt), len(tokens) - 1)


def prompt(match, length):
    """A prompt that shares its first ``match`` tokens with range(1100)."""
    return [*range(match), *range(5000, 5000 + length - match)]


@pytest.mark.parametrize(
    ("match", "length", "hit"),
    [(1100, 1400, 1024), (800, 1400, 512), (400, 1400, 0), (1100, 1300, 1024), (1024, 1024, 512), (1024, 1025, 1024)],
)
def test_the_worked_numbers_of_what_is_hit(match, length, hit):
    tree = Tree()
    tree.add(range(1100), 512, 1024)
    found = tree.look_up(prompt(match, length))
    assert found.tokens == hit
    assert len(found.pages) == hit // BLOCK and (found.snapshot is None) == (hit == 0)
    assert found.matched == match // BLOCK * BLOCK


def test_a_miss_says_why():
    tree = Tree(snapshots=1)
    tree.add(range(1100), 512)
    assert tree.look_up([7] * 600).reason == "no_match"
    assert tree.look_up(range(200)).reason == "shorter_than_block"
    assert tree.look_up(range(256)).reason == "shorter_than_block", "its last token has to be computed"
    assert tree.look_up(prompt(300, 600)).reason == "no_snapshot"
    assert tree.look_up(range(600)).reason == ""
    tree.add(range(9000, 9600), 512)
    assert tree.look_up(range(600)).reason == "evicted", "the one snapshot went to another"
    while tree.cache.evict():
        pass
    assert tree.look_up(range(600)).reason == "evicted"
    assert (tree.blocks.free_pages, tree.blocks.free_snapshots, tree.cache.evicted_snapshots) == (64, 1, 2)


def test_requests_of_different_salts_share_nothing():
    tree = Tree()
    tree.add(range(600), 512, salt="a")
    assert tree.look_up(range(600), "a").tokens == 512
    assert tree.look_up(range(600), "b").reason == tree.look_up(range(600)).reason == "no_match"


def test_the_least_recently_used_leaf_goes_first_and_what_somebody_holds_stays():
    tree = Tree(pages=8)
    tree.add(range(512), 512)
    tree.add(range(9000, 9512), 512)
    tree.add(range(512), 512)
    used = tree.look_up(range(600))
    tree.blocks.incref(used.pages)
    assert tree.cache.evict() and tree.cache.evict() and not tree.cache.evict()
    assert tree.look_up(range(600)) == used and tree.look_up(range(9000, 9600)).tokens == 0
    tree.blocks.decref(used.pages)
    assert tree.cache.evict() and tree.cache.evict() and tree.blocks.free_pages == 8


def test_the_end_of_a_turn_takes_no_place_of_what_others_begin_from():
    tree = Tree(snapshots=2)
    tree.add(range(512), 512)
    tree.add(range(9000, 9512), 256, transient=True)
    assert tree.cache.room(transient=False) is not None, "the oldest goes, whatever it is"
    assert tree.look_up(range(600)).reason == "evicted"
    tree.cache.room(transient=True)
    assert tree.look_up(range(9000, 9512)).reason == "evicted"
    tree = Tree(snapshots=1)
    tree.add(range(512), 512)
    assert tree.cache.room(transient=True) is None


def test_names_follow_from_the_root_the_salt_and_all_tokens_before():
    tree = Tree(block=4)
    one, two = tree.names(range(9)), tree.names([99, *range(1, 9)])
    assert len(one) == 2 and not set(one) & set(two)
    assert list(tree.cache.names(one[0], range(4, 9))) == one[1:]
    assert PrefixCache(tree.blocks, 4, "other").start("") != tree.cache.start("") != tree.cache.start("a")


@pytest.fixture
def target(artifact):
    (found,) = read_manifest(artifact("micro-tp1-snapshots")).targets.values()
    return found


def test_measured_seconds_come_first(target):
    prefill = target.paddings("prefill")[-1]
    measured = {"copy@8": 3e-3, f"prefill@{prefill}": 1e-3 * prefill}
    assert snapshot_cost(target, measured) == SnapshotCost(3e-3, pytest.approx(1e-3), "s")
    assert snapshot_cost(target, measured).least == 4, "three tokens cost as much as the copy"
    assert snapshot_cost(target, {"copy@8": 3e-3}).unit == "bytes", "one side alone says nothing"


def test_bytes_where_nobody_knows_the_device(target):
    """A state is read and written once; prefill moves the bytes that the compiler counts."""
    (fetch,) = (cell for cell in target.cells.values() if cell.phase == "offload")
    own = [leaf for leaf in fetch.outputs if leaf.group == "out" and leaf.name in ("kda_recurrent", "kda_conv")]
    state = sum(leaf.nbytes for leaf in own)
    prefill = target.cells[f"prefill@{target.paddings('prefill')[-1]}"]
    worth = snapshot_cost(target, {})
    assert worth == SnapshotCost(2 * state, prefill.bytes_accessed / prefill.padding, "bytes")
    assert (worth.least - 1) * worth.token <= worth.keep < worth.least * worth.token
    silent = {name: replace(cell, bytes_accessed=None) for name, cell in target.cells.items()}
    assert snapshot_cost(replace(target, cells=silent), {}) is None


def test_stats_print_both_sides(artifact, target):
    with Engine(artifact("micro-tp1-snapshots"), report=lambda text: None) as engine:
        assert engine.stats()["prefix_cache"]["worth"] == snapshot_cost(target, {}).record()
