"""What the dispatcher (the command that was typed) and the agents on other hosts say to each other, over stdin and stdout.

A greeting line comes first, then frames: each is a tag of one byte and data, which is not looked into. What a remote shell prints
at login comes before the greeting, and is skipped.

Both ends are the same version of ddplaunch, but a host may be under another user's control: a report that does not fit its type
exactly is refused. Texts of the operating system (arguments, variables, paths) travel as bytes: they need not be UTF-8.
"""

from __future__ import annotations

import os
import re
import selectors
from collections.abc import Callable
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from ddplaunch import __version__
from ddplaunch.plan.cluster import Endpoint
from ddplaunch.reach.channel.streams import Chunk
from ddplaunch.reach.pipes import BARS, CONTROL, OURS, STDERR, STDOUT
from ddplaunch.spec.order import Order
from ddplaunch.system.console.streams import Screen
from ddplaunch.system.errors import LaunchError
from ddplaunch.system.fields import (
    MAX_AGENTS,
    Duration,
    Host,
    Keyword,
    Line,
    Number,
    Status,
    Text,
    decoder,
    text,
)
from ddplaunch.system.loop import stream
from ddplaunch.system.loop.loop import Loop
from ddplaunch.system.loop.stream import FrameError, Outgoing
from ddplaunch.system.process import clock

PROTOCOL = 1

# to a host
ORDER = b"j"  # messages.HostOrder
HOLD = b"h"  # whether the host is to hold the output of its agent back: b"1" or b""
TAKEN = b"t"  # TAKEN_STEP more bytes of its output have been read, see `AHEAD`
REQUEST = b"r"  # doctor.nodes.messages.Asked, to the doctor's program in place of an agent
# both ways
HEARTBEAT = b"b"
CHANNEL = 0  # the number of the stream that carries the connection of the agent
STREAM = b"q"  # streams.Chunk: between the coordinator, which is where the job was typed, and the agent of the host

TO_HOST = ORDER + HOLD + TAKEN + REQUEST + HEARTBEAT + STREAM

OUTPUT = STDOUT + STDERR + OURS + BARS
FROM_HOST = OUTPUT + CONTROL + HEARTBEAT + STREAM
# bytes of output that a host sends before they are read where the job was typed: what the agent says to the coordinator comes
# behind them, and over a slow connection megabytes would make it look silent
AHEAD = 1 << 18
TAKEN_STEP = 1 << 16

LIMIT = 16 << 20  # bytes of data in one frame; the largest is an order, with variables and arguments
LOGIN_LIMIT = 1 << 20  # bytes that a shell may print before the greeting

_MARK = b"\0ddplaunch-remote "
_LONGEST_GREETING = 100  # bytes
_GREETING = re.compile(re.escape(_MARK) + rb"(\d{1,9}) ([0-9A-Za-z.+-]{1,40})\n")


def pack(tag: bytes, data: bytes) -> bytes:
    """Make a frame."""
    if len(data) > LIMIT:
        raise ValueError(f"a frame of {len(data)} bytes, and the limit is {LIMIT}")
    return stream.pack(tag, data)


def greeting() -> bytes:
    """The line that comes before the first frame."""
    return b"%s%d %s\n" % (_MARK, PROTOCOL, __version__.encode())


class PipeDecoder:
    """The receiving end of a stream of frames."""

    def __init__(self, tags: bytes) -> None:
        self._tags = tags
        self._frames = stream.Decoder(1 + LIMIT)

    def feed(self, data: bytes) -> None:
        """Add what has arrived."""
        self._frames.feed(data)

    def take(self) -> tuple[bytes, bytes] | None:
        """Return the tag and the data of the next frame; None while the frame is incomplete.

        Raises FrameError: what arrived is no frame.
        """
        try:
            frame = self._frames.take()
        except FrameError:
            raise FrameError(f"sent {self._frames.beginning!r}, which is no frame") from None
        if frame is None:
            return None
        is_known = bool(frame) and frame[:1] in self._tags
        if not is_known:
            raise FrameError(f"sent {frame[:20]!r}, which is no frame")
        return frame[:1], frame[1:]


class GreetingDecoder:
    """Finds the greeting in what a host prints; the bytes behind it, `rest`, are then for a PipeDecoder."""

    def __init__(self) -> None:
        self._buffer = b""
        self.rest = b""

    def feed(self, data: bytes) -> tuple[int, str] | None:
        """Return the protocol and the version of the peer, once the greeting is complete.

        Raises FrameError: too much comes before it.
        """
        begin = max(0, len(self._buffer) - _LONGEST_GREETING)  # no greeting begins earlier: it would have been found
        self._buffer += data
        found = _GREETING.search(self._buffer, begin)
        if found is not None:
            self.rest = self._buffer[found.end() :]
            return int(found[1]), found[2].decode()
        if len(self._buffer) > LOGIN_LIMIT:
            raise FrameError(f"printed {len(self._buffer)} bytes before ddplaunch had started there")
        return None

    @property
    def skipped(self) -> str:
        """The last 1000 bytes of what was printed instead of a greeting."""
        return self._buffer[-1000:].decode(errors="replace")


