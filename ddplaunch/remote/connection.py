"""The connection to one host: the ssh process or the like, its output, and the frames in both directions. Decides nothing."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Collection, Mapping
from enum import Enum, auto
from typing import TYPE_CHECKING

from ddplaunch.agent.pipes import BARS, MESSAGE, OURS, STDERR, STDOUT
from ddplaunch.loop.frames import FrameError
from ddplaunch.loop.loop import Loop
from ddplaunch.process.child import Child, StartError, Stdio, start, why_not_started
from ddplaunch.remote.protocol import FROM_HOST, HEARTBEAT, STREAM, GreetingDecoder, PipeDecoder
from ddplaunch.remote.remote_job import AgentStart
from ddplaunch.remote.stdio import OutputPipe

if TYPE_CHECKING:
    from ddplaunch.remote.dispatcher import Dispatcher

_READ = 1 << 18  # bytes at a time
_KEPT = 1 << 16  # bytes of what the process itself prints, for an error report
_LONGEST_LINE = 1 << 20  # bytes of a line in several messages that are kept together


class HostPhase(Enum):
    """The state of a host's connection."""

    WAITING = auto()  # not started yet
    STARTING = auto()  # the process runs, the greeting has not come
    CONNECTED = auto()  # ddplaunch runs on the host
    CLOSED = auto()


