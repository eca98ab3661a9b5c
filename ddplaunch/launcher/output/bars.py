"""Progress bars of several ranks as few: equal ones once, of each kind the slowest, the fastest and what is between. Pure.

Each node's agent condenses the bars of its workers and sends them; the front (the process at the terminal) does so with those of
all nodes. The lines that bars leave when they are complete are shown once for all ranks whose bars say the same.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from math import inf

from msgspec import Struct

from ddplaunch.reach.pipes import OutputQueue
from ddplaunch.system.console.streams import Stream
from ddplaunch.system.fields import COLOUR
from ddplaunch.system.process.clock import soonest
from ddplaunch.system.words import compress

INTERVAL = 0.1  # seconds between two redraws; faster is not seen
LONGEST = 500  # characters of a bar that are passed on: no terminal is wider
MOST_KINDS = 16
PROMPT_ROW = 1 << 10  # the row of a prompt, a line that has not ended: it stands below all bars, and has no progress
# in a message of its own: what was typed behind that line stays, and the next line begins below it
ANSWERED = PROMPT_ROW + 1
_MOST_AT_FULL_RATE = 128  # bars; to read more as often would take more than a fortieth of a core
_MOST_RANKS = 1 << 20  # in a message: what a host sends may be anything
_ROOM = 60_000  # bytes of all bars: they fit into one message

_TIMES = r"\[[^\[\]]*\]?\s*\Z"  # tqdm's [00:09<00:14, 1.25it/s] differs between bars that are equal
_PERCENT = r"(?<!\d)(\d{1,3})(?:\.\d+)?%"
_COUNT = r"(?<![\d.])(\d{1,15})/(\d{1,15})(?![\d.])"
_NUMBER = r"\d{1,15}"
# tqdm's 00:09<00:14, 1.25it/s without what a script adds behind it; rich's 0:00:09 and 1.25it/s
_PACE = r"(?:\d+:)+\d\d(?:<[\d:?]+,\s*[^,\]]*)?|[\d.]+\s?\S*/(?:s|it)\b"
_LEAST_TOLERANCE = 0.02  # of the whole: ranks in step redraw at different moments
_MOST_TOLERANCE = 0.05  # of the whole, for a step that is larger: who is an epoch behind of three is behind


class Bar(Struct, frozen=True):
    """A row that workers redraw."""

    ranks: tuple[int, ...]  # ascending; those that show it, or one that is as far
    text: str  # as one of them has drawn it, with its colours
    row: int = 0  # of the rows of a worker, from the top; or PROMPT_ROW


def row_text(row: bytes) -> str:
    """Return as much of a row as is passed on."""
    return row[: 4 * LONGEST].decode(errors="replace")[:LONGEST]


class _Read(Struct, frozen=True, kw_only=True):
    """What a bar such as "epoch 3:  50%|####    | 10/20" says: a label, then its progress."""

    bar: Bar
    kind: tuple[int, str, int]  # row, letters of the label, how many figures it has; bars of one kind are compared
    label_figures: tuple[int, ...]  # each an epoch, or a rank
    progress: float  # from 0 to 1, or a figure if nothing says how large the whole is
    tolerance: float  # by how much the progress of two bars may differ that count as equal


def _read(bar: Bar) -> _Read:
    """Return what a bar says: its kind, how far it is, and by how much two bars of its kind may differ and count as the same."""
    if bar.row == PROMPT_ROW:  # a line that has not ended, as of input(): no bar, but shown below them
        letters = "".join(filter(str.isalpha, bar.text))
        return _Read(bar=bar, kind=(PROMPT_ROW, letters, 0), label_figures=(), progress=0.0, tolerance=0.0)
    text = re.sub(_TIMES, "", re.sub(COLOUR, "", bar.text))
    percent = re.search(_PERCENT, text)
    counted = re.search(_COUNT, text[percent.end() if percent else 0 :])
    first = percent or counted  # what stands first of the progress, behind the label
    label = text[: first.start()] if first else text
    letters = "".join(filter(str.isalpha, label))
    figures = tuple(map(int, re.findall(_NUMBER, label)))
    kind = bar.row, letters, len(figures)
    progress = tolerance = 0.0
    if percent:
        progress, tolerance = int(percent[1]) / 100, _LEAST_TOLERANCE
    if counted and (whole := int(counted[2])):
        # more exact than the percentage; bars that are one step of the whole apart count as equal (1.001: floats are inexact)
        progress, tolerance = int(counted[1]) / whole, max(_LEAST_TOLERANCE, min(1.001 / whole, _MOST_TOLERANCE))
    if figures and not first:  # nothing says how large the whole is: the first figure is how far the bar is
        progress, tolerance, figures = float(figures[0]), max(1.0, _LEAST_TOLERANCE * figures[0]), ()
    return _Read(bar=bar, kind=kind, label_figures=figures, progress=progress, tolerance=tolerance)


def is_complete(text: str) -> bool:
    """Whether a row shows a progress that has reached its end."""
    plain = re.sub(COLOUR, "", text)
    percent = re.search(_PERCENT, plain)
    if percent:
        return percent[1] == "100"
    return any(int(done) == int(whole) > 0 for done, whole in re.findall(_COUNT, plain))


def wording(text: str) -> str:
    """Return what a row says, without its colours, times and speeds, which differ between bars that are equal."""
    return " ".join(re.sub(_PACE, "", re.sub(COLOUR, "", text)).split())


def by_kind(bars: Iterable[Bar]) -> list[list[Bar]]:
    """Return the bars of each kind, that is of the same row and label: the slowest first, equal ones as one."""
    found: dict[tuple[int, str, int], list[_Read]] = {}
    for read in map(_read, bars):
        found.setdefault(read.kind, []).append(read)
    groups = sorted(found.items(), key=lambda item: (item[0][0], min(one.bar.ranks[0] for one in item[1]), item[0][1]))
    return [_merge_kind(group) for _, group in groups]


def _merge_kind(group: list[_Read]) -> list[Bar]:
    """Return the bars of one kind, the slowest first; ranks that are equally far share a bar.

    Their labels may hold figures, such as "epoch 3" or "rank 1": those that are no rank say how far a bar is, too.
    """
    epoch_positions = [position for position in range(len(group[0].label_figures)) if not _is_rank(group, position)]

    def epoch(read: _Read) -> tuple[int, ...]:
        return tuple(read.label_figures[position] for position in epoch_positions)

    equals: list[list[_Read]] = []  # the slowest first
    for read in sorted(group, key=lambda read: (epoch(read), read.progress, read.bar.ranks)):
        slowest = equals[-1][0] if equals else None
        is_equal = (
            slowest is not None
            and epoch(slowest) == epoch(read)
            and read.progress - slowest.progress <= max(slowest.tolerance, read.tolerance)
        )
        if is_equal:
            equals[-1].append(read)
        else:
            equals.append([read])
    # the text that ranks share is that of the slowest of them; of the ranks that are ahead of all others, that of the fastest
    slower, ahead = (equals[:-1], equals[-1:]) if len(equals) > 1 else (equals, [])
    return [*(_as_one_bar(reads, 0) for reads in slower), *(_as_one_bar(reads, -1) for reads in ahead)]


def _is_rank(group: Sequence[_Read], position: int) -> bool:
    """Whether the figure at this position of the labels says who draws the bar, and not how far it is.

    Ranks are in the same epoch or one apart: figures that differ by more are no epochs, nor are those that grow with the rank.
    """
    figures = {read.label_figures[position] for read in group}
    differ_too_much = max(figures) - min(figures) > 1
    follow_ranks = len({read.label_figures[position] - read.bar.ranks[0] for read in group}) == 1
    return len(figures) > 1 and (differ_too_much or follow_ranks)


def _as_one_bar(reads: Sequence[_Read], shown: int) -> Bar:
    """Return one bar for the ranks of all, with the text of the bar at index `shown`."""
    ranks = tuple(sorted({rank for read in reads for rank in read.bar.ranks}))
    return Bar(ranks, reads[shown].bar.text, reads[shown].bar.row)


def condense(bars: Iterable[Bar]) -> tuple[Bar, ...]:
    """Return the slowest bar of each kind, the fastest, and one for all between; bars of several nodes may be condensed again."""
    left: list[Bar] = []
    for merged in by_kind(bars)[:MOST_KINDS]:
        if between := merged[1:-1]:
            ranks = tuple(sorted({rank for bar in between for rank in bar.ranks}))
            merged[1:-1] = [Bar(ranks, between[len(between) // 2].text, between[0].row)]
        left += merged
    return tuple(left)


# --- as a message


def pack(bars: Iterable[Bar]) -> bytes:
    """Return a message of bars: a line each, as many as fit."""
    packed = bytearray()
    for bar in bars:
        text = bar.text[:LONGEST].translate({10: " ", 13: " "}).encode(errors="replace")
        line = b"%s %d %s\n" % (compress(bar.ranks).encode(), bar.row, text)
        if len(packed) + len(line) <= _ROOM:
            packed += line
    return bytes(packed)


def unpack(message: bytes) -> tuple[Bar, ...]:
    """Return the bars in a message.

    Raises:
        ValueError: the message is no message of bars.
    """
    bars: list[Bar] = []
    ranks_left = _MOST_RANKS
    try:
        for line in filter(None, message.split(b"\n")):
            ranks, row, text = line.split(b" ", 2)
            bars.append(Bar(_ranks(ranks.decode(), ranks_left), row_text(text), int(row)))
            ranks_left -= len(bars[-1].ranks)
    except ValueError:
        raise ValueError("these are no progress bars") from None
    return tuple(bars)


def _ranks(text: str, most: int) -> tuple[int, ...]:
    """Return the ranks in ranks and ranges, "0-3,7"; raise ValueError for more than `most`, or a rank that is as high."""
    ranks: list[int] = []
    for part in text.split(","):
        low, dash, high = part.partition("-")
        first, last = int(low), int(high) if dash else int(low)
        if not 0 <= first <= last < most or len(ranks) > most:
            raise ValueError(part)
        ranks += range(first, last + 1)
    return tuple(ranks)


class BarFeed:
    """Passes the bars of a node, or of all, on: at once, then each `interval` at most, less often if they are many.

    Bars that have not changed are not passed on again.
    """

    def __init__(self, queue: OutputQueue, interval: float = INTERVAL) -> None:
        """Pass bars on by `queue` to the front (the process that has the console); the owner gives them at each call."""
        self._queue = queue
        self._interval = self._pause = interval  # seconds
        self._last_message = b""
        self._sent_at = -inf
        self.deadline: float | None = None  # when to call `update`, monotonic seconds

    def note_change(self, at: float) -> None:
        """Note that bars have changed: they are due at once, or a pause after the last message."""
        self.deadline = soonest(self.deadline, max(at, self._sent_at + self._pause))

    def update(self, bars: Collection[Bar], at: float) -> None:
        """Pass these bars on now, if they have changed: a bar that has become a line is to be gone before the line is shown."""
        self.deadline = None
        # to condense twice as many takes twice as long: then they are passed on half as often
        self._pause = self._interval * max(1.0, len(bars) / _MOST_AT_FULL_RATE)
        message = pack(condense(bars))
        if message == self._last_message:
            return
        if self._queue.put_bars(message):
            self._last_message = message
            self._sent_at = at
        else:  # other output waits: bars would be old when they are read
            self.deadline = at + self._pause

    def repeat(self, at: float) -> None:
        """Pass the bars on again, even if they have not changed: the terminal has another size."""
        if self._last_message:
            self._last_message = b""
            self.note_change(at)


WAIT = 0.5  # seconds that the line of a finished bar waits for those of other ranks

Block = tuple[tuple[int, ...], Stream, bytes]  # the ranks, ascending, whose lines these are
_Writer = tuple[int, Stream]


class _SharedLine:
    """The line of a finished bar, which ranks whose bars have the same wording share."""

    __slots__ = ("due", "is_released", "line", "ranks", "stream", "wording")

    def __init__(self, stream: Stream, line: bytes, wording: str, due: float) -> None:
        self.stream = stream
        self.line = line  # as the first of them has written it
        self.wording = wording
        self.due = due
        self.ranks: list[int] = []
        self.is_released = False  # it was returned, to be shown


class FinishedBars:
    """The lines that finished bars leave: each waits for other ranks to share it, WAIT seconds at most.

    It waits for the ranks that draw bars. The lines of each rank keep their order: what a rank writes after its bar waits in
    the rank's queue, behind the line of the bar.
    """

    def __init__(self) -> None:
        self._drawing_ranks: dict[Stream, set[int]] = {stream: set() for stream in Stream}
        self._waiting_lines: list[_SharedLine] = []  # the first is due first
        # of each rank and stream that waits, in order; none is empty
        self._queues: dict[_Writer, list[_SharedLine | bytes]] = {}

    @property
    def deadline(self) -> float | None:
        """When to call flush; None: not before the next feed."""
        return self._waiting_lines[0].due if self._waiting_lines else None

    def feed(self, rank: int, stream: Stream, block: bytes, at: float, *, drawn: bool) -> list[Block]:
        """Take whole lines of a rank; return what to show now.

        `drawn`: the lines come from rows that were redrawn, so that each may be a bar. Ordinary lines wait only behind those.
        """
        queue = self._queues.get((rank, stream))
        if not drawn:
            if queue is None:
                return [((rank,), stream, block)]
            queue.append(block)
            return []
        queue = self._queues.setdefault((rank, stream), [])
        for line in re.findall(rb"[^\n]*\n", block):
            # a line of more characters (of 4 bytes at most) is no bar, and to search one of megabytes takes seconds
            text = line.decode(errors="replace") if len(line) <= 4 * LONGEST else ""
            queue.append(self._share(rank, stream, line, wording(text), at) if is_complete(text) else line)
        return self._release_due(at)

    def note_drawing(self, rank: int, stream: Stream) -> None:
        """Note that a rank draws bars: the lines of other ranks wait for those that its bars will leave."""
        self._drawing_ranks[stream].add(rank)

    def _share(self, rank: int, stream: Stream, line: bytes, wording: str, at: float) -> _SharedLine:
        """Return the waiting line with this wording, to which the rank is added; else a new one, which waits for other ranks."""
        of_stream = [waiting for waiting in self._waiting_lines if waiting.stream is stream]
        of_rank = [index for index, waiting in enumerate(of_stream) if rank in waiting.ranks]
        # a line before the rank's last one would be shown before lines that the rank wrote earlier
        first = of_rank[-1] + 1 if of_rank else 0
        for waiting in of_stream[first:]:
            if waiting.wording == wording:
                waiting.ranks.append(rank)
                return waiting
        new = _SharedLine(stream, line, wording, at + WAIT)
        new.ranks.append(rank)
        self._waiting_lines.append(new)
        return new

    def end_stream(self, rank: int, stream: Stream, at: float) -> list[Block]:
        """Note that a stream has ended; return the lines that have waited for it alone."""
        self._drawing_ranks[stream].discard(rank)
        return self._release_due(at)

    def flush(self, at: float) -> list[Block]:
        """Return the lines that have waited long enough at this time."""
        return self._release_due(at)

    def _release_due(self, at: float) -> list[Block]:
        """Return the lines that have waited long enough, or that all ranks with bars have joined, and what waited behind."""
        blocks: list[Block] = []
        for line in self._waiting_lines:
            all_have_joined = self._drawing_ranks[line.stream].issubset(line.ranks)
            is_due = at >= line.due or all_have_joined
            if is_due and not line.is_released:  # a line that was due may have released this one, see `_release_line`
                self._release_line(line, blocks)
        self._waiting_lines = [line for line in self._waiting_lines if not line.is_released]
        for writer in list(self._queues):
            self._add_unblocked(writer, blocks)
        return blocks

    def _release_line(self, line: _SharedLine, blocks: list[Block]) -> None:
        """Add a line to `blocks`, behind all that its ranks have written before; so lines that are not due yet may go too.

        The line itself stays first in its ranks' queues, until `_add_unblocked` takes it away.
        """
        line.is_released = True
        for rank in line.ranks:
            queue = self._queues.get((rank, line.stream), [])
            while line in queue and queue[0] is not line:
                first = queue[0]
                if isinstance(first, _SharedLine) and not first.is_released:
                    self._release_line(first, blocks)
                else:  # a line of this rank alone; or a shared one, which is in `blocks`, and only leaves the queue
                    self._take_first(rank, line.stream, blocks)
        blocks.append((tuple(sorted(line.ranks)), line.stream, line.line))

    def _add_unblocked(self, writer: _Writer, blocks: list[Block]) -> None:
        """Add to `blocks` what a rank wrote before its first line that still waits."""
        queue = self._queues[writer]
        while queue and (isinstance(queue[0], bytes) or queue[0].is_released):
            self._take_first(*writer, blocks)
        if not queue:
            del self._queues[writer]

    def _take_first(self, rank: int, stream: Stream, blocks: list[Block]) -> None:
        """Take the first off a rank's queue, and add it to `blocks`, where the line of a finished bar is already."""
        first = self._queues[rank, stream].pop(0)
        if isinstance(first, bytes):
            blocks.append(((rank,), stream, first))
