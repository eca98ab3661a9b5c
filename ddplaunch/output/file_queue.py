"""What is to be written to files, on its way to the process that writes them. Touches no file, and never blocks.

A disk may hang, as that of a file server that does not respond, and what writes to it is then in uninterruptible sleep. So that
is a process of its own (`report/file_writer.py`), which can be left behind; a thread would keep its process from ending.
"""

from __future__ import annotations

import os
import selectors
from collections import Counter, deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ddplaunch.output.file_messages import CLOSE, END, EVENT, HEADER, MISSING, OPEN, PROGRESS, WRITE, replies
from ddplaunch.process import clock

if TYPE_CHECKING:
    import socket

    Reply = Mapping[str, Any]

HOLD = 32 << 20  # bytes waiting from which the workers' pipes are left alone, as long as the disk takes any
LIMIT = 64 << 20  # bytes waiting from which output is dropped
HANG_TIMEOUT = 3.0  # seconds without progress after which the disk hangs; a second look comes RECHECK later
RECHECK = 1.0  # seconds: after a pause of everything the writer needs a moment, too
_BLOCK = 1 << 16  # bytes of small messages that wait together
_ROOM = 1 << 20  # bytes beyond LIMIT for what is no output


class Log:
    """One log, which the other process writes."""

    def __init__(self, files: FileQueue, number: int) -> None:
        self._files = files
        self._number = number

    def write(self, data: bytes) -> None:
        """Append."""
        self._files.append(self._number, data)

    def close(self) -> None:
        """End it."""
        self._files.close_log(self._number)

    @property
    def is_kept(self) -> bool:
        """Whether all that is written is kept."""
        return self._files.keeps_logs


