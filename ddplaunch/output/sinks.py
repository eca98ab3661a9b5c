"""Writes a worker's bytes to its log, its last part kept for the failure report, and to the display."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from ddplaunch.output.display import Display
from ddplaunch.output.file_queue import Log
from ddplaunch.output.prefix import Prefix
from ddplaunch.output.streams import Stream

if TYPE_CHECKING:
    from ddplaunch.output.filter import LineFilter

TAIL = 8192  # bytes of stderr kept for the failure report

Put = Callable[[Stream, bytes], None]


class Output:
    """Everything that the workers of this node write."""

    def __init__(self, display: Display, put: Put) -> None:
        self._display = display
        self._put = put
        self._logs: dict[tuple[int, Stream], Log] = {}
        self._tails: dict[int, bytes] = {}
        self._ended: set[tuple[int, Stream]] = set()
        self._filters: dict[tuple[int, Stream], tuple[LineFilter, Prefix, Log]] = {}
        self._filter_logs: list[Log] = []
        self.written_at: dict[int, float] = {}  # when each worker has last written, by the clock of deadlines
        self.muted = False  # what would be shown is dropped and counted
        self.dropped = 0  # bytes so far

    def open(self, rank: int, logs: tuple[Log, Log] | None) -> None:
        """Expect output of this worker."""
        self._tails[rank] = b""
        self.written_at.pop(rank, None)
        self._ended -= {(rank, stream) for stream in Stream}
        self._logs.update(((rank, stream), log) for stream, log in zip(Stream, logs or (), strict=False))

    def duplicate(self, headers: Mapping[int, str], stream: Stream, needles: tuple[str, ...], log: Log) -> None:
        """Copy the lines of these workers that contain any of `needles` to one more log, each after its rank's header."""
        from ddplaunch.output.filter import LineFilter  # few jobs ask for it

        self._filter_logs.append(log)
        for rank, header in headers.items():
            self._filters[rank, stream] = (LineFilter(needles), Prefix(header.encode()), log)

    def received(self, rank: int, stream: Stream, data: bytes, at: float) -> None:
        """Take what a worker wrote."""
        self.written_at[rank] = at
        log = self._logs.get((rank, stream))
        if log is not None:
            log.write(data)
        if stream is Stream.ERR:
            self._tails[rank] = (self._tails[rank] + data[-TAIL:])[-TAIL:]
        if (rank, stream) in self._filters:
            filter_, header, file = self._filters[rank, stream]
            if lines := filter_.feed(data):
                file.write(header.add(lines))
        self._show(self._display.feed(rank, stream, data, at))

    def interrupted(self) -> None:
        """Note that the workers get Ctrl-C."""
        self._display.interrupted()

    def ended(self, rank: int, stream: Stream, at: float) -> None:
        """Note that the stream has ended."""
        if (rank, stream) in self._ended:
            return
        self._ended.add((rank, stream))
        self._show(self._display.end(rank, stream, at))
        if (rank, stream) in self._filters:
            filter_, header, file = self._filters[rank, stream]
            if lines := filter_.end():
                file.write(header.add(lines))
        log = self._logs.pop((rank, stream), None)
        if log is not None:
            log.close()

    def close_filters(self) -> None:
        """End the filtered copies of this generation."""
        for log in self._filter_logs:
            log.close()
        self._filter_logs.clear()
        self._filters.clear()

    def tail(self, rank: int) -> str:
        """The last lines of a worker's stderr."""
        tail = self._tails.get(rank, b"")
        if len(tail) == TAIL:
            tail = tail.partition(b"\n")[2]
        return tail.decode(errors="replace")

    @property
    def deadline(self) -> float | None:
        """When to call flush."""
        return self._display.deadline()

    def flush(self, at: float) -> None:
        """Show what was held back long enough."""
        self._show(self._display.flush(at))

    def _show(self, chunks: Iterable[tuple[Stream, bytes]]) -> None:
        for stream, shown in chunks:
            if self.muted:
                self.dropped += len(shown)
            else:
                self._put(stream, shown)

    @property
    def is_kept(self) -> bool:
        """Whether everything that the workers write is in logs too."""
        return bool(self._logs) and all(log.is_kept for log in self._logs.values())