# --- pipes of frames, which are stdin and stdout of an agent


_READ = 1 << 16  # bytes at a time


class InputPipe(PipeDecoder):
    """Frames of the dispatcher, read from the stdin of the process that it has started on a host."""

    def __init__(self, fd: int) -> None:
        super().__init__(TO_HOST)
        os.set_blocking(fd, False)
        self._fd = fd

    def fileno(self) -> int:
        """The descriptor to watch."""
        return self._fd

    def read(self) -> bool:
        """Read what has arrived; return whether more may come. An error counts as the end."""
        try:
            data = os.read(self._fd, _READ)
        except BlockingIOError:
            return True
        except OSError:
            return False
        self.feed(data)
        return bool(data)

    def wait(self, timeout: float) -> tuple[bytes, bytes] | None:
        """Wait for a frame, `timeout` seconds at most; None if none came in time, or the stream has ended, or is malformed."""
        deadline = clock.now() + timeout
        with selectors.DefaultSelector() as selector:
            selector.register(self._fd, selectors.EVENT_READ)
            try:
                while (frame := self.take()) is None:
                    if not clock.wait(selector, deadline) or not self.read():
                        return None
            except FrameError:
                return None
        return frame

    def close(self) -> None:
        """Close it in this process."""
        os.close(self._fd)


class OutputPipe(Outgoing):
    """Frames to the other side."""

    def __init__(self, fd: int, first: bytes = b"") -> None:
        """Send `first` before any frame; `attach` has a loop send what finds no room at once."""
        os.set_blocking(fd, False)
        super().__init__(None, fd)
        self._fd = fd
        if first:
            self._put(first)

    def attach(self, loop: Loop) -> None:
        """Have the loop send what waits."""
        self._loop = loop
        self._watch()

    def put(self, tag: bytes, data: bytes) -> None:
        """Queue a frame, and send what can be sent at once."""
        if not self.broken:
            self._put(pack(tag, data))

    def close(self) -> None:
        """Close the descriptor in this process."""
        if self._loop is not None:
            self._loop.unwatch(self._fd)
        os.close(self._fd)


def reserve_stdio() -> tuple[InputPipe, OutputPipe]:
    """Send the greeting; from now on stdin and stdout are for frames alone: other code reads /dev/null and prints to stderr."""
    pipes = InputPipe(os.dup(0)), OutputPipe(os.dup(1), greeting())
    devnull = os.open(os.devnull, os.O_RDWR)
    os.dup2(devnull, 0)
    os.dup2(2, 1)
    os.close(devnull)
    return pipes


_Pid = Annotated[int, Meta(ge=2, le=2**22)]  # the kernel's PID_MAX_LIMIT
_Ticks = Annotated[int, Meta(ge=0, le=2**62)]


class HostOrder(Struct, frozen=True):
    """To a host: the job, and the host's part in it."""

    job: Order
    token: Line  # the secret of this job, which authenticates its agents to each other
    env: tuple[tuple[bytes, bytes], ...]
    cwd: bytes
    node_rank: Number
    typed_on: Host  # where the command was typed that coordinates the job
    hosts: Annotated[tuple[Host, ...], Meta(max_length=MAX_AGENTS)]  # names by node rank
    cluster: Line
    min_nodes: Number
    endpoint: Endpoint  # of the workers
    screen: Screen  # where the command was typed
    heartbeat_timeout: Duration  # seconds without a frame after which the workers are ended
    simulated: Keyword | None  # "divide" or "share": all nodes are simulated on this machine
    killed: tuple[Number, ...] = ()  # ranks that --chaos kills

    def __post_init__(self) -> None:
        if self.node_rank >= len(self.hosts):
            raise ValueError(f"node rank {self.node_rank} of {len(self.hosts)} hosts")


class Ready(Struct, frozen=True, tag="ready"):
    """From a host: it has all that the job needs."""


class Worker(Struct, frozen=True, tag="worker"):
    """From a host: a worker was started."""

    rank: Number
    pid: _Pid


class OrderRefused(Struct, frozen=True, tag="refused"):
    """From a host: the job cannot run there."""

    message: Text
    hint: Text | None
    status: Annotated[int, Meta(ge=1, le=255)]


class AgentEnded(Struct, frozen=True, tag="ended"):
    """From a host: nothing of the job is left there, except for processes that write to a disk that hangs."""

    status: Status
    spared: tuple[tuple[_Pid, _Ticks], ...] = ()  # these processes: pid and start


Report = Ready | Worker | OrderRefused | AgentEnded

encode = msgspec.json.Encoder().encode
order: Callable[[bytes], HostOrder] = decoder(HostOrder)
chunk: Callable[[bytes], Chunk] = decoder(Chunk)
report: Callable[[bytes], Report] = decoder(Report)


def refusal(error: LaunchError) -> OrderRefused:
    """The answer to the dispatcher by an error because of which nothing was started."""
    hint = None if error.hint is None else text(error.hint)
    return OrderRefused(message=text(error.message), hint=hint, status=error.status)
