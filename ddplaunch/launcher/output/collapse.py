"""Equal lines of several ranks become one. Pure: times and lines in, groups of ranks and lines out."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable

from ddplaunch.system.console.streams import Stream

WAIT = 0.25  # seconds a line waits for the same line of other ranks
MAX_HELD = 16 * 2**20  # bytes; beyond it the oldest lines no longer wait

Group = tuple[Stream, tuple[int, ...], bytes]  # the ranks, ascending, that wrote this block of whole lines


class _Entry:
    """A line and the ranks that have written it."""

    __slots__ = ("at", "last_of", "line", "ranks", "stream")

    def __init__(self, stream: Stream, line: bytes, at: float, rank: int) -> None:
        self.stream = stream
        self.line = line
        self.at = at
        self.ranks = [rank]
        self.last_of = 0  # how many live ranks have written no later one to the stream


class _Writers:
    """The ranks that write to a stream: the last entry of each, and how many live ones have joined none that is held."""

    __slots__ = ("last", "live", "number_missing")

    def __init__(self, ranks: Iterable[int]) -> None:
        self.last = dict.fromkeys(ranks, -1)
        self.expect_all()

    def expect_all(self) -> None:
        """Wait for all of them; no line is held."""
        self.live = set(self.last)
        self.number_missing = len(self.live)


class Collapse:
    """Lines of all ranks, in order of first appearance, each held until no other rank can join it.

    A rank joins the oldest equal line behind its own last one on that stream: so its lines keep their order, and a
    line that it wrote twice is shown twice. A rank that has written a later line, or has ended, is not waited for.
    """

    def __init__(self, writers: Iterable[tuple[int, Stream]]) -> None:
        """Wait for lines of these ranks on these streams, until each stream has ended."""
        self._entries: dict[int, _Entry] = {}  # by number, ascending without gaps
        self._oldest = 0  # number of the first entry
        self._next = 0  # number of the next entry
        self._held = 0  # bytes
        self._numbers: dict[tuple[Stream, bytes], list[int]] = {}  # where a line stands; the first may be gone
        ranks: dict[Stream, list[int]] = {stream: [] for stream in Stream}
        for rank, stream in writers:
            ranks[stream].append(rank)
        self._writers = {stream: _Writers(of_stream) for stream, of_stream in ranks.items()}

    @property
    def deadline(self) -> float | None:
        """When to call flush; None: nothing waits."""
        return self._entries[self._oldest].at + WAIT if self._entries else None

    def feed(self, rank: int, stream: Stream, block: bytes, at: float) -> list[Group]:
        """Add whole lines of a rank; return the groups, of any ranks, that no other rank can join any more.

        A line of a rank joins the same line of other ranks only behind the entry of its line before, so that order is kept.
        """
        writers = self._writers[stream]
        number = writers.last[rank]
        for line in block[:-1].split(b"\n"):
            number = self._join(rank, stream, line, number, at)
        if rank in writers.live:
            self._leave_last_entry(writers, rank)
            self._entries[number].last_of += 1
        writers.last[rank] = number
        return self.flush(at)

    def _leave_last_entry(self, writers: _Writers, rank: int) -> None:
        """Count a live rank no longer where it stood: at its last entry, or among those that have joined none."""
        if (entry := self._entries.get(writers.last[rank])) is not None:
            entry.last_of -= 1
        else:
            writers.number_missing -= 1

    def _join(self, rank: int, stream: Stream, line: bytes, after: int, at: float) -> int:
        """Add a rank to the same line of other ranks, behind the entry `after`; return the number of the entry."""
        numbers = self._numbers.setdefault((stream, line), [])
        place = bisect_right(numbers, max(after, self._oldest - 1))
        if place < len(numbers):
            number = numbers[place]
            self._entries[number].ranks.append(rank)
            return number
        gone = bisect_left(numbers, self._oldest)
        if gone > len(numbers) // 2:
            del numbers[:gone]
        number = self._next
        self._next += 1
        numbers.append(number)
        self._entries[number] = _Entry(stream, line, at, rank)
        self._held += len(line) + 1
        return number

    def end_stream(self, rank: int, stream: Stream, at: float) -> list[Group]:
        """Wait for this rank no longer on this stream; return the groups that need no longer wait."""
        ended = self._writers[stream]
        if rank in ended.live:
            ended.live.remove(rank)
            self._leave_last_entry(ended, rank)
        groups = self.flush(at)
        if not any(writers.live for writers in self._writers.values()):
            for writers in self._writers.values():  # the next generation, if there is one
                writers.expect_all()
        return groups

    def flush(self, at: float) -> list[Group]:
        """Return the lines that wait for no further rank; neighbouring lines of the same ranks are one group."""
        groups: list[Group] = []
        lines: list[bytes] = []
        key: tuple[Stream, list[int]] | None = None
        while self._entries:
            entry = self._entries[self._oldest]
            if self._writers[entry.stream].number_missing and at < entry.at + WAIT and self._held <= MAX_HELD:
                break
            self._forget(entry)
            entry.ranks.sort()
            if key is not None and key != (entry.stream, entry.ranks):
                groups.append((key[0], tuple(key[1]), b"\n".join(lines) + b"\n"))
                lines.clear()
            key = (entry.stream, entry.ranks)
            lines.append(entry.line)
        if key is not None:
            groups.append((key[0], tuple(key[1]), b"\n".join(lines) + b"\n"))
        return groups

    def _forget(self, entry: _Entry) -> None:
        """Hold the oldest entry no more; live ranks that wrote it last have now joined none that is held."""
        same = (entry.stream, entry.line)
        if self._numbers[same][-1] == self._oldest:
            del self._numbers[same]
        self._writers[entry.stream].number_missing += entry.last_of
        del self._entries[self._oldest]
        self._oldest += 1
        self._held -= len(entry.line) + 1
