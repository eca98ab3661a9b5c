"""The front, the process that the user started: it has the terminal, passes signals to the agent and writes what the agent shows.

The agent, which it forks, supervises the workers. The front may block on a terminal or pipe that is not read; the agent never
does. The front ends what a lost agent has left, and an agent that does not show that it runs; all else is decided elsewhere.
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
_STREAM_NAMES = {STDOUT: "stdout", STDERR: "stderr"}
# errors of a pipe and of a terminal whose reader has left (`| head`): that is not worth a message, and workers do not die of it
_READER_LEFT = (errno.EPIPE, errno.EIO)


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

    `signals` are passed to the agent, besides those that `passed_on` adds; one that was ignored when the command was started
    (nohup) stays ignored. Of them `stops` ask the job to end, and a second one of `sent_again` is no second request.
    `output` takes the agent's messages; None: our stdout and stderr do. An agent that gives no sign of life for
    more than `heartbeat_timeout` seconds is killed.

    Raises:
        LaunchError: the machine has no room for the agent.
    """
    passed = passed_on(signals)
    modes_before = modes()
    process = child.start(agent, passed)
    # Python's C handler writes the signal's number straight to the agent's pipe, even while we block on a terminal
    signal.set_wakeup_fd(process.pipes.signals[1], warn_on_full_buffer=False)
    front = _Front(process, frozenset(stops), sent_again, output or FrontOutput(), heartbeat_timeout)
    for signum in passed:
        signal.signal(signum, front.on_sigtstp if signum == signal.SIGTSTP else front.on_signal)
    # a Python handler interrupts even a write that blocks on a terminal, so that a lost agent's processes never wait for it
    signal.signal(signal.SIGCHLD, front.on_sigchld)
    front.on_sigchld(signal.SIGCHLD, None)  # an agent that ended before this line has sent its SIGCHLD to nobody
    signal.signal(signal.SIGALRM, front.on_sigalrm)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, passed)
    _show_until_end(front, process)
    return _status_of_job(front, process, modes_before)


def _show_until_end(front: _Front, agent: child.AgentProcess) -> None:
    """Show the agent's messages until the agent has ended, or is killed because it does not respond; then take no more signals.

    The signal handlers of the front raise both exceptions, out of a write that may block.
    """
    try:
        front.set_timer()
        front.output.show(agent.pipes.output[0])
    except _Unread:
        pass  # the job was stopped, and nobody reads: the rest of the output is dropped
    except _Unresponsive as error:
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
        agent.kill()  # before the print, which may block
        print_now(f"{error}\n")
    front.is_done = True
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def _status_of_job(front: _Front, agent: child.AgentProcess, modes_before: Modes | None) -> int:
    """Reap the agent and return the exit status of the job; unless it is 0, restore the modes that the terminal had before it."""
    if front.killed_agent:
        if ends_within(agent.pid, child.KILL_TIMEOUT):  # else it is in uninterruptible sleep, and is named below
            agent.reap()
            set_modes(modes_before)
        print_now(child.describe_leftovers())
        return exitcodes.of_signal(front.stopped_by) if front.stopped_by else exitcodes.NODE_LOST
    wait_status = agent.reap()
    if wait_status:
        set_modes(modes_before)  # a worker that was killed while it edited a line has left those that it needed
    status, text = child.status_of(agent.pid, wait_status)
    print_now(text)
    return status or (exitcodes.NOT_WRITTEN if front.output.failed else exitcodes.OK)


class _Unread(Exception):
    """What is left to be written is not read, and the job was asked to stop."""


class _Unresponsive(Exception):
    """The agent does not run: it is stopped, in uninterruptible sleep, or in a loop. The text is for the user."""


