"""The hosts on which the dispatcher (the command that was typed) starts agents: what starts each, and the connections to them.

A connection is the ssh process or the like, its output, and the frames in both directions. Reports no errors: `Handler` does.
"""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Collection, Mapping
from enum import Enum, auto
from typing import Protocol

from msgspec import Struct

from ddplaunch.reach import protocol
from ddplaunch.reach.order import Orders
from ddplaunch.reach.pipes import MESSAGE
from ddplaunch.reach.protocol import (
    FROM_HOST,
    HEARTBEAT,
    HOLD,
    OUTPUT,
    STREAM,
    TAKEN,
    TAKEN_STEP,
    GreetingDecoder,
    OutputPipe,
    PipeDecoder,
)
from ddplaunch.spec.job import JobSpec
from ddplaunch.system.loop.loop import Loop
from ddplaunch.system.loop.stream import FrameError
from ddplaunch.system.process.child import Child, StartError, Stdio, start, why_not_started

_READ = 1 << 18  # bytes at a time
_OWN_OUTPUT_KEPT = 1 << 16  # bytes of what the process itself prints, for an error message
_LONGEST_LINE = 1 << 20  # bytes of a line in several messages that are kept together


class AgentStart(Struct, frozen=True, kw_only=True):
    """How the agent of a host is started, and its order."""

    node_rank: int
    host: str  # for ssh
    argv: tuple[str, ...]
    orders: Orders

    def order(self) -> bytes:
        """Write the first frame to the agent: only now, since it names all hosts, and all frames would take much memory."""
        return protocol.encode(self.orders.for_host(self.node_rank))


class RemoteJob(Struct, frozen=True, kw_only=True):
    """All that the dispatcher needs to know."""

    spec: JobSpec
    agents: tuple[AgentStart, ...]  # by node rank
    run_id: str
    starter: str
    python: str  # the interpreter on the hosts
    min_nodes: int
    env: Mapping[str, str]  # of ssh, or what else starts the agents
    open_files: tuple[int, int]  # RLIMIT_NOFILE (soft, hard) of those processes


class HostPhase(Enum):
    """The state of a host's connection."""

    WAITING = auto()  # not started yet
    STARTING = auto()  # the process runs, the greeting has not come
    CONNECTED = auto()  # ddplaunch runs on the host
    CLOSED = auto()


class Handler(Protocol):
    """Who is told what comes from each host, such as the dispatcher. A connection whose call raises a FrameError is killed."""

    def connected(self, host: HostConnection, protocol: int, version: str) -> None:
        """ddplaunch runs on the host."""

    def output_received(self, host: HostConnection, stream: bytes, data: bytes) -> None:
        """Handle output of the host."""

    def report_received(self, host: HostConnection, data: bytes) -> None:
        """Handle a report of the host."""

    def chunk_received(self, host: HostConnection, data: bytes) -> None:
        """Handle a part of a stream."""

    def disconnected(self, host: HostConnection) -> None:
        """Handle the end of the connection."""


