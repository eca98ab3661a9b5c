"""Turns what the workers of a node write into what the console shows. Runs in the node's agent.

Pure: bytes and times in, bytes out. It opens, reads and writes no file, decodes nothing, and never holds a line
beyond `deadline`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from math import inf
from typing import TYPE_CHECKING, Protocol

from ddplaunch.system.console.lines import Lines, LoneLines
from ddplaunch.system.console.streams import Chunks, Prefix, Prefixes, Screen, ShownWorker, Stream, without_torchs
from ddplaunch.system.process.clock import soonest

if TYPE_CHECKING:
    from ddplaunch.launcher.output.bars import Bar, Block, FinishedBars
    from ddplaunch.launcher.output.collapse import Collapse, Group
    from ddplaunch.launcher.output.tracebacks import Tracebacks


class _RawReader:
    """The only worker on the console, without a prefix: every byte at once, unchanged."""

    __slots__ = ("_close_line", "_midline")

    deadline = None

    def __init__(self, *, terminal: bool) -> None:
        self._close_line = terminal  # else our next message, or the shell's prompt, would follow the worker's last line
        self._midline = False

    def feed(self, data: bytes, at: float) -> bytes:
        if data:
            self._midline = not data.endswith(b"\n")
        return data

    def flush(self, at: float) -> bytes:
        return b""

    def end(self) -> bytes:
        return b"\n" if self._midline and self._close_line else b""


_NO_PREFIX = Prefix(b"")
_PIPES = Screen()
_MODULES = b"Extension modules: "  # faulthandler's list of them, which explains no crash
_Writer = tuple[int, Stream]
_Reader = Lines | LoneLines | _RawReader


class WallClock(Protocol):
    """What knows the time of day."""

    def time_of_day(self, at: float) -> bytes:
        """Return the time of day, as it stands before a line, at a time in monotonic seconds."""


class Logs(Protocol):
    """What keeps the output in logs."""

    @property
    def logs_have_all(self) -> bool:
        """Whether all that is shown is in logs too."""


class Display:
    """What the console shows of one node's workers, for the whole job: their bytes come in, whole lines with a prefix go out.

    | mode | several workers shown | one worker shown |
    | --- | --- | --- |
    | prefix | whole lines, each with its rank before it | the same, but a progress bar stays a bar |
    | collapse | the same, equal lines of several ranks once | as prefix |
    | raw | whole lines as they are, a progress bar as it comes | every byte as it comes |
    | rank0 | | rank 0, every byte as it comes |
    | none | | |

    Where the screen has rows of --live below the lines, no byte comes before its line has ended: the rows would be drawn over it.

    A reader (of `_Reader`) makes blocks of whole lines of what one stream of a worker wrote. A block then passes three filters,
    each of which is made when the job first needs it, and may keep lines back: `_tracebacks`, `_finished_bars`, `_collapse`.
    """

    def __init__(
        self,
        *,
        mode: str,
        ranks: Sequence[ShownWorker],
        screen: Screen = _PIPES,
        template: str | None = None,
        world_size: int | None = None,
        wall_clock: WallClock | None = None,
        folds_tracebacks: bool = False,
    ) -> None:
        """Show `ranks`, all workers of this node, hidden ones too, in the mode of --output, on the streams of `screen`.

        `template` replaces the prefix (--log-line-prefix-template; None or "": the rank in brackets); `world_size` is the job's,
        None: `ranks` are all; `wall_clock` gives the time of day that stands before each line, None: no time stands there;
        `folds_tracebacks`: those that say nothing new, where several workers share the console and the logs have them whole.
        """
        shown = {worker.rank: worker for worker in ranks if mode != "none" and worker.streams}
        if mode == "rank0":
            shown = {rank: worker for rank, worker in shown.items() if rank == 0}
        self._shown = shown
        self._terminals = screen.terminals
        self._unprefixed = mode in ("raw", "rank0")
        self._has_template = bool(template)
        self._wall_clock = wall_clock
        # with more workers than those, other nodes write to the console too
        all_workers_are_here = world_size is None or len(ranks) >= world_size
        # one worker has the console for itself; a line with a time before it is no longer the worker's own
        self._shows_one_alone = len(shown) == 1 and (mode == "rank0" or all_workers_are_here) and wall_clock is None
        self._tells_ranks_apart = not self._shows_one_alone and not self._unprefixed  # by a prefix before each line
        self._streams: dict[_Writer, _Reader] = {}
        self._with_deadline: dict[_Writer, _Reader] = {}  # the readers that have a deadline
        # monotonic seconds; the first deadline of these or earlier: to find the first for each piece would cost too much
        self._flush_at: float | None = None
        self._has_rows_below = screen.has_rows
        # the streams whose bars are shown in place, by the front
        self._with_bars_in_place = screen.live if screen.has_rows or not self._unprefixed else frozenset[Stream]()
        self._bars: dict[_Writer, Lines] = {}  # the readers that have rows to be shown in place
        # both since the caller has set them to False
        self.bars_have_changed = False
        self.bar_has_ended = False  # one is shown in place no more
        self._tracebacks: Tracebacks | None = None  # made with the first traceback that may be folded
        self._folds_equal = folds_tracebacks and self._tells_ranks_apart
        self._folds_consequences = self._folds_equal and Stream.ERR in screen.terminals
        self.logs: Logs | None = None  # set by what writes them
        self._finished_bars: FinishedBars | None = None  # made with the first bar
        self._collapse: Collapse | None = None  # None: equal lines of several ranks are not joined
        if mode == "collapse" and not self._shows_one_alone:
            from ddplaunch.launcher.output.collapse import Collapse  # few jobs ask for it

            self._collapse = Collapse((rank, stream) for rank, worker in shown.items() for stream in worker.streams)
        highest_rank = max([(world_size or 1) - 1, *shown])
        self._prefixes = {
            stream: self._make_prefixes(stream in screen.colour, template, highest_rank) for stream in Stream
        }

    def feed(self, rank: int, stream: Stream, data: bytes, at: float) -> Chunks:
        """Take what was read from a worker at this time (monotonic seconds); return what to write, in order."""
        reader = self._reader(rank, stream)
        if reader is None:
            return []
        block = reader.feed(data, at)
        self._note_state(rank, stream, reader)
        return self._pass_block(rank, stream, block, at, reader)

    def end_stream(self, rank: int, stream: Stream, at: float) -> Chunks:
        """Take the end of a stream; return what to write: its last line too, even without a newline.

        The lines that the filters have kept back come too, and those of other ranks that have waited for this one alone.
        """
        reader = self._reader(rank, stream)
        if reader is None:  # the stream is hidden
            return []
        del self._streams[rank, stream]  # a restarted worker gets a new reader
        self._forget_deadline(rank, stream)
        self._note_bar(rank, stream, reader=None)
        chunks = self._pass_block(rank, stream, reader.end(), at, reader)
        if self._tracebacks is not None and stream is Stream.ERR:
            chunks += self._prefix_block(rank, stream, self._tracebacks.end_stream(rank, at), at)
        if self._finished_bars is not None:
            chunks += self._prefix_blocks(self._finished_bars.end_stream(rank, stream, at), at)
        if self._collapse is not None:
            chunks += self._prefix_groups(self._collapse.end_stream(rank, stream, at), at)
        return chunks

    def note_interrupt(self) -> None:
        """Note that the workers get Ctrl-C: one line is shown for all tracebacks that follow from it."""
        if (tracebacks := self._make_tracebacks()) is not None:
            tracebacks.note_interrupt()

    @property
    def folds_consequences(self) -> bool:
        """Whether `note_failed` is to be called."""
        return self._folds_consequences

    def note_failed(self, ranks: Collection[int] = (), *, elsewhere: bool = False) -> None:
        """Note that these workers have failed, or one of another node: tracebacks of others may follow from that."""
        if self._folds_consequences and (tracebacks := self._make_tracebacks()) is not None:
            tracebacks.note_failed(ranks, elsewhere=elsewhere)

    def restart(self) -> None:
        """Note that other workers take the places of those that have ended."""
        if self._tracebacks is not None:
            self._tracebacks.restart()

    def release(self, at: float) -> Chunks:
        """Return the tracebacks that are still held, since no worker is left that could explain them."""
        return self._prefix_blocks(_of_stderr(self._tracebacks.flush(inf)), at) if self._tracebacks is not None else []

    @property
    def _logs_have_all(self) -> bool:
        return self.logs is not None and self.logs.logs_have_all

    def _make_tracebacks(self) -> Tracebacks | None:
        """Return what folds tracebacks, made at the first call; None where each traceback is shown."""
        if self._tracebacks is None and self._tells_ranks_apart:
            with suppress(Exception):  # its file may be gone, or of another version: then each traceback is shown
                from ddplaunch.launcher.output.tracebacks import Tracebacks  # most jobs end without a traceback

                # an error that another rank has shown may differ in its numbers, which only the logs will have
                folds_equal = self._folds_equal and self._logs_have_all
                self._tracebacks = Tracebacks(folds_consequences=self._folds_consequences, folds_equal=folds_equal)
        return self._tracebacks

    def deadline(self) -> float | None:
        """When to call flush, monotonic seconds; None: not before the next feed."""
        parts = (self._collapse, self._finished_bars, self._tracebacks)
        return soonest(self._flush_at, *(part.deadline for part in parts if part is not None))

    def flush(self, at: float) -> Chunks:
        """Return the lines that readers and filters have kept back, and whose deadline has come at `at` (monotonic seconds)."""
        chunks: Chunks = []
        if self._flush_at is not None and at >= self._flush_at:
            for (rank, stream), reader in list(self._with_deadline.items()):
                block = reader.flush(at)
                self._note_state(rank, stream, reader)
                chunks += self._pass_block(rank, stream, block, at, reader)
            self._flush_at = soonest(*(reader.deadline for reader in self._with_deadline.values()))
        if self._tracebacks is not None:
            chunks += self._prefix_blocks(_of_stderr(self._tracebacks.flush(at)), at)
        if self._finished_bars is not None:
            chunks += self._prefix_blocks(self._finished_bars.flush(at), at)
        if self._collapse is not None:
            chunks += self._prefix_groups(self._collapse.flush(at), at)
        return chunks

    def bars(self) -> list[Bar]:
        """Return the bars that are to be shown in place, by rank: each row that a worker redraws is one, and a prompt is.

        A prompt is a line that has not ended; it stands alone in its reader's rows.
        """
        from ddplaunch.launcher.output.bars import PROMPT_ROW, Bar, row_text  # most jobs draw none

        by_writer = sorted(self._bars.items(), key=lambda item: (item[0][0], item[0][1].value))
        return [
            Bar(ranks=(rank,), text=row_text(row), row=PROMPT_ROW if reader.is_open else number)
            for (rank, _), reader in by_writer
            for number, row in enumerate(reader.rows)
            if row.strip()
        ]

    def has_prompt(self, rank: int) -> bool:
        """Whether a line of this worker that has not ended is shown in place."""
        return any(reader.is_open for (of, _), reader in self._bars.items() if of == rank)

    def answered(self, rank: int) -> None:
        """Note that the prompt of this worker has its answer, which was typed behind it on the terminal."""
        for (of, stream), reader in list(self._bars.items()):
            if of == rank and reader.is_open:
                reader.answered()
                self._note_bar(rank, stream, reader)

    def _note_bar(self, rank: int, stream: Stream, reader: _Reader | None) -> None:
        """Note whether the reader of this stream has a bar now, or an open line, to be shown in place; None: the stream ends."""
        if isinstance(reader, Lines) and reader.is_bar:
            self._bars[rank, stream] = reader
            self.bars_have_changed = True
        elif self._bars.pop((rank, stream), None) is not None:
            self.bars_have_changed = self.bar_has_ended = True

    def _reader(self, rank: int, stream: Stream) -> _Reader | None:
        """Return the reader that makes lines of a worker's stream, made at the first call; None if the stream is not shown."""
        worker = self._shown.get(rank)
        if worker is None or stream not in worker.streams:
            return None
        reader = self._streams.get((rank, stream))
        if reader is None:
            reader = self._streams[rank, stream] = self._new_reader(rank, stream)
        return reader

    def _make_prefixes(self, has_colour: bool, template: str | None, highest_rank: int) -> Prefixes:
        """Return the prefixes of one stream, as wide as that of the highest rank of the job."""
        return Prefixes(
            tuple(self._shown.values()),
            colour=has_colour,
            template=template,
            highest=highest_rank,
            together=self._collapse is not None,
        )

    def _new_reader(self, rank: int, stream: Stream) -> _Reader:
        """Return a reader: `Lines` gives out whole lines, for a console that several workers share.

        For one worker alone, `LoneLines` gives out a progress bar at once, too, and `_RawReader` every byte.
        """
        is_live = stream in self._with_bars_in_place
        if self._has_rows_below:  # of --live, which the front would draw over a line that has not ended
            return Lines(live=is_live)
        if self._shows_one_alone and self._unprefixed:
            return _RawReader(terminal=stream in self._terminals)
        if self._shows_one_alone and not is_live:
            return LoneLines(self._prefixes[stream].of((rank,)))
        if self._unprefixed and self._wall_clock is None:
            return LoneLines(_NO_PREFIX)  # between lines that have no prefix, a bar may come as it is
        return Lines(live=is_live)

    def _note_state(self, rank: int, stream: Stream, reader: _Reader) -> None:
        """Note what has changed in a reader that has read or flushed: whether its rank draws bars, and when to flush it."""
        self._note_if_rank_draws(rank, stream, reader)
        if stream in self._with_bars_in_place:
            self._note_bar(rank, stream, reader)
        if reader.deadline is None:
            self._forget_deadline(rank, stream)
        else:
            self._with_deadline[rank, stream] = reader
            self._flush_at = soonest(self._flush_at, reader.deadline)

    def _pass_block(self, rank: int, stream: Stream, block: bytes, at: float, reader: _Reader) -> Chunks:
        """Pass whole lines that `reader` returned through the filters; return, with prefixes, what is to be shown now."""
        if not block:
            return []
        if not self._unprefixed and not self._has_template:
            # torch puts the rank before its tracebacks, as our prefix does: a template may not
            block = without_torchs(rank, block)
        if stream is Stream.ERR:
            block = self._fold_tracebacks(rank, block, at)
        if self._finished_bars is None or not block:  # None: no rank has drawn a bar yet
            return self._prefix_block(rank, stream, block, at)
        drawn = isinstance(reader, Lines) and reader.was_redrawn  # these lines come from rows that were redrawn
        return self._prefix_blocks(self._finished_bars.feed(rank, stream, block, at, drawn=drawn), at)

    def _fold_tracebacks(self, rank: int, block: bytes, at: float) -> bytes:
        """Return what to show now of lines of stderr: no traceback that is or may be folded, and not faulthandler's modules."""
        if self._tracebacks is None and self._folds_equal and b"Traceback (" in block:
            self._make_tracebacks()
        if self._folds_equal and _MODULES in block and self._logs_have_all:
            block = b"".join(line for line in block.splitlines(keepends=True) if not line.startswith(_MODULES))
        return block if self._tracebacks is None else self._tracebacks.feed(rank, block, at)

    def _note_if_rank_draws(self, rank: int, stream: Stream, reader: _Reader) -> None:
        """Note that a rank draws bars, so that the lines that they leave wait for those of other ranks."""
        if not self._tells_ranks_apart or not isinstance(reader, Lines) or not (reader.draws or reader.was_redrawn):
            return
        if self._finished_bars is None:
            from ddplaunch.launcher.output.bars import FinishedBars  # most jobs draw none

            self._finished_bars = FinishedBars()
        self._finished_bars.note_drawing(rank, stream)

    def _prefix_blocks(self, blocks: list[Block], at: float) -> Chunks:
        """Return blocks with the prefix of their ranks; those of one rank may wait for other ranks to join."""
        chunks: Chunks = []
        for ranks, stream, block in blocks:
            if len(ranks) == 1:
                chunks += self._prefix_block(ranks[0], stream, block, at)
            else:
                chunks += self._prefix_groups([(stream, ranks, block)], at)
        return chunks

    def _forget_deadline(self, rank: int, stream: Stream) -> None:
        """Note that the reader of this stream holds nothing back."""
        self._with_deadline.pop((rank, stream), None)
        if not self._with_deadline:
            self._flush_at = None

    def _prefix_block(self, rank: int, stream: Stream, block: bytes, at: float) -> Chunks:
        """Return a block with the time and the prefix of its rank, or keep its lines for other ranks to join (`_collapse`)."""
        if not block:
            return []
        if self._collapse is not None:
            return self._prefix_groups(self._collapse.feed(rank, stream, block, at), at)
        time_of_day = self._wall_clock.time_of_day(at) if self._wall_clock is not None else b""
        has_prefix = self._tells_ranks_apart  # the reader of a worker alone has added its prefix
        if not has_prefix and not time_of_day:
            return [(stream, block)]  # as it came, which may be less than a line
        prefix = self._prefixes[stream].of((rank,)) if has_prefix else _NO_PREFIX
        return [(stream, prefix.add(block, time_of_day))]

    def _prefix_groups(self, groups: list[Group], at: float) -> Chunks:
        """Return blocks with the prefix of their ranks."""
        time_of_day = self._wall_clock.time_of_day(at) if self._wall_clock is not None else b""
        return [(stream, self._prefixes[stream].of(ranks).add(block, time_of_day)) for stream, ranks, block in groups]


def _of_stderr(shown: Iterable[tuple[tuple[int, ...], bytes]]) -> list[Block]:
    return [(ranks, Stream.ERR, block) for ranks, block in shown]
