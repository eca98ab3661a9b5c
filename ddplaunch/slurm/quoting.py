"""Escapes the arguments of a command for srun, for which a colon by itself begins another component. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

_BARE = re.compile(r"\\*:")


def escaped(argv: Sequence[str]) -> list[str]:
    """Escape the arguments so that none is a colon by itself: put a backslash before it, and one more before an escaped one."""
    return [f"\\{argument}" if _BARE.fullmatch(argument) else argument for argument in argv]


def unescaped(argv: Sequence[str]) -> list[str]:
    """Return the arguments as they were before `escaped`."""
    return [argument[1:] if _BARE.fullmatch(argument) else argument for argument in argv]
