"""Writes the bytes of a node's workers to their logs and to the display, in its agent; keeps the last for the failure summary."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from ddplaunch.launcher.output.display import Display
from ddplaunch.reach.pipes import STDERR, STDOUT, OutputQueue
from ddplaunch.record.file_queue import Log
from ddplaunch.system.console.lines import MAX_LINE, Lines
from ddplaunch.system.console.streams import Prefix, Stream
from ddplaunch.system.fields import TERMINAL_ESCAPE
from ddplaunch.system.process.clock import is_due, soonest

if TYPE_CHECKING:
    from ddplaunch.launcher.output.bars import Bar, BarFeed

_NODES_AT_ONCE = 8  # nodes that pass their bars on at the full rate; more nodes do so less often
TAIL = 1 << 16  # bytes of stderr kept: faulthandler writes some thousands after the reason of a crash
_RECENT = 500  # bytes kept of what each worker wrote last
_LONGEST = 1 << 16  # bytes of a line that are passed on before its end
_TAGS = {Stream.OUT: STDOUT, Stream.ERR: STDERR}


class LineFilter:
    """Passes on the lines that contain any needle; case-sensitive, no patterns.

    As in torchrun (torch/distributed/elastic/multiprocessing/tail_log.py, which reads with universal newlines) a
    carriage return ends a line too, and each line comes out with a newline. A line that is too long to be held is cut.
    """

    __slots__ = ("_is_after_return", "_needles", "_rest")

    def __init__(self, needles: Iterable[str]) -> None:
        self._needles = [needle.encode("utf-8", "surrogateescape") for needle in needles]
        self._rest = bytearray()  # of the line that has not ended
        self._is_after_return = False  # the last piece ended with a carriage return, already taken as the line's end

    def feed(self, data: bytes) -> bytes:
        """Take a piece of any size; return the matching lines that are complete now."""
        if self._is_after_return and data:
            data = data.removeprefix(b"\n")
            self._is_after_return = False
        if b"\r" in data:
            self._is_after_return = data.endswith(b"\r")
            data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        end = data.rfind(b"\n") + 1
        if not end:
            self._rest += data
            return self.end() if len(self._rest) > MAX_LINE else b""
        block = bytes(self._rest) + data[:end]
        self._rest[:] = data[end:]
        return self._matching(block)

    def end(self) -> bytes:
        """Return the line that has not ended, newline added, if it matches."""
        block = bytes(self._rest) + b"\n" if self._rest else b""
        self._rest.clear()
        return self._matching(block)

    def _matching(self, block: bytes) -> bytes:
        """Return the lines of a block that contain a needle."""
        if not any(needle in block for needle in self._needles):
            return b""  # nearly always, and much faster than line by line
        return b"".join(
            line for line in block.splitlines(keepends=True) if any(needle in line for needle in self._needles)
        )


def without_escapes(data: bytes) -> bytes:
    """Return the data without colours, links and the like."""
    return re.sub(TERMINAL_ESCAPE.encode(), b"", data) if b"\x1b" in data else data


class PlainText:
    """Passes on the pieces of one stream at once, but of a bar that is drawn only a state now and then.

    A state ends with a carriage return, as tqdm's do in any log: whatever renders the log finds the last one.
    """

    __slots__ = ("_lines", "_passed")

    def __init__(self) -> None:
        self._lines = Lines(end_of_state=b"\r")
        self._passed = b""  # the part of the unended line that was passed on

    @property
    def deadline(self) -> float | None:
        """When to call flush; None: not before the next feed."""
        return self._lines.deadline

    def feed(self, data: bytes, at: float) -> bytes:
        """Take a piece read at this time; return what the log gets."""
        return self._pass_on(self._lines.feed(data, at), self._lines.beginning)

    def flush(self, at: float) -> bytes:
        """Return what is due at this time."""
        return self._pass_on(self._lines.flush(at), self._lines.beginning)

    def end(self) -> bytes:
        """Return what is left; the last line ends as the worker left it."""
        beginning = self._lines.beginning
        last = self._lines.end()
        return self._pass_on(last[:-1] if beginning and last == beginning + b"\n" else last, b"")

    def _pass_on(self, block: bytes, beginning: bytes) -> bytes:
        """Return what the log gets of ended lines, and of the beginning of the next line."""
        if block:
            block, self._passed = _continue_line(self._passed, block), b""
        # a link is removed once it is whole
        if beginning and len(beginning) <= _LONGEST and b"\x1b]" not in beginning:
            block, self._passed = block + _continue_line(self._passed, beginning), beginning
        return without_escapes(block)


def _continue_line(passed: bytes, text: bytes) -> bytes:
    """Return the rest of a line of which `passed` was passed on; the whole, behind a carriage return, if it has changed."""
    return text[len(passed) :] if text.startswith(passed) else b"\r" + text


class _FilteredCopy(NamedTuple):
    """One more log of a worker's stream, which several workers may share: the lines that pass a filter."""

    filter: LineFilter
    header: Prefix  # stands before each line: whose it is
    log: Log

    def write(self, lines: bytes) -> None:
        if lines:
            self.log.write(self.header.add(lines))


