"""The command that the user started: it has the terminal, passes signals to the agent and writes what the agent shows.

It may block on a terminal or pipe that is not read; the agent never does. It ends what a lost agent has left, and an agent
that does not show that it runs; all else is decided elsewhere.
"""

from __future__ import annotations

import errno
import os
import select
import signal
import time
from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING

from ddplaunch.launcher.node import child
from ddplaunch.launcher.node.signals import SignalDeduplicator, SignalOrigin, passed_on
from ddplaunch.reach.pipes import (
    BARS,
    CONTROL,
    GOES_ON,
    MAY_STOP,
    MESSAGE,
    STDERR,
    STDOUT,
    STOPPED,
    UNREAD_TIMEOUT,
    FrontPipes,
)
from ddplaunch.reach.repeated_stop import typed_at
from ddplaunch.system import exitcodes
from ddplaunch.system.process import clock
from ddplaunch.system.process.terminal import Modes, modes, set_modes, size_of
from ddplaunch.system.process.tree import ends_within, is_orphaned_group
from ddplaunch.system.words import duration

if TYPE_CHECKING:
    import socket

    from ddplaunch.launcher.output.area import StatusArea

_STOP_TIMEOUT = 2.0  # seconds that workers may take to stop; one in a call of a driver cannot
_NAMES = {STDOUT: "stdout", STDERR: "stderr"}
_READER_LEFT = (errno.EPIPE, errno.EIO)  # of a pipe, of a terminal: no error of ours, and workers do not die of it


def run(
    agent: Callable[[FrontPipes], int],
    signals: Iterable[int],
    stops: Collection[int],
    *,
    sent_again: frozenset[int] = frozenset(),
    output: FrontOutput | None = None,
    heartbeat_timeout: float = 10.0,
) -> int:
    """Fork, run `agent` in the child, serve the agent until the child ends, and return the exit status of the job.

    `signals` are those that go to the agent besides those of `passed_on`; one that was ignored when the command
    was started (nohup) stays ignored. `stops` are those that ask the job to end, `sent_again` those that may come twice.
    `output` takes the agent's messages; None: our stdout and stderr do. An agent that gives no sign of life for
    more than `heartbeat_timeout` seconds is killed.

    Raises:
        LaunchError: the machine has no room for the agent.
    """
    passed = passed_on(signals)
    before = modes()
    process = child.start(agent, passed)
    # the C handler writes the signal's number straight to the agent, even while we block on a terminal
    signal.set_wakeup_fd(process.pipes.signals[1], warn_on_full_buffer=False)
    deduplicator = SignalDeduplicator(frozenset(stops), sent_again)
    front = _Front(process, deduplicator, frozenset(stops), output or FrontOutput(), heartbeat_timeout)
    for signum in passed:
        signal.signal(signum, front.suspend if signum == signal.SIGTSTP else front.note_stop)
    # a Python handler runs even while we block on a terminal, so that a lost agent's processes never wait for it
    signal.signal(signal.SIGCHLD, front.child_ended)
    front.child_ended(signal.SIGCHLD, None)  # an agent that ended before has sent its signal to nobody
    signal.signal(signal.SIGALRM, front.interval_passed)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, passed)
    _show_until_end(front, process)
    return _status_of_job(front, process, before)


def _show_until_end(front: _Front, agent: child.AgentProcess) -> None:
    """Show the agent's messages until the agent has ended, or is killed because it does not respond."""
    try:
        front.watch_time()
        front.output.show(agent.pipes.output[0])
    except _Unread:
        pass
    except _Unresponsive as error:
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
        agent.kill()  # first, since the print may block
        print_now(f"{error}\n")
    front.is_done = True
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def _status_of_job(front: _Front, agent: child.AgentProcess, before: Modes | None) -> int:
    """Reap the agent, give the terminal its modes of `before` if the agent was killed, and return the exit status."""
    if front.killed_agent:
        if ends_within(agent.pid, child.KILL_TIMEOUT):
            agent.reap()
            set_modes(before)
        print_now(child.describe_leftovers())
        return exitcodes.of_signal(front.stopped_by) if front.stopped_by else exitcodes.NODE_LOST
    wait_status = agent.reap()
    if wait_status:
        set_modes(before)  # a worker that was killed while it edited a line has left them as it needed them
    status, text = child.status_of(agent.pid, wait_status)
    print_now(text)
    return status or (exitcodes.NOT_WRITTEN if front.output.failed else exitcodes.OK)


class _Unread(Exception):
    """What is left to be written is not read, and the job was asked to stop."""


class _Unresponsive(Exception):
    """The agent does not run: it is stopped, in uninterruptible sleep, or in a loop. The text is for the user."""


