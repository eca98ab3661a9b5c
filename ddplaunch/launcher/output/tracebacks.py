"""Folds tracebacks that say nothing new, each into a line: of Ctrl-C, of a peer that ended, of an error shown before.

Pure; the node's agent feeds it. The logs have all tracebacks whole. A traceback that may follow from another worker's failure is
held until that failure is known, for HELD_FOR seconds at most; of those that follow from each other, the first is shown whole.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from math import inf

from msgspec import Struct

from ddplaunch.launcher.decide.first_failure import follows_another
from ddplaunch.spec.outcome import WorkerError

SETTLED_AFTER = 0.2  # seconds in which other tracebacks of the same failure come
HELD_FOR = 1.0  # seconds until the failure from which one follows is known on all nodes

_FIRST_LINE = b"Traceback (most recent call last):"
_CHAINED = (b"During handling of the above exception", b"The above exception was the direct cause")
_INTERRUPT = re.compile(rb"KeyboardInterrupt(: .*)?")
_FRAME = re.compile(rb'^  File "([^"]+)", line (\d+), in (.+)$', re.MULTILINE)
_LIBRARY = re.compile(rb"<|.*/(site|dist)-packages/|.*/lib(64)?/python\d")
_CPP = re.compile(rb"Exception raised from |frame #\d+: ")  # what torch adds to messages
_CPP_PLACE = re.compile(rb"\[[^][\s]*\.(?:cc|cpp|hpp|h):\d+\] ")
_NUMBERS = re.compile(rb"0x[0-9a-f]+|\d+")
_MOST_ERRORS = 100  # that are remembered
_MOST_LINES = 1000  # of a traceback
_LONGEST_TEXT = 160  # bytes of an exception

Shown = tuple[tuple[int, ...], bytes]  # the ranks, ascending, whose lines these are


class _Traceback:
    """A traceback of a rank, from its first line on, with what the rank has written after it.

    It is open while its lines come, and complete once another line follows; a complete one is held, folded or shown.
    """

    __slots__ = ("changed_at", "exception_line", "lines", "lines_behind", "rank")

    def __init__(self, rank: int, line: bytes, at: float) -> None:
        self.rank = rank
        # monotonic seconds: while it is open, when its last line came; later, when it was complete
        self.changed_at = at
        self.lines = [line]
        self.exception_line = b""  # the line "ValueError: ..." at its end; empty before that line has come
        self.lines_behind: list[bytes] = []  # lines after it, while it is held

    @property
    def is_interrupt(self) -> bool:
        return _INTERRUPT.fullmatch(self.exception_line) is not None

    @property
    def text(self) -> bytes:
        return b"".join([*self.lines, *self.lines_behind])

    @property
    def error(self) -> bytes:
        """The whole traceback, without the numbers in which those of several ranks differ; places in the code keep theirs."""
        return b"".join(line if line.startswith(b"  File ") else _NUMBERS.sub(b"#", line) for line in self.lines)

    @property
    def place(self) -> bytes:
        """Where it was raised in the program's own code: " at train.py:7 in step"."""
        frames = _FRAME.findall(b"".join(self.lines))
        own = [frame for frame in frames if not _LIBRARY.match(frame[0])] or frames
        if not own:
            return b""
        file, line, function = own[-1]
        return b" at %b:%b" % (file, line) + (b"" if function == b"<module>" else b" in %b" % function)


class _Folded(Struct):
    """Equal tracebacks of several ranks."""

    first: _Traceback
    due: float  # when their line is shown, monotonic seconds
    ranks: list[int]  # in order of arrival

    def shown(self) -> Shown:
        """Return the line that stands for all these tracebacks."""
        ranks = tuple(sorted(self.ranks))
        if self.first.is_interrupt:
            return ranks, b"KeyboardInterrupt%b\n" % self.first.place
        text = _summary(self.first.exception_line)
        if len(ranks) > 1:  # each rank names the address of another connection
            text = re.sub(rb" \[[^][]*\]:\d+", b"", text)
        return ranks, b"%b,%b   (-v shows the traceback)\n" % (text, self.first.place)


