"""Looks at files whose disk may hang, as that of a dead file server. What asks the disk is a child, which can be left behind.

What the kernel knows of a path without asking the disk takes no child: so a start on a disk that works costs none.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from ddplaunch.system.errors import LaunchError
from ddplaunch.system.process.linux import find_in_cache

T = TypeVar("T")
WITHIN = 3.0  # seconds that a disk gets to answer


def exists(paths: Sequence[str], what: str) -> bool:
    """Return whether there is anything at one of these paths; `what` names it in an error.

    Raises:
        LaunchError: its disk hangs.
    """
    known = {path: find_in_cache(path) for path in paths}
    unknown = [path for path, found in known.items() if found is None]
    return any(known.values()) or (bool(unknown) and answer(partial(_exist, unknown), unknown[0], what))


def _exist(paths: Sequence[str]) -> bool:
    return any(map(os.path.lexists, paths))


def answer(question: Callable[[], T], path: str, what: str, hint: str | None = None) -> T:
    """Call `question` in a child, and return or raise what the call did; `what` names what is at `path` in an error.

    Raises:
        LaunchError: the disk hangs.
    """
    from ddplaunch.system.process.ask import AskedEnded, ask  # most starts ask nothing

    try:
        return ask(question, WITHIN)
    except TimeoutError:
        why = f"its disk does not answer, or not within {WITHIN:g} s"
    except AskedEnded as error:
        why = str(error)
    except BlockingIOError:  # there is no room for a child
        return question()
    raise LaunchError(f"{what} cannot be used: {path}: {why}", hint=hint)
