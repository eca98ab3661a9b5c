"""How the words of a command pass through srun, for which a colon by itself begins another component. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

_BARE = re.compile(r"\\*:")


def sheltered(words: Sequence[str]) -> list[str]:
    """Write the words so that none is a colon by itself: a backslash before it says so, and one more before that of another."""
    return [f"\\{word}" if _BARE.fullmatch(word) else word for word in words]


def unsheltered(words: Sequence[str]) -> list[str]:
    """Give the words as they were."""
    return [word[1:] if _BARE.fullmatch(word) else word for word in words]
