"""The command that the user started: it has the terminal, passes signals to the agent and writes what the agent shows.

It may block on a terminal or pipe that is not read; the agent never does. It ends what a lost agent has left, and an agent
that does not show that it runs when the user is impatient; all else is decided elsewhere.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable, Collection, Iterable

from ddplaunch import exitcodes
from ddplaunch.agent import child
from ddplaunch.agent.pipes import (
    BUSY,
    CONTROL,
    GOES_ON,
    IDLE,
    IS_RUNNING,
    MAY_STOP,
    MESSAGE,
    RUNS,
    STDERR,
    STDOUT,
    STOPPED,
    UNREAD_TIMEOUT,
    FrontPipes,
)
from ddplaunch.agent.signals import SignalDeduplicator, passed_on
from ddplaunch.process.terminal import modes, set_modes
from ddplaunch.process.tree import is_orphaned_group
from ddplaunch.supervise.deadline import soonest

_STOP_TIMEOUT = 2.0  # seconds that workers may take to stop; one in a call of a driver cannot
_REPLY_TIMEOUT = 2.0  # seconds that an agent which is to kill its workers at once may take to show that it runs
_KILL_TIMEOUT = 5.0  # seconds to wait for SIGKILL to work


def run(
    agent: Callable[[FrontPipes], int],
    signals: Iterable[int],
    stops: Collection[int],
    meanwhile: Callable[[], None],
    *,
    sent_again: frozenset[int] = frozenset(),
    control: int | None = None,
) -> int:
    """Fork, run `agent` in the child, do `meanwhile`, serve the agent until it ends, and give the status of the job.

    `signals` are those that go to the agent besides those of `passed_on`; one that was ignored when the command
    was started (nohup) stays ignored. `stops` are those that ask the job to end, `sent_again` those that may come twice.
    `control` is a descriptor for what the agent sends to a caller in Python, a line each.

    Raises:
        LaunchError: the machine has no room for the agent.
    """
    passed = passed_on(signals)
    before = modes()
    pid, pipes = child.start(agent, passed)
    # the C handler writes the signal's number straight to the agent, even while we block on a terminal
    signal.set_wakeup_fd(pipes.signals[1], warn_on_full_buffer=False)
    front = _Front(pid, SignalDeduplicator(frozenset(stops), sent_again), frozenset(stops), pipes)
    for signum in passed:
        signal.signal(signum, front.suspend if signum == signal.SIGTSTP else front.note_stop)
    # a Python handler runs even while we block on a terminal, so that a lost agent's processes never wait for it
    signal.signal(signal.SIGCHLD, front.child_ended)
    signal.signal(signal.SIGALRM, front.time_is_up)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, passed)
    try:
        meanwhile()
        front.show(pipes, control)
    except _Unread:
        pass
    except _Unresponsive:
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
        child.kill(pid)  # first, since the print may block
        _print(f"ddplaunch: the agent (pid {pid}) did not respond and was killed, with the workers\n")
    front.is_done = True
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if front.killed_agent:
        if child.wait_ended(pid, _KILL_TIMEOUT):
            child.reap_agent(pid)
            set_modes(before)
        _print(child.left_over())
        return exitcodes.of_signal(front.stopped_by)
    wait_status = child.reap_agent(pid)
    if wait_status:
        set_modes(before)  # a worker that was killed while it edited a line has left them as it needed them
    status, text = child.status_of(pid, wait_status)
    _print(text)
    return status


class _Unread(Exception):
    """What is left to be written is not read, and the job was asked to stop."""


class _Unresponsive(Exception):
    """The agent is to kill its workers, and does not run: it is stopped, in uninterruptible sleep, or in a loop."""


class _Front:
    """The state that the writing shares with the signal handlers, which interrupt it."""

    def __init__(self, agent: int, deduplicator: SignalDeduplicator, stops: frozenset[int], pipes: FrontPipes) -> None:
        self._agent = agent
        self._deduplicator = deduplicator
        self._stops = stops
        self._pipes = pipes
        self._replies = pipes.replies[0]
        self._suspending = False
        self.stopped_by = 0  # the first signal to stop
        self.killed_agent = False
        self.is_done = False
        self._seen: set[int] = set()  # bytes that the agent has replied
        self._reply_by: float | None = None  # when an agent that has not shown that it runs is given up
        self._read_by: float | None = None  # when output that is not read is
        self._written = 0  # bytes
        self._written_before = 0  # _written, when the timer was set

    def show(self, pipes: FrontPipes, control: int | None) -> None:
        """Write what the agent sends until it ends. A closed stdout or stderr is dropped, and the rest goes on.

        Raises:
            _Unread: that was given up.
        """
        fds = {STDOUT: 1, STDERR: 2}
        if control is not None:
            fds[CONTROL] = control
        buffer = bytearray(MESSAGE + 1)
        view = memoryview(buffer)
        reader = pipes.output[0]
        while size := reader.recv_into(buffer):
            stream = bytes(view[:1])
            if stream not in fds:
                continue
            data = view[1:size] if stream != CONTROL else memoryview(bytes(view[1:size]) + b"\n")
            try:
                while data:
                    written = _write(fds[stream], data)
                    self._written += written
                    data = data[written:]
            except OSError:
                del fds[stream]

    def note_stop(self, signum: int, _frame: object) -> None:
        """Note a signal to stop; the agent has received it already."""
        if signum not in self._stops or self.is_done:
            return
        escalates = self._deduplicator.take(signum, time.monotonic(), direct=False).escalates
        if not self.stopped_by:
            self.stopped_by = signum
        elif escalates and self._reply_by is None and not child.has_ended(self._agent):
            self._forget(RUNS)
            self._pipes.request(IS_RUNNING)
            self._reply_by = time.monotonic() + _REPLY_TIMEOUT
        self._limit_wait()

    def suspend(self, _signum: int, _frame: object) -> None:
        """Stop as the terminal asked, once the agent, which received it too, has stopped the workers.

        SIGSTOP, since SIGTSTP would have to get its default action back for a moment, in which the next one would stop us
        without a request to the agent. Where no shell could let us go on, SIGTSTP means nothing, as for any program.
        """
        if is_orphaned_group():
            self._pipes.pass_on(signal.SIGCONT)
        elif not self._suspending:
            self._suspending = True
            may_stop = self._may_stop()
            as_a_worker_needs_them = modes()
            self._suspending = False
            if may_stop:
                os.kill(os.getpid(), signal.SIGSTOP)
                set_modes(as_a_worker_needs_them)  # the shell has set its own, and the worker knows of no pause

    def _may_stop(self) -> bool:
        """Wait until the workers have stopped: the shell takes its terminal when we do. No if they go on already."""
        self._forget(STOPPED + GOES_ON)
        self._pipes.request(MAY_STOP)
        until = time.monotonic() + _STOP_TIMEOUT
        while not (self._seen & {*STOPPED, *GOES_ON}) and (left := until - time.monotonic()) > 0:
            if not self._wait_reply(left):
                break
        return not (self._seen & {*GOES_ON})

    def _wait_reply(self, seconds: float) -> bool:
        """Take what the agent replies in this time; False if it has ended."""
        poll = select.poll()
        poll.register(self._replies, select.POLLIN)
        poll.poll(seconds * 1000)
        try:
            replies = os.read(self._replies, 256)
        except BlockingIOError:
            return True
        for reply in replies:
            self._seen.add(reply)
            if reply == IDLE[0]:
                self._seen.discard(BUSY[0])
        return bool(replies)

    def _forget(self, replies: bytes) -> None:
        """Drop replies to earlier requests, which came too late."""
        self._wait_reply(0)
        self._seen -= {*replies}

    def child_ended(self, _signum: int, _frame: object) -> None:
        """End what a lost agent has left."""
        if not self.is_done and child.has_ended(self._agent):
            child.sweep(self._agent)
            self._limit_wait()

    def _limit_wait(self) -> None:
        if self.stopped_by and child.has_ended(self._agent):
            self._reply_by = None
            self._written_before = self._written
            self._read_by = time.monotonic() + UNREAD_TIMEOUT
        if (deadline := soonest(self._reply_by, self._read_by)) is not None:
            signal.setitimer(signal.ITIMER_REAL, max(deadline - time.monotonic(), 0.001))

    def time_is_up(self, _signum: int, _frame: object) -> None:
        """Give up an agent that does not run, and output that is not read: the end of a stopped job waits for neither.

        Raises:
            _Unresponsive: the agent is to be killed.
            _Unread: the rest of the output is not written.
        """
        now = time.monotonic()
        if self._reply_by is not None and now >= self._reply_by:
            self._reply_by = None
            self._wait_reply(0.1)  # after a pause of everything the agent needs a moment
            if not (self._seen & {*RUNS, *BUSY}) and not child.has_ended(self._agent):
                self.killed_agent = True
                raise _Unresponsive
        if self._read_by is not None and now >= self._read_by and self._written == self._written_before:
            raise _Unread
        self._limit_wait()


def _write(fd: int, data: memoryview) -> int:
    while True:
        try:
            return os.write(fd, data)
        except BlockingIOError:
            # another process has set O_NONBLOCK on the file that it shares with us: it is not ours to change
            poll = select.poll()
            poll.register(fd, select.POLLOUT)
            poll.poll()


def _print(text: str) -> None:
    try:
        os.write(2, text.encode())
    except OSError:
        pass
