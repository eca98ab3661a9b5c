"""Expands the patterns of the paths to which Slurm writes the output of a job. Pure."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

_SYMBOL = re.compile(r"%(\d*)([%AaJjNnstux])")
_NUMBERS = "AaJjnst"  # a width pads these with zeros, and is ignored for the others


def expand(pattern: str, known: Mapping[str, str]) -> str:
    """Replace the letters behind % that are known; leave the others."""

    def replace(found: re.Match[str]) -> str:
        width, letter = found.groups()
        value = known.get(letter)
        if value is None:
            return found[0]
        return value.zfill(int(width or 0)) if letter in _NUMBERS else value

    return _SYMBOL.sub(replace, pattern)


def is_complete(pattern: str) -> bool:
    """Whether all of it is expanded."""
    return _SYMBOL.search(pattern) is None


def of_job(job: Mapping[str, str]) -> dict[str, int]:
    """Return the output files of a job whose paths are known, and what goes there: 1 stdout, or both; 2 stderr.

    scontrol expands most, but not the node, padded numbers and %%.
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
        if is_complete(path) and path not in ("", "/dev/null"):
            found.setdefault(path, stream)
    return found


def shown(path: str, folder: str) -> str:
    """The path, relative to this folder if it is inside."""
    inside = os.path.relpath(path, folder)
    return path if inside.startswith(os.pardir) else inside
