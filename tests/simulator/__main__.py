"""`make simulate SEEDS=1000`: run seeds on all cores, and print the shortest history of the first that fails."""

from __future__ import annotations

import argparse
import os
import sys
import time
from multiprocessing import Pool

from tests.simulator.scenario import scenario
from tests.simulator.simulation import failure_of, report


def failed(seed: int) -> tuple[int, str]:
    """Return a seed with the invariant that does not hold, "" if all do."""
    return seed, failure_of(scenario(seed))


def main() -> int:
    """Run what the command line says."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulator")
    parser.add_argument("--seeds", type=int, default=1000, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--seed", type=int, help="this one only, with its history")
    options = parser.parse_args()
    if options.seed is not None:
        print((found := report(options.seed)) or f"seed {options.seed} holds")
        return bool(found)
    began = time.monotonic()
    with Pool(os.cpu_count()) as pool:
        seeds = range(options.first, options.first + options.seeds)
        broken = sorted(found for found in pool.imap_unordered(failed, seeds, 50) if found[1])
    spent = time.monotonic() - began
    print(f"{options.seeds} seeds in {spent:.1f} s, {options.seeds / spent:.0f} a second; {len(broken)} fail")
    for seed, why in broken[:20]:
        print(f"  seed {seed}: {why}")
    if broken:
        print(report(broken[0][0]))
    return bool(broken)


sys.exit(main())
