"""The way to one host: the process that leads there, what it says and what is said to it. Decides nothing."""

from __future__ import annotations

import os
import selectors
import signal
from collections import deque
from collections.abc import Collection, Mapping
from enum import Enum, auto
from typing import Protocol

from ddplaunch.agent.pipes import MESSAGE, STDERR, STDOUT
from ddplaunch.process.start import Child, StartError, Stdio, start, why_not_started
from ddplaunch.record import record
from ddplaunch.remote.protocol import BEAT, FROM_HOST, Decoder, FrameError, Reception, pack

_READ = 1 << 18  # bytes at a time
_KEPT = 1 << 16  # bytes of what the process says on its own, for an error report
_LONGEST_LINE = 1 << 20  # bytes of a line that came in pieces until it is shown in pieces


@record(kw_only=True)
class AgentStart:
    """How a host is reached, and what is said first."""

    place: int  # node rank
    host: str  # as ssh takes it
    argv: tuple[str, ...]
    order: bytes


class HostPhase(Enum):
    """How far a branch has come."""

    WAITING = auto()  # its turn has not come
    CALLING = auto()  # the process runs, nobody has answered
    THERE = auto()  # ddplaunch runs there
    GONE = auto()


class ConnectionHandler(Protocol):
    """Whom a branch tells what it hears."""

    def greeted(self, branch: HostConnection, protocol: int, version: str) -> None:
        """Ddplaunch runs there."""

    def reported(self, branch: HostConnection, data: bytes) -> None:
        """A report came."""

    def showed(self, branch: HostConnection, stream: bytes, data: bytes) -> None:
        """Output came."""

    def gone(self, branch: HostConnection) -> None:
        """Nothing more will come."""


