"""A sequence's state in host memory."""

import numpy as np

from ling3export.runners.load.sharded import ShardedState, Shards


def shards(*shape, value):
    return Shards(shape, {tuple((0, n) for n in shape): np.full(shape, value, np.float32)})


def test_slot_0_of_later_calls_is_ignored():
    """Regression: later calls of ``onload`` write slot 0, so receipts of builds with three calls or more failed."""

    def kept(slot_0, latent=1):
        first = {"kda_recurrent": shards(2, 3, value=1), "mla_latent": shards(1, 2, value=1)}
        middle = {"kda_recurrent": shards(2, 3, value=slot_0), "mla_latent": shards(1, 2, value=1)}
        last = {"kda_recurrent": shards(2, 3, value=slot_0), "mla_latent": shards(1, 2, value=latent)}
        return ShardedState((first, middle, last))

    assert kept(5).compared(kept(6)) == (6 + 3 * 2, 0)
    assert kept(5).compared(kept(5, latent=9)) == (12, 2)


def test_padding_of_the_last_call_counts_for_nothing():
    """Regression: builds whose sequences have 10 pages, moved in calls of 8 (copy@8), failed their receipts."""

    def kept(padding, last=1):
        pages = np.array([[[last], [padding]]], np.float32)
        first = {"mla_latent": shards(1, 2, 1, value=1)}
        return ShardedState(
            (first, {"mla_latent": Shards(pages.shape, {((0, 1), (0, 2), (0, 1)): pages})}),
            (np.array([0, 1]), np.array([2, -1])),
        )

    assert kept(5).compared(kept(6)) == (3, 0)
    assert kept(5).compared(kept(5, last=9)) == (3, 1)
