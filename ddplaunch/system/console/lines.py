"""Joins what one stream of a worker wrote, in pieces of any size, into whole lines. Works on bytes; decodes nothing."""

from __future__ import annotations

from ddplaunch.system.console.screen import HIDE_CURSOR, RedrawnRows, moves, split_unfinished
from ddplaunch.system.console.streams import RESET, Prefix
from ddplaunch.system.process.clock import soonest

MAX_LINE = 64 * 2**20  # bytes; a longer line is cut, so that a worker that never ends one cannot fill our memory
FIRST_UPDATE = 1.0  # seconds until a progress bar that has not ended is shown at all
UPDATE_INTERVAL = 10.0  # seconds between two updates of a progress bar that has not ended
SETTLE_TIME = 0.25  # seconds a line is held for a cursor that went up before and may come back to it
# how many rows up the cursor is expected to go: rows are held for that, since a bar that ends may be the inner one of several
LIVE_CLIMB = 3  # where bars are shown in place, and what is held is seen as well
HIDDEN_CURSOR_CLIMB = 16  # of a program that hides the cursor, as rich does as long as it redraws
LIVE_SETTLE_TIMES = (0.5, 2.0)  # seconds before and after the cursor first went up
_LONGEST_SHOWN = 2000  # bytes of a line that has not ended, as far as it is shown
RESTS_FOR = 0.5  # seconds after which a line that has not ended is shown in place: a prompt, dots
STILL_FOR = 30.0  # seconds without a change after which a bar becomes a line, until it moves


