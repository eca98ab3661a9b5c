"""One worker's log file with an upper size, and when what was written to it.

The beginning and the end of a log are kept, the middle is dropped. Nothing is buffered: what `write` took is in the file, even if
this process is killed the moment after. It never raises OSError: a log that cannot be written any more keeps the reason in
`error` and takes no more.

Logs hold what workers write and nothing else, so the times are in a file beside them, `log-times`. Its lines are "SECONDS OFFSET
NAME": at this time, since 1970, the log NAME had OFFSET bytes. `ddplaunch logs --since` reads them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache

from ddplaunch.system.process.files import content

DEFAULT_LIMIT = 2**30  # bytes
_PIECE = 2**20  # bytes copied at once


class _File:
    """A file that is only appended to, and what is known of its end."""

    def __init__(self, path: str, folder: int | None) -> None:
        self.path = path  # relative to `folder`, a descriptor; None: to the working directory
        self._folder = folder
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        self.fd = os.open(path, flags, 0o600, dir_fd=folder)
        self.size = os.fstat(self.fd).st_size
        self.ends_midline = self.size > 0 and os.pread(self.fd, 1, self.size - 1) != b"\n"

    def append(self, data: bytes) -> None:
        """Write all of it; after an OSError `size` tells how much was written."""
        view = memoryview(data)
        while view:
            written = os.write(self.fd, view)
            self.size += written
            self.ends_midline = view[written - 1] != ord("\n")
            view = view[written:]

    def end_of_piece(self, data: bytes, start: int, room: int) -> int:
        """Return where in `data` the piece ends that begins at `start` and fits into this room, between lines if possible.

        `start` itself: this file is to take nothing more.
        """
        if len(data) - start <= room:
            return len(data)
        line_end = data.rfind(b"\n", start, start + max(0, room)) + 1
        if line_end:
            return line_end
        # a line that has not begun here goes to the next file whole, unless it is too long for any
        return start if self.size and not self.ends_midline else start + max(0, room)

    def remove(self) -> None:
        """Close and unlink, if the name still exists."""
        os.close(self.fd)
        with suppress(FileNotFoundError):
            os.unlink(self.path, dir_fd=self._folder)


class BoundedLog:
    """A log of at most `limit` bytes, plus a line with the number of those left out.

    The first half of the limit goes to the file itself, what follows to segments beside it, PATH.tail-1, PATH.tail-2
    and so on, each at most a sixth of the limit. Only the last two are kept, and `close` appends them to the file: so
    the copies, too, stay within the limit. Cuts are made between lines where there are any.
    """

    def __init__(
        self, path: str | os.PathLike[str], limit: int | None = DEFAULT_LIMIT, *, folder: int | None = None
    ) -> None:
        """Open for appending, with mode 0600 if the file is new; limit None: unbounded. A failure is in `error` afterwards.

        `folder` is a descriptor of the folder that a relative path is relative to; a link is never followed. What the file has
        already counts: if that is more than the half of `limit` that the file may take, `close` adds only the last two segments.
        """
        self.error: OSError | None = None  # the first one; nothing was written since
        self.path = os.fspath(path)
        self._folder = folder
        self._limit = limit
        # the file itself and at most two segments; the last one is written to. Empty: it could not be opened, or is closed
        self._files: list[_File] = []
        self._segments = 0  # begun so far
        self._dropped_bytes = 0  # bytes of segments that were removed
        self._lost_bytes = 0  # bytes that came after the error, or after `close`
        try:
            self._files.append(_File(self.path, folder))
        except OSError as error:
            self.error = error

    def write(self, data: bytes) -> None:
        """Append; after an error or after close, drop."""
        written = 0
        try:
            while written < len(data) and self._files and self.error is None:
                file = self._files[-1]
                end = file.end_of_piece(data, written, self._room_in(file, if_unlimited=len(data)))
                if end > written:
                    size_before = file.size
                    try:
                        file.append(data[written:end])
                    finally:
                        written += file.size - size_before
                else:  # the next line goes to another segment
                    self._begin_segment()
        except OSError as error:
            self.error = error
        self._lost_bytes += len(data) - written

    def _begin_segment(self) -> None:
        """Begin the next segment; there are at most two, so the oldest goes."""
        _, *segments = self._files
        if len(segments) == 2:
            oldest = self._files.pop(1)
            self._dropped_bytes += oldest.size
            oldest.remove()
        self._segments += 1
        self._files.append(_File(f"{self.path}.tail-{self._segments}", self._folder))

    @property
    def end(self) -> tuple[str, int]:
        """The file, the log itself or a segment, that is written to next, and its size."""
        return (self._files[-1].path, self._files[-1].size) if self._files else (self.path, 0)

    def _room_in(self, file: _File, *, if_unlimited: int) -> int:
        """Return for how many more bytes a file has room; `if_unlimited` if there is no limit."""
        if self._limit is None:
            return if_unlimited
        share = self._limit // 2 if file is self._files[0] else max(1, self._limit // 6)
        return share - file.size

    def note_missing(self, size: int, why: str) -> None:
        """Say in its place that so many bytes are missing here."""
        if self._files and self.error is None:
            try:
                self._note(self._files[-1], f"{size} bytes are missing here: {why}")
            except OSError as error:
                self.error = error

    def close(self, after_piece: Callable[[], None] = lambda: None) -> None:
        """Append the segments to the file, and note what is missing where; call `after_piece` for each copied piece."""
        try:
            self._append_segments(after_piece)
        except OSError as error:  # segments that could not be joined stay where they are
            self.error = self.error or error
        for file in self._files:
            try:
                os.close(file.fd)
            except OSError as error:  # network file systems report a full disk here
                self.error = self.error or error
        self._files.clear()

    def _append_segments(self, after_piece: Callable[[], None]) -> None:
        """Append the segments to the file itself, behind a note on the bytes that are left out between them."""
        if not self._files:
            return
        whole = self._files[0]
        if self._dropped_bytes:
            self._note(whole, f"{self._dropped_bytes} bytes are left out here: the log had reached its limit")
        while len(self._files) > 1:
            segment, size_before = self._files[1], whole.size
            try:
                for offset in range(0, segment.size, _PIECE):
                    whole.append(os.pread(segment.fd, min(_PIECE, segment.size - offset), offset))
                    after_piece()
            except OSError:  # the disk is full: the segment stays, so no half of it may stay in the file as well
                os.ftruncate(whole.fd, size_before)
                raise
            self._files.pop(1).remove()
        if self._lost_bytes:
            why = self.error.strerror if self.error else "closed"
            self._note(whole, f"{self._lost_bytes} bytes are missing here: {why}")

    def _note(self, file: _File, text: str) -> None:
        file.append(b"%b[ddplaunch: %b]\n" % (b"\n" if file.ends_midline else b"", text.encode()))


# --- when what was written

TIMES = "log-times"
INTERVAL = 10.0  # seconds between two lines about one log, at first
_LARGEST_TIMES = 64 << 20  # bytes that are read: far more than a run of months has
# bytes: the interval doubles each time the file has grown by so many, so it stays small in a run of months
_DOUBLES_EVERY = 4 << 20


class LogTimes:
    """Writes the file of times; if it cannot, lines are missing, and `--since` shows more than was asked for."""

    def __init__(self, folder: int) -> None:
        """Make the file in the folder of this descriptor."""
        self._size = 0  # bytes of the file
        self._noted: dict[str, float] = {}  # when each log was noted last, in seconds since 1970
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
            self._fd = os.open(TIMES, flags, 0o600, dir_fd=folder)
        except OSError:
            self._fd = -1

    def note(self, name: str, offset: int, at: float) -> None:
        """Note, unless that was done not long ago, that this log has `offset` bytes at this time (seconds since 1970)."""
        interval = INTERVAL * 2 ** (self._size // _DOUBLES_EVERY)  # so that the file of times stays small
        was_noted_at = self._noted.get(name)
        is_recent = was_noted_at is not None and 0 <= at - was_noted_at < interval  # not if the clock was set back
        if self._fd < 0 or is_recent:
            return
        self._noted[name] = at
        try:
            self._size += os.write(self._fd, b"%d %d %b\n" % (at, offset, os.fsencode(name)))
        except OSError:  # a full disk is reported where the logs themselves are written
            self._fd = -1


def offset_at(folder: str, name: str, at: float) -> int:
    """Return an offset in a log before which all was written before this time; 0 if that is not known."""
    return _offsets_at(folder, at).get(os.fsencode(name), 0)


@cache  # there may be thousands of logs, and lines of all of them in one file; what was written before that time stays
def _offsets_at(folder: str, at: float) -> Mapping[bytes, int]:
    """Return how long each log was at a time, by name, as the file of times says."""
    offsets: dict[bytes, int] = {}
    for line in (content(f"{folder}/{TIMES}", _LARGEST_TIMES) or b"").split(b"\n"):
        with suppress(ValueError):  # a number of thousands of digits
            match line.split(b" ", 2):
                case [when, size, name] if when.isdigit() and size.isdigit() and int(when) <= at:
                    offsets[name] = max(offsets.get(name, 0), int(size))
    return offsets
