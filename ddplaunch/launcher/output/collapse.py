"""Equal lines of a node's ranks become one, for --output collapse. Pure: times and lines in, groups of ranks and lines out."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from itertools import groupby

from ddplaunch.system.console.streams import Stream

WAIT = 0.25  # seconds a line waits for the same line of other ranks
MAX_HELD = 16 * 2**20  # bytes; beyond it the oldest lines no longer wait
_NEVER = -1  # as the number of an entry: the rank has written no line yet

Group = tuple[Stream, tuple[int, ...], bytes]  # the ranks, ascending, that wrote this block of whole lines


class _Entry:
    """A line and the ranks that have written it; held until it is shown."""

    __slots__ = ("at", "line", "live_ranks_here", "ranks", "stream")

    def __init__(self, stream: Stream, line: bytes, at: float, rank: int) -> None:
        self.stream = stream
        self.line = line
        self.at = at  # when the first of the ranks wrote it, monotonic seconds
        self.ranks = [rank]
        self.live_ranks_here = 0  # how many live ranks stand here: they have written no later line to the stream


class _Writers:
    """The ranks that write to one stream. A rank whose stream has not ended is live, and stands at the entry of its last line."""

    __slots__ = ("last_entry", "live_ranks", "live_ranks_before_oldest")

    def __init__(self, ranks: Iterable[int]) -> None:
        self.last_entry = dict.fromkeys(ranks, _NEVER)  # by rank: the number of the entry of its last line
        self.expect_all()

    def expect_all(self) -> None:
        """Wait for all of them; no line is held."""
        self.live_ranks = set(self.last_entry)
        # how many live ranks stand before the oldest entry that is held, and so may join any; 0: none can join the oldest
        self.live_ranks_before_oldest = len(self.live_ranks)


class Collapse:
    """Holds the lines of all ranks in order of first appearance until no other rank can join; a rank stands at its last line.

    A rank joins the oldest equal line behind its own last one on that stream: so its lines keep their order, and a
    line that it wrote twice is shown twice. A rank that has written a later line, or has ended, is not waited for.
    """

    def __init__(self, writers: Iterable[tuple[int, Stream]]) -> None:
        """Wait for lines of these ranks on these streams, until each stream has ended."""
        self._entries: dict[int, _Entry] = {}  # held, by number: counted in order of arrival, without gaps
        self._oldest = 0  # number of the oldest entry that is held
        self._next = 0  # number of the next entry
        self._held_bytes = 0
        # the numbers of the entries with this line, ascending; the first may be held no more
        self._numbers: dict[tuple[Stream, bytes], list[int]] = {}
        ranks_by_stream: dict[Stream, list[int]] = {stream: [] for stream in Stream}
        for rank, stream in writers:
            ranks_by_stream[stream].append(rank)
        self._writers = {stream: _Writers(ranks) for stream, ranks in ranks_by_stream.items()}

    @property
    def deadline(self) -> float | None:
        """When to call flush; None: nothing waits."""
        return self._entries[self._oldest].at + WAIT if self._entries else None

    def feed(self, rank: int, stream: Stream, block: bytes, at: float) -> list[Group]:
        """Add whole lines of a rank; return the groups, of any ranks, that no other rank can join any more.

        A line of a rank joins the same line of other ranks only behind the entry of its line before, so that order is kept.
        """
        writers = self._writers[stream]
        number = writers.last_entry[rank]
        for line in block[:-1].split(b"\n"):
            number = self._join(rank, stream, line, number, at)
        # each is counted at the entry of its last line: one that stands before the oldest entry may still join that
        if rank in writers.live_ranks:
            self._uncount_where_it_stands(writers, rank)
            self._entries[number].live_ranks_here += 1
        writers.last_entry[rank] = number
        return self.flush(at)

    def _uncount_where_it_stands(self, writers: _Writers, rank: int) -> None:
        """Count a live rank no longer where it stood: at its last entry, or before all that are held."""
        if (entry := self._entries.get(writers.last_entry[rank])) is not None:
            entry.live_ranks_here -= 1
        else:
            writers.live_ranks_before_oldest -= 1

    def _join(self, rank: int, stream: Stream, line: bytes, after: int, at: float) -> int:
        """Add a rank to the first entry with the same line behind the entry number `after`, else to a new one.

        Return the number of the entry.
        """
        numbers = self._numbers.setdefault((stream, line), [])
        index = bisect_right(numbers, max(after, self._oldest - 1))  # entries before the oldest are held no more
        if index < len(numbers):
            number = numbers[index]
            self._entries[number].ranks.append(rank)
            return number
        # numbers of entries that are held no more are dropped many at a time, for each time moves the others
        count_of_gone = bisect_left(numbers, self._oldest)
        if count_of_gone > len(numbers) // 2:
            del numbers[:count_of_gone]
        number = self._next
        self._next += 1
        numbers.append(number)
        self._entries[number] = _Entry(stream, line, at, rank)
        self._held_bytes += len(line) + 1
        return number

    def end_stream(self, rank: int, stream: Stream, at: float) -> list[Group]:
        """Wait for this rank no longer on this stream; return the groups that need no longer wait."""
        ended = self._writers[stream]
        if rank in ended.live_ranks:
            ended.live_ranks.remove(rank)
            self._uncount_where_it_stands(ended, rank)
        groups = self.flush(at)
        all_have_ended = not any(writers.live_ranks for writers in self._writers.values())
        if all_have_ended:
            for writers in self._writers.values():  # the workers may be restarted
                writers.expect_all()
        return groups

    def flush(self, at: float) -> list[Group]:
        """Return the lines that wait for no further rank; neighbouring lines of the same ranks are one group."""
        released: list[_Entry] = []
        while self._entries:
            entry = self._entries[self._oldest]
            may_be_joined = self._writers[entry.stream].live_ranks_before_oldest > 0  # by ranks that stand before it
            if may_be_joined and at < entry.at + WAIT and self._held_bytes <= MAX_HELD:
                break
            self._forget(entry)
            entry.ranks.sort()
            released.append(entry)
        return [
            (stream, tuple(ranks), b"".join(entry.line + b"\n" for entry in entries))
            for (stream, ranks), entries in groupby(released, key=lambda entry: (entry.stream, entry.ranks))
        ]

    def _forget(self, entry: _Entry) -> None:
        """Hold the oldest entry no more; live ranks whose last line it has now stand before all entries that are held."""
        same = (entry.stream, entry.line)
        if self._numbers[same][-1] == self._oldest:
            del self._numbers[same]
        self._writers[entry.stream].live_ranks_before_oldest += entry.live_ranks_here
        del self._entries[self._oldest]
        self._oldest += 1
        self._held_bytes -= len(entry.line) + 1
