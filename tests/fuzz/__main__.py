"""`python -m tests.fuzz`: compare random programs. Exit code 1 if any differs."""

from __future__ import annotations

import argparse
import sys
import time

from .compare import fuzz


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--count", type=int, default=2000, help="how many programs (default: 2000)")
    parser.add_argument("--seed", type=int, default=0, help="the same seed gives the same programs (default: 0)")
    parser.add_argument("--only", type=int, metavar="N", help="only program N of the seed")
    chosen = parser.parse_args()
    numbers = range(chosen.count) if chosen.only is None else range(chosen.only, chosen.only + 1)
    start, started = time.monotonic(), time.process_time()
    outcome = fuzz(chosen.seed, numbers, stop_at=3)
    for failure in outcome.failures:
        print(failure, end="\n\n")
    did = ", ".join(f"{what} {count}" for what, count in sorted(outcome.seen.items()))
    print(
        f"{len(outcome.failures)} failures in {time.monotonic() - start:.0f} s, "
        f"{time.process_time() - started:.0f} s of it computing: {did}",
        file=sys.stderr,
    )
    return 1 if outcome.failures else 0


if __name__ == "__main__":
    sys.exit(main())
