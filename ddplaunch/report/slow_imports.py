"""The imports that a run with --keep-warm still had to do, and the --preload that spares the next run them. Trusts no worker."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ddplaunch.report.error_file import content

_LINE = r"(\w[\w.]{0,99}) (\d{1,5}\.\d)"
_MOST = 4  # modules that are named


def advice(path: str, preload: Sequence[str]) -> str:
    """Return a line for the user about the modules that worker/import_times.py has noted at `path`; "" if there are none."""
    lines = content(path).decode(errors="replace").splitlines()
    found = {match[1]: float(match[2]) for line in lines if (match := re.fullmatch(_LINE, line, re.ASCII))}
    slow = sorted(((name, seconds) for name, seconds in found.items() if name not in preload), key=lambda one: -one[1])[
        :_MOST
    ]
    if not slow:
        return ""
    took = ", ".join(f"{name} ({seconds:.1f} s)" for name, seconds in slow)
    wanted = ",".join([*preload, *(name for name, _ in slow)])
    return f"each worker imported {took} itself; `--preload {wanted}` keeps that warm too"
