"""Measures ddplaunch against torchrun and a plain shell loop and prints one table. README.md says what each line means.

python benchmarks/run.py [--quick] [--json] [--check] [NAME ...]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import differences
import ends
import lives
import nodes
import outputs
import profiles
import rests
import slurm
import starts
import survivals
import throughput
from bed import Bed, Figure

BENCHMARKS: dict[str, Callable[[Bed], Iterator[Figure]]] = {
    "hello": starts.hello,
    "torch": starts.torch_import,
    "steps": starts.steps,
    "warm": starts.kept_warm,
    "many": starts.many,
    "crash": ends.crash,
    "raise": ends.raising,
    "restart": ends.restart,
    "nodes": nodes.start,
    "nodes-crash": nodes.crash,
    "agents": nodes.many,
    "survive": survivals.survive,
    "slurm": slurm.start,
    "slurm-crash": slurm.crash,
    "rest": rests.rest,
    "memory": rests.memory,
    "live": lives.live,
    "lines": outputs.lines,
    "flood": outputs.flood,
    "profile": profiles.profiled,
    "differences": differences.differences,
    "threads": throughput.threads,
}
_EMPTY = 9.0  # milliseconds of `python -c pass` on the machine for which targets in milliseconds were set


def main() -> None:
    """Run the benchmarks that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds: rougher figures, in a third of the time")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    parser.add_argument(
        "--check", action="store_true", help="exit with 1 if a target is missed by more than the rounds differ"
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(BENCHMARKS)}; not given: all")
    asked = parser.parse_args()
    if unknown := [name for name in asked.names if name not in BENCHMARKS]:
        parser.error(f"{unknown[0]} is not one of {', '.join(BENCHMARKS)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # `timeout` too has all ended that was started
    bed = Bed(quick=asked.quick)
    began = time.monotonic()
    facts = machine()
    empty = median(bed.seconds([*bed.python, "-c", "pass"]) for _ in range(21)) * 1e3
    facts["empty Python"] = f"{empty:.1f} ms"
    figures: list[Figure] = []
    try:
        for name in asked.names or BENCHMARKS:
            print(f"{name} ...", file=sys.stderr, flush=True)
            for measured in BENCHMARKS[name](bed):
                figure = _for_pace(measured, empty / _EMPTY)
                print(
                    f"  {figure.name}  {_rounded(figure.value)} {figure.unit}  {figure.how}",
                    file=sys.stderr,
                    flush=True,
                )
                figures.append(figure)
    finally:
        bed.close()
    facts["seconds"] = f"{time.monotonic() - began:.0f}"
    if asked.json:
        print(json.dumps({"machine": facts, "figures": [_plain(one) for one in figures]}, indent=1))
    else:
        print(table(figures))
        print("\n" + ", ".join(f"{name} {value}" for name, value in facts.items()))
    if asked.check and (missed := [one.name for one in figures if one.is_missed]):
        sys.exit(f"missed by more than the noise: {', '.join(missed)}")


def _for_pace(figure: Figure, slower: float) -> Figure:
    """Stretch a target in milliseconds by how much slower than the first machine this one starts a Python."""
    if figure.unit != "ms" or figure.target is None:
        return figure
    return replace(figure, target=round(figure.target * slower))


def _plain(figure: Figure) -> dict[str, Any]:
    low, high = figure.spread
    return {**asdict(figure), "low": low, "high": high, "met": figure.met}


def machine() -> dict[str, str]:
    """Say where this was measured."""
    cpuinfo = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.partition(":")[2].strip() for line in cpuinfo if line.startswith("model name")), "unknown CPU")
    return {
        "machine": f"{len(os.sched_getaffinity(0))} x {model}",
        "Linux": platform.release(),
        "Python": platform.python_version(),
        "torch": version("torch"),
        "load": " ".join(f"{load:.1f}" for load in os.getloadavg()),
    }


def table(figures: list[Figure]) -> str:
    """Write the figures, one a line."""
    rows = [("", "measured", "half of the rounds", "target", "", "")]
    for one in figures:
        sign = ">=" if one.more_is_better else "<="
        target = "" if one.target is None else f"{sign} {one.target:g} {one.unit}".rstrip()
        verdict = {True: "met", False: "MISSED", None: ""}[one.met]
        spread = " to ".join(dict.fromkeys(map(_rounded, one.spread)))
        rows.append((one.name, f"{_rounded(one.value)} {one.unit}".rstrip(), spread, target, verdict, one.how))
    widths = [max(len(row[at]) for row in rows) for at in range(5)]
    return "\n".join(
        "  ".join((*(cell.ljust(width) for cell, width in zip(row[:5], widths, strict=True)), row[5])).rstrip()
        for row in rows
    )


def _rounded(value: float) -> str:
    return f"{value:.0f}" if value >= 100 or value == int(value) else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


if __name__ == "__main__":
    main()
