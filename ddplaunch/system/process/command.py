"""Runs a command from a child that looks for something: it has a time limit, needs no shell, and ends with the child."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence
from functools import partial

from msgspec import Struct

from ddplaunch.system.process.fork import unfollowed
from ddplaunch.system.process.linux import signal_at_end_of

_LONGEST = 1 << 20  # characters of each stream that are kept


class Ended(Struct, frozen=True, kw_only=True):
    """How a command ended."""

    status: int | None  # negative: the signal that ended it; None: it was killed at the time limit
    out: str = ""
    err: str = ""


def run(
    argv: Sequence[str], env: Mapping[str, str], timeout: float, folder: str = "/", *, keeps_start: bool = False
) -> Ended:
    """Run a command and return its output. In the root folder no file of the user changes what it does.

    Of a long output the end is kept, or the start.

    Raises: OSError: it cannot be started.
    """
    import subprocess  # takes 10 ms

    kept = slice(_LONGEST) if keeps_start else slice(-_LONGEST, None)
    try:
        with unfollowed():
            done = subprocess.run(
                argv,
                env=env,
                cwd=folder,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=timeout,
                check=False,
                preexec_fn=partial(_begin, os.getpid()),  # which is safe, since such a child has no threads
            )
    except subprocess.TimeoutExpired as late:
        return Ended(status=None, out=_text(late.stdout, kept), err=_text(late.stderr, kept))
    return Ended(status=done.returncode, out=_text(done.stdout, kept), err=_text(done.stderr, kept))


def _begin(parent: int) -> None:
    """Take signals again, which the child blocks, and end with the child."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    signal_at_end_of(parent, signal.SIGKILL)


def _text(stream: bytes | None, kept: slice) -> str:
    return (stream or b"")[kept].decode(errors="replace")
