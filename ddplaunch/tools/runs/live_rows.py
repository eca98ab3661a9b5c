"""The rows of --live: one for the job, one for each group of ranks that differ, one for all others. Pure."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from math import inf
from statistics import median_high, median_low

from msgspec import Struct

from ddplaunch.record.folders import short
from ddplaunch.record.seen.collectives import Wait
from ddplaunch.system.console.tables import BAD, NAME, NOTE, ODD, Piece, Words, line
from ddplaunch.system.fields import line as printable
from ddplaunch.system.words import count, duration, size, these_ranks
from ddplaunch.tools.runs import find
from ddplaunch.tools.runs.client import RunReplies
from ddplaunch.tools.runs.columns import ENDED_WELL, Row, rows_of, state_of, totals
from ddplaunch.tools.runs.ps import PHASES, progress_of, standing, written_metrics, written_pace, written_progress

_MOST = 8  # rows for ranks that differ
_GAP = "  "
_RECENT = 30.0  # seconds in which steps are counted
_LEAST_TIME = 5.0  # seconds between two steps that say how fast the job is
_QUIET = 10.0  # seconds without output, and
_TELLING = 3  # ranks that write: of two, one that writes nothing may well be the usual one
_TIMES_QUIETER = 4  # times as many as the others', from which a rank is quiet
_IDLE, _BUSY = 5.0, 50.0  # percent of a core: a rank below the one is idle where the others are above the other
_MUCH_MORE = 1.2  # times the memory of the others, and
_MORE_MEMORY = 256 << 20  # bytes more, from which a rank's memory is shown
_LONGER = 5  # times as long as a step usually takes: then the job makes none
_STANDS = 10.0  # seconds without a step or a line from any rank
_RUNNING = ("running", "debugged")  # states of which a rank may still differ


class _Different(Struct, frozen=True):
    """Why a rank has a row: the first reason that fits counts."""

    order: int
    text: str
    style: str
    row: Row


class LiveRows:
    """What the looks at a job so far tell."""

    def __init__(self) -> None:
        """Know nothing yet."""
        self._replies: RunReplies | None = None
        self._rows: list[Row] = []
        self._at = 0.0
        self._steps: deque[tuple[float, int]] = deque()  # when the job had made how many
        self._moved: object = None  # what changes while a job moves
        self._moved_at = 0.0
        self._waits: tuple[Wait, ...] = ()

    def take(self, replies: RunReplies, at: float) -> None:
        """Take what the nodes reply at this time (monotonic seconds)."""
        if self._replies is not None and replies.run is None and not replies.nodes:
            self._replies.problem = replies.problem  # what was known before is still shown
            return
        self._rows = rows_of(replies, self._rows, at - self._at)
        self._replies, self._at = replies, at
        moved = [(row.worker.pid, row.worker.written, _steps(row)) for row in self._rows]
        if moved != self._moved:
            self._moved, self._moved_at, self._waits = moved, at, ()
        self._take_step(replies, at)

    def _take_step(self, replies: RunReplies, at: float) -> None:
        """Note how many steps the job has made by now; after a restart, count from the step where the job resumes."""
        progress, steps = progress_of(replies), self._steps
        if progress is None:
            return
        if steps and progress.step < steps[-1][1]:
            steps.clear()
        if not steps or progress.step > steps[-1][1]:
            steps.append((at - progress.age, progress.step))
        while len(steps) > 2 and steps[1][0] < at - _RECENT:
            steps.popleft()

    def stands(self, at: float) -> bool:
        """Whether no rank has made a step or written a line for some time: which collective they wait in is worth a question."""
        return bool(self._rows) and at - self._moved_at >= _STANDS

    def take_waits(self, waits: Iterable[Wait]) -> None:
        """Take who waits in which collective, once the same was found twice."""
        self._waits = tuple(waits)

    # --- the rows

    def render(self, at: float, width: int, height: int) -> list[Words]:
        """Return what a terminal of so many columns shows at this time, in so many rows at most."""
        if self._replies is None:
            return []
        different = self._different()
        shown = _together(different)
        rest = [row for row in self._rows if row.worker.rank not in {each.row.worker.rank for each in different}]
        head, below = [self._job(at, width)], [self._rest(rest, is_all=not different)] if self._rows else []
        problems = [line((text, ODD)) for text in find.silent(self._replies.nodes)]
        if self._replies.problem:
            problems.append(line((printable(self._replies.problem), ODD)))
        middle = [*problems, *shown][: min(_MOST, max(0, height - len(head) - len(below)))]
        rows = [*head, *middle, *below][:height]
        for row in rows:
            row.truncate(width, overflow="ellipsis")
        return rows

    def _job(self, at: float, width: int) -> Words:
        """Return the row of the job: as many of its facts as there is room for, in their order of importance."""
        replies = self._replies
        assert replies is not None
        run, progress = replies.run, progress_of(replies)
        if run is None:
            return line((short(find.name_of(replies)), NAME))
        pace, pause = self._pace(), at - self._steps[-1][0] if self._steps else 0.0
        stands = pause > max(_STANDS, _LONGER / pace if pace else 0.0)
        facts: list[Piece] = [duration(run.seconds + at - self._at)]
        if still := standing(run):
            facts.insert(0, (still, ODD))
        elif run.phase != "running":
            facts.insert(0, (PHASES.get(run.phase, run.phase), ODD))
        if told := written_progress(progress, run):
            facts.append((told, NAME))
        if progress is not None:
            if stands and run.phase == "running" and progress.step != progress.total:
                facts.append((f"no step for {duration(pause)}", ODD))
            elif progress.total and pace and progress.step < progress.total:
                facts.append(f"{duration((progress.total - progress.step) / pace)} left")
        if pace and not stands:
            facts.append(written_pace(pace))
        facts += written_metrics(progress) if progress is not None else []
        if run.restarts:
            facts.append((f"restart {run.restarts} of {run.max_restarts}", ODD))
        if alive := [row for row in self._rows if row.is_alive]:
            facts += totals(alive)
        found, used = [line((short(run.run_id), NAME))], len(short(run.run_id))
        for fact in map(line, facts):
            if used + len(_GAP) + fact.cell_len <= width:
                found += [line(_GAP), fact]
                used += len(_GAP) + fact.cell_len
        return Words("", no_wrap=True, overflow="ignore").join(found) if used <= width else line(facts[0])

    def _pace(self) -> float | None:
        """Return steps a second: those of the last half minute, else all that the script has told, else the collectives'."""
        assert self._replies is not None
        steps, progress, run = self._steps, progress_of(self._replies), self._replies.run
        if len(steps) > 1 and steps[-1][0] - steps[0][0] >= _LEAST_TIME:
            return (steps[-1][1] - steps[0][1]) / (steps[-1][0] - steps[0][0])
        if progress is not None and progress.seconds and progress.step > progress.first_step:
            return (progress.step - progress.first_step) / progress.seconds
        return run.steps_per_second if run is not None else None

    def _different(self) -> list[_Different]:
        """Return the ranks that differ from the others, and how; a rank once."""
        running = [row for row in self._rows if row.worker.state in _RUNNING and row.worker.pid]
        tests = (_ended, self._missing, _in_other_state, _starts, _quiet(running), _idle(running), _behind(running),
                 _large(running), self._straggles)  # fmt: skip
        found = []
        for row in self._rows:
            for order, test in enumerate(tests):
                if (told := test(row)) is not None:
                    text, style = told
                    found.append(_Different(order, text, style, row))
                    break
        are_alike = len(found) == len(self._rows) and len({(each.order, each.text) for each in found}) == 1
        return [] if are_alike else found  # as at the start, when all ranks import torch

    def _missing(self, row: Row) -> tuple[str, str] | None:
        for wait in self._waits:
            if row.worker.rank in wait.missing:
                verb = "waits" if len(wait.waiting) == 1 else "wait"
                return f"has not reached {wait.collective}, in which {these_ranks(wait.waiting)} {verb}", ODD
        return None

    def _straggles(self, row: Row) -> tuple[str, str] | None:
        run = self._replies.run if self._replies is not None else None
        named = f"rank {row.worker.rank} "
        if run is not None and run.straggler.startswith(named):
            return printable(run.straggler.removeprefix(named)), ODD
        return None

    def _rest(self, rest: Sequence[Row], *, is_all: bool) -> Words:
        """Return the row of the ranks that do not differ: what all of them do, or how many do what."""
        if not rest:
            return line(("no other rank", NOTE))
        who = f"all {len(rest)}" if is_all and len(rest) > 1 else f"{len(rest)} more" if not is_all else "rank 0"
        ranks = {row.worker.rank for row in rest}
        doing: Counter[str] = Counter()
        for wait in self._waits:
            if here := ranks & set(wait.waiting):
                doing[f"in {wait.collective}"] += len(here)
                ranks -= here
        doing.update(_does(row) for row in rest if row.worker.rank in ranks)
        told = [text if len(doing) == 1 else f"{number} {text}" for text, number in doing.most_common()]
        steps = [row.worker.progress.step for row in rest if row.worker.progress is not None]
        if len(steps) > 1:
            told.append(f"step {min(steps):,}" + (f"-{max(steps):,}" if min(steps) < max(steps) else ""))
        quiet = [row.worker.quiet for row in rest if row.worker.quiet is not None]
        if self._waits and quiet:
            told.append(f"quiet for {duration(min(quiet))}")
        return line((f"{who}: {', '.join(told)}", NOTE))