class _Front:
    """The state that the writing shares with the signal handlers, which interrupt it."""

    def __init__(
        self,
        agent: child.AgentProcess,
        deduplicator: SignalDeduplicator,
        stops: frozenset[int],
        output: FrontOutput,
        heartbeat_timeout: float,
    ) -> None:
        """Serve this agent; `stops` are the signals at which the user wants the job to end.

        The agent is given up when it has been silent for more than `heartbeat_timeout` seconds.
        """
        self.output = output
        self._agent = agent
        self._deduplicator = deduplicator
        self._stops = stops
        self._suspending = False
        self.stopped_by = 0  # the first signal to stop
        self.killed_agent = False
        self.is_done = False
        self._escalates = False  # the agent is to kill its workers
        self._watch = child.Watch(agent, heartbeat_timeout)
        self._question: child.Question | None = None  # to an agent that is to stop or kill its workers
        self._unread = 0  # INTERVALs without progress, in which the job has ended as it was asked to
        self._written_before = 0  # bytes, one interval ago

    def note_stop(self, signum: int, _frame: object) -> None:
        """Note a signal to stop. The agent has received the same signal already."""
        if signum not in self._stops or self.is_done:
            return
        typed = typed_at(os.getpid(), signum)
        event = self._deduplicator.take(signum, time.monotonic(), SignalOrigin.FRONT, typed=typed)
        if not self.stopped_by:
            self.stopped_by = signum
            if self._agent.prevent_start():
                self.killed_agent = True
                print_now(child.prevented_by(signum))
        elif event.escalates:
            self._escalates = True
        else:
            return
        if self._question is None and not self.killed_agent:
            self._question = child.Question(self._agent)
        self.watch_time()

    def suspend(self, _signum: int, _frame: object) -> None:
        """Stop this process for SIGTSTP, which the agent received, too, once the agent has stopped the workers.

        SIGSTOP, since SIGTSTP would have to get its default action back for a moment, in which the next one would stop us
        without a request to the agent. Where no shell could let us go on, SIGTSTP means nothing, as for any program.
        """
        if is_orphaned_group():
            self._agent.pipes.pass_on(signal.SIGCONT)
        elif not self._suspending:
            self._suspending = True
            may_stop = self._may_stop()
            as_a_worker_needs_them = modes()
            self._suspending = False
            if may_stop:
                self.output.give_back()
                os.kill(os.getpid(), signal.SIGSTOP)
                self.output.forget_area()  # the shell has written below it
                set_modes(as_a_worker_needs_them)  # the shell has set its own, and the worker knows of no pause

    def _may_stop(self) -> bool:
        """Wait until the workers have stopped: the shell takes its terminal when we do. No if they go on already."""
        replies = self._agent.replies
        replies.forget(STOPPED + GOES_ON)
        self._agent.pipes.request(MAY_STOP)
        replies.wait(STOPPED + GOES_ON, clock.now() + _STOP_TIMEOUT)
        return not replies.has(GOES_ON)

    def child_ended(self, _signum: int, _frame: object) -> None:
        """End what a lost agent has left; look sooner at one that is stopped."""
        if self.is_done:
            return
        if self._agent.has_ended:
            self.output.agent_has_ended = True
            self._agent.sweep()
            self.watch_time()
        elif self._agent.is_stopped and not self._watch.silent:
            self.watch_time()

    def watch_time(self) -> None:
        """Have `interval_passed` called when it is time to look at the agent, or at output that nobody reads."""
        has_agent = not self._agent.has_ended
        if self._question is not None or (self.stopped_by and not has_agent):
            signal.setitimer(signal.ITIMER_REAL, child.INTERVAL)
        elif has_agent:
            signal.setitimer(signal.ITIMER_REAL, self._watch.wait())

    def interval_passed(self, _signum: int, _frame: object) -> None:
        """Give up an agent that does not run, or output that nobody reads: the end of a stopped job waits for neither.

        Raises:
            _Unresponsive: the agent is to be killed.
            _Unread: the rest of the output is not written.
        """
        if self._agent.has_ended:
            self._question = None
            self._look_at_output()
        elif (keeps_lease := self._watch.keeps_lease()) and self._question is not None:
            self._look_at_answer(self._question)
        elif not (keeps_lease and self._watch.look()):
            self.killed_agent = True
            raise _Unresponsive(f"error: ddplaunch's agent {self._watch.describe()}: killed, with its workers")
        self.watch_time()

    def _look_at_output(self) -> None:
        """Give up output that nobody reads, once the job has ended as it was asked to."""
        if not self.stopped_by:
            return
        self._unread = self._unread + 1 if self.output.written == self._written_before else 0
        self._written_before = self.output.written
        if self._unread * child.INTERVAL >= UNREAD_TIMEOUT:
            raise _Unread

    def _look_at_answer(self, question: child.Question) -> None:
        """Kill an agent that was to kill its workers, and does not answer; of one that was to stop them, say so."""
        if question.has_answer():
            self._question = None
        elif not question.repeat():
            if self._escalates:
                self.killed_agent = True
                raise _Unresponsive(
                    f"ddplaunch: the agent (pid {self._agent.pid}) did not respond and was killed, with the workers"
                )
            self._question = None
            within = duration(self._watch.within)
            print_now(
                f"ddplaunch: the agent (pid {self._agent.pid}) does not respond{self._agent.describe_silence()}. "
                f"Without an answer for {within} it is killed, with the workers\n"
            )