class Tracebacks:
    """The filter for the stderr of all workers of a node, in whole lines: folds a traceback (shows one line in its place)."""

    def __init__(self, *, folds_consequences: bool = False, folds_equal: bool = False) -> None:
        """`folds_consequences`: fold failures that follow from another one; `folds_equal`: failures that another rank has shown.

        Those of Ctrl-C are folded in any case, once `note_interrupt` was called.
        """
        self._folds_consequences = folds_consequences
        self._folds_equal = folds_equal
        self._shown: dict[bytes, int] = {}  # the errors that were shown whole, and by which rank
        self._was_interrupted = False  # the workers have got Ctrl-C
        self._unfinished: dict[int, _Traceback] = {}  # by rank: being written
        self._held: dict[int, _Traceback] = {}  # by rank: follows from a failure that is not known yet
        self._folded: dict[bytes, _Folded] = {}  # whose line is to be shown, by what equal ones have in common
        self._failed: set[int] = set()  # the ranks of this node that have failed
        self._cause_is_shown = False  # a failure from which others follow was shown, or is on another node

    def restart(self) -> None:
        """Forget which workers have failed: others take their places."""
        self._failed.clear()
        self._shown.clear()
        self._cause_is_shown = False

    def note_interrupt(self) -> None:
        """Note that the workers get Ctrl-C."""
        self._was_interrupted = True

    def note_failed(self, ranks: Collection[int] = (), *, elsewhere: bool = False) -> None:
        """Note that these workers have failed, or one on another node has."""
        self._failed.update(ranks)
        self._cause_is_shown = self._cause_is_shown or elsewhere

    @property
    def deadline(self) -> float | None:
        """When to call flush; None: not before the next feed."""
        to_fold = self._failed if self._cause_is_known else ()
        times = [
            *(one.changed_at + SETTLED_AFTER for one in self._unfinished.values()),
            *(one.changed_at + (SETTLED_AFTER if rank in to_fold else HELD_FOR) for rank, one in self._held.items()),
            *(one.due for one in self._folded.values()),
        ]
        return min(times, default=None)

    @property
    def _cause_is_known(self) -> bool:
        """Whether a failure is known from which the held tracebacks follow: a rank has failed that has no held traceback."""
        return self._cause_is_shown or not self._failed.issubset(self._held)

    def feed(self, rank: int, block: bytes, at: float) -> bytes:
        """Take whole lines of a rank; return what to show now, which may begin with lines that were held back before."""
        if rank in self._held:  # its traceback is complete, and kept back until its cause is known
            self._held[rank].lines_behind.append(block)
            return b""
        if rank not in self._unfinished and _FIRST_LINE not in block:
            return block
        lines = block.splitlines(keepends=True)
        shown = b""
        for number, line in enumerate(lines):
            shown += self._feed_line(rank, line, at)
            if rank in self._held:  # this line has completed a traceback: the lines behind it wait with it
                self._held[rank].lines_behind += lines[number + 1 :]
                break
        return shown

    def _feed_line(self, rank: int, line: bytes, at: float) -> bytes:
        """Take one line of a rank; return what to show now: nothing while the line belongs to a traceback that may be folded."""
        text = line.rstrip(b"\r\n")
        traceback = self._unfinished.get(rank)
        if traceback is None:
            if text == _FIRST_LINE:
                self._unfinished[rank] = _Traceback(rank, line, at)
                return b""
            return line
        traceback.changed_at = at
        # "During handling of the above exception, ..." and an empty line stand between two tracebacks of one error
        is_chained = text == _FIRST_LINE and traceback.exception_line and not traceback.lines[-1].strip()
        is_part = not text or text.startswith(_CHAINED) or _CPP.match(text)  # the last: what torch's C++ adds
        is_after_end = text == _FIRST_LINE or (traceback.exception_line and not is_part)
        if is_chained:
            traceback.exception_line = b""  # that of the next part is to come
        elif is_after_end:
            return self._fold_hold_or_show(rank, at) + self._take_line_after_traceback(rank, line, at)
        elif not traceback.exception_line and not text.startswith(b" "):  # its frames are indented
            traceback.exception_line = text
        traceback.lines.append(line)
        # one that is too long is shown as it is, and so are its further lines
        return self._unfinished.pop(rank).text if len(traceback.lines) > _MOST_LINES else b""

    def _take_line_after_traceback(self, rank: int, line: bytes, at: float) -> bytes:
        """Take the line behind a complete traceback, which waits with the traceback if that is held."""
        if rank not in self._held:
            return self._feed_line(rank, line, at)
        self._held[rank].lines_behind.append(line)
        return b""

    def _fold_hold_or_show(self, rank: int, at: float) -> bytes:
        """Fold the traceback of a rank, which is complete now, or hold it until its cause is known, or return it whole.

        Those that are folded with the same key (`b"interrupt"`, the error) share a line.
        """
        traceback = self._unfinished.pop(rank)
        has_exception = bool(traceback.exception_line)  # else it was cut off
        if self._was_interrupted and traceback.is_interrupt:
            self._fold(traceback, b"interrupt", at)
        elif self._folds_consequences and has_exception and _may_be_consequence(traceback):
            traceback.changed_at = at  # from which its time in `_held` counts
            self._held[rank] = traceback
        elif self._folds_equal and has_exception and self._was_shown_by_another(traceback):
            self._fold(traceback, traceback.error, at)
        else:
            return traceback.text
        return b""

    def _was_shown_by_another(self, one: _Traceback) -> bool:
        """Whether another rank has shown this error; else note that this rank shows it now."""
        if len(self._shown) >= _MOST_ERRORS:
            self._shown.clear()
        return self._shown.setdefault(one.error, one.rank) != one.rank

    def _fold(self, one: _Traceback, key: bytes, at: float) -> None:
        """Have one line shown for this traceback and for all with the same key that come within SETTLED_AFTER seconds."""
        folded = self._folded.setdefault(key, _Folded(first=one, due=at + SETTLED_AFTER, ranks=[]))
        if one.rank not in folded.ranks:
            folded.ranks.append(one.rank)

    def end_stream(self, rank: int, at: float) -> bytes:
        """Note that the stderr of a rank has ended; return what to show of its last traceback."""
        return self._fold_hold_or_show(rank, at) if rank in self._unfinished else b""

    def flush(self, at: float) -> list[Shown]:
        """Return what is due at this time, by ranks; inf: all that is left."""
        shown = [*self._end_silent(at), *self._release_held(at)]
        due = [key for key, one in self._folded.items() if at >= one.due]
        return [*shown, *(self._folded.pop(key).shown() for key in due)]

    def _end_silent(self, at: float) -> list[Shown]:
        """Take tracebacks as complete if their last line is SETTLED_AFTER seconds old; return those that are shown whole."""
        silent = [
            (rank, one.changed_at + SETTLED_AFTER)
            for rank, one in self._unfinished.items()
            if at >= one.changed_at + SETTLED_AFTER
        ]
        texts = [(rank, self._fold_hold_or_show(rank, min(at, since))) for rank, since in silent]
        return [((rank,), text) for rank, text in texts if text]

    def _release_held(self, at: float) -> list[Shown]:
        """Fold held tracebacks whose cause is known, and return the lines after them; return whole what was held too long.

        Of a rank that has not failed, the traceback is held on: the worker may have caught the exception. `at` is inf once all
        workers have ended.
        """
        shown: list[Shown] = []
        # once one has waited for equal ones, which may come a moment later, all are folded together
        settled_at = (one.changed_at + SETTLED_AFTER for rank, one in self._held.items() if rank in self._failed)
        one_has_settled = any(at >= then for then in settled_at)
        for rank, one in sorted(self._held.items(), key=lambda item: item[1].changed_at):
            has_failed = rank in self._failed or at == inf
            if self._cause_is_known and has_failed and one_has_settled:
                del self._held[rank]
                error = _summary(one.exception_line) + one.place
                # equal ones share a line, those too that differ only in numbers
                self._fold(one, re.sub(rb"\d+", b"#", error), one.changed_at)
                if one.lines_behind:
                    shown.append(((rank,), b"".join(one.lines_behind)))
            elif at >= one.changed_at + HELD_FOR:
                del self._held[rank]
                if has_failed:  # no cause has come: the others may follow from this failure, which is shown whole
                    self._cause_is_shown = True
                shown.append(((rank,), one.text))
        return shown


def _may_be_consequence(one: _Traceback) -> bool:
    """Whether an exception may follow from the failure of another worker, by its text: a lost connection does."""
    kind, _, message = one.exception_line.decode(errors="replace").partition(": ")
    traceback = b"".join(one.lines).decode(errors="replace")
    return follows_another(WorkerError(type=kind, message=message, traceback=traceback))


def _summary(exception: bytes) -> bytes:
    """Return the exception in short: without torch's place in C++, the first sentence of its message."""
    text = _CPP_PLACE.sub(b"", exception).partition(b". ")[0]
    return text if len(text) <= _LONGEST_TEXT else text[:_LONGEST_TEXT] + b"..."
