"""When it is looked who comes last, and what is said of it; the nodes' answers and the children are played by functions."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import pytest

from ddplaunch.launcher.decide.job import Member
from ddplaunch.launcher.job.messages import encode, for_coordinator
from ddplaunch.launcher.job.questions import Asker
from ddplaunch.launcher.job.straggler_check import StragglerCheck
from ddplaunch.record.seen import Arrivals
from ddplaunch.record.seen import arrivals as reading
from ddplaunch.record.window.questions import Answered, AskArrivals, NoAnswer, NodeArrivals
from tests.loops import FakeLoop
from tests.unit.builders import arrivals

MS = 1_000_000
EVERY = 30.0
MEMBERS = {id: Member(id=id, host=f"host-{id}", workers=2, requested_rank=None) for id in range(2)}


def late_by(rank: int, late: int, ahead: int, first: int) -> Arrivals:
    """Return the times of a rank at 60 steps of 100 ms."""
    return arrivals(rank, first, [ahead + number * 100 * MS + late for number in range(first, first + 60)])


class Bed:
    """Two nodes of two ranks; node 1's time of day and its other clock are both ahead of ours."""

    def __init__(self) -> None:
        self.asked: list[tuple[AskArrivals, Asker]] = []
        self.said: list[str] = []
        self.warned: list[str] = []
        self.members: dict[int, Member] | None = MEMBERS
        self.loop = FakeLoop(at=0.0)
        self.loop.ask = self._compare  # type: ignore[assignment]  # a child, which this test does without
        bed: Any = self  # in place of the coordinator, its questions and the reporter
        self.questions, self.print = bed, self.warned.append
        self.check = StragglerCheck(self.loop, EVERY, bed, bed)

    def members_at_work(self) -> dict[int, Member] | None:
        return self.members

    def ask(self, question: AskArrivals, _within: float, asker: Asker) -> None:
        self.asked.append((question, asker))

    def clock_offset(self, id: int) -> tuple[float, float]:
        return (-5.0, 0.0) if id else (0.0, 0.0)

    def report_straggler(self, text: str, _facts: object, _pace: float | None) -> None:
        self.said.append(text)

    def keep_collectives(self, _timings: object) -> int:
        return 0

    def _compare(
        self, question: Callable[[], Any], otherwise: Any, answered: Callable[[Any], None], *, within: float
    ) -> None:
        answered(question())

    def begin(self, now: float) -> None:
        """Have a worker make a process group at this time."""
        self.loop.pass_time(now - self.loop.now())
        self.check.begin()

    def expire(self, now: float, members: dict[int, Member] | None = MEMBERS) -> bool:
        """Let the time be `now`; whether the nodes were asked. Without members they are not to be."""
        before, self.members = len(self.asked), members
        self.loop.pass_time(now - self.loop.now())
        return len(self.asked) > before

    def answer(self, late: dict[int, int], *, first: int = 1, set_by: int = 0) -> None:
        """Have both nodes answer."""
        _, asker = self.asked[-1]
        for id, member in MEMBERS.items():
            wall = 7000 * MS * id + (set_by if id else 0)
            ahead = wall + 5000 * MS * id
            series = tuple(late_by(rank, late.get(rank, 0), ahead, first) for rank in (2 * id, 2 * id + 1))
            asker.on_answer(member, NodeArrivals(wall, series))
        asker.on_all_answered()


def test_nobody_is_asked_before_a_worker_has_a_process_group_and_then_now_and_again():
    bed = Bed()
    assert bed.loop.deadline is None
    assert not bed.expire(90.0)
    bed.begin(100.0)
    assert bed.loop.deadline == 130.0
    assert not bed.expire(129.9)
    assert bed.expire(130.5)
    assert bed.loop.deadline == 160.0


def test_who_comes_last_is_named_with_the_host_by_one_clock():
    bed = Bed()
    bed.begin(0.0)
    bed.expire(30.0)
    bed.answer({3: 20 * MS})
    assert bed.said == [
        "rank 3 on host-1 came last to the collectives in 100% of the last 60 steps, 20 ms after the median rank: "
        "20% of a step"
    ]
    bed.expire(60.0)
    bed.answer({3: 20 * MS}, first=61)
    assert len(bed.said) == 1
    assert bed.check.described_straggler is not None


