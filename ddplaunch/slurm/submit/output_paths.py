"""Where Slurm writes the output of a job: its patterns, with what is known put in. Pure."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

_SYMBOL = re.compile(r"%(\d*)([%AaJjNnstux])")
_NUMBERS = "AaJjnst"  # a width pads these with zeros, and is nothing to the others


def expand(pattern: str, known: Mapping[str, str]) -> str:
    """Put in what is known, by the letter behind %; what is not stays as it is."""

    def replace(found: re.Match[str]) -> str:
        width, letter = found.groups()
        value = known.get(letter)
        if value is None:
            return found[0]
        return value.zfill(int(width or 0)) if letter in _NUMBERS else value

    return _SYMBOL.sub(replace, pattern)


def is_whole(pattern: str) -> bool:
    """Whether nothing is left to be put in."""
    return _SYMBOL.search(pattern) is None


def of_job(job: Mapping[str, str]) -> dict[str, int]:
    """Give the files that a job writes, as far as it is known where they are, and what to each: 1 stdout, or both; 2 stderr.

    scontrol puts in most, but not the node, no padded number and no %%.
    """
    node = job.get("BatchHost", "").partition(".")[0]
    known = {"j": job["JobId"], "n": "0", "t": "0", "x": job.get("JobName", ""), "%": "%"}
    known["A"] = job.get("ArrayJobId", job["JobId"])
    if job.get("ArrayTaskId", "").isdecimal():
        known["a"] = job["ArrayTaskId"]
    if node:
        known["N"] = node
    found: dict[str, int] = {}
    for stream, name in ((1, "StdOut"), (2, "StdErr")):
        path = expand(job.get(name, ""), known)
        if is_whole(path) and path not in ("", "/dev/null"):
            found.setdefault(path, stream)
    return found


def shown(path: str, folder: str) -> str:
    """How a path is written for somebody in this folder."""
    inside = os.path.relpath(path, folder)
    return path if inside.startswith(os.pardir) else inside
