"""When --chaos breaks what."""

from __future__ import annotations

from ddplaunch.remote.chaos import Schedule
from ddplaunch.spec import Fault

KILL = Fault(kind="kill", target=5, after=2.0)
LOSE = Fault(kind="node", target=1, after=3.0)
HANG = Fault(kind="hang", target=2, after=1.0)


def test_nothing_is_due_before_the_workers_run():
    schedule = Schedule([KILL])
    assert schedule.deadline is None
    assert schedule.due(1e9) == []


def test_faults_are_due_in_the_order_of_their_times():
    schedule = Schedule([KILL, LOSE, HANG])
    schedule.begin(100.0)
    assert schedule.deadline == 101.0
    assert schedule.due(100.9) == []
    assert schedule.due(102.5) == [HANG, KILL]
    assert schedule.deadline == 103.0
    assert schedule.due(103.0) == [LOSE]
    assert schedule.deadline is None


def test_a_later_generation_does_not_start_the_time_again():
    schedule = Schedule([KILL])
    schedule.begin(100.0)
    schedule.begin(101.0)
    assert schedule.deadline == 102.0