class FrontOutput:
    """Where the agent's messages go. A stdout or stderr that takes nothing is dropped, and the rest goes on."""

    def __init__(self, control: int | None = None, *, rewraps: bool = True) -> None:
        """`control` is a descriptor for what the agent sends to a caller in Python, a line each; `rewraps` as in StatusArea."""
        self._fds = {STDOUT: 1, STDERR: 2}
        if control is not None:
            self._fds[CONTROL] = control
        self.written = 0  # bytes
        self.failed: str | None = None  # why output could not be written
        self.agent_has_ended = False
        self._rewraps = rewraps
        self._area: StatusArea | None = None  # since the first bar
        self._terminals: tuple[bytes, ...] = ()  # where lines have to stand above the area, on the last of them

    def show(self, reader: socket.socket) -> None:
        """Write all messages of the agent until the agent ends."""
        buffer = bytearray(MESSAGE + 1)
        view = memoryview(buffer)
        more = select.poll()
        more.register(reader, select.POLLIN)
        while size := reader.recv_into(buffer):
            stream, data = bytes(view[:1]), view[1:size]
            if stream == BARS:
                self._take_bars(bytes(data))
            elif stream == CONTROL:
                self._write(stream, memoryview(bytes(data) + b"\n"))
            elif self._area is not None and stream in self._terminals:
                self._write(stream, memoryview(self._area.write(bytes(data), self._terminal_size())))
            else:
                self._write(stream, data)
            # after a time in which the terminal took nothing, the last of many states is drawn
            if self._area is not None and not more.poll(0):
                self._draw(self._area)
        self._erase_area()

    def _erase_area(self) -> None:
        """Leave only lines on the screen."""
        if self._area is not None:
            self._write(self._terminals[-1], memoryview(self._area.write(b"", self._terminal_size())))

    def forget_area(self) -> None:
        """Leave what is drawn where it is: another program writes below it."""
        if self._area is not None:
            self._area.forget()

    def _take_bars(self, message: bytes) -> None:
        """Show progress bars in place on a terminal, or answer the agent's question for the size of the terminal."""
        from ddplaunch.launcher.output.bars import ANSWERED, unpack

        self._open_area()
        if self._area is None:
            return
        bars = unpack(message)
        if any(bar.row == ANSWERED for bar in bars):
            self._write(self._terminals[-1], memoryview(self._area.keep_prompt(self._terminal_size())))
        else:
            self._area.show_bars(bars)

    def _open_area(self) -> None:
        """Have an area below the lines, if there is none and stdout or stderr is a terminal."""
        from ddplaunch.launcher.output.area import StatusArea

        if self._area is None:
            self._terminals = tuple(stream for stream in _NAMES if os.isatty(self._fds.get(stream, -1)))
            self._area = StatusArea(rewraps=self._rewraps) if self._terminals else None

    def _terminal_size(self) -> os.terminal_size | None:
        """Return the size of the terminal that has the area; None if the terminal is not ours at present, or is gone."""
        fd = self._fds.get(self._terminals[-1]) if self._terminals else None
        return size_of(fd) if fd is not None else None

    def give_back(self) -> None:
        """Restore the terminal. Outputs of this kind change no modes, so there is nothing to do."""

    def _draw(self, area: StatusArea) -> None:
        self._write(self._terminals[-1], memoryview(area.draw(self._terminal_size())))

    def _write(self, stream: bytes, data: memoryview) -> None:
        """Write all of `data` to one of our streams; a stream that takes nothing any more is dropped, and named once."""
        if stream not in self._fds:
            return
        try:
            while data:
                written = _write(self._fds[stream], data)
                self.written += written
                data = data[written:]
        except OSError as error:
            del self._fds[stream]
            if stream != CONTROL and error.errno not in _READER_LEFT:
                self.failed = (error.strerror or str(error)).lower()
                print_now(f"error: cannot write to {_NAMES[stream]}: {self.failed}\n")


def _write(fd: int, data: memoryview) -> int:
    """Write to a descriptor as if it blocked, whatever flags it has; return how many bytes were written."""
    while True:
        try:
            return os.write(fd, data)
        except BlockingIOError:
            # another process has set O_NONBLOCK on the file that it shares with us: it is not ours to change
            poll = select.poll()
            poll.register(fd, select.POLLOUT)
            poll.poll()


def print_now(text: str) -> None:
    """Write to stderr, whatever comes of it."""
    try:
        os.write(2, text.encode())
    except OSError:
        pass
