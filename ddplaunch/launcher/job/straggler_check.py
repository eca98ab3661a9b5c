"""Asks all nodes from time to time when their ranks came to their collectives, and says which rank comes last. Opens nothing.

It begins once a worker has a process group, and runs in the coordinator. What is compared is compared in a child: of many ranks
that takes its time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from msgspec.structs import asdict, replace

from ddplaunch.launcher.tell.job_reporter import JobReporter
from ddplaunch.record.seen.stragglers import Clock, History, Steps, Straggler, compare
from ddplaunch.system.errors import call_or_report
from ddplaunch.system.loop.loop import Loop

if TYPE_CHECKING:  # msgspec's are imported for the first reading, when the workers have long started
    from ddplaunch.launcher.decide.job import Member
    from ddplaunch.launcher.job.questions import Questions
    from ddplaunch.record.window.questions import Answer, NodeArrivals

WORKERS_WITHIN = 2.0  # seconds that workers have to answer
TRAVEL_TIME = 3.0  # seconds of an answer besides, for the children that ask them and for the channel
_COMPARED_WITHIN = 20.0  # seconds, on a busy machine
_NAMED_AGAIN_AFTER = 300.0  # seconds from one report to the next, and twice as long each time that the rank is the same
# nanoseconds: if a host's time of day has moved by more against its monotonic clock, it was set
_LARGEST_DRIFT = 2_000_000
# bytes of lines about collectives: after so many, and each time again, they are kept half as often
_BYTES_TO_DOUBLING = 1 << 17
_MOST_RANKS_READ_WHOLLY = 128  # ranks of which all collectives are compared; of n times as many, only every n-th


class _LastReport(NamedTuple):
    """The last time that a rank was named."""

    rank: int
    at: float  # monotonic seconds
    pause_if_same: float  # seconds in which the same rank is not named again


class _Coordinator(Protocol):
    """The coordinator, as far as the check needs it."""

    @property
    def questions(self) -> Questions: ...
    def members_at_work(self) -> Mapping[int, Member] | None: ...
    def clock_offset(self, id: int) -> tuple[float, float]: ...


class StragglerCheck:
    """Makes readings of the generation that runs, each a question to all nodes, and keeps what they have shown."""

    def __init__(self, loop: Loop, every: float, coordinator: _Coordinator, reporter: JobReporter) -> None:
        """Read nothing yet; once begun, read every so many seconds."""
        self._loop = loop
        self._every = every
        self._coordinator = coordinator
        self._reporter = reporter
        self._kept_bytes = 0  # of the lines about collectives in the record of the run
        self._keep_timings_from = 0.0  # monotonic seconds: of readings before, the record gets no lines
        self._history = History()  # what the readings of this generation have shown
        self._hosts: dict[int, str] = {}  # by rank, where there are several
        # by how many nanoseconds a node's time of day was last ahead of its monotonic clock, by member: shows whether it leaps
        self._walls: dict[int, int] = {}
        self._is_reading = False  # a question is not answered by all, or the answers are being compared
        self._last_report = _LastReport(-1, 0.0, 0.0)  # none: the first one waits for no time
        self.last_pace: float | None = None  # steps per second, when last known: still there after the job's last step
        self.last_steps: int | None = None  # about how many this generation has made, when last known
        # not set: no generation has a process group, or the check has failed
        self._next_reading_at = loop.timer(None, self._on_time, may_come_late=True)

    def begin(self) -> None:
        """Begin: a worker of this generation has a process group."""
        self._history, self._hosts, self.last_steps = History(), {}, None
        self._next_reading_at.set(self._loop.now() + self._every)

    def stop(self) -> None:
        """Read no more; what was found is kept."""
        self._next_reading_at.cancel()

    def _on_time(self) -> None:
        """Read now, unless the last reading goes on or no node is to be asked. Called by the loop."""
        self._next_reading_at.set(self._loop.now() + self._every)
        members = self._coordinator.members_at_work()
        if members is not None and not self._is_reading:
            self._is_reading = True
            self.call_or_give_up(self._read, members)

    def call_or_give_up(self, call: Callable[..., None], *arguments: Any) -> None:
        """Call this; if it fails, warn, and look for stragglers no more: no job ends for that."""
        call_or_report(partial(call, *arguments), self._give_up)

    def _give_up(self, why: str) -> None:
        self.stop()
        self._reporter.print(f"warning: stragglers are no longer looked for: {why}")

    def _read(self, members: Mapping[int, Member]) -> None:
        """Ask all nodes when their ranks came to the collectives: of many ranks only every n-th time, so that all fit."""
        from ddplaunch.record.window.questions import AskArrivals

        ranks = sum(member.workers for member in members.values())
        question = AskArrivals(within=WORKERS_WITHIN, every=max(1, ranks // _MOST_RANKS_READ_WHOLLY))
        reading = _Reading(self, self._history, len(members))
        self._coordinator.questions.ask(question, WORKERS_WITHIN + TRAVEL_TIME, reading)

    def add_answer(self, reading: _Reading, member: Member, answer: Answer) -> None:
        """Add what a node answers to a reading, unless the node has no answer, or its clock cannot be compared with ours."""
        from ddplaunch.record.window.questions import NodeArrivals

        if isinstance(answer, NodeArrivals) and (clock := self._clock_of(member, answer.wall)) is not None:
            reading.add(member, answer, clock)

    def _clock_of(self, member: Member, wall: int) -> Clock | None:
        """Return how the times of a node come to our clock; None if that node's time of day was set since the last reading.

        `wall` is by how many nanoseconds that time of day is ahead of the node's monotonic clock now.
        """
        last_wall, self._walls[member.id] = self._walls.get(member.id, wall), wall
        if abs(wall - last_wall) > _LARGEST_DRIFT:
            return None
        offset, error = self._coordinator.clock_offset(member.id)
        return Clock(ahead=wall - round(offset * 1e9), error=round(error * 1e9))

    def compare_answers(self, reading: _Reading) -> None:
        """Have a child compare the answers, if any recorder has answered."""
        nothing = _Compared([], [])
        if not reading.hosts:
            self._on_compared(reading, nothing)
            return
        then = partial(self.call_or_give_up, self._on_compared, reading)
        self._loop.ask(reading.compared, nothing, then, within=_COMPARED_WITHIN)

    def _on_compared(self, reading: _Reading, compared: _Compared) -> None:
        """Take the result of the child: keep the timings, and report a straggler."""
        self._is_reading = False
        self._keep(compared.timings)
        has_generation_ended = reading.history is not self._history or not self._next_reading_at.is_set
        if has_generation_ended:
            return
        self._history.add(compared.steps, time.monotonic())
        self.last_pace, self.last_steps = self.pace or self.last_pace, self.steps or self.last_steps
        if reading.nodes > 1 or self._hosts:  # nodes that end before the others are still those of their ranks
            self._hosts = {**self._hosts, **reading.hosts}
        self._report_straggler()

    def _keep(self, timings: list[dict[str, Any]]) -> None:
        """Have the record of the run keep these lines about collectives; the more bytes it has, the longer it gets no more."""
        if not timings or time.monotonic() < self._keep_timings_from:
            return
        self._kept_bytes += sum(map(self._reporter.keep_collectives, timings))
        doublings = self._kept_bytes // _BYTES_TO_DOUBLING
        half = self._every / 2  # of the time to the next reading, which is kept too as long as nothing is doubled
        self._keep_timings_from = time.monotonic() + half * 2**doublings

    def _report_straggler(self) -> None:
        """Report the straggler, unless the same rank was reported not long ago: the more often it was, the longer ago."""
        straggler, now, last = self.straggler, time.monotonic(), self._last_report
        if straggler is None:
            return
        is_same = straggler.rank == last.rank
        # another rank has to wait for no more than _NAMED_AGAIN_AFTER, however often the last one was named
        pause = last.pause_if_same if is_same else min(last.pause_if_same, _NAMED_AGAIN_AFTER)
        if now - last.at < pause:
            return
        self._last_report = _LastReport(straggler.rank, now, 2 * last.pause_if_same if is_same else _NAMED_AGAIN_AFTER)
        self._reporter.report_straggler(str(straggler), asdict(straggler), self.pace)

    @property
    def straggler(self) -> Straggler | None:
        """The rank that the last readings have shown to come last."""
        found = self._history.straggler
        return None if found is None else replace(found, host=self._hosts.get(found.rank, ""))

    @property
    def described_straggler(self) -> tuple[str, dict[str, Any]] | None:
        """The same in a sentence and as data."""
        found = self.straggler
        return None if found is None else (str(found), asdict(found))

    @property
    def pace(self) -> float | None:
        """Steps in a second."""
        return self._history.pace

    @property
    def steps(self) -> int | None:
        """About how many steps the job had made at the last reading; None while it makes none, or that is not known."""
        return self._history.steps


class _Compared(NamedTuple):
    """What the answers of one reading show together."""

    steps: list[Steps]  # who was last in the steps of each process group
    timings: list[dict[str, Any]]  # lines for the record of the run


class _Reading:
    """One question to all nodes, and what they answer."""

    def __init__(self, check: StragglerCheck, history: History, nodes: int) -> None:
        """`history` is that of the generation in which the question is asked, `nodes` the number of those that are asked."""
        self._check = check
        self.history = history
        self.nodes = nodes
        self.hosts: dict[int, str] = {}  # of the ranks whose recorders have answered
        self._answers: list[tuple[NodeArrivals, Clock]] = []

    def on_answer(self, member: Member, answer: Answer) -> None:
        """Have the check add the answer of a node. Called by the questions."""
        self._check.call_or_give_up(self._check.add_answer, self, member, answer)

    def on_all_answered(self) -> None:
        """Have the check compare the answers. Called by the questions."""
        self._check.call_or_give_up(self._check.compare_answers, self)

    def add(self, member: Member, answer: NodeArrivals, clock: Clock) -> None:
        """Add the answer of a node, whose times come to our clock by `clock`."""
        self._answers.append((answer, clock))
        self.hosts |= {each.rank: member.host for each in answer.series}

    def compared(self) -> _Compared:
        """Compare all that was answered. Runs in a child, and catches what fails: the loop would raise it again."""
        try:
            from ddplaunch.record.seen.arrivals import rows_of_arrivals

            found = [each for answer, _ in self._answers for each in answer.series]
            clocks = {each.rank: clock for answer, clock in self._answers for each in answer.series}
            return _Compared(compare(found, clocks), rows_of_arrivals(found, clocks))
        except Exception:  # noqa: BLE001 - whatever it is, such as a module of ours that was removed meanwhile
            return _Compared([], [])