class Lines:
    """One stream among several on the same console: gives out whole lines only.

    Of a line that was overwritten with carriage returns (a progress bar) the last state is the line. A bar that
    has not ended is shown as a line after FIRST_UPDATE, then each UPDATE_INTERVAL at most, if it moves; a `live` one is shown
    in place by another program, and becomes a line when it stands still.
    """

    __slots__ = (
        "_current_bar_is_returned",
        "_end_of_state",
        "_has_returned_a_bar",
        "_is_live",
        "_partial_is_shown",
        "_partial_line",
        "_return_state_at",
        "_returned_state",
        "_screen",
        "_settle_at",
        "_show_partial_at",
        "_unfinished",
        "was_redrawn",
    )

    def __init__(self, *, live: bool = False, end_of_state: bytes = b"\n") -> None:
        """`live`: the bars are shown in place; `end_of_state` follows each state of a bar that has not ended.

        Times are monotonic seconds; None: nothing is due.
        """
        self._is_live = live
        self._end_of_state = end_of_state
        self._current_bar_is_returned = False  # it has not moved for STILL_FOR, and was returned as a line
        self._partial_is_shown = False  # the line that has not ended has rested for RESTS_FOR: it is shown in place
        self._show_partial_at: float | None = None  # when the line that has not ended has rested, and is shown
        self._partial_line = bytearray()  # what there is of a line that has not ended, without a screen
        self._unfinished = b""  # carriage return or escape sequence at the end of the last piece
        self._screen: RedrawnRows | None = None  # only while the worker redraws
        self._settle_at: float | None = None  # when rows above the cursor become lines, unless it goes up before
        self._return_state_at: float | None = None  # when the state of the bar is returned as a line
        self._has_returned_a_bar = False  # at some time: its next states wait longer than the first
        self._returned_state = b""  # the state of a bar that was returned last as a line, until there are other lines
        self.was_redrawn = False  # what was returned last comes from rows that the worker redraws

    @property
    def deadline(self) -> float | None:
        """When to call flush; None: not before the next feed."""
        return soonest(self._settle_at, self._return_state_at, self._show_partial_at)

    @property
    def is_bar(self) -> bool:
        """Whether there are `rows` to be shown in place."""
        return self._partial_is_shown or (self._is_live and self.draws and not self._current_bar_is_returned)

    @property
    def is_open(self) -> bool:
        """Whether the only one of the `rows` is a line that has not ended, and has rested."""
        return self._partial_is_shown

    @property
    def is_idle(self) -> bool:
        """Whether all that was fed has been returned as lines."""
        return self._screen is None and not self._partial_line and not self._unfinished

    @property
    def draws(self) -> bool:
        """Whether rows are being redrawn."""
        return self._screen is not None and self._screen.ends_in_bar

    @property
    def beginning(self) -> bytes:
        """What there is of a line that has not ended; empty while a bar is drawn."""
        return bytes(self._partial_line) if self._screen is None else b""

    @property
    def rows(self) -> list[bytes]:
        """The rows of the bar."""
        if self._partial_is_shown:
            return [bytes(self._partial_line[-_LONGEST_SHOWN:])]
        return self._screen.rows if self._screen is not None else []

    def feed(self, data: bytes, at: float) -> bytes:
        """Take a piece read at time `at` (monotonic seconds); return the lines that are complete now."""
        data, self._unfinished = split_unfinished(self._unfinished + data)
        if b"\r" in data:
            data = data.replace(b"\r\n", b"\n")
        if self._screen is not None or moves(data):
            block, self.was_redrawn = self._without_returned_state(self._draw(data, at)), True
            self._schedule_partial_line(at, begins_line=True)
            return block
        self.was_redrawn, self._returned_state = False, b""  # most output: lines that nothing redraws
        end = data.rfind(b"\n") + 1
        whole = self._take_partial_line() + data[:end] if end and self._partial_line else data[:end]
        self._partial_line += data[end:]
        self._schedule_partial_line(at, begins_line=end > 0)
        return whole if len(self._partial_line) <= MAX_LINE else whole + self._take_partial_line() + b"\n"

    def _schedule_partial_line(self, at: float, *, begins_line: bool) -> None:
        """Where bars are shown in place, set when the line that has not ended is shown there: after it has rested for RESTS_FOR.

        `begins_line`: this line began just now, so what was set for the line before does not hold.
        """
        is_scheduled_or_shown = self._show_partial_at is not None or self._partial_is_shown
        if self._is_live and (begins_line or not self._partial_line or not is_scheduled_or_shown):
            self._partial_is_shown = False
            self._show_partial_at = at + RESTS_FOR if self._partial_line else None

    def answered(self) -> None:
        """Leave out what was shown of the line: a prompt, which stays on the terminal with its answer."""
        self._take_partial_line()
        self._partial_is_shown, self._show_partial_at = False, None

    def _take_partial_line(self) -> bytes:
        text = bytes(self._partial_line)
        self._partial_line.clear()
        return text

    def _draw(self, data: bytes, at: float) -> bytes:
        """Feed rows that redraw themselves to the screen; return the lines that are complete, and set when to look again."""
        # how many rows up the cursor may go: a bar that ends may be the inner one, with those of outer bars above
        guessed_climb = HIDDEN_CURSOR_CLIMB if HIDE_CURSOR in data else LIVE_CLIMB if self._is_live else 0
        screen = self._screen or RedrawnRows(guessed_climb)
        block = screen.feed(self._take_partial_line() + data)
        if screen.longest > MAX_LINE:
            block += screen.end()
            screen = RedrawnRows()
        self._set_times(screen, at)
        self._keep_screen_while_redrawn(screen)
        return block

    def _set_times(self, screen: RedrawnRows, at: float) -> None:
        """Set when the rows above the cursor settle, and when the state of a bar becomes a line, after a piece was drawn."""
        if not screen.holds_lines:
            self._settle_at = None
        elif self._settle_at is None or screen.went_up_in_last_piece:
            before_going_up, later = LIVE_SETTLE_TIMES if self._is_live else (SETTLE_TIME, SETTLE_TIME)
            self._settle_at = at + (later if screen.went_up else before_going_up)
        if not screen.ends_in_bar:
            self._return_state_at = None
        elif self._is_live:  # it has moved, which is seen in place
            self._current_bar_is_returned = False
            self._return_state_at = at + STILL_FOR
        elif self._return_state_at is None:
            self._return_state_at = at + (UPDATE_INTERVAL if self._has_returned_a_bar else FIRST_UPDATE)

    def _without_returned_state(self, block: bytes) -> bytes:
        """Return the lines in `block` but for the state of a bar that was returned already, if the bar has ended in it."""
        if not self._returned_state or not block:
            return block
        line, self._returned_state = self._returned_state + b"\n", b""
        at = (b"\n" + block).find(b"\n" + line)
        return block if at < 0 else block[:at] + block[at + len(line) :]

    def _keep_screen_while_redrawn(self, screen: RedrawnRows) -> None:
        """Keep the screen while the worker redraws; else only the line that has not ended."""
        line = screen.plain_line()
        self._screen = screen if line is None else None
        self._partial_line += line or b""

    def flush(self, at: float) -> bytes:
        """Return the lines that are due at this time (monotonic seconds): rows that have settled, and the state of a bar."""
        block = b""
        if self._show_partial_at is not None and at >= self._show_partial_at:
            # a line without an end, such as a prompt, has rested: whoever shows this output in place may show it now
            self._partial_is_shown, self._show_partial_at = True, None
        self.was_redrawn = self._screen is not None
        if self._screen is None:
            return block
        if self._settle_at is not None and at >= self._settle_at:
            self._settle_at = None
            block = self._without_returned_state(self._screen.settle())
            if not self._screen.ends_in_bar:
                self._return_state_at = None
        if self._return_state_at is not None and at >= self._return_state_at:
            self._return_state_at = None  # until the bar moves: one that does not is shown once
            state = self._screen.snapshot()
            is_too_long = len(state) > _LONGEST_SHOWN  # its states would fill the console: it waits for its end
            if not is_too_long:
                self._has_returned_a_bar = self._current_bar_is_returned = True
                if state and state != self._returned_state:
                    block += state + self._end_of_state
                # a state without a newline is no line yet: the bar's last state is written once more, as a line
                self._returned_state = state if self._end_of_state == b"\n" else b""
        self._keep_screen_while_redrawn(self._screen)
        self._schedule_partial_line(at, begins_line=False)
        return block

    def end(self) -> bytes:
        """Return what is left when the stream was closed; the last line gets its newline. Not to be fed again."""
        last = b"" if self._unfinished == b"\r" else self._unfinished
        self.was_redrawn = self._screen is not None
        if self._screen is not None:
            return self._without_returned_state(self._screen.feed(last) + self._screen.end())
        text = self._take_partial_line() + last
        return text + b"\n" if text else b""


