"""``python -m tests.fuzz``: the same cases as the tests, or more, or others, or one again. ``--help`` says how."""

import argparse
import os
import resource
import sys
import time

os.environ["LING3_CACHE"] = os.devnull  # never the user's: each worker has its own

from tests.fuzz.harness import Failure, Found, run
from tests.fuzz.targets import TARGETS


def cpu_seconds() -> float:
    """Seconds of CPU that processes have taken which this one started, and which have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> int:
    parser = argparse.ArgumentParser(prog="make fuzz", description="Seeded damage for everything that reads.")
    parser.add_argument("--target", action="append", choices=TARGETS, help="only this one; may be repeated")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--times", type=int, default=10, help="cases: so many times those of `make test`")
    parser.add_argument("--cases", type=int, help="cases of each target instead")
    parser.add_argument("--case", type=int, help="this case alone, as it failed")
    asked = parser.parse_args()
    whole = Found()
    for name in asked.target or TARGETS:
        begun, before, count = time.monotonic(), cpu_seconds(), asked.cases or asked.times * TARGETS[name][1]
        found = run(name, range(count) if asked.case is None else [asked.case], asked.seed)
        whole.counts += found.counts
        whole.failures += found.failures
        counts = ", ".join(f"{count} {kind}" for kind, count in sorted(found.counts.items()))
        print(
            f"{name:12} seed {asked.seed}: {counts} in {time.monotonic() - begun:.0f} s "
            f"({cpu_seconds() - before:.0f} s of CPU)",
            flush=True,
        )
        shown: dict[str, list[Failure]] = {}
        for failure in found.failures:
            shown.setdefault(
                failure.text.strip().split("\n")[-1][:80] if failure.kind != "hang" else "hang", []
            ).append(failure)
        for alike in shown.values():
            print(f"\n{alike[0]}\n({len(alike)} alike)\n", flush=True)
    print(f"{whole.counts.total()} cases: {dict(whole.counts)}")
    return 1 if whole.failures else 0


if __name__ == "__main__":
    sys.exit(main())