class _Front:
    """The front's signal handlers, and the state that they share with the writing of output, which they interrupt."""

    def __init__(
        self,
        agent: child.AgentProcess,
        stops: frozenset[int],
        sent_again: frozenset[int],
        output: FrontOutput,
        heartbeat_timeout: float,
    ) -> None:
        """Serve this agent, which is given up after `heartbeat_timeout` seconds without a sign of life.

        `stops` ask the job to end; a second one of `sent_again`, which a scheduler sends more than once, is no second request.
        """
        self.output = output
        self._agent = agent
        self._deduplicator = SignalDeduplicator(stops, sent_again)
        self._stops = stops
        self._waits_for_workers_to_stop = False  # as after Ctrl-Z: a second SIGTSTP meanwhile changes nothing
        self.stopped_by = 0  # the first signal to stop; 0: none came
        self.killed_agent = False  # by this process
        self.is_done = False  # the agent has ended or is given up, so signals to stop come too late
        self._workers_are_to_be_killed = False  # the user has asked a second time
        self._watch = child.Watch(agent, heartbeat_timeout)
        self._urgent_question: child.Question | None = None  # to an agent that has to end its workers; None: answered
        # INTERVALs in a row in which nobody has read output, after the end of a job that was stopped
        self._intervals_unread = 0
        self._written_before = 0  # bytes, one interval ago

    def on_signal(self, signum: int, _frame: object) -> None:
        """Note a signal to stop, and ask more often from now on whether the agent runs; other signals concern the agent alone.

        The agent has received the signal already, from the C handler, and decides by the same rules whether it escalates.
        """
        if signum not in self._stops or self.is_done:
            return
        typed = typed_at(os.getpid(), signum)  # whether Ctrl-C at a terminal can have sent it
        event = self._deduplicator.event_of(signum, time.monotonic(), SignalOrigin.FRONT, typed=typed)
        if not self.stopped_by:
            self.stopped_by = signum
            if self._agent.prevent_start():  # it still got ready, and was killed: no job has begun
                self.killed_agent = True
                print_now(child.prevented_by(signum))
        elif event.is_request:
            self._workers_are_to_be_killed = True  # by this process, if the agent does not answer the question below
        else:
            return  # a repetition asks for nothing new
        if self._urgent_question is None and not self.killed_agent:
            self._urgent_question = child.Question(self._agent)
        self.set_timer()

    def on_sigtstp(self, _signum: int, _frame: object) -> None:
        """Stop this process for SIGTSTP (Ctrl-Z), which the agent received, too, once the agent has stopped the workers.

        By SIGSTOP: SIGTSTP would have to get its default action back for a moment, in which the next one would stop us without a
        request to the agent. Where no shell could let us go on, SIGTSTP means nothing, as for any program: the agent is told so.
        """
        if is_orphaned_group():
            self._agent.pipes.pass_on(signal.SIGCONT)
        elif not self._waits_for_workers_to_stop:
            self._waits_for_workers_to_stop = True
            may_stop = self._wait_for_workers_to_stop()  # False: the job goes on already
            modes_of_worker = modes()
            self._waits_for_workers_to_stop = False
            if may_stop:
                self.output.restore_terminal()
                os.kill(os.getpid(), signal.SIGSTOP)  # returns once somebody has sent SIGCONT
                self.output.forget_area()  # the shell has written below it
                set_modes(modes_of_worker)  # the shell has set its own, and the worker does not know of the pause

    def _wait_for_workers_to_stop(self) -> bool:
        """Wait until the workers have stopped: the shell takes its terminal when we do. False: they go on already."""
        replies = self._agent.replies
        replies.forget(STOPPED + GOES_ON)
        self._agent.pipes.request(MAY_STOP)
        replies.wait(STOPPED + GOES_ON, clock.now() + _STOP_TIMEOUT)
        return not replies.has(GOES_ON)

    def on_sigchld(self, _signum: int, _frame: object) -> None:
        """End what the agent left, if it has ended; if it was stopped, set the timer to look at it sooner than while it runs."""
        if self.is_done:
            return
        if self._agent.has_ended:
            self.output.agent_has_ended = True
            self._agent.sweep()
            self.set_timer()  # from now on for output of a stopped job, which nobody may read
        elif self._agent.is_stopped and not self._watch.silent:  # else it is looked at more often already
            self.set_timer()

    def set_timer(self) -> None:
        """Have `on_sigalrm` called when it is time to look at the agent, or at output that nobody reads."""
        has_agent = not self._agent.has_ended
        if self._urgent_question is not None or (self.stopped_by and not has_agent):
            signal.setitimer(signal.ITIMER_REAL, child.INTERVAL)
        elif has_agent:
            signal.setitimer(signal.ITIMER_REAL, self._watch.wait())

    def on_sigalrm(self, _signum: int, _frame: object) -> None:
        """Give up an agent that does not run, or output that nobody reads: the end of a stopped job waits for neither.

        Raises:
            _Unresponsive: the agent is to be killed.
            _Unread: the rest of the output is not written.
        """
        if self._agent.has_ended:
            self._urgent_question = None
            self._check_output_is_read()
        else:
            self._check_agent()
        self.set_timer()

    def _check_agent(self) -> None:
        """Look whether the agent runs, and ask it again: urgently while it has to stop its workers, else by `_watch`.

        Raises _Unresponsive: it does not run, or has let its workers live beyond their lease (until when they may live).
        """
        keeps_lease = self._watch.keeps_lease()
        if keeps_lease and self._urgent_question is not None:
            self._check_answer(self._urgent_question)
        elif not keeps_lease or not self._watch.look():
            self.killed_agent = True
            raise _Unresponsive(f"error: ddplaunch's agent {self._watch.describe()}: killed, with its workers")

    def _check_output_is_read(self) -> None:
        """Give up output that nobody reads, once the job has ended as it was asked to. Raises _Unread."""
        if not self.stopped_by:
            return
        self._intervals_unread = self._intervals_unread + 1 if self.output.written == self._written_before else 0
        self._written_before = self.output.written
        if self._intervals_unread * child.INTERVAL >= UNREAD_TIMEOUT:
            raise _Unread

    def _check_answer(self, question: child.Question) -> None:
        """Take the answer of an agent that was told to end its workers, or ask it again; after some questions give it up.

        An agent that was to kill its workers is then killed itself (raises _Unresponsive). One that was to stop them is left to
        `_watch`, which has more patience, and the user is told.
        """
        if question.has_answer():
            self._urgent_question = None
            return
        is_given_up = not question.repeat()
        if not is_given_up:
            return
        agent = f"ddplaunch: the agent (pid {self._agent.pid})"
        if self._workers_are_to_be_killed:
            self.killed_agent = True
            raise _Unresponsive(f"{agent} did not respond and was killed, with the workers")
        self._urgent_question = None
        state, within = self._agent.describe_silence(), duration(self._watch.gives_up_after)
        print_now(f"{agent} does not respond{state}. Without an answer for {within} it is killed, with the workers\n")