# --- how a rank may differ: the text for its row and the style of that, None where the rank does not differ so

_Test = Callable[[Row], "tuple[str, str] | None"]


def _ended(row: Row) -> tuple[str, str] | None:
    return (printable(row.worker.how), BAD) if row.worker.how not in ("", ENDED_WELL) else None


def _in_other_state(row: Row) -> tuple[str, str] | None:
    is_usual = row.worker.state in ("running", "waiting", "ended")
    return None if is_usual else (state_of(row.worker).plain, ODD)


def _starts(row: Row) -> tuple[str, str] | None:
    return ("not started yet", ODD) if row.worker.state == "waiting" else None


def _quiet(running: Sequence[Row]) -> _Test:
    """Return whether a rank has written nothing for much longer than the others that write at all."""
    spans = [row.worker.quiet for row in running if row.worker.quiet is not None]
    least = max(_QUIET, _TIMES_QUIETER * median_low(spans)) if spans else _QUIET

    def test(row: Row) -> tuple[str, str] | None:
        quiet = row.worker.quiet
        if len(spans) < _TELLING or quiet is None or quiet < least or row.worker.state == "ended":
            return None
        return f"quiet for {duration(quiet)}", ODD

    return test


def _idle(running: Sequence[Row]) -> _Test:
    """Return whether a rank uses hardly any CPU while most others are busy."""
    used = [row.cpu for row in running if row.cpu is not None]
    usual = median_high(used) if len(used) > 1 else 0.0

    def test(row: Row) -> tuple[str, str] | None:
        is_idle = row.cpu is not None and row.cpu < _IDLE and usual > _BUSY
        return (f"idle: {row.cpu:.0f}% of a core, others {usual:.0f}%", ODD) if is_idle else None

    return test


