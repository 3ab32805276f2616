"""Faults of one of two hosts at random moments.

``python -m tools.campaigns.host_faults ARTIFACT COUNT [AT_ONCE [KIND …]]`` injects each kind COUNT times and prints a
table.
"""

import os
import random
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.support.faults import End, Fault, inject

KINDS = ("killed", "stopped", "slowed", "partitioned")
PHASES = ("starting", "loading", "running")


def drawn(kind: str, seed: int) -> Fault:
    """A fault of a kind at a random moment."""
    dice = random.Random(f"{kind} {seed}")
    if kind == "slowed":  # host 0 waits only for followers
        return Fault(kind, "running", 1, dice.randint(2, 60))
    phase = PHASES[seed % len(PHASES)]
    return Fault(kind, phase, dice.randint(0, 1), dice.uniform(0, 1))


def main() -> None:
    """Prints the end of each fault, and for each kind the longest time and how many ended as specified."""
    artifact, count = Path(sys.argv[1]), int(sys.argv[2])
    kinds = sys.argv[4:] or KINDS
    faults = [drawn(kind, seed) for seed in range(count) for kind in kinds]
    ends: dict[str, list[End]] = {kind: [] for kind in kinds}
    with ThreadPoolExecutor(int(sys.argv[3]) if sys.argv[3:] else 1) as pool:
        for fault, end in zip(faults, pool.map(lambda fault: inject(artifact, fault), faults), strict=True):
            ends[fault.kind].append(end)
            print(f"{fault}\n  {end.seconds:.1f} s {end.said} {end.wrong}", file=sys.stderr, flush=True)
    for kind, group in ends.items():
        right, longest = sum(not end.wrong for end in group), max(end.seconds for end in group)
        print(f"{kind:12} {right} of {count} as stated, longest {longest:.1f} s")
    used = os.times()
    print(f"{used.children_user + used.children_system:.0f} processor seconds")


if __name__ == "__main__":
    main()
