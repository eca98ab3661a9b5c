"""Looks at files whose disk may hang, as that of a dead file server. What asks the disk is a child, which can be left behind.

What the kernel knows of a path without asking the disk takes no child: so a start on a disk that works costs none.
"""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Callable, Sequence
from typing import NoReturn, TypeVar

from ddplaunch.system.errors import LaunchError
from ddplaunch.system.process.linux import detach, find_in_cache, signal_at_end_of

T = TypeVar("T")
WITHIN = 3.0  # seconds that a disk gets to answer
_THERE, _MISSING = b"+", b"-"
_SILENT = f"its disk does not answer, or not within {WITHIN:g} s"


def exists(paths: Sequence[str], what: str) -> bool:
    """Return whether there is anything at one of these paths; `what` names it in an error.

    Raises:
        LaunchError: its disk hangs.
    """
    known = {path: find_in_cache(path) for path in paths}
    unknown = [path for path, found in known.items() if found is None]
    return any(known.values()) or (bool(unknown) and _exist(unknown, what))


def answer(question: Callable[[], T], path: str, what: str, hint: str | None = None) -> T:
    """Call `question` in a child, and return or raise what the call did; `what` names what is at `path` in an error.

    Raises:
        LaunchError: the disk hangs.
    """
    from ddplaunch.system.process.ask import AskedEnded, ask  # most starts ask nothing

    try:
        return ask(question, WITHIN)
    except TimeoutError:
        why = _SILENT
    except AskedEnded as error:
        why = str(error)
    except BlockingIOError:  # there is no room for a child
        return question()
    raise LaunchError(f"{what} cannot be used: {path}: {why}", hint=hint)


def _exist(paths: Sequence[str], what: str) -> bool:
    """Ask for one byte, which takes none of the imports of `answer`: each first start on a machine comes here."""
    from ddplaunch.system.process.ask import end_asked, fork_to_answer

    us = os.getpid()
    try:
        pid, answers = fork_to_answer(lambda pipe: _look(us, paths, pipe))
    except BlockingIOError:  # there is no room for a child
        return any(map(os.path.lexists, paths))
    poll = select.poll()
    poll.register(answers, select.POLLIN)
    received = os.read(answers, 1) if poll.poll(WITHIN * 1000) else b""
    os.close(answers)
    end_asked(pid, has_answered=bool(received))
    if received not in (_THERE, _MISSING):
        raise LaunchError(f"{what} cannot be used: {paths[0]}: {_SILENT}")
    return received == _THERE


def _look(parent: int, paths: Sequence[str], pipe: int) -> NoReturn:
    """Look in the child, and write to descriptor 3 what is there."""
    try:
        signal_at_end_of(parent, signal.SIGKILL)
        detach(pipe)
        os.write(3, _THERE if any(map(os.path.lexists, paths)) else _MISSING)
    finally:
        os._exit(0)
