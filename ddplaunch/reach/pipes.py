"""The pipes between the front (the process that was typed; it has the terminal) and the agent, which is its child.

Signals and requests go one way, replies and output the other.
Either side sees the other's end, whatever ended it, as the end of the stream. Interprets nothing that it carries.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import time
from contextlib import suppress
from math import inf

from msgspec import Struct

from ddplaunch.system.loop.loop import Loop
from ddplaunch.system.loop.stream import Outgoing
from ddplaunch.system.process import clock
from ddplaunch.system.process.linux import memory_file
from ddplaunch.system.process.tree import Process

STDOUT = b"o"
STDERR = b"e"
# for stderr, by ddplaunch itself: from an agent that another command has started, which shows equal ones once
OURS = b"w"
# progress bars to be shown in place, see launcher/output/bars.py: in place of those before
BARS = b"p"
# where the socket of the run lies, "FOLDER\0NAME": from there come the rows of --live
SOCKET = b"s"
ROWS = b"l"  # the rows of --live, from its viewer, in place of those before: see record/window/requests.py
CONTROL = b"c"  # JSON, see reach/protocol.py: for the command that started this agent elsewhere; others ignore it
MESSAGE = 1 << 16  # bytes of output in one message
FULL = 8 << 20  # bytes waiting for the front from which the workers' pipes are left alone
# requests of a front: one of these bytes and another, the number of a signal for the first three
HOST_SIGNAL = b"h"  # the same, but it was sent to the front of this host itself
MAY_STOP = b"t"  # SIGTSTP has come, and the front stops last: has everything else, or does it go on already?
IS_RUNNING = b"r"  # reply, if the loop runs
ASKING_SIGNAL = signal.SIGURG  # asks a handler the same; by default it does nothing, so it harms no agent at its start
REQUEST = 2  # bytes
# replies of the agent
STOPPED = b"s"  # to MAY_STOP: all workers are stopped
GOES_ON = b"c"  # to MAY_STOP: the workers are not stopped, or no longer
LOOP_ANSWERS = b"r"  # to IS_RUNNING, from the loop
HANDLER_ANSWERS = b"l"  # to the signal ASKING_SIGNAL, from its handler
# seconds without progress after which output that is not read no longer delays the end of a stopped job
UNREAD_TIMEOUT = 2.0


class FrontPipes(Struct, frozen=True):
    """Both ends of all pipes, before the fork that leaves each process its own."""

    front: int  # pid
    signals: tuple[int, int]  # pipe: the agent reads, the front's signal handlers write one byte a signal
    requests: tuple[int, int]  # pipe: the agent reads, the front writes REQUEST bytes at a time
    replies: tuple[int, int]  # pipe: the front reads, the agent writes a byte for each request that has a reply
    output: tuple[socket.socket, socket.socket]  # SOCK_SEQPACKET: the front reads, the agent writes
    start: tuple[int, int]  # pipe with one byte, see `child.decide_start`
    # a line for each process that is to outlive the agent, which the front must not kill then; no worker has a copy
    spared: tuple[socket.socket, socket.socket]
    lease: int  # file in memory: until when workers may live without the coordinator, as the agent has it

    @classmethod
    def make(cls) -> FrontPipes:
        """Make all pipes and socket pairs in the front, before it forks the agent."""
        signals, requests, replies, start = os.pipe(), os.pipe(), os.pipe(), os.pipe()
        for fd in (*signals, *requests, *replies, *start):
            os.set_blocking(fd, False)
        # agent and front compete for this byte: if the agent takes it, the job begins; if the front does, the job never will
        os.write(start[1], b".")
        reader, writer = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)  # messages, which stay whole
        writer.setblocking(False)
        writer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16 * MESSAGE)
        return cls(
            front=os.getpid(),
            signals=signals,
            requests=requests,
            replies=replies,
            output=(reader, writer),
            start=start,
            spared=socket.socketpair(),  # names processes that are to outlive the agent
            lease=memory_file("ddplaunch-lease"),  # holds until when the workers may live
        )

    def pass_on(self, signum: int) -> None:
        """From the front, pass a signal on to the agent, if it lives."""
        _write(self.signals[1], bytes([signum]))

    def request(self, kind: bytes, signum: int = 0) -> None:
        """From the front, request something of the agent, if it lives."""
        _write(self.requests[1], kind + bytes([signum]))

    def spare(self, pid: int, started: int) -> None:
        """From the agent, before it ends: name a process that the front is to spare then."""
        with suppress(OSError):  # the front has ended
            self.spared[1].send(b"%d %d\n" % (pid, started), socket.MSG_DONTWAIT)

    def spared_processes(self) -> list[tuple[int, int]]:
        """On the front's side, what the agent has named: the pid and the start of each process."""
        try:
            named = self.spared[0].recv(1 << 16, socket.MSG_PEEK | socket.MSG_DONTWAIT)  # look, do not take
        except BlockingIOError:
            return []
        return [(int(pid), int(started)) for pid, started in map(bytes.split, named.splitlines())]

    def is_spared(self, process: Process) -> bool:
        """On the front's side, whether the agent has named this very process."""
        return (process.pid, process.started) in self.spared_processes()

    def note_lease(self, left: float) -> None:
        """From the agent: say for how many seconds its workers may live from now; inf: as long as they like."""
        os.pwrite(self.lease, b"%020.6f" % min(_boot_time() + left, _NEVER), 0)

    def lease_left(self) -> float:
        """On the front's side, for how many seconds the workers may live; 0.0: the lease is over."""
        over_at = float(os.pread(self.lease, 20, 0) or _NEVER)
        return inf if over_at == _NEVER else max(0.0, over_at - _boot_time())

    def front_side(self) -> None:
        """Close what belongs to the agent; a pipe without a reader would make the last signals an error."""
        os.close(self.replies[1])
        self.output[1].close()
        self.spared[1].close()

    def agent_side(self) -> None:
        """Close what belongs to the front."""
        os.close(self.signals[1])
        os.close(self.requests[1])
        os.close(self.replies[0])
        self.output[0].close()
        self.spared[0].close()