def _behind(running: Sequence[Row]) -> _Test:
    """Return whether a rank is two or more steps behind most others."""
    steps = [row.worker.progress.step for row in running if row.worker.progress is not None]
    usual = median_high(steps) if len(steps) > 1 else 0

    def test(row: Row) -> tuple[str, str] | None:
        progress = row.worker.progress
        behind = usual - progress.step if progress is not None else 0
        if behind < 2:
            return None
        return f"{count(behind, 'step')} behind", ODD

    return test


def _large(running: Sequence[Row]) -> _Test:
    """Return whether a rank uses by far the most memory: of GPUs if that is known, else of the host."""
    on_gpus = {row.worker.rank: row.worker.gpu_memory for row in running if row.worker.gpu_memory is not None}
    used = on_gpus or {row.worker.rank: row.worker.rss for row in running}
    usual = median_low(used.values()) if used else 0
    least = max(usual * _MUCH_MORE, usual + _MORE_MEMORY, *used.values()) if len(used) > 1 else inf

    def test(row: Row) -> tuple[str, str] | None:
        own = used.get(row.worker.rank, 0)
        if own < least:
            return None
        return f"{'GPU ' if on_gpus else ''}memory {size(own)}, others {size(usual)}", ODD

    return test


def _together(different: Collection[_Different]) -> list[Words]:
    """Return a row for all ranks that differ in the same way, what matters most first."""
    found: dict[tuple[int, str, str], list[Row]] = {}
    for each in sorted(different, key=lambda each: (each.order, each.row.worker.rank)):
        found.setdefault((each.order, each.text, each.style), []).append(each.row)
    made = []
    for (_, text, style), rows in found.items():
        last = printable(rows[0].worker.last) if len(rows) == 1 else ""
        host = f" on {rows[0].host}" if len({row.host for row in rows}) == 1 else ""
        who = these_ranks([row.worker.rank for row in rows])
        made.append(line((who, NAME), (host, NOTE), ": ", (text, style), (f": {last}" if last else "", NOTE)))
    return made


def _steps(row: Row) -> tuple[int, int | None] | None:
    progress = row.worker.progress
    return (progress.step, progress.total) if progress is not None else None


def _does(row: Row) -> str:
    return "ended" if row.worker.how == ENDED_WELL else row.worker.state
