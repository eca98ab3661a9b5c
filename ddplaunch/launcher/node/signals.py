"""What signals mean, and how they reach a loop behind a front (the process that was typed): passed on by the front, or directly.

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
    ASKING_SIGNAL,
    GOES_ON,
    HANDLER_ANSWERS,
    HOST_SIGNAL,
    IS_RUNNING,
    LOOP_ANSWERS,
    MAY_STOP,
    REQUEST,
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
# in the front's pipe as well, to which its C handler writes each signal: its child's end and its timer concern the front alone
_FOR_FRONT_ALONE = (signal.SIGCHLD, signal.SIGALRM)
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
    """Distinguishes a signal that was sent again from a copy that comes by another way. Pure: the time comes with the signal."""

    def __init__(self, stops: frozenset[int], sent_again: frozenset[int] = frozenset(), *, lasts: float = inf) -> None:
        """`stops` ask for the end of the job; `sent_again` are sent more than once by a scheduler, without escalating.

        A signal to stop that comes `lasts` seconds after the first one is the first one again.
        """
        self._stops = stops
        self._sent_again = sent_again | {signal.SIGHUP}
        self._stop_requests = StopRequests(sent_again, lasts=lasts)
        # when each signal last came that was no copy, and from where it has come since
        self._came: dict[int, tuple[float, set[SignalOrigin]]] = {}

    def event_of(
        self,
        signum: int,
        at: float,
        source: SignalOrigin,
        *,
        typed: Typed = Typed.NO,
        is_request: bool | None = None,
    ) -> node.SignalReceived:
        """Return the event for a signal, which says what the signal means: a copy, a first request to stop, a repetition, ...

        Only a signal of the front is a request: where a stop is under way, it kills the workers. One that merely repeats is none.
        `is_request`: a caller of `launch()`, which knows whether a person insists, has decided it; None: it is decided here.
        """
        if self._is_copy(signum, at, source):
            return node.SignalReceived(signum, at, is_request=False, is_copy=True)
        # `take` remembers it as well; a signal that stops nothing repeats none
        meaning = self._stop_requests.take(signum, at, typed) if signum in self._stops else Meaning.FIRST
        # SAME: that request again, as by a wrapper (uv) that passes on what the whole group has had
        is_first, merely_repeats = meaning is Meaning.FIRST, meaning is Meaning.SAME
        is_decided_here = is_request is None
        if is_request is None:
            # a scheduler, whose signal comes first, does not ask to kill workers that are being stopped for another reason
            is_request = meaning is Meaning.INSISTS or (is_first and signum not in self._sent_again)
        return node.SignalReceived(
            signum,
            at,
            is_request=is_request and source is SignalOrigin.FRONT,
            # the caller decides on what a person has typed there
            is_typed=typed is not Typed.NO or not is_decided_here,
            # a program which begins with a polite signal (SIGINT, SIGTERM, SIGHUP) sends others if that does not help
            is_first_by_program=is_first and signum in POLITE and typed is not Typed.YES,
            # the signal that made the request; 0: this one does not merely repeat it
            repeats_request_of=self._stop_requests.first if merely_repeats and is_decided_here else 0,
        )

    def _is_copy(self, signum: int, at: float, source: SignalOrigin) -> bool:
        """Whether the same signal has just come from elsewhere, and not from this source yet; remember the source."""
        since, sources = self._came.get(signum, (-inf, set()))
        if at - since < COPY_WINDOW and source not in sources:
            sources.add(source)
            return True
        self._came[signum] = (at, {source})
        return False


class SignalSource:
    """Turns signals, and requests of the front, into events of the loop of an agent, or of a command that has started agents."""

    def __init__(
        self,
        loop: Loop,
        pipes: FrontPipes,
        *,
        stops: frozenset[int],
        sent_again: frozenset[int] = frozenset(),
        end_within: float,
        cluster_signals_all: bool = False,
        from_caller: bool = False,
        heartbeat_timeout: float = inf,
    ) -> None:
        """Prepare to take signals; `stops` ask for the end of the job, a second one of `sent_again` is no second request.

        `end_within` seconds after the end of the front, this process is killed if it still lives. `cluster_signals_all`: a signal
        that comes to this process directly was sent by the cluster to all of the job (Slurm's proctrack/linuxproc).
        `from_caller`: SIGINT comes from a caller of `launch()`, which sends it a second time only if a person insists.
        A front that is stopped, and has asked nothing for more than `heartbeat_timeout` seconds, is killed.
        """
        self._loop = loop
        self._stops = stops
        # a signal to stop that comes later than that begins another stop: the first has had its effect
        self._deduplicator = SignalDeduplicator(stops, sent_again, lasts=end_within)
        self._cluster_signals_all = cluster_signals_all
        self._from_caller = from_caller
        self._end_within = end_within
        self.was_asked_to_end = False  # whether a signal to stop has come
        self.stops_by_user = 0  # how many of them the user has sent: one more, and nothing is waited for at the end
        self._sigquit_kills = False  # whether SIGQUIT kills the workers at once; not if it is ignored, or stops nothing
        self._own_signals_fd = -1  # where the numbers of signals to this process are read; -1 before `listen`
        # those that the front has passed on, its requests, and the replies to these
        self._front_signals_fd, self._requests_fd = pipes.signals[0], pipes.requests[0]
        self._replies_fd = pipes.replies[1]
        # of the front, which asks at least once in `_longest_wait` seconds whether this process runs
        self._front_pid = pipes.front
        self._front_waits_to_stop = False  # whether it is to stop (Ctrl-Z), and waits until the workers have stopped
        self._job_goes_on = True  # SIGCONT or a signal to stop came after the last SIGTSTP
        self._interval = watch_interval(heartbeat_timeout)
        self._longest_wait = longest_wait(heartbeat_timeout)
        # times that the front was looked at since it last asked, and how many get it killed if it is stopped; inf: it never is
        self._looks_at_silent_front = 0
        self._most_looks_at_silent_front = PATIENCE * heartbeat_timeout / self._interval
        self._look_at_front_timer = loop.timer(None, self._look_at_front, may_come_late=True)

    def listen(self, signals: Iterable[int]) -> None:
        """Take these signals from now on, and SIGCHLD, SIGCONT and the signal by which the front asks whether we run."""
        signals = frozenset(signals)
        self._sigquit_kills = signal.SIGQUIT in signals & self._stops  # at once, as a second signal to stop does
        self._own_signals_fd, wakeup = os.pipe()
        for fd in (self._own_signals_fd, wakeup):
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)  # Python's C handler writes each signal's number there
        for signum in (*signals, signal.SIGCHLD):
            signal.signal(signum, _do_nothing)  # the loop reads the number
        signal.signal(signal.SIGCONT, self._on_sigcont)
        # even while the loop is in a long call
        signal.signal(ASKING_SIGNAL, lambda _signum, _frame: self._reply(HANDLER_ANSWERS))
        signal.pthread_sigmask(signal.SIG_SETMASK, ())  # all were blocked since before the fork
        self._loop.watch(self._own_signals_fd, self._on_signals)
        self._loop.watch(self._front_signals_fd, self._on_front_signals)
        self._loop.watch(self._requests_fd, self._on_requests)
        may_kill_front = self._most_looks_at_silent_front < inf  # a look does, if it is stopped and silent for too long
        if may_kill_front:
            self._look_at_front_timer.set(self._loop.now() + self._longest_wait)

    def wait(self, seconds: float) -> None:
        """Run the loop for so long, whatever comes meanwhile."""
        timer = self._loop.timer(self._loop.now() + seconds, lambda: None)
        while timer.is_set:
            self._loop.run_once()

    def wait_for(self, pending: Pending[T]) -> T:
        """Return the answer of a child when it has come, or its `otherwise` as soon as the user sends a signal to stop."""
        before = self.stops_by_user
        while pending.pid:
            self._loop.run_once()
            if self.stops_by_user != before:
                pending.give_up()
        return pending.answer

    def received(
        self,
        signum: int,
        source: SignalOrigin,
        *,
        by_cluster: bool = False,
        typed: Typed = Typed.NO,
        is_request: bool | None = None,
    ) -> None:
        """Take a signal that came from `source`: post its event, which says what it means; `is_request` as for `event_of`."""
        self.was_asked_to_end = self.was_asked_to_end or signum in self._stops
        event = self._deduplicator.event_of(signum, self._loop.now(), source, typed=typed, is_request=is_request)
        self.stops_by_user += event.is_request and signum in self._stops
        self._loop.post(replace(event, by_cluster=by_cluster, quit_kills=self._sigquit_kills))

    def _on_signals(self) -> None:
        """Take the signals that came to this process itself. Called by the loop, and before those of the front are taken."""
        try:
            numbers = os.read(self._own_signals_fd, 256)
        except BlockingIOError:
            return
        for signum in numbers:
            if signum == signal.SIGCHLD:
                self._loop.post(ChildEnded())
            elif signum == ASKING_SIGNAL or (signum == signal.SIGCONT and not self._has_front):
                pass  # the Python handler has answered; SIGCONT is how the kernel tells of the front's end
            else:
                self.received(signum, SignalOrigin.PROCESS, by_cluster=self._cluster_signals_all)
        self._post_if_front_waits_to_stop()  # workers may have stopped, or the job goes on

    def _on_front_signals(self) -> None:
        """Take the signals that the front has passed on, or the end of the front. Called by the loop.

        Each SIGINT of a caller of `launch()` is a request: the caller passes it on a second time only if a person insists.
        """
        numbers = self._read_front()
        # Slurm signals a process before its parent, so that this process has the same signals already: take those first
        self._on_signals()
        if numbers is None:  # nothing is there: `_on_requests`, which takes signals before a request, has read them
            return
        if not numbers:  # the front has ended
            self._lose_front()
        for signum in numbers:
            if signum not in _FOR_FRONT_ALONE:  # as its own SIGCHLD is, which its C handler writes there, too
                is_of_caller = self._from_caller and signum == signal.SIGINT
                typed = typed_at(self._front_pid, signum)
                self.received(signum, SignalOrigin.FRONT, typed=typed, is_request=True if is_of_caller else None)
        self._note_whether_job_goes_on(numbers)  # it does not from SIGTSTP to SIGCONT or a stop
        self._post_if_front_waits_to_stop()

    @property
    def _has_front(self) -> bool:
        """Whether the front lives: it is the parent of this process, which another process adopts once the front has ended."""
        return os.getppid() == self._front_pid

    def _lose_front(self) -> None:
        """Report the loss of the front, which is listened to no longer."""
        self._look_at_front_timer.cancel()
        self._loop.unwatch(self._front_signals_fd)
        self._loop.post(node.FrontLost(self._loop.now()))

    def _look_at_front(self) -> None:
        """Kill a front that is stopped and shows no sign of life, and report its loss. Called by the loop.

        Looks are counted, so a pause of both processes gives nobody up. A front that does not ask for another reason writes to
        a disk that hangs.
        """
        self._look_at_front_timer.set(self._loop.now() + self._interval)
        self._looks_at_silent_front += 1
        if self._looks_at_silent_front >= self._most_looks_at_silent_front and self._is_front_stopped:
            os.kill(self._front_pid, signal.SIGKILL)
            self._lose_front()

    @property
    def _is_front_stopped(self) -> bool:
        """Whether the front is stopped, and is not to go on.

        One that may go on at any time is left alone: a shell has stopped it, with the workers or as a job in the background, or
        a batch system has suspended the script that calls it, which may not reach sessions such as ours.
        """
        if not self._job_goes_on or not self._has_front:
            return False
        front = look(self._front_pid)
        if front is None or front.state != "T" or state_of(front.parent) == "T":
            return False
        return standing(self._front_pid) is not Standing.BACKGROUND

    def see_front_go_on(self) -> None:
        """Wait until the front is not stopped, or is given up: once this process has ended, nobody would end it."""
        while self._look_at_front_timer.is_set and self._is_front_stopped:
            self._loop.run_once()

    def _read_front(self) -> bytes | None:
        """Return the signals that the front has passed on: b"" at its end, None if they were read before, with a request."""
        try:
            return os.read(self._front_signals_fd, 256)
        except BlockingIOError:
            return None

    def _note_whether_job_goes_on(self, signals: bytes) -> None:
        for signum in signals:
            if signum == signal.SIGTSTP:
                self._job_goes_on = False
            elif signum == signal.SIGCONT or signum in self._stops:
                self._job_goes_on = True

    def _on_requests(self) -> None:
        """Take the requests of the front: of the REQUEST bytes of each, the first is its kind. Called by the loop."""
        requests = os.read(self._requests_fd, 256 * REQUEST)
        if not requests:  # the front has ended
            self._loop.unwatch(self._requests_fd)
        for at in range(0, len(requests), REQUEST):
            kind, signum = requests[at : at + 1], requests[at + 1]
            if kind == HOST_SIGNAL:  # came to the front itself, which another host's command has started
                self.received(signum, SignalOrigin.HOST)
            elif kind == MAY_STOP:  # it asks after Ctrl-Z, whose SIGTSTP is in the other pipe, and is taken first
                if self._loop.watches(self._front_signals_fd):  # else its end was read before
                    self._on_front_signals()
                self._front_waits_to_stop = True
            elif kind == IS_RUNNING:
                self._looks_at_silent_front = 0  # it asks, so it is not silent
                if self._look_at_front_timer.is_set:  # not without a heartbeat timeout, nor once the front is lost
                    self._look_at_front_timer.set(self._loop.now() + self._longest_wait)
                self._reply(LOOP_ANSWERS)
        self._post_if_front_waits_to_stop()  # the process then calls `let_front_stop`

    def _post_if_front_waits_to_stop(self) -> None:
        if self._front_waits_to_stop:
            self._loop.post(FrontWaits())

    def let_front_stop(self, *, all_stopped: bool) -> None:
        """Answer a front that waits to stop, if `all_stopped` that are to stop before it, or the job goes on again."""
        if self._front_waits_to_stop and (self._job_goes_on or all_stopped):
            self._front_waits_to_stop = False
            self._reply(GOES_ON if self._job_goes_on else STOPPED)

    def _reply(self, reply: bytes) -> None:
        with suppress(OSError):  # the front has ended
            os.write(self._replies_fd, reply)

    def _on_sigcont(self, _signum: int, _frame: object) -> None:
        """Have the kernel kill this process, and the workers with it, if it does not end in time after the front was lost.

        A Python handler runs even where the loop does not; SIGCONT comes from the kernel when the front ends.
        """
        if not self._has_front:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_REAL, self._end_within)


def _do_nothing(_signum: int, _frame: object) -> None:
    """Only there so that the wakeup descriptor is written to."""