def test_a_node_that_ends_before_the_others_is_still_the_host_of_its_ranks():
    bed = Bed()
    bed.begin(0.0)
    bed.expire(30.0)
    bed.answer({3: 20 * MS})
    bed.expire(60.0, {0: MEMBERS[0]})
    _, asker = bed.asked[-1]
    asker.on_answer(MEMBERS[0], NodeArrivals(0, (late_by(0, 0, 0, 61),)))
    asker.on_all_answered()
    assert bed.check.described_straggler is not None
    assert bed.check.described_straggler[0].startswith("rank 3 on host-1 ")


def test_a_node_whose_clock_was_set_does_not_count_that_time():
    bed = Bed()
    bed.begin(0.0)
    bed.expire(30.0)
    bed.answer({})
    bed.expire(60.0)
    bed.answer({}, first=61, set_by=40 * MS)
    assert bed.said == []
    assert bed.check.straggler is None
    bed.expire(90.0)
    bed.answer({}, first=121, set_by=40 * MS)
    assert bed.check.straggler is None


def test_the_next_reading_waits_for_the_last_and_no_suspended_job_is_read():
    bed = Bed()
    bed.begin(0.0)
    assert not bed.expire(30.0, None)
    assert bed.expire(60.0)
    assert not bed.expire(90.0)
    _, asker = bed.asked[-1]
    asker.on_answer(MEMBERS[0], NoAnswer("was lost before it had answered"))
    asker.on_all_answered()
    assert bed.expire(120.0)


def test_what_is_left_of_the_generation_before_counts_no_more():
    bed = Bed()
    bed.begin(0.0)
    bed.expire(30.0)
    bed.check.stop()
    assert bed.loop.deadline is None
    bed.check.last_steps = 60
    bed.begin(40.0)
    bed.answer({3: 20 * MS})
    assert bed.check.straggler is None
    assert bed.check.last_steps is None
    assert bed.expire(70.0)


def test_what_fails_in_it_ends_the_readings_and_nothing_else():
    bed = Bed()
    bed.begin(0.0)
    bed.expire(30.0)
    _, asker = bed.asked[-1]
    asker.on_answer(MEMBERS[0], object())
    asker.on_answer(None, NodeArrivals(0, ()))
    assert bed.warned[0].startswith("warning: stragglers are no longer looked for: AttributeError")
    assert bed.loop.deadline is None


@pytest.mark.parametrize("late", [0, -500 * MS])
def test_what_is_sent_of_arrivals_arrives(late):
    found = (late_by(0, 0, 10**18, 1), late_by(1, late, 10**18, 1), late_by(1, 0, 10**18, 5))
    message = for_coordinator(encode(Answered(1, NodeArrivals(-7, found))))
    assert isinstance(message, Answered)
    assert isinstance(message.answer, NodeArrivals)
    assert message.answer.series == found
    assert message.answer.series[1].calls == [(step, 10**18 + step * 100 * MS + late) for step in range(1, 61)]


def test_a_comparison_that_is_not_found_any_more_finds_nobody(monkeypatch):
    bed = Bed()
    bed.begin(0.0)
    bed.expire(30.0)
    monkeypatch.setitem(
        sys.modules, "ddplaunch.record.seen.arrivals", None
    )  # its import fails, as that of a removed file
    bed.answer({3: 20 * MS})
    assert bed.check.straggler is None
    assert bed.warned == []  # nothing was raised in the child, and so again in the loop


def test_what_a_node_sends_of_groups_grows_with_its_own_ranks_and_not_with_those_of_the_job():
    entry = {"process_group": ["0"], "profiling_name": "gloo:f", "collective_seq_id": 1, "time_created_ns": 10**18}
    body = json.dumps({"entries": [entry]}).encode()

    def size(members: str) -> int:
        series = (each for rank in range(8) for each in reading.arrivals(rank, [body], {"0": members}))
        return len(encode(Answered(1, NodeArrivals(0, tuple(series)))))

    assert size("0-8191") - size("0-7") == 8 * len("819")
    irregular = ",".join(map(str, range(0, 20_000, 2)))  # longer than what is sent
    assert size(irregular) < size("0-7")
