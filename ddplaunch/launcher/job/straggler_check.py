"""Has all nodes asked from time to time when their workers came to their collectives, and says who comes last. Opens nothing.

It begins once a worker has a process group. What is compared is compared in a child: of many ranks that takes its time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec.structs import asdict, replace

from ddplaunch.record.seen.stragglers import Clock, History, Steps, Straggler, compare
from ddplaunch.system.errors import expendable
from ddplaunch.system.loop.loop import Loop

if TYPE_CHECKING:  # msgspec's are imported for the first reading, when the workers have long started
    from ddplaunch.launcher.decide.job import Member
    from ddplaunch.launcher.job.questions import Asker
    from ddplaunch.record.window.questions import Answer, AskArrivals, NodeArrivals

WITHIN = 2.0  # seconds that workers have
ON_THE_WAY = 3.0  # seconds, for the children that ask them and for the channel
_COMPARED_WITHIN = 20.0  # seconds, on a busy machine
_AGAIN = 300.0  # seconds from one word to the next, and twice as long each time that it is the same
_JUMP = 2_000_000  # nanoseconds by which a clock was set
_DOUBLES = 1 << 17  # bytes about collectives after which they are kept half as often
_COMPARED = 128  # ranks of which all is compared; of more, less each


class _LastReport(NamedTuple):
    """The last time that a rank was named."""

    rank: int
    at: float  # monotonic seconds
    enough_for: float  # seconds in which the same rank is not named again


class StragglerCheck:
    """What readings have shown of the generation that runs."""

    def __init__(
        self,
        loop: Loop,
        every: float,
        *,
        members: Callable[[], Mapping[int, Member] | None],
        ask: Callable[[AskArrivals, float, Asker], None],
        offset: Callable[[int], tuple[float, float]],
        report: Callable[[str, Mapping[str, Any], float | None], None],
        warn: Callable[[str], None],
        keep: Callable[[Mapping[str, Any]], int] = lambda _: 0,
    ) -> None:
        """Check every so many seconds; `members` returns the nodes to ask, None while no node is to be asked.

        `offset` gives what is to be added to a node's times, in seconds, and how wrong that may be. `keep` writes a line about
        when ranks came to their collectives, and returns its bytes.
        """
        self._keep = keep
        self._kept_bytes = 0
        self._keeps_again_at = 0.0  # monotonic seconds
        self._warn = warn
        self._every = every
        self._ask = ask
        self._loop = loop
        self._members = members
        self._offset = offset
        self._report = report
        self._history = History()
        self._hosts: dict[int, str] = {}  # by rank, where there are several
        self._walls: dict[int, int] = {}  # what the wall clock of a node showed last, in nanoseconds, by member
        self._is_reading = False
        self._last_report = _LastReport(-1, 0.0, 0.0)
        self.last_pace: float | None = None  # also of a job that has made its last step
        self.last_steps: int | None = None  # about how many this generation has made
        self._next = loop.timer(None, self._on_time, may_rest=True)

    def begin(self) -> None:
        """Begin: a worker of this generation has a process group."""
        self._history, self._hosts, self.last_steps = History(), {}, None
        self._next.set(self._loop.now() + self._every)

    def stop(self) -> None:
        """Read no more; what was found is kept."""
        self._next.cancel()

    def _on_time(self) -> None:
        self._next.set(self._loop.now() + self._every)
        members = self._members()
        if members is not None and not self._is_reading:
            self._is_reading = True
            self._guard(lambda: self._read(members))

    def _guard(self, call: Callable[[], None]) -> None:
        """Call this; if it fails, warn, and look for stragglers no more."""

        def failed(why: str) -> None:
            self.stop()
            self._warn(f"warning: stragglers are no longer looked for: {why}")

        expendable(call, failed)

    def _read(self, members: Mapping[int, Member]) -> None:
        """Ask all nodes when their ranks came to the collectives, and compare the answers in a child."""
        from ddplaunch.launcher.job.questions import Asker
        from ddplaunch.record.window.questions import AskArrivals

        reading, history, several = _Reading(self._clock), self._history, len(members) > 1

        def compared(found: tuple[list[Steps], list[dict[str, Any]]]) -> None:
            """Take the answer of the child: keep the timings, less and less often, and report a straggler."""
            self._is_reading = False
            steps, timings = found
            if timings and time.monotonic() >= self._keeps_again_at:
                self._kept_bytes += sum(map(self._keep, timings))
                self._keeps_again_at = time.monotonic() + (self._every / 2) * 2 ** (self._kept_bytes // _DOUBLES)
            if history is self._history and self._next.is_set:
                history.add(steps, time.monotonic())
                self.last_pace, self.last_steps = self.pace or self.last_pace, self.steps or self.last_steps
                if several or self._hosts:  # nodes that end before the others are still those of their ranks
                    self._hosts = {**self._hosts, **reading.hosts}
                self._report_straggler()

        def done() -> None:
            nothing: tuple[list[Steps], list[dict[str, Any]]] = ([], [])
            if not reading.hosts:  # no recorder has answered
                compared(nothing)
                return
            self._loop.ask(
                reading.compare, nothing, lambda found: self._guard(lambda: compared(found)), within=_COMPARED_WITHIN
            )

        ranks = sum(member.workers for member in members.values())
        question = AskArrivals(WITHIN, max(1, ranks // _COMPARED))
        taken = Asker(
            answered=lambda member, answer: self._guard(lambda: reading.on_answer(member, answer)),
            done=lambda: self._guard(done),
        )
        self._ask(question, WITHIN + ON_THE_WAY, taken)

    def _clock(self, member: Member, wall: int) -> Clock | None:
        """Return how the times of a node come to our clock; None if that node's clock was set since the last reading."""
        last_wall, self._walls[member.id] = self._walls.get(member.id, wall), wall
        if abs(wall - last_wall) > _JUMP:
            return None
        offset, error = self._offset(member.id)
        return Clock(ahead=wall - round(offset * 1e9), error=round(error * 1e9))

    def _report_straggler(self) -> None:
        """Report the straggler, unless the same rank was reported not long ago."""
        straggler, now = self.straggler, time.monotonic()
        if straggler is None:
            return
        last, is_same = self._last_report, straggler.rank == self._last_report.rank
        if now - last.at < (last.enough_for if is_same else min(last.enough_for, _AGAIN)):
            return
        self._last_report = _LastReport(straggler.rank, now, 2 * last.enough_for if is_same else _AGAIN)
        self._report(str(straggler), asdict(straggler), self.pace)

    @property
    def straggler(self) -> Straggler | None:
        """The rank that the last readings have shown to come last."""
        found = self._history.straggler
        return None if found is None else replace(found, host=self._hosts.get(found.rank, ""))

    @property
    def last_word(self) -> tuple[str, dict[str, Any]] | None:
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


class _Reading:
    """What the nodes answer to one question."""

    def __init__(self, clock: Callable[[Member, int], Clock | None]) -> None:
        self._clock = clock
        self._answers: list[tuple[NodeArrivals, Clock]] = []
        self.hosts: dict[int, str] = {}

    def on_answer(self, member: Member, answer: Answer) -> None:
        """Take the answer of a node."""
        from ddplaunch.record.window.questions import NodeArrivals

        if isinstance(answer, NodeArrivals) and (clock := self._clock(member, answer.wall)) is not None:
            self._answers.append((answer, clock))
            self.hosts |= {each.rank: member.host for each in answer.series}

    def compare(self) -> tuple[list[Steps], list[dict[str, Any]]]:
        """Compare all that was answered, and return the lines about it too; runs in a child."""
        try:
            from ddplaunch.record.seen.arrivals import of_arrivals

            found = [each for answer, _ in self._answers for each in answer.series]
            clocks = {each.rank: clock for answer, clock in self._answers for each in answer.series}
            return compare(found, clocks), of_arrivals(found, clocks)
        except Exception:  # noqa: BLE001 - it would be raised in the agent, where it is no reason to end a job
            return [], []