class HostConnection:
    """The dispatcher's connection to one host: the process that leads there (ssh, say), and the frames through its pipes."""

    def __init__(self, agent: AgentStart, loop: Loop, handler: Handler) -> None:
        """Prepare the connection to a host; `start` starts the command that leads there."""
        self.agent = agent
        self.phase = HostPhase.WAITING
        self.exit_status: int | None = None  # of the process, as a shell shows it; None: it has not ended
        self.start_error = ""  # why the process could not be started
        self.was_connected = False  # the greeting has come
        self.is_ready = False  # the host has all that the job needs
        self.given_up = False  # the job goes on without it: its end is no error
        self.fault = ""  # why the process was killed
        # heartbeats since anything came from the agent; None: the agent still gets ready, and sends none yet
        self._unanswered_heartbeats: int | None = None
        self._loop = loop
        self._handler = handler
        self._child: Child | None = None
        self._stdin = self._stdout = self._stderr = -1  # our ends of the pipes of the process; -1: closed
        self._sender: OutputPipe | None = None  # writes frames to its stdin
        self._greeting_decoder: GreetingDecoder | None = GreetingDecoder()  # None: the greeting has come
        self._decoder = PipeDecoder(FROM_HOST)
        self._own_output = b""  # the end of what the process itself has printed to stderr
        self._partial_lines: dict[bytes, bytes] = {}  # by tag: the beginning of a line whose rest is in the next frame
        self._is_held = False  # the host was told to send no output for now: who reads ours does not read
        self._unacknowledged = 0  # bytes of output that came, and that the host does not know yet to have come
        self._has_ended = False  # the process has

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

    def start(self, env: Mapping[str, str], open_files: tuple[int, int], handled: Collection[int]) -> None:
        """Start the process with these variables and RLIMIT_NOFILE (soft, hard); a failure is reported as its end.

        `handled` are the signals that this process handles: the new one takes them as a program does by default.
        """
        self.phase = HostPhase.STARTING
        theirs: list[int] = []  # the ends of the pipes that the process gets as stdin, stdout and stderr
        try:
            for name in ("_stdin", "_stdout", "_stderr"):
                reader, writer = os.pipe2(os.O_CLOEXEC)
                ours, its = (writer, reader) if name == "_stdin" else (reader, writer)
                setattr(self, name, ours)
                theirs.append(its)
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
        self._loop.watch(self._child.pidfd, self._on_child_end)
        self._loop.watch(self._stderr, self._on_stderr)
        self._loop.watch(self._stdout, self._on_stdout)

    def wait_again(self) -> None:
        """Be as before the start: the process that was to lead to the host has ended, and another is started later."""
        self.phase = HostPhase.WAITING
        self.exit_status, self._child, self._has_ended = None, None, False
        self._greeting_decoder, self._own_output = GreetingDecoder(), b""

    def _on_child_end(self) -> None:
        """Read what is still in the pipes of the process that has ended, and close them, even if another process holds them."""
        assert self._child is not None
        self._loop.unwatch(self._child.pidfd)
        self._has_ended = True
        while self._stderr >= 0 and self._on_stderr():
            pass
        while self._stdout >= 0 and self._on_stdout():
            pass
        code = os.waitstatus_to_exitcode(os.waitpid(self._child.pid, 0)[1])
        self.exit_status = code if code >= 0 else 128 - code  # a signal is a negative code
        start_error = why_not_started(self._child, self.agent.argv[0])
        if start_error is not None:  # the child has failed before it was ssh
            self.start_error = str(start_error)
        for stream, piece in self._partial_lines.items():
            self._handler.output_received(self, stream, piece)
        os.close(self._child.pidfd)
        os.close(self._child.failure)  # the pipe by which the child has told of a failed start
        self._close()
        self._handler.disconnected(self)

    def _close(self) -> None:
        self.phase = HostPhase.CLOSED
        self.close_stdin()
        self._close_pipe("_stdout")
        self._close_pipe("_stderr")

    def kill(self, fault: str = "") -> None:
        """Kill the process here, for this fault if it has one; the agent on the host ends when its stdin closes."""
        self.fault = fault or self.fault
        if self.phase is HostPhase.WAITING:  # no process is there yet, and none is wanted
            self.phase = HostPhase.CLOSED
        if self._child is not None and not self._has_ended:
            signal.pidfd_send_signal(self._child.pidfd, signal.SIGKILL)

    def give_up(self) -> None:
        """Stop waiting for an agent that still gets ready. An agent with unread output may have begun, and is left alone."""
        has_sent_no_heartbeat = self._unanswered_heartbeats is None
        gets_ready = self.phase is HostPhase.CONNECTED and has_sent_no_heartbeat and not self._has_unread_output()
        if self.phase in (HostPhase.WAITING, HostPhase.STARTING) or gets_ready:
            self.given_up = True
            self.kill()

    def _has_unread_output(self) -> bool:
        if self._stdout < 0:
            return False
        poll = select.poll()
        poll.register(self._stdout, select.POLLIN)
        return bool(poll.poll(0))

    # --- to the host

    def send(self, tag: bytes, data: bytes) -> None:
        """Queue a frame, and send what can be sent at once."""
        if self._sender is not None:
            self._sender.put(tag, data)
            if self._sender.broken:  # the process has ended, which its pidfd reports
                self.close_stdin()

    def send_heartbeat(self) -> int:
        """Send a heartbeat unless other frames are queued, which do as well; return how many have had no reply."""
        if self._sender is not None and not self._sender.size:
            self.send(HEARTBEAT, b"")
        if self._unanswered_heartbeats is None:  # the agent is still being prepared
            return 0
        self._unanswered_heartbeats += 1
        return self._unanswered_heartbeats

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

    def hold(self, is_held: bool) -> None:
        """Have the host hold the output of its agent back, or send it again; all else still comes."""
        if is_held is not self._is_held and self.phase is HostPhase.CONNECTED:
            self._is_held = is_held
            self.send(HOLD, b"1" if is_held else b"")

    # --- from the host

    def _on_stderr(self) -> bool:
        """Keep what the process itself prints; return whether there was anything."""
        data = _read(self._stderr)
        if data == b"":
            self._close_pipe("_stderr")
        self._own_output = (self._own_output + (data or b""))[-_OWN_OUTPUT_KEPT:]
        return bool(data)

    def _on_stdout(self) -> bool:
        """Read what the host has sent, and handle its frames; return whether there was anything."""
        data = _read(self._stdout)
        if data == b"":  # the other end is closed
            self._close_pipe("_stdout")
        if data and not self.fault:  # of a connection that is being killed nothing counts
            agent_is_ready = self._unanswered_heartbeats is not None
            if agent_is_ready:
                self._unanswered_heartbeats = 0  # whatever comes shows that the agent lives
            try:
                self._on_data(data)
            except FrameError as error:
                self.kill(str(error))
        return bool(data)

    def _on_data(self, data: bytes) -> None:
        """Read the greeting, then the frames of a host, and pass each to the handler."""
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
                self._unanswered_heartbeats = 0  # from its first heartbeat on, the agent is to answer ours
            elif tag in OUTPUT:
                self._on_output(tag, content)
            elif tag == STREAM:
                self._handler.chunk_received(self, content)
            else:
                self._handler.report_received(self, content)

    def _on_output(self, tag: bytes, content: bytes) -> None:
        """Pass output on; a line that the host had to split into full messages is joined first, up to _LONGEST_LINE bytes."""
        self._acknowledge(len(content))
        joined = self._partial_lines.pop(tag, b"") + content
        all_were_full = len(joined) % MESSAGE == 0
        if all_were_full and not joined.endswith(b"\n") and len(joined) < _LONGEST_LINE:
            self._partial_lines[tag] = joined
        else:
            self._handler.output_received(self, tag, joined)

    def _acknowledge(self, size: int) -> None:
        """Tell the host now and then that its output has come: it sends no more than AHEAD without that."""
        self._unacknowledged += size
        while self._unacknowledged >= TAKEN_STEP:
            self._unacknowledged -= TAKEN_STEP
            self.send(TAKEN, b"")


def _read(fd: int) -> bytes | None:
    """What can be read at once, b"" at the end, None if there is nothing yet."""
    try:
        return os.read(fd, _READ)
    except BlockingIOError:
        return None
    except OSError:
        return b""
