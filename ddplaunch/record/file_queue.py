"""The agent's end of the queue to the process that writes the files of a run, and the messages of that queue.

A disk may hang, as that of a file server that does not respond, and what writes to it is then in uninterruptible sleep. So a
process of its own writes (`record/file_writer.py`), which can be left behind; a thread would keep its process from ending. The
queue touches no file, and never blocks.
"""

from __future__ import annotations

import marshal
import os
import socket
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from ddplaunch.system.loop import loop as loops
from ddplaunch.system.loop.loop import Loop, Timer
from ddplaunch.system.loop.stream import LENGTH_WORD, Decoder, SendBuffer, head
from ddplaunch.system.loop.stream import pack as frame

Reply = Mapping[str, Any]

HOLD = 32 << 20  # bytes waiting from which the workers' pipes are left alone, as long as the disk takes any
LIMIT = 64 << 20  # bytes waiting from which output is dropped
HANG_TIMEOUT = 3.0  # seconds without progress after which the disk hangs; a second look comes RECHECK later
RECHECK = 1.0  # seconds: after a pause of the whole machine the writer needs a moment, too
_ROOM_FOR_EVENTS = 1 << 20  # bytes beyond LIMIT for what is no output

# Messages and replies are frames: of a message what it is, for which log, and the content; of a reply packed values.
PROGRESS = 16  # bytes at the beginning of the shared file: what the writer has done so far, in bytes and in steps
HEADER = LENGTH_WORD + 5  # bytes: the length word, what it is, and for which log

# what a message is; the number of a log is 0 where there is none
MAKE = b"m"  # the folder of the run; packed
OPEN = b"o"  # a log; packed: its name and limit
WRITE = b"w"
MISSING = b"d"  # so many bytes of a log were dropped
CLOSE = b"c"
EVENT = b"e"  # for events.jsonl; packed
SAMPLE = b"s"  # a line of a file of its own; packed: its name and its content
JSON = b"j"  # a file of JSON as a whole; packed: its name and its content
REPLACE = b"r"  # a file as a whole: its name, a newline, its content
REMOVE = b"u"  # a file elsewhere; its path
LISTEN = b"l"  # at the socket of the run; packed
END = b"."
LONGEST_REPLY = 1 << 20  # bytes


def pack(values: Any) -> bytes:
    """Pack values that JSON can hold for a fork of this process, which writes them as JSON: that takes longer to import."""
    try:
        return marshal.dumps(values)
    except ValueError:  # some are of a class of their own, as signals are
        import json

        return marshal.dumps(json.loads(json.dumps(values)))


def header(kind: bytes, log: int, size: int) -> bytes:
    """Return what comes before the content of a message."""
    return head(5 + size) + kind + log.to_bytes(4)


def parse(data: bytes) -> tuple[bytes, int, int]:
    """Return what a header says: what the message is, for which log, and how long the content."""
    return (
        data[LENGTH_WORD : LENGTH_WORD + 1],
        int.from_bytes(data[LENGTH_WORD + 1 :]),
        int.from_bytes(data[:LENGTH_WORD]) - 5,
    )


def reply(**values: Any) -> bytes:
    """Make a reply."""
    return frame(pack(values))


def values_of(reply: bytes) -> Mapping[str, Any]:
    """Return what a reply says."""
    values: Mapping[str, Any] = marshal.loads(reply)
    return values


class Log:
    """One log, which the writer writes."""

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
        """Whether all that is written to it is kept."""
        return self._files.keeps_logs