class FileQueue:
    """Our side of the socket to that process, which takes `serve` of its module; without one, everything is dropped."""

    def __init__(
        self,
        sock: socket.socket | None = None,
        shared: int = -1,
        pid: int = 0,
        listener: socket.socket | None = None,
    ) -> None:
        """`shared` is a file in memory: what the writer has done, and what is left for it when the agent ends before it.

        `listener` is the socket of the run: the writer, which has it too, gives it a name on the disk.
        """
        self.pid = pid  # of the writer; 0: there is none
        self.listener = listener
        self._sock = sock
        self._shared = shared
        self._blocks: deque[bytearray] = deque()
        self._sent_of_first = 0  # bytes
        self._received = b""
        self._handed_over = 0  # bytes, ever
        self._seen = b""  # of the writer's progress, at the last look
        self._rechecks = False
        self._selector: selectors.BaseSelector | None = None
        self._logs = 0  # numbers given
        self._missing: Counter[int] = Counter()  # bytes that were dropped of a log since it last took any
        self._ending = False
        self.replied: Callable[[Reply], None] = _ignore  # is called with each reply but the next one
        self.listening: Callable[[Reply], None] = _ignore  # is called when connections to `listener` can come
        self.size = 0  # bytes waiting here
        self.dropped_lines = 0
        self.hangs = False  # the disk: there was no progress for long
        self.has_hung = False  # ever
        self.fails = False  # a log could not be written
        self.deadline: float | None = None  # when to look whether there is progress, by the clock of deadlines

    # --- what is written

    def open_log(self, data: bytes) -> Log:
        """Open a log; `data` is the content of the message."""
        self._logs += 1
        self.put(OPEN, data, self._logs)
        return Log(self, self._logs)

    def append(self, log: int, data: bytes) -> None:
        """Append to a log; drop it if too much waits, from then on until all of that is gone."""
        if self._missing or self.size + len(data) > LIMIT or self._sock is None:
            self._missing[log] += len(data)
            self.dropped_lines += data.count(b"\n")
        else:
            self.put(WRITE, data, log)

    def close_log(self, log: int) -> None:
        """End a log, and say in it what is missing at its end."""
        self._note_missing(log)
        self.put(CLOSE, b"", log)

    def _note_missing(self, log: int) -> None:
        if log in self._missing:
            self.put(MISSING, b"%d" % self._missing.pop(log), log)

    def put(self, kind: bytes, data: bytes = b"", log: int = 0) -> None:
        """Hand a message over, or keep it until there is room."""
        if self._sock is None or (kind == EVENT and self.size > LIMIT + _ROOM):
            return
        header = kind + log.to_bytes(4, "little") + len(data).to_bytes(8, "little")
        self._handed_over += HEADER + len(data)
        sent = 0
        if not self._blocks:
            try:
                sent = self._sock.sendmsg((header, data))
            except BlockingIOError:
                pass
            except OSError:
                self.receive()  # it may have said why, before its end
                return
        if sent < HEADER + len(data):
            if not self._blocks or len(self._blocks[-1]) > _BLOCK:
                self._blocks.append(bytearray())
            before = len(self._blocks[-1])
            self._blocks[-1] += header[sent:]
            self._blocks[-1] += memoryview(data)[max(0, sent - HEADER) :]
            self.size += len(self._blocks[-1]) - before
            self._watch()
        if self.deadline is None and not self.hangs:
            self.deadline = clock.now() + HANG_TIMEOUT
            self._seen = self._progress()
        elif self.hangs:
            self._look(clock.now())

    def _flush(self) -> None:
        assert self._sock is not None
        try:
            while self._blocks:
                sent = self._sock.send(memoryview(self._blocks[0])[self._sent_of_first :])
                self.size -= sent
                self._sent_of_first += sent
                if self._sent_of_first == len(self._blocks[0]):
                    self._blocks.popleft()
                    self._sent_of_first = 0
            for log in tuple(self._missing):
                self._note_missing(log)
        except BlockingIOError:
            pass
        except OSError:
            self._lose_writer()

    # --- the loop

    def attach(self, selector: selectors.BaseSelector) -> None:
        """Have the loop of this process take replies, and send what waits."""
        self._selector = selector
        if self._sock is not None:
            selector.register(self._sock, selectors.EVENT_READ, self._ready)

    def _watch(self) -> None:
        if self._selector is not None and self._sock is not None:
            wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._blocks else 0)
            if self._selector.get_key(self._sock).events != wanted:
                self._selector.modify(self._sock, wanted, self._ready)

    def _ready(self) -> None:
        self.receive()
        if self._sock is not None and self._blocks:
            self._flush()
            if self.hangs:
                self._look(clock.now())
        self._watch()

    def receive(self) -> None:
        """Take the replies that have come."""
        try:
            while self._sock is not None:
                data = self._sock.recv(1 << 16)
                if not data:
                    self._lose_writer()
                found, self._received = replies(self._received + data)
                for reply in found:
                    (self.listening if "listening" in reply else self.replied)(reply)
        except BlockingIOError:
            pass
        except OSError:
            self._lose_writer()

    def expire(self, now: float) -> None:
        """Look, if it is time, whether the writer has done anything since the last look."""
        if self.deadline is not None and now >= self.deadline:
            self._look(now)

    def _look(self, now: float) -> None:
        progress, before = self._progress(), self._seen
        self._seen = progress
        if int.from_bytes(progress[:8], "little") == self._handed_over:
            self.deadline, self.hangs = None, False
        elif progress != before:
            self.deadline, self.hangs = now + HANG_TIMEOUT, False
        elif not self.hangs and not self._rechecks:
            self._rechecks = True
            self.deadline = now + RECHECK
            return
        elif not self.hangs:
            self.deadline, self.hangs, self.has_hung = None, True, True
        self._rechecks = False

    def _progress(self) -> bytes:
        return os.pread(self._shared, PROGRESS, 0)

    @property
    def is_open(self) -> bool:
        """Whether there is a process that takes what is put here."""
        return self._sock is not None

    @property
    def keeps_logs(self) -> bool:
        """Whether all that is written to logs is kept."""
        return self._sock is not None and not (self.fails or self.hangs or self._missing)

    @property
    def holds(self) -> bool:
        """Whether the workers' pipes should be left alone: the disk is slower than they are."""
        return self.size > HOLD and not self.hangs

    # --- the end

    def end(self) -> None:
        """Have the writer end when it has written all."""
        self._ending = True
        self.put(END)

    @property
    def is_busy(self) -> bool:
        """Whether it has not, and the disk does not hang."""
        if self.hangs and self._sock is not None:
            self._look(clock.now())
        return self._sock is not None and not self.hangs

    def leave(self) -> None:
        """Leave what waits to the writer: it takes that if the disk ever answers."""
        if self._sock is None:
            return
        at = PROGRESS
        for block in self._blocks:
            at += os.pwrite(self._shared, memoryview(block)[self._sent_of_first :], at)
            self._sent_of_first = 0
        self.close()

    def _lose_writer(self) -> None:
        if not self._ending:
            self.replied({"problem": "the process that writes the logs has ended"})
        self.close()

    def close(self) -> None:
        """Close our side, which the writer sees."""
        if self._sock is None:
            return
        if self._selector is not None:
            self._selector.unregister(self._sock)
        self._sock.close()
        os.close(self._shared)
        self._sock, self.deadline, self.hangs = None, None, False
        self.pid = 0
        self._blocks.clear()
        self.size = 0


def _ignore(_reply: Reply) -> None:
    """Before there is a folder that takes replies."""