class FrontOutput:
    """Writes the agent's messages, on a terminal above an area of progress bars. A stdout or stderr that fails is dropped."""

    def __init__(self, control: int | None = None, *, rewraps: bool = True) -> None:
        """`control` is a descriptor for what the agent sends to a caller in Python, a line each; None: nobody takes that.

        `rewraps`: the terminal wraps lines again when its width changes.
        """
        self._fds = {STDOUT: 1, STDERR: 2}  # by the byte that begins a message of the agent
        if control is not None:
            self._fds[CONTROL] = control
        self.written = 0  # bytes, ever
        self.failed: str | None = None  # why output could not be written
        self.agent_has_ended = False  # as the front has seen
        self._rewraps = rewraps
        self._area: StatusArea | None = None  # None before the first progress bar, and where there is no terminal
        self._terminals: tuple[bytes, ...] = ()  # STDOUT and STDERR if they are terminals; the area is on the last

    def show(self, reader: socket.socket) -> None:
        """Write all messages of the agent, each a byte for its stream and its data, until the agent ends."""
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
            # only once no message waits: to draw the area for each of many messages would delay the rest of them
            if self._area is not None and not more.poll(0):
                self._write(self._stream_of_area, memoryview(self._area.draw(self._terminal_size())))
        self._erase_area()

    def _erase_area(self) -> None:
        """Take the status area away, so that only lines are on the screen."""
        if self._area is not None:
            self._write(self._stream_of_area, memoryview(self._area.write(b"", self._terminal_size())))

    def forget_area(self) -> None:
        """Leave what is drawn where it is: another program writes below it."""
        if self._area is not None:
            self._area.forget()

    def _take_bars(self, message: bytes) -> None:
        """On a terminal, show the agent's progress bars from the next draw on, or keep a prompt that the user has answered.

        A prompt is a line of a worker that has not ended, as of input(). A message that one was answered holds no other bar.
        """
        from ddplaunch.launcher.output.bars import ANSWERED, unpack

        self._open_area()
        if self._area is None:  # there is no terminal
            return
        bars = unpack(message)
        was_prompt_answered = any(bar.row == ANSWERED for bar in bars)
        if was_prompt_answered:
            self._write(self._stream_of_area, memoryview(self._area.keep_prompt(self._terminal_size())))
        else:
            self._area.show_bars(bars)

    def _open_area(self) -> None:
        """Have a status area below the lines, if there is none yet and stdout or stderr is a terminal."""
        from ddplaunch.launcher.output.area import StatusArea

        if self._area is None:
            self._terminals = tuple(stream for stream in _STREAM_NAMES if os.isatty(self._fds.get(stream, -1)))
            self._area = StatusArea(rewraps=self._rewraps) if self._terminals else None

    @property
    def _stream_of_area(self) -> bytes:
        return self._terminals[-1]

    def _terminal_size(self) -> os.terminal_size | None:
        """Return the size of the terminal that has the area; None if the terminal is not ours at present, or is gone."""
        fd = self._fds.get(self._stream_of_area) if self._terminals else None
        return size_of(fd) if fd is not None else None

    def restore_terminal(self) -> None:
        """Restore the terminal. Outputs of this kind change no modes, so there is nothing to do."""

    def _write(self, stream: bytes, data: memoryview) -> None:
        """Write all of `data` to one of our streams; drop a stream that fails, and tell the user, unless its reader has left."""
        if stream not in self._fds:  # it was dropped, or nobody takes it
            return
        try:
            while data:
                written = _write_some(self._fds[stream], data)
                self.written += written
                data = data[written:]
        except OSError as error:
            del self._fds[stream]
            if stream != CONTROL and error.errno not in _READER_LEFT:
                self.failed = (error.strerror or str(error)).lower()
                print_now(f"error: cannot write to {_STREAM_NAMES[stream]}: {self.failed}\n")


def _write_some(fd: int, data: memoryview) -> int:
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