class FileQueue:
    """The agent's end of the socket to the writer, the process that writes the files; without a writer, everything is dropped."""

    def __init__(
        self, sock: socket.socket | None = None, shared: int = -1, pid: int = 0, listener: socket.socket | None = None
    ) -> None:
        """Send messages over `sock`; None: there is no writer.

        `shared` is a file in memory: it says how much the writer has done, and takes what the agent leaves to it at its end.
        `listener` is the socket of the run: the writer, which has it too, gives it a name on the disk.
        """
        self.pid = pid  # of the writer; 0: there is none
        self.listener = listener
        self._sock = sock
        self._shared_file = shared
        self._buffer = SendBuffer(-1 if sock is None else sock)
        self._replies = Decoder(LONGEST_REPLY)
        self._bytes_handed_over = 0  # ever
        self._seen_progress = b""  # the writer's progress (the first PROGRESS bytes of `shared`), at the last look
        self._is_rechecking = False  # whether the timer is set for a second look
        self._loop: Loop | None = None
        self._progress_timer: Timer | None = None  # to look whether there is progress
        self._logs_opened = 0  # which is the number of the latest log
        self._dropped_bytes: Counter[int] = Counter()  # by log, since the writer last took any output
        self._was_told_to_end = False
        # called with each reply, except for that to LISTEN
        self.on_reply: Callable[[Reply], None] = lambda _: None
        # called with that reply: the socket of the run has a name now, or can have none
        self.on_socket_reply: Callable[[Reply], None] = lambda _: None
        self.dropped_lines = 0
        self.hangs = False  # the disk hangs: the writer has made no progress for long
        self.has_hung = False  # the disk hung at some time
        self.fails = False  # a log could not be written

    # --- what is written

    def open_log(self, data: bytes) -> Log:
        """Open a log; `data` is the content of the message."""
        self._logs_opened += 1
        self.put(OPEN, data, self._logs_opened)
        return Log(self, self._logs_opened)

    def append(self, log: int, data: bytes) -> None:
        """Append to a log. Once too much waits, drop what comes until all that waits is written."""
        if self._dropped_bytes or self.size + len(data) > LIMIT or self._sock is None:
            self._dropped_bytes[log] += len(data)
            self.dropped_lines += data.count(b"\n")
        else:
            self.put(WRITE, data, log)

    def close_log(self, log: int) -> None:
        """End a log, and say in it what is missing at its end."""
        self._note_missing(log)
        self.put(CLOSE, b"", log)

    def _note_missing(self, log: int) -> None:
        if log in self._dropped_bytes:
            self.put(MISSING, b"%d" % self._dropped_bytes.pop(log), log)

    def put(self, kind: bytes, data: bytes = b"", log: int = 0) -> None:
        """Send a message to the writer, or keep the message until the socket has room. See `append` for output of workers.

        Of all other messages, which are few, only events may be so many that they are dropped.
        """
        if self._sock is None or (kind == EVENT and self.size > LIMIT + _ROOM_FOR_EVENTS):
            return
        self._bytes_handed_over += HEADER + len(data)
        try:
            self._buffer.put(header(kind, log, len(data)), data)
        except OSError:
            self.receive()  # the writer may have said why it ended
            return
        self._watch()
        # a sample is no reason to wake this process for; the next message finds out whether the disk hangs
        if kind != SAMPLE:
            self._expect_progress()

    @property
    def size(self) -> int:
        """The bytes that wait here."""
        return self._buffer.size

    def _flush(self) -> None:
        try:
            self._buffer.flush()
            if not self.size:
                for log in tuple(self._dropped_bytes):
                    self._note_missing(log)
        except OSError:
            self._lose_writer()

    # --- the loop

    def attach(self, loop: Loop) -> None:
        """Have the loop of this process take replies, and send what waits."""
        self._loop, self._progress_timer = loop, loop.timer(None, self._check_progress)
        if self._sock is not None:
            loop.watch(self._sock, self._on_ready)
            self._watch()
            self._expect_progress()

    def _watch(self) -> None:
        if self._loop is not None and self._sock is not None:
            self._loop.watch(self._sock, self._on_ready, loops.READ | loops.WRITE if self.size else loops.READ)

    def _on_ready(self) -> None:
        """Take the replies of the writer, and send what waits for the writer. Called by the loop."""
        self.receive()
        if self._sock is not None and self.size:
            self._flush()
            if self.hangs:
                self._check_progress()
        self._watch()

    def receive(self) -> None:
        """Take the replies that have come."""
        try:
            while self._sock is not None:
                data = self._sock.recv(1 << 16)
                if not data:
                    self._lose_writer()
                    return
                self._replies.feed(data)
                while (found := self._replies.take()) is not None:
                    reply = values_of(found)
                    is_about_socket = "listening" in reply
                    (self.on_socket_reply if is_about_socket else self.on_reply)(reply)
        except BlockingIOError:
            pass
        except OSError:
            self._lose_writer()

    def _expect_progress(self) -> None:
        """Look in a while whether the writer has done anything; where the disk hangs, look now."""
        if self._loop is None or self._progress_timer is None or self._sock is None:
            return
        if self.hangs:
            self._check_progress()
        elif not self._progress_timer.is_set and self._bytes_handed_over:
            self._seen_progress = os.pread(self._shared_file, PROGRESS, 0)
            self._progress_timer.set(self._loop.now() + HANG_TIMEOUT)

    def _check_progress(self) -> None:
        """See whether the writer has done anything since the last look; only two looks without progress mean that the disk hangs.

        Called when the timer is due, and while the disk hangs, whenever something is to be written.
        """
        assert self._loop is not None
        assert self._progress_timer is not None
        progress = os.pread(self._shared_file, PROGRESS, 0)
        bytes_done = int.from_bytes(progress[:8], "little")
        has_done_all = bytes_done == self._bytes_handed_over
        has_progressed = progress != self._seen_progress
        self._seen_progress, now = progress, self._loop.now()
        if has_done_all:
            self.hangs = False
            self._progress_timer.cancel()
        elif has_progressed:
            self.hangs = False
            self._progress_timer.set(now + HANG_TIMEOUT)
        elif not self.hangs and not self._is_rechecking:
            self._is_rechecking = True
            self._progress_timer.set(now + RECHECK)
            return
        elif not self.hangs:
            self.hangs = self.has_hung = True
            self._progress_timer.cancel()
        self._is_rechecking = False

    @property
    def is_open(self) -> bool:
        """Whether there is a process that takes what is put here."""
        return self._sock is not None

    @property
    def keeps_logs(self) -> bool:
        """Whether all that is written to logs is kept."""
        return self._sock is not None and not (self.fails or self.hangs or self._dropped_bytes)

    @property
    def holds(self) -> bool:
        """Whether the workers' pipes should be left alone: the disk is slower than they are."""
        return self.size > HOLD and not self.hangs

    # --- the end

    def end(self) -> None:
        """Have the writer end when it has written all."""
        self._was_told_to_end = True
        self.put(END)

    @property
    def is_busy(self) -> bool:
        """Whether the writer is still at it, and the disk does not hang."""
        if self.hangs and self._sock is not None:
            self._check_progress()
        return self._sock is not None and not self.hangs

    def leave(self) -> None:
        """Leave what waits to the writer, in the shared file: it writes that if the disk ever answers."""
        if self._sock is None:
            return
        at = PROGRESS
        for block in self._buffer.take():
            at += os.pwrite(self._shared_file, block, at)
        self.close()

    def _lose_writer(self) -> None:
        if not self._was_told_to_end:
            who = f"the process that writes the logs{f' (pid {self.pid})' if self.pid else ''}"
            self.on_reply({"problem": f"{who} has ended, perhaps killed: output is shown, but no longer kept"})
        self.close()

    def close(self) -> None:
        """Close this end, at which the writer ends; what still waits is dropped."""
        if self._sock is None:
            return
        if self._loop is not None and self._progress_timer is not None:  # `attach` was called
            self._loop.unwatch(self._sock)
            self._progress_timer.cancel()
        self._sock.close()
        os.close(self._shared_file)
        self._sock, self.hangs = None, False
        self.pid = 0
        self._buffer.take()  # and drop it