class Output:
    """All that the workers of this node write, on its way to their logs and to the front (the process that has the console)."""

    def __init__(
        self,
        display: Display,
        queue: OutputQueue,
        *,
        nodes: int = 1,
        on_terminal: frozenset[int] = frozenset(),
    ) -> None:
        """Write what `display` makes of the output to `queue`, which leads to the front; `nodes`: how many share the console.

        `on_terminal`: ranks whose output goes to a terminal with its escape sequences, and to their logs without these.
        """
        self._on_terminal = on_terminal
        self._plain_texts: dict[tuple[int, Stream], PlainText] = {}  # removes escape sequences for the logs
        self._display = display
        display.logs = self
        self._queue = queue
        self._nodes = nodes
        self._bars: BarFeed | None = None  # made with the first bar
        self._logs: dict[tuple[int, Stream], Log] = {}
        self._tails: dict[int, bytearray] = {}  # the last output on stderr, by rank: TAIL bytes, or up to twice as much
        self._ended: set[tuple[int, Stream]] = set()
        self._copies: dict[tuple[int, Stream], _FilteredCopy] = {}
        self._filter_logs: list[Log] = []  # the logs of `_copies`, each once
        self.written_at: dict[int, float] = {}  # when each worker has last written, monotonic seconds
        self.written: Counter[int] = Counter()  # bytes, by rank
        self._last_written: dict[int, tuple[Stream, bytes]] = {}  # by rank: where it wrote last, and the end of that
        self.muted = False  # what would be shown is dropped and counted
        self.dropped = 0  # bytes so far
        self._debugger_has_terminal = False  # nothing is shown then
        self._status_row: list[Bar] = []  # shown in place until a worker writes
        # the worker that reads the terminal, -1: none; how to find out in which read(2) it waits there, None: in none
        self._terminal_rank = -1
        self._find_awaited_read: Callable[[], str | None] | None = None
        self._read_at_prompt: str | None = None  # the read(2) in which that worker waited when its prompt appeared

    def open(self, rank: int, logs: tuple[Log, Log] | None) -> None:
        """Expect output of this worker, which starts; `logs` are those of its stdout and stderr, None: it has none."""
        self._tails[rank] = bytearray()
        for of_last_generation in (self.written_at, self.written, self._last_written):
            of_last_generation.pop(rank, None)
        self._ended -= {(rank, stream) for stream in Stream}
        self._logs.update(((rank, stream), log) for stream, log in zip(Stream, logs or (), strict=False))

    def expect_prompts(self, rank: int, awaited_input: Callable[[], str | None]) -> None:
        """Leave the answered prompts of this worker, which reads the terminal, on the screen.

        `awaited_input` returns in which read(2) it waits there, as `terminal.awaited_input` does.
        """
        self._terminal_rank, self._find_awaited_read, self._read_at_prompt = rank, awaited_input, None

    def _keep_answered_prompt(self, at: float) -> None:
        """Leave a prompt and its answer on the screen once the user has answered, so that no bar is drawn over them.

        The prompt has its answer when the worker no longer waits in the read(2) in which it waited at the prompt.
        """
        if self._find_awaited_read is None:  # no worker reads there
            return
        if not self._display.has_prompt(self._terminal_rank):
            self._read_at_prompt = None
        elif self._read_at_prompt is None:
            self._read_at_prompt = self._find_awaited_read()
        elif self._find_awaited_read() != self._read_at_prompt:
            from ddplaunch.launcher.output.bars import ANSWERED, Bar, pack

            self._read_at_prompt = None
            answered = pack([Bar(ranks=(self._terminal_rank,), text="", row=ANSWERED)])  # tells the front
            # while a debugger has the terminal nothing is shown; while output waits the queue takes no bars: the answer is
            # not kept then, and what the worker writes next continues the prompt
            if not self._debugger_has_terminal and self._queue.put_bars(answered):
                self._display.answered(self._terminal_rank)
                self._pass_bars_on(at)

    def duplicate(self, headers: Mapping[int, str], stream: Stream, needles: tuple[str, ...], log: Log) -> None:
        """Copy the lines of these workers that contain any of `needles` to one more log, each after its rank's header."""
        self._filter_logs.append(log)
        for rank, header in headers.items():
            self._copies[rank, stream] = _FilteredCopy(LineFilter(needles), Prefix(header.encode()), log)

    def on_output(self, rank: int, stream: Stream, data: bytes, at: float) -> None:
        """Write what a worker wrote to its logs, and show it; `at` in monotonic seconds."""
        self._keep_answered_prompt(at)
        self.written_at[rank] = at
        self.written[rank] += len(data)
        self._keep_recent(rank, stream, data)
        if self._status_row:
            self.show_status((), "", at)  # an empty text takes it away: it is shown until a worker writes
        # what the worker drew for the terminal is too much for its log
        logged = self._plain_text(rank, stream).feed(data, at) if rank in self._on_terminal else data
        self._write(rank, stream, logged)
        self._show(self._display.feed(rank, stream, data, at), at)

    def _keep_recent(self, rank: int, stream: Stream, data: bytes) -> None:
        """Keep the end of what a worker wrote last, for `last_line`: bytes of its other stream do not continue the line."""
        last_stream, recent = self._last_written.get(rank, (stream, b""))
        line = recent if last_stream is stream else b""
        self._last_written[rank] = stream, (line + data[-_RECENT:])[-_RECENT:]

    def _plain_text(self, rank: int, stream: Stream) -> PlainText:
        return self._plain_texts.get((rank, stream)) or self._plain_texts.setdefault((rank, stream), PlainText())

    def _write(self, rank: int, stream: Stream, data: bytes) -> None:
        """Write the bytes of a worker to its log and its filtered copy, and keep the end of its stderr."""
        if not data:
            return
        log = self._logs.get((rank, stream))
        if log is not None:
            log.write(data)
        if stream is Stream.ERR:
            tail = self._tails[rank]
            tail += data[-TAIL:]
            if len(tail) > 2 * TAIL:  # to shorten it with each piece would move its bytes each time
                del tail[:-TAIL]
        if (copy := self._copies.get((rank, stream))) is not None:
            copy.write(copy.filter.feed(data))

    def note_interrupt(self) -> None:
        """Note that the workers get Ctrl-C."""
        self._display.note_interrupt()

    def note_failed(self, ranks: Callable[[], Collection[int]] = tuple, *, elsewhere: bool = False) -> None:
        """Note that workers have failed: those that `ranks` returns, or one on another node."""
        if self._display.folds_consequences and self.logs_have_all:
            self._display.note_failed(ranks(), elsewhere=elsewhere)

    def release(self, at: float) -> None:
        """Show the tracebacks that are still held: all workers have ended."""
        self._show(self._display.release(at), at)

    def restart(self) -> None:
        """Note that a generation begins."""
        self._display.restart()

    def end_stream(self, rank: int, stream: Stream, at: float) -> None:
        """Note that a stream has ended: show and write what is left of it, and close its log. A second call has no effect."""
        if (rank, stream) in self._ended:
            return
        self._ended.add((rank, stream))
        # what was kept back of a terminal's output, to drop escape sequences, and of a copy that has some lines only
        if (plain := self._plain_texts.pop((rank, stream), None)) is not None:
            self._write(rank, stream, plain.end())
        self._show(self._display.end_stream(rank, stream, at), at)
        if (copy := self._copies.get((rank, stream))) is not None:
            copy.write(copy.filter.end())
        log = self._logs.pop((rank, stream), None)
        if log is not None:
            log.close()

    def close_filters(self) -> None:
        """End the filtered copies of this generation."""
        for log in self._filter_logs:
            log.close()
        self._filter_logs.clear()
        self._copies.clear()

    def tail(self, rank: int) -> str:
        """Return the last lines of a worker's stderr."""
        tail = bytes(self._tails.get(rank, b"")[-TAIL:])
        if len(tail) == TAIL:  # the first line is probably not whole
            tail = tail.partition(b"\n")[2]
        return tail.decode(errors="replace")

    def last_line(self, rank: int) -> str:
        """Return the last line that a worker wrote, or the end of a long one; of a progress bar its last state."""
        lines = re.split(rb"[\r\n]+", without_escapes(self._last_written.get(rank, (Stream.OUT, b""))[1]))
        return next((text for line in reversed(lines) if (text := line.decode(errors="replace").strip())), "")

    @property
    def deadline(self) -> float | None:
        """When to call flush."""
        deadline = soonest(self._display.deadline(), *(plain.deadline for plain in self._plain_texts.values()))
        return deadline if self._bars is None or self._debugger_has_terminal else soonest(deadline, self._bars.deadline)

    def flush(self, at: float) -> None:
        """Show what was held back long enough."""
        for (rank, stream), plain in self._plain_texts.items():
            self._write(rank, stream, plain.flush(at))
        self._show(self._display.flush(at), at)
        self._keep_answered_prompt(at)
        if self._bars is not None and is_due(self._bars.deadline, at) and not self._debugger_has_terminal:
            self._bars.update(self._bars_in_place(), at)

    def show_status(self, ranks: tuple[int, ...], text: str, at: float) -> None:
        """Show in place what these workers do, until any writes; an empty text takes it away."""
        if self._debugger_has_terminal or not (text or self._status_row):
            return
        from ddplaunch.launcher.output.bars import Bar  # none without a terminal

        self._status_row = [Bar(ranks, text)] if text else []
        self._bar_feed().update(self._bars_in_place(), at)

    def show_bars_again(self, at: float) -> None:
        """Pass the bars on once more: the terminal has another size, or another program has written to it."""
        if self._bars is not None and not self._debugger_has_terminal:
            self._bars.repeat(at)

    def hide(self, hidden: bool) -> None:
        """Show nothing, not even progress bars, or show again what comes; the logs have all."""
        if hidden and not self._debugger_has_terminal and self._bars is not None:
            self._queue.put_bars(b"")
        self._debugger_has_terminal = hidden

    def _show(self, chunks: Iterable[tuple[Stream, bytes]], at: float) -> None:
        """Send output to the front, unless output is muted or a debugger has the terminal."""
        if self._debugger_has_terminal:
            return
        if self._display.bars_have_changed:
            self._pass_bars_on(at)  # before the lines, one of which a bar may have become
        for stream, shown in chunks:
            if self.muted:
                self.dropped += len(shown)
            else:
                self._queue.put(_TAGS[stream], shown)

    def _pass_bars_on(self, at: float) -> None:
        """Have bars that have changed passed on."""
        feed = self._bar_feed()
        if self._display.bar_has_ended:
            feed.update(self._bars_in_place(), at)  # now, for the line that the bar may have become is shown next
        else:
            feed.note_change(at)
        self._display.bars_have_changed = self._display.bar_has_ended = False

    def _bars_in_place(self) -> list[Bar]:
        return self._status_row or self._display.bars()

    def _bar_feed(self) -> BarFeed:
        """Return what passes bars on, made at the first call."""
        if self._bars is None:
            from ddplaunch.launcher.output.bars import INTERVAL, BarFeed  # most jobs draw none

            # however many nodes there are, the command that shows the bars of all gets a limited number of messages
            interval = INTERVAL * max(1.0, self._nodes / _NODES_AT_ONCE)
            self._bars = BarFeed(self._queue, interval)
        return self._bars

    @property
    def logs_have_all(self) -> bool:
        """Whether everything that the workers write is in logs too."""
        return bool(self._logs) and all(log.is_kept for log in self._logs.values())
