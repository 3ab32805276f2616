"""``python -m tests.fuzz``: the cases of the tests, more of them, other ones, or one again; see ``--help``."""

import argparse
import os
import resource
import sys
import time

os.environ["LING3_CACHE"] = os.devnull  # never the user's cache: each worker has its own

from tests.fuzz.harness import Failure, Found, run
from tests.fuzz.targets import TARGETS


def cpu_seconds() -> float:
    """CPU seconds of ended child processes."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> int:
    parser = argparse.ArgumentParser(prog="make fuzz", description="Runs all readers on input with seeded damage.")
    parser.add_argument("--target", action="append", choices=TARGETS, help="only this target; may be repeated")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--times", type=int, default=10, help="multiple of the number of cases in `make test`")
    parser.add_argument("--cases", type=int, help="number of cases for each target, instead of --times")
    parser.add_argument("--case", type=int, help="only this case, such as one that failed")
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