class HostConnection:
    """One host of the job."""

    def __init__(self, agent: AgentStart, loop: Loop, handler: Dispatcher) -> None:
        self.agent = agent
        self.phase = HostPhase.WAITING
        self.exit_status: int | None = None  # of the process, as a shell shows it
        self.start_error = ""  # why the process could not be started
        self.was_connected = False  # the greeting has come
        self.is_ready = False  # the host has all that the job needs
        self.given_up = False  # the job goes on without it: its end is no error
        self.fault = ""  # why the process was killed
        self._unanswered: int | None = None  # heartbeats; None: it sends none yet
        self._loop = loop
        self._handler = handler
        self._child: Child | None = None
        self._stdin = self._stdout = self._stderr = -1
        self._sender: OutputPipe | None = None  # to its stdin
        self._greeting_decoder: GreetingDecoder | None = GreetingDecoder()
        self._decoder = PipeDecoder(FROM_HOST)
        self._own_output = b""
        self._partial_lines: dict[bytes, bytes] = {}
        self._paused = False
        self._has_ended = False

    def __str__(self) -> str:
        return self.agent.host.rpartition("@")[2]

    @property
    def pid(self) -> int | None:
        """The pid of ssh, or of what else connects to the host."""
        return self._child.pid if self._child is not None else None

    @property
    def own_output(self) -> str:
        """What the process itself printed: errors of ssh, login banners, a traceback."""
        skipped = self._greeting_decoder.skipped if self._greeting_decoder is not None else ""
        return f"{skipped}\n{self._own_output.decode(errors='replace')}"

    # --- the process

    def start(self, env: Mapping[str, str], handled: Collection[int], open_files: tuple[int, int]) -> None:
        """Start the process; a failure is reported as its end."""
        self.phase = HostPhase.STARTING
        theirs: list[int] = []
        try:
            for name in ("_stdin", "_stdout", "_stderr"):
                reader, writer = os.pipe2(os.O_CLOEXEC)
                ours, others = (writer, reader) if name == "_stdin" else (reader, writer)
                setattr(self, name, ours)
                theirs.append(others)
                os.set_blocking(ours, False)
            self._sender = OutputPipe(self._stdin)
            self._child = start(self.agent.argv, env, Stdio(*theirs), handled=handled, open_files=open_files)
        except (StartError, OSError) as error:
            self.start_error = str(error)
            self._close()
            self._handler.disconnected(self)
            return
        finally:
            for fd in theirs:
                os.close(fd)
        self._sender.attach(self._loop)
        self._loop.watch(self._child.pidfd, self._child_ended)
        self._loop.watch(self._stderr, self._read_stderr)
        if not self._paused:
            self._loop.watch(self._stdout, self._read_stdout)

    def _child_ended(self) -> None:
        assert self._child is not None
        self._loop.unwatch(self._child.pidfd)
        self._has_ended = True
        if not self._paused:
            self._finish()

    def _finish(self) -> None:
        """Read what the process has left in its pipes, and close them, even if another process still holds them."""
        assert self._child is not None
        while self._stderr >= 0 and self._read_stderr():
            pass
        while self._stdout >= 0 and self._read_stdout():
            pass
        code = os.waitstatus_to_exitcode(os.waitpid(self._child.pid, 0)[1])
        self.exit_status = code if code >= 0 else 128 - code
        if (never := why_not_started(self._child, self.agent.argv[0])) is not None:
            self.start_error = str(never)
        for stream, piece in self._partial_lines.items():
            self._handler.output_received(self, stream, piece)
        os.close(self._child.pidfd)
        os.close(self._child.failure)
        self._close()
        self._handler.disconnected(self)

    def _close(self) -> None:
        self.phase = HostPhase.CLOSED
        self.close_stdin()
        self._close_pipe("_stdout")
        self._close_pipe("_stderr")

    def kill(self) -> None:
        """Kill the process here; the agent on the host ends when its stdin closes."""
        if self._child is not None and not self._has_ended:
            signal.pidfd_send_signal(self._child.pidfd, signal.SIGKILL)

    def kill_for(self, fault: str) -> None:
        """Kill the process because of this fault."""
        self.fault = fault
        self.kill()

    def give_up(self) -> None:
        """Stop waiting for an agent that still gets ready; one that may have begun, as what it sent is unread, is spared."""
        gets_ready = self.phase is HostPhase.CONNECTED and self._unanswered is None and not _can_read(self._stdout)
        if self.phase is HostPhase.WAITING:
            self.phase = HostPhase.CLOSED
        elif self.phase is HostPhase.STARTING or gets_ready:
            self.given_up = True
            self.kill()

    # --- to the host

    def send(self, tag: bytes, data: bytes) -> None:
        """Queue a frame, and send what can be sent at once."""
        if self._sender is not None:
            self._sender.put(tag, data)
            if self._sender.broken:  # the process has ended, which its pidfd reports
                self.close_stdin()

    def send_heartbeat(self, *, reading: bool) -> int:
        """Send a heartbeat unless other frames are queued; return how many have had no reply.

        `reading` is whether replies are read at present.
        """
        if self._sender is not None and not self._sender.size:
            self.send(HEARTBEAT, b"")
        if self._unanswered is None:  # its agent is still being prepared
            return 0
        self._unanswered = self._unanswered + 1 if reading else 0
        return self._unanswered

    def close_stdin(self) -> None:
        """Close the stdin of the process, at which the agent on the host ends."""
        self._sender = None
        self._close_pipe("_stdin")

    def _close_pipe(self, name: str) -> None:
        fd = getattr(self, name)
        if fd >= 0:
            self._loop.unwatch(fd)
            os.close(fd)
            setattr(self, name, -1)

    # --- from the host

    def pause(self, paused: bool) -> None:
        """Stop reading its output, or go on."""
        if paused is self._paused:
            return
        self._paused = paused
        if self.phase not in (HostPhase.STARTING, HostPhase.CONNECTED):
            return
        if not paused and self._has_ended:
            self._finish()
        elif self._stdout >= 0 and paused:
            self._loop.unwatch(self._stdout)
        elif self._stdout >= 0:
            self._loop.watch(self._stdout, self._read_stdout)

    def _read_stderr(self) -> bool:
        """Keep what the process itself prints; return whether there was anything."""
        data = _read(self._stderr)
        if data == b"":
            self._close_pipe("_stderr")
        self._own_output = (self._own_output + (data or b""))[-_KEPT:]
        return bool(data)

    def _read_stdout(self) -> bool:
        """Read frames; return whether there was anything."""
        data = _read(self._stdout)
        if data == b"":
            self._close_pipe("_stdout")
        if data and not self.fault:
            if self._unanswered is not None:
                self._unanswered = 0
            try:
                self._received(data)
            except FrameError as error:
                self.kill_for(str(error))
        return bool(data)

    def _received(self, data: bytes) -> None:
        if self._greeting_decoder is not None:
            greeting = self._greeting_decoder.feed(data)
            if greeting is None:
                return
            data, self._greeting_decoder = self._greeting_decoder.rest, None
            self.phase, self.was_connected = HostPhase.CONNECTED, True
            self._handler.connected(self, *greeting)
        self._decoder.feed(data)
        while (frame := self._decoder.take()) is not None:
            tag, content = frame
            if tag == HEARTBEAT:
                self._unanswered = 0
            elif tag in (STDOUT, STDERR, OURS, BARS):
                self._handle_output(tag, content)
            elif tag == STREAM:
                self._handler.chunk_received(self, content)
            else:
                self._handler.report_received(self, content)

    def _handle_output(self, stream: bytes, data: bytes) -> None:
        """Hand output on; a line that was split over several messages is joined first."""
        data = self._partial_lines.pop(stream, b"") + data
        if len(data) % MESSAGE == 0 and not data.endswith(b"\n") and len(data) < _LONGEST_LINE:
            self._partial_lines[stream] = data
        else:
            self._handler.output_received(self, stream, data)


def _can_read(fd: int) -> bool:
    """Whether something is there to be read, or the end; False once it is closed."""
    if fd < 0:
        return False
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(0))


def _read(fd: int) -> bytes | None:
    """What can be read at once, b"" at the end, None if there is nothing yet."""
    try:
        return os.read(fd, _READ)
    except BlockingIOError:
        return None
    except OSError:
        return b""