class LoneLines:
    """The only worker on the console, with a prefix: whole lines, but a progress bar is passed on at once and stays a bar."""

    __slots__ = ("_between", "_partial_is_shown", "_partial_line", "_prefix", "_unfinished")

    deadline = None  # nothing waits for a time

    def __init__(self, prefix: Prefix) -> None:
        """Put this prefix before each line, and each state of a bar."""
        self._prefix = prefix.text
        # a part that was passed on cannot be searched for colours left on, so each line resets them
        self._between = (RESET if prefix.coloured else b"") + b"\n" + prefix.text
        self._partial_line = bytearray()  # of the line that has not ended, as long as it has no carriage return
        self._partial_is_shown = False  # a part of the line has been passed on
        self._unfinished = b""  # carriage return or escape sequence at the end of the last piece

    def feed(self, data: bytes, at: float) -> bytes:
        """Take a piece; return what is to be written now: whole lines, or all of it while a bar is drawn."""
        data, self._unfinished = split_unfinished(self._unfinished + data)
        data = data.replace(b"\r\n", b"\n")
        is_bar = b"\r" in data or self._partial_is_shown  # a line of which a part was passed on goes on like a bar
        is_too_long = len(self._partial_line) + len(data) > MAX_LINE
        end = len(data) if is_bar or is_too_long else data.rfind(b"\n") + 1
        if not end:
            self._partial_line += data
            return b""
        text = bytes(self._partial_line) + data[:end]
        self._partial_line[:] = data[end:]
        return self._with_prefixes(text)

    def _with_prefixes(self, text: bytes) -> bytes:
        before = b"" if self._partial_is_shown else self._prefix
        self._partial_is_shown = not text.endswith(b"\n")
        out = before + text.replace(b"\n", self._between).replace(b"\r", b"\r" + self._prefix)
        return out if self._partial_is_shown else out.removesuffix(self._prefix)

    def flush(self, at: float) -> bytes:
        """Return nothing: there is no deadline."""
        return b""

    def end(self) -> bytes:
        """Return what is left when the stream was closed; the last line gets its newline. Not to be fed again."""
        rest = bytes(self._partial_line) + (b"" if self._unfinished == b"\r" else self._unfinished)
        return self._with_prefixes(rest + b"\n") if rest or self._partial_is_shown else b""