class HostConnection:
    """One host of the job."""

    def __init__(self, call: AgentStart, selector: selectors.BaseSelector, handler: ConnectionHandler) -> None:
        self.call = call
        self.phase = HostPhase.WAITING
        self.exit_status: int | None = None  # of the process, as a shell shows it
        self.never_started = ""  # why there was no process
        self.has_answered = False  # ddplaunch runs there, or did
        self.is_ready = False  # all is there that the job needs
        self.given_up = False  # by us: its end says nothing
        self.fault = ""  # for which we have ended the process
        self._unanswered: int | None = None  # beats; None: it does not answer yet
        self._selector = selector
        self._handler = handler
        self._child: Child | None = None
        self._stdin = self._stdout = self._stderr = -1
        self._queue: deque[memoryview] = deque()
        self._reception: Reception | None = Reception()
        self._decoder = Decoder(FROM_HOST)
        self._said = b""
        self._pieces: dict[bytes, bytes] = {}
        self._paused = False
        self._has_ended = False

    def __str__(self) -> str:
        return self.call.host.rpartition("@")[2]

    @property
    def pid(self) -> int | None:
        """The process that leads there."""
        return self._child.pid if self._child is not None else None

    @property
    def said(self) -> str:
        """What the process has said on its own: ssh's complaints, a login's words, a traceback."""
        skipped = self._reception.skipped if self._reception is not None else ""
        return f"{skipped}\n{self._said.decode(errors='replace')}"

    # --- the process

    def start(self, env: Mapping[str, str], handled: Collection[int], open_files: tuple[int, int]) -> None:
        """Start the process; that it cannot be is told as its end."""
        self.phase = HostPhase.CALLING
        theirs: list[int] = []
        try:
            for name in ("_stdin", "_stdout", "_stderr"):
                reader, writer = os.pipe2(os.O_CLOEXEC)
                ours, others = (writer, reader) if name == "_stdin" else (reader, writer)
                setattr(self, name, ours)
                theirs.append(others)
                os.set_blocking(ours, False)
            self._child = start(self.call.argv, env, Stdio(*theirs), handled=handled, open_files=open_files)
        except (StartError, OSError) as error:
            self.never_started = str(error)
            self._close()
            self._handler.gone(self)
            return
        finally:
            for fd in theirs:
                os.close(fd)
        self._selector.register(self._child.pidfd, selectors.EVENT_READ, self._ended)
        self._selector.register(self._stderr, selectors.EVENT_READ, self._complained)
        if not self._paused:
            self._selector.register(self._stdout, selectors.EVENT_READ, self._readable)

    def _ended(self) -> None:
        assert self._child is not None
        self._selector.unregister(self._child.pidfd)
        self._has_ended = True
        if not self._paused:
            self._finish()

    def _finish(self) -> None:
        """Take in what the process has left in its pipes, and let go of it. Whoever else holds them has nothing to say."""
        assert self._child is not None
        while self._stderr >= 0 and self._complained():
            pass
        while self._stdout >= 0 and self._readable():
            pass
        code = os.waitstatus_to_exitcode(os.waitpid(self._child.pid, 0)[1])
        self.exit_status = code if code >= 0 else 128 - code
        if (never := why_not_started(self._child, self.call.argv[0])) is not None:
            self.never_started = str(never)
        for stream, piece in self._pieces.items():
            self._handler.showed(self, stream, piece)
        os.close(self._child.pidfd)
        os.close(self._child.failure)
        self._close()
        self._handler.gone(self)

    def _close(self) -> None:
        self.phase = HostPhase.GONE
        self.hang_up()
        self._close_output("_stdout")
        self._close_output("_stderr")

    def kill(self) -> None:
        """End the process, not what it leads to."""
        if self._child is not None and not self._has_ended:
            signal.pidfd_send_signal(self._child.pidfd, signal.SIGKILL)

    def break_off(self, fault: str) -> None:
        """End the process for what it did wrong."""
        self.fault = fault
        self.kill()

    def give_up(self) -> None:
        """Wait for no answer."""
        if self.phase is HostPhase.WAITING:
            self.phase = HostPhase.GONE
        elif self.phase is HostPhase.CALLING:
            self.given_up = True
            self.kill()

    # --- to the host

    def send(self, tag: bytes, data: bytes) -> None:
        """Send a frame, as soon as there is room for it."""
        if self._stdin >= 0:
            self._queue.append(memoryview(pack(tag, data)))
            self._flush()

    def beat(self, *, heeded: bool) -> int:
        """Say that we are there, unless that waits to be taken already; give how often that was not answered.

        `heeded` is whether answers are read at all.
        """
        if not self._queue:
            self.send(BEAT, b"")
        if self._unanswered is None:  # it is still getting ready
            return 0
        self._unanswered = self._unanswered + 1 if heeded else 0
        return self._unanswered

    def _flush(self) -> None:
        while self._queue:
            try:
                written = os.write(self._stdin, self._queue[0])
            except BlockingIOError:
                break
            except OSError:  # its end will tell
                self.hang_up()
                return
            if written == len(self._queue[0]):
                self._queue.popleft()
            else:
                self._queue[0] = self._queue[0][written:]
        is_watched = self._stdin in self._selector.get_map()
        if self._queue and not is_watched:
            self._selector.register(self._stdin, selectors.EVENT_WRITE, self._flush)
        elif is_watched and not self._queue:
            self._selector.unregister(self._stdin)

    def hang_up(self) -> None:
        """Say nothing more: what runs there ends."""
        self._queue.clear()
        self._close_output("_stdin")

    def _close_output(self, name: str) -> None:
        fd = getattr(self, name)
        if fd >= 0:
            if fd in self._selector.get_map():
                self._selector.unregister(fd)
            os.close(fd)
            setattr(self, name, -1)

    # --- from the host

    def pause(self, paused: bool) -> None:
        """Leave alone what it shows, or take it up again."""
        if paused is self._paused:
            return
        self._paused = paused
        if self.phase not in (HostPhase.CALLING, HostPhase.THERE):
            return
        if not paused and self._has_ended:
            self._finish()
        elif self._stdout >= 0:
            if paused:
                self._selector.unregister(self._stdout)
            else:
                self._selector.register(self._stdout, selectors.EVENT_READ, self._readable)

    def _complained(self) -> bool:
        """Keep what the process says on its own; say whether there was anything."""
        data = _read(self._stderr)
        if data == b"":
            self._close_output("_stderr")
        self._said = (self._said + (data or b""))[-_KEPT:]
        return bool(data)

    def _readable(self) -> bool:
        """Take in what came; say whether there was anything."""
        data = _read(self._stdout)
        if data == b"":
            self._close_output("_stdout")
        if data and not self.fault:
            if self._unanswered is not None:
                self._unanswered = 0
            try:
                self._heard(data)
            except FrameError as error:
                self.break_off(str(error))
        return bool(data)

    def _heard(self, data: bytes) -> None:
        if self._reception is not None:
            greeting = self._reception.feed(data)
            if greeting is None:
                return
            data, self._reception = self._reception.rest, None
            self.phase, self.has_answered = HostPhase.THERE, True
            self._handler.greeted(self, *greeting)
        self._decoder.feed(data)
        while (frame := self._decoder.take()) is not None:
            tag, content = frame
            if tag == BEAT:
                self._unanswered = 0
            elif tag in (STDOUT, STDERR):
                self._show(tag, content)
            else:
                self._handler.reported(self, content)

    def _show(self, stream: bytes, data: bytes) -> None:
        """Show what came, but a line that was too long for one message whole."""
        data = self._pieces.pop(stream, b"") + data
        if len(data) % MESSAGE == 0 and not data.endswith(b"\n") and len(data) < _LONGEST_LINE:
            self._pieces[stream] = data
        else:
            self._handler.showed(self, stream, data)


def _read(fd: int) -> bytes | None:
    """What is there, b"" at the end, None if nothing is there yet."""
    try:
        return os.read(fd, _READ)
    except BlockingIOError:
        return None
    except OSError:
        return b""
