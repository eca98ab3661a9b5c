"""The process that makes the rows of --live, its viewer: it asks the run as `ddplaunch top` does, and writes to no terminal."""

from __future__ import annotations

import socket
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from math import inf
from statistics import median_high, median_low
from typing import NamedTuple

from msgspec import Struct

from ddplaunch.reach.pipes import MESSAGE, ROWS, STDERR
from ddplaunch.record.folders import short
from ddplaunch.record.run_socket import SocketPath
from ddplaunch.record.seen.collectives import Wait, waits
from ddplaunch.record.window import requests
from ddplaunch.record.window.questions import AskStacks, AskStatus
from ddplaunch.record.window.requests import LONGEST_DRAW, decode_draw
from ddplaunch.system.console.streams import use_colour
from ddplaunch.system.console.tables import BAD, NAME, NOTE, ODD, Look, Piece, Words, line, section, written
from ddplaunch.system.errors import LaunchError
from ddplaunch.system.fields import line as printable
from ddplaunch.system.words import count, duration, size, these_ranks
from ddplaunch.tools.runs import client, find, ps, talk
from ddplaunch.tools.runs.client import RunReplies
from ddplaunch.tools.runs.columns import ENDED_WELL, Row, rows_of, state_of, totals
from ddplaunch.tools.runs.find import of_running
from ddplaunch.tools.runs.ps import PHASES, idle_in_words, progress_of, written_metrics, written_pace, written_progress

_ANSWER_WITHIN = 0.5  # seconds that the nodes have to answer
_LOOK_EVERY = 1.0  # seconds from one look to the next, more where one costs more than
_SHARE_OF_CORE = 0.006  # of a core: here, and in the agent of the node with the most workers
_CPU_OF_WORKER = 1e-4  # seconds of that agent's CPU for each of them, as was measured
_LONGEST_PAUSE = 10.0  # seconds from one look to the next, whatever it costs
_CONFIRM_AFTER = 2.0  # seconds from a first look that finds ranks waiting to the second one
# seconds from one question about collectives to the next, twice as long where the ranks have moved
_ASK_AGAIN_AFTER = 10.0
_MOST_LISTED = 16  # workers that a snapshot lists
_PART = MESSAGE // 4  # characters in one reply: UTF-8 has at most four bytes for each


def serve(connection: socket.socket, env: Mapping[str, str]) -> None:
    """Answer the requests of the front (the process that was typed) for rows, or for a snapshot of the job, until it ends."""
    viewer = _Viewer(env)
    while data := connection.recv(LONGEST_DRAW):
        draw = decode_draw(data)
        if draw.snapshot:
            replies = replies_with(STDERR, f"{viewer.snapshot(draw.socket_path, draw.columns)}\n")
        else:
            rows = viewer.rows(draw.socket_path, draw.columns, draw.lines)
            replies = replies_with(ROWS, rows[:_PART])  # in one reply, since each replaces the rows before
        for reply in replies:
            connection.send(reply)


def replies_with(stream: bytes, drawn: str) -> list[bytes]:
    """Return the replies, at least one, that carry what was drawn to a stream of the front."""
    starts = range(0, max(1, len(drawn)), _PART)
    return [stream + drawn[start : start + _PART].encode(errors="replace") for start in starts]