_NEVER = 1e12  # seconds


def _boot_time() -> float:
    """The seconds since the machine has started, the same in both processes."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _write(fd: int, data: bytes) -> None:
    try:
        os.write(fd, data)
    except OSError:  # the agent has ended, or so many wait that one more makes no difference
        pass


class Replies:
    """What the agent has replied, on the front's side."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._seen: set[int] = set()

    def has(self, any_of: bytes) -> bool:
        """Whether one of these replies has been taken."""
        return not self._seen.isdisjoint(any_of)

    def forget(self, replies: bytes) -> None:
        """Drop replies to earlier requests, which came too late."""
        self.take()
        self._seen -= {*replies}

    def take(self) -> bool:
        """Take what has come; False if the agent has ended."""
        try:
            replies = os.read(self._fd, 256)
        except BlockingIOError:
            return True
        self._seen.update(replies)
        return bool(replies)

    def wait(self, any_of: bytes, deadline: float) -> bool:
        """Wait for one of these until `deadline` (monotonic seconds); False if none came, or the agent has ended."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._fd, selectors.EVENT_READ)
            while not self.has(any_of) and clock.wait(selector, deadline) and self.take():
                pass
        return self.has(any_of)


class OutputQueue(Outgoing):
    """Output on its way to the front. Never blocks, never grows without end if its owner respects `full`."""

    def __init__(self, loop: Loop, sock: socket.socket) -> None:
        super().__init__(loop, sock)
        self._last_stream = b""  # the stream of the message that waits last
        self.fileno = sock.fileno

    @property
    def full(self) -> bool:
        """Whether so much waits that no more should be added."""
        return self.size >= FULL

    def put(self, stream: bytes, data: bytes) -> None:
        """Queue data for STDOUT, STDERR, OURS (stderr, by ddplaunch itself), BARS or CONTROL; send what can be sent at once.

        Data becomes messages of at most MESSAGE bytes, which end between lines where possible: lines of other hosts may come
        between two messages. A message is the byte of its stream, and its data.
        """
        # data is added to the last message that waits: one more message takes more memory than a line, and a turn of the front
        may_be_added = stream == self._last_stream and stream in (STDOUT, STDERR)
        if may_be_added and self._buffer.extend(data, most=len(stream) + MESSAGE):
            return
        self._last_stream = stream
        view = memoryview(data)
        start = 0
        while start < len(data) and not self.broken:
            end = start + MESSAGE
            if end < len(data):
                end = data.rfind(b"\n", start, end) + 1 or end
            self._put(stream, view[start:end], joins=False)  # each is one message
            start = end

    def put_bars(self, message: bytes) -> bool:
        """Queue the state of progress bars if nothing waits, or there are none any more; return whether it was taken."""
        if self.size and message:
            return False
        self.put(BARS, message or b"\n")  # what waits is counted in bytes
        return True


READER_TIMEOUT = 5.0  # seconds without progress after which the reader of our stdout no longer blocks the workers


class Backpressure:
    """Watches the agent's output queue, so that a reader that does not read stops the workers, but not for ever.

    Full: the workers' pipes are left alone, as a shell pipeline would do it. Full for READER_TIMEOUT seconds without the
    reader taking a byte: the workers go on, and what they write goes to the logs only, until the queue has room.
    """

    def __init__(self, loop: Loop, queue: OutputQueue) -> None:
        self._queue = queue
        self._loop = loop
        self._sent_when_held = 0  # bytes that the reader had ever taken when its time began
        self._reader_timer = loop.timer(None, self._on_timeout)
        self._is_time_up = False  # for the reader, since the last `update`
        self.holds = False  # the workers' pipes are to be left alone
        self.mutes = False  # output is to be dropped from view

    def update(self, *, logged: bool) -> None:
        """Decide by the queue whether workers wait (`holds`) or output goes to the logs only (`mutes`). Called in each turn.

        `logged`: whether all output is in logs. If not, output is never dropped.
        """
        has_room = self._queue.size < FULL // 2
        reader_has_read = self._queue.sent > self._sent_when_held
        if has_room:
            self.holds = self.mutes = False
            self._reader_timer.cancel()
        elif self._queue.full and not self.holds and not self.mutes:
            self._hold()
        elif self.mutes and not logged:
            self._hold()  # a log could not be written any more: from here on waiting is better than losing
        elif self.holds and self._is_time_up:
            if logged and not reader_has_read:
                self.holds, self.mutes = False, True
            else:
                self._hold()  # with new time for the reader
        self._is_time_up = False

    def _hold(self) -> None:
        """Have the workers wait; the reader has READER_TIMEOUT seconds to take a byte."""
        self.holds, self.mutes = True, False
        self._sent_when_held = self._queue.sent
        self._reader_timer.set(self._loop.now() + READER_TIMEOUT)

    def _on_timeout(self) -> None:
        """Note that the time for the reader is up; the next `update` sees whether it has read. Called by the loop."""
        self._is_time_up = True
