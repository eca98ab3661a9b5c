"""Has a signal that ends this command do so only once the command has cleaned up."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def do_nothing(signum: int, frame: object) -> None:
    """Ignore a signal. With SIG_IGN in place of this, Python would print that it drops a signal which came just before."""


class _Ended(BaseException):
    """A signal has come; raised by its handler in the block."""


@contextmanager
def after_cleanup() -> Iterator[None]:
    """Let a signal end this process only after the `finally` of the block. Signals that are handled or ignored stay so."""
    ending = [signum for signum in _ENDING if signal.getsignal(signum) is signal.SIG_DFL]
    received: list[int] = []

    def leave_block(signum: int, _frame: object) -> None:
        for each in ending:
            signal.signal(each, do_nothing)  # a second one would cut the cleanup short
        received.append(signum)
        raise _Ended

    for signum in ending:
        signal.signal(signum, leave_block)
    try:
        yield
    except _Ended:
        pass
    finally:
        for signum in ending:
            signal.signal(signum, signal.SIG_DFL)
    if received:
        os.kill(os.getpid(), received[0])  # ends this process
