"""Decides whether a signal to stop that follows another one is meant as a second request. Pure: the time comes with the signal.

Many senders ask twice by themselves: uv passes on a signal that the whole group has had, LSF and the runners of CI services send
SIGINT and then SIGTERM. The table in docs/guides/stopping-and-restarting.md names them. Workers that save must outlive that.
"""

from __future__ import annotations

import signal
from enum import Enum, auto
from math import inf
from signal import SIGHUP, SIGINT, SIGTERM

from ddplaunch.system.process.terminal import Standing, standing

# seconds in which the same signal is one: timeout(1) sends it twice at once, which a busy machine may let us see so much later
REPEAT_WINDOW = 0.1
ECHO_WINDOW = 0.5  # seconds in which a wrapper passes on a signal that we have had already: uv waits for 0.2 s
# seconds in which the same signal, sent by a program, repeats the request: later, the first has not helped
SAME_REQUEST = 5.0
POLITE = frozenset({SIGINT, SIGTERM, SIGHUP})  # signals of which a sender tries one after another before it kills


class Typed(Enum):
    """Whether a person has typed the signal, as by Ctrl-C or `ddplaunch stop`."""

    NO = auto()
    # it came to the foreground of a terminal, whose keyboard is not our stdin: wrappers then pass Ctrl-C on
    PERHAPS = auto()
    YES = auto()


class Meaning(Enum):
    """What a signal to stop is taken for."""

    FIRST = auto()  # the request to stop
    DUPLICATE = auto()  # the signal before it, sent twice at once: not worth a word
    SAME = auto()  # the request that was made before
    INSISTS = auto()  # a second request: the workers are to be killed


class StopRequests:
    """The signals to stop that have come to a process since a stop began, and what each of them means.

    A wrapper is a program around ddplaunch, such as uv, that passes on signals which the whole process group has had.
    """

    def __init__(self, sent_again: frozenset[int] = frozenset(), *, lasts: float = inf) -> None:
        """`sent_again` are signals that a scheduler may send twice: they are no second request, unless a person types them.

        A stop lasts `lasts` seconds: a signal that comes later begins another one.
        """
        # the kernel, the shell and systemd each send SIGHUP when a terminal is closed
        self._sent_by_schedulers = sent_again | {SIGHUP}
        self._lasts = lasts
        self.first = 0  # the signal that asked for the stop; 0: none has
        self._first_at = -inf  # monotonic seconds, as all times here
        self._requests = 0  # signals that somebody has sent on purpose: neither duplicates nor passed on by a wrapper
        self._last_came_at: dict[int, float] = {}  # when each signal last came, its duplicates aside
        self._latest_signal = 0  # the last of these signals
        self._passed_on: set[int] = set()  # signals that a wrapper has passed on in this stop

    def take(self, signum: int, at: float, typed: Typed = Typed.NO) -> Meaning:
        """Return what a signal to stop means, and remember it; `typed`: whether a person has typed it."""
        if not self.first or at - self._first_at >= self._lasts:
            self._begin(signum, at)
            return Meaning.FIRST
        before = self._last_came_at.get(signum)
        if before is not None and at - before < REPEAT_WINDOW:
            return Meaning.DUPLICATE
        if self._is_passed_on(signum, at, typed):
            meaning = Meaning.SAME
            self._passed_on.add(signum)
        else:
            meaning = self._judge_request(signum, at, typed)
            if signum not in self._sent_by_schedulers:  # which send it of themselves, and perhaps twice
                self._requests += 1
        self._last_came_at[signum], self._latest_signal = at, signum
        return meaning

    def _begin(self, signum: int, at: float) -> None:
        """Remember the first signal of a stop, and no signal before it."""
        self.first, self._first_at, self._latest_signal, self._requests = signum, at, signum, 1
        self._last_came_at = {signum: at}
        self._passed_on = set()

    def _is_passed_on(self, signum: int, at: float, typed: Typed) -> bool:
        """Whether a wrapper may have passed on the signal before this one, which it does once for each."""
        repeats_latest = signum == self._latest_signal and at - self._last_came_at[signum] < ECHO_WINDOW
        return repeats_latest and signum in POLITE and signum not in self._passed_on and typed is not Typed.YES

    def _judge_request(self, signum: int, at: float, typed: Typed) -> Meaning:
        """Return INSISTS for a signal, sent on purpose, that asks for more than the first one did; else SAME.

        A person insists by typing the same again. A program may send two polite signals, or one again at once; a third one,
        one again after SAME_REQUEST seconds, or a signal that is not polite insists.
        """
        before = self._last_came_at.get(signum)
        is_typed_again = before is not None and typed is not Typed.NO
        if is_typed_again:
            return Meaning.INSISTS
        if signum in self._sent_by_schedulers:
            return Meaning.SAME
        # of all signals, or of this one: it was sent, was passed on, and comes again
        is_third = self._requests >= 2 or signum in self._passed_on
        is_again_later = before is not None and at - before >= SAME_REQUEST
        is_polite = signum in POLITE
        return Meaning.INSISTS if is_third or is_again_later or not is_polite else Meaning.SAME


_TYPED = {Standing.FOREGROUND: Typed.PERHAPS, Standing.KEYBOARD: Typed.YES}


def typed_at(pid: int, signum: int) -> Typed:
    """Return whether a signal to this process is a Ctrl-C of a terminal: SIGINT, while the process has the terminal."""
    return _TYPED.get(standing(pid), Typed.NO) if signum == signal.SIGINT else Typed.NO
