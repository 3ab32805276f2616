"""Several processes that take the same steps: process 0 leads and writes, all compare the tokens that they saw.

One process is the case today. A group of them implements Ranks: ``gather`` is an all-gather of 32 bytes.
"""

from collections.abc import Iterable
from typing import Protocol

from ling3export.runners.eval_objects import RankDivergence, tokens_digest


class Ranks(Protocol):
    """The processes of a run.

    Attributes:
        index: This one; 0 reads the suite, writes the files and prints.
    """

    index: int

    def gather(self, digest: bytes) -> list[bytes]:
        """The 32 bytes of every process, by index."""


class OneProcess:
    """No other process."""

    index = 0

    def gather(self, digest: bytes) -> list[bytes]:
        """Its own."""
        return [digest]


ALONE = OneProcess()


def check_ranks(ranks: Ranks, ids: Iterable[int]) -> None:
    """Compares the token ids of a batch between processes.

    Raises:
        RankDivergence: They differ.
    """
    digests = ranks.gather(bytes.fromhex(tokens_digest(ids)))
    others = [index for index, digest in enumerate(digests) if digest != digests[0]]
    if others:
        raise RankDivergence(
            f"sampled tokens: expected the same on {len(digests)} processes, found others than on process 0 on "
            f"{', '.join(map(str, others))}",
            "every process must load the same artifact and see the same environment",
        )


def follow(batches: Iterable[list[int]], ranks: Ranks) -> None:
    """What a process that does not lead does: takes part in each batch, compares, is silent.

    Args:
        batches: The token ids of each batch that the leader had it run, until the leader stops.
        ranks: The processes.

    Raises:
        RankDivergence: Another process saw other tokens.
    """
    for ids in batches:
        check_ranks(ranks, ids)