class _Viewer:
    """Asks the job for the status of its workers (a look) as often as that costs little, and makes what --live shows."""

    def __init__(self, env: Mapping[str, str]) -> None:
        """Know no job yet: each request of the front names the socket of its job."""
        self._colour = use_colour(env, isatty=True)
        self._live_rows = LiveRows()
        self._next_look_at = 0.0  # monotonic seconds, as all times here
        self._confirmed_waits = ConfirmedWaits()

    def rows(self, path: SocketPath, columns: int, lines: int) -> str:
        """Return the rows for a terminal of this size, after a look at the job if one is due."""
        cpu_before, now = time.process_time(), time.monotonic()
        if now >= self._next_look_at and (replies := client.ask(path, AskStatus(), _ANSWER_WITHIN)) is not None:
            self._live_rows.on_replies(replies, time.monotonic())
            if self._live_rows.lacks_signs_of_life(now) and now >= self._confirmed_waits.ask_at:
                self._ask_for_waits_in_collectives(path)
            workers_by_node = Counter(id(node) for node, _ in replies.workers)
            agents_cpu = max(workers_by_node.values(), default=0) * _CPU_OF_WORKER
            cpu = max(time.process_time() - cpu_before, agents_cpu)
            pause = cpu / _SHARE_OF_CORE  # after which looks have cost that share of the time
            self._next_look_at = now + max(_LOOK_EVERY, min(pause, _LONGEST_PAUSE))
        # half of the lines are left to the output of workers
        width = columns - 1  # a row as wide as the terminal could be followed by an empty one
        shown = self._live_rows.render(time.monotonic(), width, max(1, lines // 2))
        return written([section(*shown)], Look(self._colour, columns)) if shown else ""

    def _ask_for_waits_in_collectives(self, path: SocketPath) -> None:
        """Ask in which collectives ranks wait, and show those in which they waited at the last question too."""
        question = AskStacks(talk.STACKS_WITHIN, frames=False)  # for which no worker is interrupted
        replies = client.ask(path, question, question.within + _ANSWER_WITHIN)
        found = waits(replies.samples if replies is not None else [])
        self._live_rows.show_waits(self._confirmed_waits.on_found(found, time.monotonic()))

    def snapshot(self, path: SocketPath, columns: int) -> str:
        """Return what `ddplaunch ps` shows, if the workers are few, then what `ddplaunch stacks` shows."""
        look = Look(self._colour, columns)
        replies = client.ask(path, AskStatus(), _ANSWER_WITHIN)
        if replies is None:
            return "ddplaunch: the job has just ended"
        run = of_running(replies)
        has_few = replies.run is not None and replies.run.world_size <= _MOST_LISTED
        shown = written([ps.render(replies) if has_few else ps.facts_of(replies)], look)
        try:
            return f"{shown}\n{talk.text_of_stacks(run, talk.WantedStacks(), look)}"
        except LaunchError as error:
            return f"{shown}\nddplaunch: {error.message}"


class ConfirmedWaits:
    """Which waits of ranks in collectives are shown, those that two questions in a row have found, and when to ask next."""

    def __init__(self) -> None:
        self.ask_at = 0.0  # not before this time; monotonic seconds
        self._pause = _ASK_AGAIN_AFTER  # seconds from the last question to the next
        self._found: list[Wait] = []  # by the last question

    def on_found(self, found: list[Wait], now: float) -> list[Wait]:
        """Return those of the waits that are confirmed, and plan the next question."""
        before, self._found = self._found, found
        confirmed = [wait for wait in found if wait in before]
        if found and not before:  # seen for the first time
            self.ask_at = now + _CONFIRM_AFTER
            return confirmed
        are_only_slow = bool(found) and not confirmed  # all have moved on: it is not worth asking so often
        if are_only_slow:
            self._found = []  # what waits next is to be seen twice again
        self._pause = self._pause * 2 if are_only_slow else _ASK_AGAIN_AFTER
        self.ask_at = now + self._pause
        return confirmed


_MOST_ROWS = 8  # rows for ranks that differ
_GAP = "  "
_RECENT_SECONDS = 30.0  # seconds in which steps are counted
_LEAST_SPAN = 5.0  # seconds between two steps that say how fast the job is
_QUIET_SECONDS = 10.0  # seconds without output, and
_ENOUGH_TO_COMPARE = 3  # ranks that write: of two, one that writes nothing may well be the usual one
_TIMES_QUIETER = 4  # times as many as the others', from which a rank is quiet
# percent of a core: a rank below the one is idle where the others are above the other
_IDLE_PERCENT, _BUSY_PERCENT = 5.0, 50.0
_TIMES_AS_MUCH = 1.2  # times the memory of the others, and
_BYTES_MORE = 256 << 20  # bytes more, from which a rank's memory is shown
_STOPPED_AFTER_STEPS = 5  # times as long as a step usually takes: then the job makes none
_STOPPED_AFTER = 10.0  # seconds without a step or a line from any rank
_RUNNING = ("running", "debugged")  # states of which a rank may still differ


class _Difference(Struct, frozen=True):
    """How a rank differs from the others."""

    text: str
    style: str = ODD


class _Different(Struct, frozen=True):
    """A rank that differs, by the first test that finds a difference."""

    order: int  # of the test: what matters most comes first
    how: _Difference
    row: Row


class _Reached(NamedTuple):
    """How far the job was at a time (monotonic seconds)."""

    at: float
    step: int


class LiveRows:
    """The rows of --live, made of what the nodes replied to the latest looks (questions for the status of all workers)."""

    def __init__(self) -> None:
        """Know nothing yet."""
        self._replies: RunReplies | None = None  # the latest ones
        self._rows: list[Row] = []  # the workers of these replies
        self._read_at = 0.0  # when these came; all times here are monotonic seconds
        self._steps: deque[_Reached] = deque()  # of about the last half minute
        self._signs_of_life: object = None  # what was seen last of all that changes while ranks work
        self._changed_at = 0.0  # when that was seen for the first time
        self._waits: tuple[Wait, ...] = ()  # empty while ranks work, and until it was found out

    def on_replies(self, replies: RunReplies, at: float) -> None:
        """Keep what the nodes reply to a look at this time (monotonic seconds)."""
        nobody_has_answered = replies.run is None and not replies.nodes
        if self._replies is not None and nobody_has_answered:
            self._replies.problem = replies.problem  # what was known before is still shown
            return
        self._rows = rows_of(replies, self._rows, at - self._read_at)
        self._replies, self._read_at = replies, at
        signs_of_life = [(row.worker.pid, row.worker.written, _steps(row)) for row in self._rows]
        if signs_of_life != self._signs_of_life:
            self._signs_of_life, self._changed_at = signs_of_life, at
            self._waits = ()  # nobody is known to wait any more
        self._note_step(replies, at)

    def _note_step(self, replies: RunReplies, at: float) -> None:
        """Note which step the job has reached; after a restart, count from the step where the job resumes."""
        progress, steps = progress_of(replies), self._steps
        if progress is None:
            return
        if steps and progress.step < steps[-1].step:
            steps.clear()
        if not steps or progress.step > steps[-1].step:
            steps.append(_Reached(at - progress.age, progress.step))  # `age` seconds ago the script said it
        while len(steps) > 2 and steps[1].at < at - _RECENT_SECONDS:
            steps.popleft()

    def lacks_signs_of_life(self, at: float) -> bool:
        """Whether no rank has made a step or written a line for some time: which collective they wait in is worth a question."""
        return bool(self._rows) and at - self._changed_at >= _STOPPED_AFTER

    def show_waits(self, waits: Iterable[Wait]) -> None:
        """Show who waits in which collective, until a rank makes a step or writes a line."""
        self._waits = tuple(waits)

    # --- the rows

    def render(self, at: float, width: int, height: int) -> list[Words]:
        """Return what a terminal of so many columns shows at this time, in so many rows at most."""
        if self._replies is None:
            return []
        different = self._different_ranks()
        by_difference = _rows_by_difference(different)
        ranks = {each.row.worker.rank for each in different}
        rest = [row for row in self._rows if row.worker.rank not in ranks]
        head = [self._job_row(at, width)]
        below = [self._row_of_rest(rest, is_all=not different)] if self._rows else []
        problems = [line((text, ODD)) for text in find.silent(self._replies.nodes)]
        if self._replies.problem:
            problems.append(line((printable(self._replies.problem), ODD)))
        middle = [*problems, *by_difference][: min(_MOST_ROWS, max(0, height - len(head) - len(below)))]
        rows = [*head, *middle, *below][:height]
        for row in rows:
            row.truncate(width, overflow="ellipsis")
        return rows

    def _job_row(self, at: float, width: int) -> Words:
        """Return the row of the job: its name, and as many of its facts as there is room for, in their order of importance."""
        assert self._replies is not None
        run = self._replies.run
        if run is None:
            return line((short(find.name_of(self._replies)), NAME))
        name = line((short(run.run_id), NAME))
        facts = [line(fact) for fact in self._facts(run, at)]
        parts, used = [name], len(short(run.run_id))
        for fact in facts:
            if used + len(_GAP) + fact.cell_len <= width:
                parts += [line(_GAP), fact]
                used += len(_GAP) + fact.cell_len
        # a terminal that is too narrow for the name shows the phase or the time
        return Words("", no_wrap=True, overflow="ignore").join(parts) if used <= width else facts[0]

    def _facts(self, run: requests.Run, at: float) -> Iterator[Piece]:
        """Yield what the row of the job says behind its name, what matters most first."""
        assert self._replies is not None
        progress, steps_per_second = progress_of(self._replies), self._pace()
        pause = at - self._steps[-1].at if self._steps else 0.0  # seconds since the last step
        usual = 1 / steps_per_second if steps_per_second else 0.0  # seconds a step
        has_stopped = pause > max(_STOPPED_AFTER, _STOPPED_AFTER_STEPS * usual)
        if idle := idle_in_words(run):
            yield idle, ODD
        elif run.phase != "running":
            yield PHASES.get(run.phase, run.phase), ODD
        yield duration(run.seconds + at - self._read_at)  # `seconds` were true when the reply was read
        if told := written_progress(progress, run):
            yield told, NAME
        if progress is not None:
            is_at_last_step = progress.step == progress.total
            if has_stopped and run.phase == "running" and not is_at_last_step:
                yield f"no step for {duration(pause)}", ODD
            elif progress.total and steps_per_second and progress.step < progress.total:
                yield f"{duration((progress.total - progress.step) / steps_per_second)} left"
        if steps_per_second and not has_stopped:
            yield written_pace(steps_per_second)
        if progress is not None:
            yield from written_metrics(progress)
        if run.restarts:
            yield f"restart {run.restarts} of {run.max_restarts}", ODD
        if alive := [row for row in self._rows if row.is_alive]:
            yield from totals(alive)

    def _pace(self) -> float | None:
        """Return steps a second: those of the last half minute, else all that the script has told, else the collectives'."""
        assert self._replies is not None
        steps, progress, run = self._steps, progress_of(self._replies), self._replies.run
        if len(steps) > 1 and steps[-1].at - steps[0].at >= _LEAST_SPAN:
            return (steps[-1].step - steps[0].step) / (steps[-1].at - steps[0].at)
        if progress is not None and progress.seconds and progress.step > progress.first_step:
            return (progress.step - progress.first_step) / progress.seconds
        return run.steps_per_second if run is not None else None

    def _different_ranks(self) -> list[_Different]:
        """Return the ranks that differ from the others, and how; a rank once. [] if all ranks differ in the same way."""
        running = [row for row in self._rows if row.worker.state in _RUNNING and row.worker.pid]
        # what matters most first; each returns how a rank differs, or None
        tests = (_ended, self._missing, _in_other_state, _starts, _quiet(running), _idle(running), _behind(running),
                 _large(running), self._straggles)  # fmt: skip
        found = []
        for row in self._rows:
            differences = ((order, test(row)) for order, test in enumerate(tests))
            first = next(((order, how) for order, how in differences if how is not None), None)
            if first is not None:
                found.append(_Different(*first, row))
        all_differ = len(found) == len(self._rows)
        # as at the start, when all ranks import torch: none differs from another
        return [] if all_differ and len({(each.order, each.how.text) for each in found}) == 1 else found

    def _missing(self, row: Row) -> _Difference | None:
        for wait in self._waits:
            if row.worker.rank in wait.missing:
                verb = "waits" if len(wait.waiting) == 1 else "wait"
                return _Difference(f"has not reached {wait.collective}, in which {these_ranks(wait.waiting)} {verb}")
        return None

    def _straggles(self, row: Row) -> _Difference | None:
        run = self._replies.run if self._replies is not None else None
        named = f"rank {row.worker.rank} "  # the agent's sentence begins with it: "rank 3 comes last in ..."
        if run is not None and run.straggler.startswith(named):
            return _Difference(printable(run.straggler.removeprefix(named)))
        return None

    def _row_of_rest(self, rest: Sequence[Row], *, is_all: bool) -> Words:
        """Return the row of the ranks that do not differ: what all of them do, or how many do what."""
        if not rest:
            return line(("no other rank", NOTE))
        who = f"{len(rest)} more"
        if is_all:
            who = f"all {len(rest)}" if len(rest) > 1 else "rank 0"
        ranks = {row.worker.rank for row in rest}
        doing: Counter[str] = Counter()
        for wait in self._waits:
            if here := ranks & set(wait.waiting):
                doing[f"in {wait.collective}"] += len(here)
                ranks -= here
        doing.update(_does(row) for row in rest if row.worker.rank in ranks)
        parts = [text if len(doing) == 1 else f"{number} {text}" for text, number in doing.most_common()]
        steps = [row.worker.progress.step for row in rest if row.worker.progress is not None]
        if len(steps) > 1:
            parts.append(f"step {min(steps):,}" + (f"-{max(steps):,}" if min(steps) < max(steps) else ""))
        quiet = [row.worker.quiet for row in rest if row.worker.quiet is not None]
        if self._waits and quiet:
            parts.append(f"quiet for {duration(min(quiet))}")
        return line((f"{who}: {', '.join(parts)}", NOTE))


# --- the tests: how a rank differs, None where it does not differ in this way. Those that compare ranks are made for all of them

_Test = Callable[[Row], _Difference | None]


def _ended(row: Row) -> _Difference | None:
    return _Difference(printable(row.worker.how), BAD) if row.worker.how not in ("", ENDED_WELL) else None


def _in_other_state(row: Row) -> _Difference | None:
    is_usual = row.worker.state in ("running", "waiting", "ended")
    return None if is_usual else _Difference(state_of(row.worker).plain)


def _starts(row: Row) -> _Difference | None:
    return _Difference("not started yet") if row.worker.state == "waiting" else None


def _quiet(running: Sequence[Row]) -> _Test:
    """Return the test whether a rank has written nothing for much longer than the others that write at all."""
    spans = [row.worker.quiet for row in running if row.worker.quiet is not None]
    least = max(_QUIET_SECONDS, _TIMES_QUIETER * median_low(spans)) if spans else _QUIET_SECONDS

    def test(row: Row) -> _Difference | None:
        quiet = row.worker.quiet
        if len(spans) < _ENOUGH_TO_COMPARE or quiet is None or quiet < least or row.worker.state == "ended":
            return None
        return _Difference(f"quiet for {duration(quiet)}")

    return test


def _idle(running: Sequence[Row]) -> _Test:
    """Return the test whether a rank uses hardly any CPU while most others are busy."""
    used = [row.cpu for row in running if row.cpu is not None]
    usual = median_high(used) if len(used) > 1 else 0.0

    def test(row: Row) -> _Difference | None:
        is_idle = row.cpu is not None and row.cpu < _IDLE_PERCENT and usual > _BUSY_PERCENT
        return _Difference(f"idle: {row.cpu:.0f}% of a core, others {usual:.0f}%") if is_idle else None

    return test


def _behind(running: Sequence[Row]) -> _Test:
    """Return the test whether a rank is two or more steps behind most others."""
    steps = [row.worker.progress.step for row in running if row.worker.progress is not None]
    usual = median_high(steps) if len(steps) > 1 else 0

    def test(row: Row) -> _Difference | None:
        progress = row.worker.progress
        behind = usual - progress.step if progress is not None else 0
        if behind < 2:
            return None
        return _Difference(f"{count(behind, 'step')} behind")

    return test


def _large(running: Sequence[Row]) -> _Test:
    """Return the test whether a rank uses by far the most memory: of GPUs if that is known of any rank, else of the host."""
    on_gpus = {row.worker.rank: row.worker.gpu_memory for row in running if row.worker.gpu_memory is not None}
    used = on_gpus or {row.worker.rank: row.worker.rss for row in running}
    usual = median_low(used.values()) if used else 0
    # no less than the largest: only the rank that uses most can differ
    least = max(usual * _TIMES_AS_MUCH, usual + _BYTES_MORE, *used.values()) if len(used) > 1 else inf

    def test(row: Row) -> _Difference | None:
        own = used.get(row.worker.rank, 0)
        if own < least:
            return None
        return _Difference(f"{'GPU ' if on_gpus else ''}memory {size(own)}, others {size(usual)}")

    return test


def _rows_by_difference(different: Collection[_Different]) -> list[Words]:
    """Return a row for all ranks that differ in the same way, what matters most first."""
    # by the order of the test (the lowest matters most) and what it found
    alike: dict[tuple[int, _Difference], list[Row]] = {}
    for each in sorted(different, key=lambda each: (each.order, each.row.worker.rank)):
        alike.setdefault((each.order, each.how), []).append(each.row)
    made = []
    for (_, how), rows in alike.items():
        last_line = printable(rows[0].worker.last) if len(rows) == 1 else ""  # of output
        host = f" on {rows[0].host}" if len({row.host for row in rows}) == 1 else ""
        who = these_ranks([row.worker.rank for row in rows])
        last_words = f": {last_line}" if last_line else ""
        made.append(line((who, NAME), (host, NOTE), ": ", (how.text, how.style), (last_words, NOTE)))
    return made


def _steps(row: Row) -> tuple[int, int | None] | None:
    progress = row.worker.progress
    return (progress.step, progress.total) if progress is not None else None


def _does(row: Row) -> str:
    return "ended" if row.worker.how == ENDED_WELL else row.worker.state
