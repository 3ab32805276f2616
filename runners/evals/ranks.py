"""Several processes that take the same steps compare the tokens that they read (``follow.SharedTurns`` hashes them)."""

from collections.abc import Sequence

from ling3export.errors import RankDivergence

HINT = "every process must load the same artifact and see the same environment"


def check_digests(digests: Sequence[bytes]) -> None:
    """Compares what each process read; none or one is always right.

    Args:
        digests: 32 bytes a process, by number.

    Raises:
        RankDivergence: They differ.
    """
    others = [number for number, digest in enumerate(digests) if digest != digests[0]]
    if others:
        raise RankDivergence(
            f"sampled tokens: expected the same on {len(digests)} processes, found others than on process 0 on "
            f"{', '.join(map(str, others))}",
            HINT,
        )
