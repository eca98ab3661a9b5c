"""The tie between the command that the user typed (front) and the agent: signals one way, output the other.

Either side sees the other's end, whatever ended it, as the end of the stream. Interprets nothing that it carries.
"""

from __future__ import annotations

import os
import socket
from collections import deque

from ddplaunch.record import record

STDOUT = b"o"
STDERR = b"e"
CONTROL = b"c"  # JSON, see remote/messages.py: for whoever started this agent elsewhere; others pass it over
MESSAGE = 1 << 16  # bytes of output in one message
FULL = 8 << 20  # bytes waiting for the front from which the workers' pipes are left alone
# among the numbers of signals
ONE_FEWER = 255  # one node of the job will not come
MAY_STOP = 254  # SIGTSTP has come, and the front stops last: has everything else, or does it go on already?
HASTE = 2.0  # seconds without progress after which output that nobody reads no longer delays the end of a stopped job


@record
class Tie:
    """Both ends of both ways, before the fork that leaves each process its own."""

    signals: tuple[int, int]  # pipe: the agent reads, the front's signal handlers write one byte a signal
    suspended: tuple[int, int]  # pipe: the front reads, the agent answers MAY_STOP, with SIGTSTP or SIGCONT
    output: tuple[socket.socket, socket.socket]  # SOCK_SEQPACKET: the front reads, the agent writes

    @classmethod
    def make(cls) -> Tie:
        """Make the pipes and the socket pair."""
        signals, suspended = os.pipe(), os.pipe()
        for fd in (*signals, *suspended):
            os.set_blocking(fd, False)
        reader, writer = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        writer.setblocking(False)
        writer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16 * MESSAGE)
        return cls(signals, suspended, (reader, writer))

    def front_side(self) -> None:
        """Close what belongs to the agent; a pipe without a reader would make the last signals an error."""
        os.close(self.suspended[1])
        self.output[1].close()

    def agent_side(self) -> None:
        """Close what belongs to the front."""
        os.close(self.signals[1])
        os.close(self.suspended[0])
        self.output[0].close()


class Outbox:
    """Output on its way to the front. Never blocks, never grows without end if its user heeds `full`."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._queue: deque[tuple[bytes, memoryview]] = deque()
        self.size = 0  # bytes waiting
        self.sent = 0  # bytes that the front has taken, ever
        self.broken = False  # the front is gone: everything is dropped

    def fileno(self) -> int:
        """The descriptor to watch for writability while anything waits."""
        return self._sock.fileno()

    @property
    def full(self) -> bool:
        """Whether so much waits that no more should be added."""
        return self.size >= FULL

    def put(self, stream: bytes, data: bytes) -> None:
        """Queue data for STDOUT, STDERR or CONTROL, and send what can be sent at once."""
        if self.broken:
            return
        view = memoryview(data)
        start = 0
        while start < len(data):
            end = start + MESSAGE
            if end < len(data):  # whole lines, since those of other hosts may come between two messages
                end = data.rfind(b"\n", start, end) + 1 or end
            self._queue.append((stream, view[start:end]))
            start = end
        self.size += len(data)
        self.flush()

    def flush(self) -> None:
        """Send until the front has no room left."""
        while self._queue:
            stream, data = self._queue[0]
            try:
                self._sock.sendmsg((stream, data))
            except BlockingIOError:
                return
            except OSError:
                self.abandon()
                return
            self._queue.popleft()
            self.size -= len(data)
            self.sent += len(data)

    def abandon(self) -> None:
        """Drop what waits and whatever comes."""
        self.broken = True
        self._queue.clear()
        self.size = 0
