"""What the agent hears besides its workers: signals that the front passes on or that come to it directly, the end of children."""

from __future__ import annotations

import os
import selectors
import signal
import time
from collections.abc import Callable, Iterable

from ddplaunch import supervise


class Hearing:
    """Turns signals into events, in the loop."""

    def __init__(
        self,
        selector: selectors.BaseSelector,
        from_front: int,
        *,
        feed: Callable[[supervise.Event], None],
        child_ended: Callable[[], None],
        front_lost: Callable[[], None],
    ) -> None:
        """`from_front` is the pipe of the front; `front_lost` is called once when it has ended."""
        self._selector = selector
        self._from_front = from_front
        self._feed = feed
        self._child_ended = child_ended
        self._front_lost = front_lost

    def listen(self, signals: Iterable[int]) -> None:
        """Take these signals, and SIGCHLD, from now on."""
        ours, wakeup = os.pipe()
        for fd in (ours, wakeup):
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
        for signum in (*signals, signal.SIGCHLD):
            signal.signal(signum, _nothing)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        self._selector.register(ours, selectors.EVENT_READ, lambda: self._signalled(os.read(ours, 256)))
        self._selector.register(self._from_front, selectors.EVENT_READ, self._front_spoke)

    def only_stops(self, stops: frozenset[int], stopped: Callable[[], None]) -> None:
        """Hear the front only if it wants the end, or ends itself: there is nothing left to be signalled."""

        def hear() -> None:
            numbers = os.read(self._from_front, 256)
            if stops.intersection(numbers):
                stopped()
            if not numbers:
                self._lose_front()

        if self._from_front in self._selector.get_map():
            self._selector.modify(self._from_front, selectors.EVENT_READ, hear)

    def _signalled(self, numbers: bytes) -> None:
        """Hear signals sent to this process itself: perhaps copies of the front's, so never a second one that kills."""
        for signum in numbers:
            if signum == signal.SIGCHLD:
                self._child_ended()
            else:
                self._feed(supervise.SignalReceived(signum, time.monotonic(), escalates=False))

    def _front_spoke(self) -> None:
        numbers = os.read(self._from_front, 256)
        if not numbers:
            self._lose_front()
            self._feed(supervise.FrontLost(time.monotonic()))
        for signum in numbers:
            if signum != signal.SIGCHLD:  # the front's child is this process
                self._feed(supervise.SignalReceived(signum, time.monotonic()))

    def _lose_front(self) -> None:
        self._selector.unregister(self._from_front)
        self._front_lost()


def _nothing(_signum: int, _frame: object) -> None:
    """Only there so that the wakeup descriptor is written to."""
