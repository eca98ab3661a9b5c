"""What signals mean, and how they reach a loop behind a front: passed on by it, or directly.

Front, agent and the loops of `remote` and `slurm` all find here which signals are passed on, which is a copy of one that has
come, and which escalates a stop. What follows from one is decided by each of them.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from contextlib import suppress
from enum import Enum, auto
from math import inf
from typing import TYPE_CHECKING, TypeVar

from msgspec.structs import replace

from ddplaunch.launcher.decide import node
from ddplaunch.launcher.node.child import PATIENCE, longest_wait, watch_interval
from ddplaunch.launcher.node.events import ChildEnded, FrontWaits
from ddplaunch.reach.pipes import (
    ASKS,
    GOES_ON,
    HOST_SIGNAL,
    IS_RUNNING,
    LIVES,
    MAY_STOP,
    REQUEST,
    RUNS,
    STOPPED,
    FrontPipes,
)
from ddplaunch.reach.repeated_stop import POLITE, Meaning, StopRequests, Typed, typed_at
from ddplaunch.system.loop.loop import Loop
from ddplaunch.system.process.terminal import Standing, standing
from ddplaunch.system.process.tree import look, state_of

if TYPE_CHECKING:  # few jobs need it
    from ddplaunch.system.loop.loop import Pending

T = TypeVar("T")


# passed on whatever the options: they end nothing by themselves
ALWAYS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT, signal.SIGWINCH)
# mean something to the front alone: its child, this process, and its timer
_OF_FRONT = (signal.SIGCHLD, signal.SIGALRM)
COPY_WINDOW = 1.0  # seconds that the front may take to pass on what came to both processes at once, as from pkill -f
END_MARGIN = 60.0  # seconds beyond the grace period in which a process ends after its front


def passed_on(signals: Iterable[int]) -> frozenset[int]:
    """Return the signals that are passed on: these, ALWAYS and SIGTSTP, but none that the caller ignores (nohup)."""
    wanted = {*ALWAYS, signal.SIGTSTP, *signals}
    return frozenset(signum for signum in wanted if signal.getsignal(signum) is not signal.SIG_IGN)


class SignalOrigin(Enum):
    """Where a process got a signal from; what comes to several processes at once, as from `pkill -f`, comes from several."""

    FRONT = auto()  # the command that the user started
    HOST = auto()  # the front of this host, itself
    PROCESS = auto()  # this process, itself
    COORDINATOR = auto()


class SignalDeduplicator:
    """Distinguishes a signal that was sent again from one that arrives twice. Pure: the time comes with the signal."""

    def __init__(self, stops: frozenset[int], sent_again: frozenset[int] = frozenset(), *, lasts: float = inf) -> None:
        """`sent_again` are signals that a scheduler sends more than once, without escalating; a stop `lasts` so many seconds."""
        self._stops = stops
        self._sent_again = sent_again | {signal.SIGHUP}
        self._requests = StopRequests(sent_again, lasts=lasts)
        self._came: dict[int, tuple[float, set[SignalOrigin]]] = {}  # since when the latest comes, and from where

    def take(
        self, signum: int, at: float, source: SignalOrigin, *, typed: Typed = Typed.NO, decided: bool | None = None
    ) -> node.SignalReceived:
        """Return the event for a signal. Only a signal that the user sent to the front escalates.

        `decided` is whether it does, if another process has decided that; None: it is decided here.
        """
        if self._is_copy(signum, at, source):
            return node.SignalReceived(signum, at, escalates=False, is_copy=True)
        meaning = self._requests.take(signum, at, typed) if signum in self._stops else Meaning.FIRST
        escalates = decided
        if escalates is None:
            escalates = meaning is Meaning.INSISTS or (meaning is Meaning.FIRST and signum not in self._sent_again)
        return node.SignalReceived(
            signum,
            at,
            escalates=escalates and source is SignalOrigin.FRONT,
            # a process of ddplaunch that has decided does not say so, and passes on what is typed
            is_typed=typed is not Typed.NO or decided is not None,
            asks_first=meaning is Meaning.FIRST and signum in POLITE and typed is not Typed.YES,
            taken_for=self._requests.first if meaning is Meaning.SAME and decided is None else 0,
        )

    def _is_copy(self, signum: int, at: float, source: SignalOrigin) -> bool:
        """Whether another process of ddplaunch has just had the same signal; remember that this one has."""
        since, sources = self._came.get(signum, (-inf, set()))
        if at - since < COPY_WINDOW and source not in sources:
            sources.add(source)
            return True
        self._came[signum] = (at, {source})
        return False


class SignalSource:
    """Turns signals, and requests of the front, into events, in the loop."""

    def __init__(
        self,
        loop: Loop,
        pipes: FrontPipes,
        *,
        stops: frozenset[int],
        sent_again: frozenset[int] = frozenset(),
        end_within: float,
        signals_all: bool = False,
        from_caller: bool = False,
        heartbeat_timeout: float = inf,
    ) -> None:
        """Prepare to take signals; `stops` ask for the end of the job, `sent_again` may come twice without escalating.

        `end_within` seconds after the end of the front, this process is killed if it still lives. `signals_all`: a signal that
        comes to this process directly was sent by the cluster to all processes of the job (Slurm's proctrack/linuxproc).
        `from_caller`: SIGINT comes from a caller of `launch()`, which sends it a second time only if a person insists.
        A front that is stopped, and has asked nothing for more than `heartbeat_timeout` seconds, is killed.
        """
        self._loop = loop
        self._from_front = pipes.signals[0]
        self._requests = pipes.requests[0]
        self._replies = pipes.replies[1]
        self._front = pipes.front
        self._end_within = end_within
        self._stops = stops
        self._deduplicator = SignalDeduplicator(stops, sent_again, lasts=end_within)
        self._signals_all = signals_all
        self._from_caller = from_caller
        self.end_asked = False  # whether a signal to stop has come
        self.stop_signals = 0  # how many of them the user has sent
        self._quit_kills = False  # whether SIGQUIT is taken, and stops the job
        self._direct = -1  # what signals to this process write to
        self._front_waits = False  # whether it is to stop, and does so last
        self._front_silent = 0  # looks since it has asked, which come only if it does not ask
        self._interval = watch_interval(heartbeat_timeout)
        self._longest_wait = longest_wait(heartbeat_timeout)
        self._most_silent = PATIENCE * heartbeat_timeout / self._interval
        self._look_at = loop.timer(None, self._look_at_front, may_rest=True)
        self._goes_on = True  # whether SIGCONT or a stop came after the last SIGTSTP

    def listen(self, signals: Iterable[int]) -> None:
        """Take these signals, and SIGCHLD, from now on."""
        signals = frozenset(signals)
        self._quit_kills = signal.SIGQUIT in signals & self._stops
        ours, wakeup = os.pipe()
        for fd in (ours, wakeup):
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
        for signum in (*signals, signal.SIGCHLD):
            signal.signal(signum, _nothing)
        signal.signal(signal.SIGCONT, self._limit_end)
        signal.signal(ASKS, lambda _signum, _frame: self._reply(LIVES))
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        self._direct = ours
        self._loop.watch(ours, self._on_signals)
        self._loop.watch(self._from_front, self._on_front_signals)
        self._loop.watch(self._requests, self._on_requests)
        if self._most_silent < inf:
            self._look_at.set(self._loop.now() + self._longest_wait)

    def wait(self, seconds: float) -> None:
        """Wait so long, whatever comes meanwhile."""
        timer = self._loop.timer(self._loop.now() + seconds, lambda: None)
        while timer.is_set:
            self._loop.run_once()

    def wait_for(self, pending: Pending[T]) -> T:
        """Return the answer when it has come, or what stands for it as soon as the user does not want to wait."""
        before = self.stop_signals
        while pending.pid:
            self._loop.run_once()
            if self.stop_signals != before:
                pending.give_up()
        return pending.answer

    def received(
        self,
        signum: int,
        source: SignalOrigin,
        *,
        by_cluster: bool = False,
        typed: Typed = Typed.NO,
        decided: bool | None = None,
    ) -> None:
        """Take a signal that came from `source`: post its event, which says whether it escalates, as far as not `decided`."""
        self.end_asked = self.end_asked or signum in self._stops
        event = self._deduplicator.take(signum, self._loop.now(), source, typed=typed, decided=decided)
        self.stop_signals += event.escalates and signum in self._stops
        self._loop.post(replace(event, by_cluster=by_cluster, quit_kills=self._quit_kills))

    def _on_signals(self) -> None:
        """Take the signals that came to this process. Called by the loop."""
        try:
            numbers = os.read(self._direct, 256)
        except BlockingIOError:
            return
        for signum in numbers:
            if signum == signal.SIGCHLD:
                self._loop.post(ChildEnded())
            elif signum == signal.SIGCONT and os.getppid() != self._front:
                pass  # the kernel's word of the front's end
            elif signum != ASKS:
                self.received(signum, SignalOrigin.PROCESS, by_cluster=self._signals_all)
        self._post_if_front_waits()

    def _on_front_signals(self) -> None:
        """Take the signals that the front has passed on, or the end of the front. Called by the loop."""
        numbers = self._read_front()
        # Slurm signals a process before its parent, so that this process has the same signals already: take those first
        self._on_signals()
        if numbers is None:
            return
        if not numbers:
            self._lose_front()
        for signum in numbers:
            if signum not in _OF_FRONT:
                decided = True if self._from_caller and signum == signal.SIGINT else None
                self.received(signum, SignalOrigin.FRONT, typed=typed_at(self._front, signum), decided=decided)
        self._note_pause(numbers)
        self._post_if_front_waits()

    def _lose_front(self) -> None:
        """Report the loss of the front, which is listened to no longer."""
        self._look_at.cancel()
        self._loop.unwatch(self._from_front)
        self._loop.post(node.FrontLost(self._loop.now()))

    def _look_at_front(self) -> None:
        """Kill a front that is stopped and shows no sign of life, and report its loss. Called by the loop.

        Looks are counted, so a pause of both processes gives nobody up. A front that does not ask for another reason writes to
        a disk that hangs.
        """
        self._look_at.set(self._loop.now() + self._interval)
        self._front_silent += 1
        if self._front_silent >= self._most_silent and self._is_front_stopped:
            os.kill(self._front, signal.SIGKILL)
            self._lose_front()

    @property
    def _is_front_stopped(self) -> bool:
        """Whether the front is stopped, and is not to go on.

        One that may go on at any time is left alone: a shell has stopped it, with the workers or as a job in the background, or
        a batch system has suspended the script that calls it, which may not reach sessions such as ours.
        """
        if not self._goes_on or os.getppid() != self._front:
            return False
        front = look(self._front)
        if front is None or front.state != "T" or state_of(front.parent) == "T":
            return False
        return standing(self._front) is not Standing.BACKGROUND

    def see_front_go_on(self) -> None:
        """Wait until the front is not stopped, or is given up: once this process has ended, nobody would end it."""
        while self._look_at.is_set and self._is_front_stopped:
            self._loop.run_once()

    def _read_front(self) -> bytes | None:
        """Return the signals that the front has passed on: b"" at its end, None if they were read before, with a request."""
        try:
            return os.read(self._from_front, 256)
        except BlockingIOError:
            return None

    def _note_pause(self, numbers: bytes) -> None:
        for signum in numbers:
            if signum == signal.SIGTSTP:
                self._goes_on = False
            elif signum == signal.SIGCONT or signum in self._stops:
                self._goes_on = True

    def _on_requests(self) -> None:
        """Take the requests of the front, each REQUEST bytes long. Called by the loop."""
        requests = os.read(self._requests, 256 * REQUEST)
        if not requests:
            self._loop.unwatch(self._requests)
        for at in range(0, len(requests), REQUEST):
            request = requests[at : at + 1]
            if request == HOST_SIGNAL:
                self.received(requests[at + 1], SignalOrigin.HOST)
            elif request == MAY_STOP:
                if self._loop.watches(self._from_front):
                    self._on_front_signals()  # its SIGTSTP is in the other pipe
                self._front_waits = True
            elif request == IS_RUNNING:
                self._front_silent = 0
                if self._look_at.is_set:
                    self._look_at.set(self._loop.now() + self._longest_wait)
                self._reply(RUNS)
        self._post_if_front_waits()

    def _post_if_front_waits(self) -> None:
        if self._front_waits:
            self._loop.post(FrontWaits())

    def let_front_stop(self, *, all_stopped: bool) -> None:
        """Answer a front that waits to stop, if all that is to stop before it has, or goes on again."""
        if self._front_waits and (self._goes_on or all_stopped):
            self._front_waits = False
            self._reply(GOES_ON if self._goes_on else STOPPED)

    def _reply(self, reply: bytes) -> None:
        with suppress(OSError):  # the front has ended
            os.write(self._replies, reply)

    def _limit_end(self, _signum: int, _frame: object) -> None:
        """Have the kernel kill this process, and the workers with it, if it does not end in time after the front was lost.

        A Python handler runs even where the loop does not; SIGCONT comes from the kernel when the front ends.
        """
        if os.getppid() != self._front:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_REAL, self._end_within)


def _nothing(_signum: int, _frame: object) -> None:
    """Only there so that the wakeup descriptor is written to."""
