"""A signal that ends this command does so once the command has cleaned up."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


class _Ended(BaseException):
    """A signal has come."""


@contextmanager
def after_cleanup() -> Iterator[None]:
    """Let a signal end this process only after the `finally` of the block; where signals have handlers, these stay."""
    ending = [signum for signum in _ENDING if signal.getsignal(signum) is signal.SIG_DFL]
    came: list[int] = []

    def end(signum: int, _frame: object) -> None:
        for each in ending:
            signal.signal(each, signal.SIG_IGN)  # a second one would cut the cleanup short
        came.append(signum)
        raise _Ended

    for signum in ending:
        signal.signal(signum, end)
    try:
        yield
    except _Ended:
        pass
    finally:
        for signum in ending:
            signal.signal(signum, signal.SIG_DFL)
    if came:
        os.kill(os.getpid(), came[0])
