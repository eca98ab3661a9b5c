"""What a loop behind the front hears: signals that the front passes on or that come to it directly, the end of children.

What a signal means is decided here for the agent and for the loops of `remote` alike; what follows from it, by each of them.
"""

from __future__ import annotations

import os
import selectors
import signal
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from math import inf

from ddplaunch.agent.pipes import MAY_STOP, ONE_FEWER, FrontPipes
from ddplaunch.supervise import node

ECHO = 0.02  # seconds in which the same signal to stop is no second one: timeout(1) sends it twice
COPY = 1.0  # seconds that the front may take to pass on what came to both processes at once, as from pkill -f


class SignalDeduplicator:
    """Tells who sends a signal to stop again from one that only comes twice. Pure: the time comes with the signal."""

    def __init__(self, stops: frozenset[int], sent_again: frozenset[int] = frozenset()) -> None:
        """`sent_again` are signals that somebody sends more than once without being impatient."""
        self._stops = stops
        self._calm = sent_again | {signal.SIGHUP}  # the kernel and the shell both tell of a closed terminal
        self._meant: dict[int, float] = {}  # when each last came that was no echo
        self._single: dict[int, tuple[bool, float]] = {}  # those that have come to one process so far: direct, when

    def take(self, signum: int, at: float, *, direct: bool) -> node.SignalReceived:
        """Give the event that this signal is; one that came `direct` to this process is perhaps a copy of the front's."""
        is_echo = at - self._meant.get(signum, -inf) < ECHO
        if signum in self._stops and not is_echo:
            self._meant[signum] = at
        is_copy = self._is_copy(signum, at, direct)
        escalates = not (direct or is_copy or is_echo or signum in self._calm)
        return node.SignalReceived(signum, at, escalates=escalates)

    def _is_copy(self, signum: int, at: float, direct: bool) -> bool:
        """Whether the other process has had it before this one, and nothing since."""
        before = self._single.pop(signum, None)
        if before is not None and before[0] is not direct and at - before[1] < COPY:
            return True
        self._single[signum] = (direct, at)
        return False


class SignalSource:
    """Turns signals into events, in the loop."""

    def __init__(
        self,
        selector: selectors.BaseSelector,
        pipes: FrontPipes,
        *,
        stops: frozenset[int],
        sent_again: frozenset[int] = frozenset(),
        feed: Callable[[node.Event], None],
        child_ended: Callable[[], None],
        front_lost: Callable[[], None],
        one_fewer: Callable[[], None] = lambda: None,
        has_stopped: Callable[[], bool] = lambda: True,
    ) -> None:
        """`front_lost` is called once, when the front has ended.

        `one_fewer` is called for each node that, as the front knows, will not come, `has_stopped` after SIGTSTP until all
        that is to stop has.
        `stops` are the signals that ask for the end, `sent_again` those of which a second one means no hurry.
        """
        self._selector = selector
        self._from_front = pipes.signals[0]
        self._suspended = pipes.suspended[1]
        self._stops = stops
        self._repeats = SignalDeduplicator(stops, sent_again)
        self._feed = feed
        self._child_ended = child_ended
        self._front_lost = front_lost
        self._one_fewer = one_fewer
        self._has_stopped = has_stopped
        self._front_waits = False  # whether it was told to stop, and is to do so last

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

    def wait(self, seconds: float) -> None:
        """Wait so long, whatever is heard meanwhile."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            for ready, _ in self._selector.select(left):
                ready.data()

    def only_stops(self, stopped: Callable[[], None]) -> None:
        """Hear the front only if it wants the end, or ends itself: there is nothing left to be signalled."""

        def hear() -> None:
            numbers = os.read(self._from_front, 256)
            if self._stops.intersection(numbers):
                stopped()
            if not numbers:
                self._lose_front()

        if self._from_front in self._selector.get_map():
            self._selector.modify(self._from_front, selectors.EVENT_READ, hear)

    def _signalled(self, numbers: bytes) -> None:
        for signum in numbers:
            if signum == signal.SIGCHLD:
                self._child_ended()
            else:
                self._came(signum, direct=True)
        self._look_for_stop()

    def _front_spoke(self) -> None:
        numbers = os.read(self._from_front, 256)
        if not numbers:
            self._lose_front()
            self._feed(node.FrontLost(time.monotonic()))
        for signum in numbers:
            if signum == ONE_FEWER:
                self._one_fewer()
            elif signum == MAY_STOP:
                self._front_waits = True
            elif signum != signal.SIGCHLD:  # the front's child is this process
                self._came(signum, direct=False)
                if signum == signal.SIGCONT or signum in self._stops:
                    self._answer(signal.SIGCONT)
        self._look_for_stop()

    def _look_for_stop(self) -> None:
        if self._front_waits and self._has_stopped():
            self._answer(signal.SIGTSTP)

    def _answer(self, signum: int) -> None:
        if self._front_waits:
            self._front_waits = False
            with suppress(OSError):  # the front has ended
                os.write(self._suspended, bytes([signum]))

    def _came(self, signum: int, *, direct: bool) -> None:
        self._feed(self._repeats.take(signum, time.monotonic(), direct=direct))

    def _lose_front(self) -> None:
        self._selector.unregister(self._from_front)
        self._front_lost()


def _nothing(_signum: int, _frame: object) -> None:
    """Only there so that the wakeup descriptor is written to."""
