"""Histories of a process that sleeps, works and is paused; no process, no waiting."""

import selectors
from math import inf

import pytest

from ddplaunch.system.process.clock import BEAT, LATE, Clock


class Machine(selectors.DefaultSelector):
    """Time as a test has it pass: a sleep lasts as long as was asked for, and longer if the process is paused then."""

    def __init__(self) -> None:
        super().__init__()
        self.time = 1000.0
        self.pause = 0.0  # seconds, of the next sleep
        self.event_after = inf  # seconds of sleep
        self.clock = Clock(lambda: self.time)

    def select(self, timeout=None):
        """Sleep."""
        self.time += min(inf if timeout is None else timeout, self.event_after) + self.pause
        self.pause = 0.0
        return []

    def wait(self, deadline: float, lenient_deadline: float = inf) -> float:
        """Sleep as a loop does, and give the time then."""
        self.clock.select(self, deadline, lenient_deadline)
        return self.clock.now()

    def pass_time(self, seconds: float) -> float:
        """Do something that long, and give the time then."""
        self.time += seconds
        return self.clock.now()


@pytest.fixture
def machine():
    with Machine() as machine:
        yield machine


def test_a_deadline_is_reached_in_sleeps_that_are_short_enough_to_notice_a_pause(machine):
    deadline, sleeps = machine.clock.now() + 3.5 * BEAT, 0
    while machine.wait(deadline) < deadline:
        sleeps += 1
    assert sleeps == 3
    assert machine.time == 1000 + 3.5 * BEAT


@pytest.mark.parametrize("seconds", [2.0, 20.0, 1e6])
def test_a_pause_uses_up_a_beat_at_most(machine, seconds):
    deadline = machine.clock.now() + 3.5 * BEAT
    machine.wait(deadline)
    machine.pause = seconds
    assert deadline - machine.wait(deadline) == pytest.approx(1.5 * BEAT)
    assert machine.wait(deadline) < machine.wait(deadline) == pytest.approx(deadline)


def test_a_pause_uses_up_a_quarter_at_most_of_a_limit_that_is_protected(machine):
    for limit in (1.0, 2.0, 60.0):  # the shortest is what counts
        machine.clock.protect(limit)
    deadline, machine.pause = machine.clock.now() + 1.0, 20.0
    assert deadline - machine.wait(deadline) == pytest.approx(0.75)


def test_what_waits_through_a_pause_gives_up_at_its_deadline_and_no_earlier(machine):
    machine.pause = 20.0
    assert machine.clock.wait(machine, machine.clock.now() + 3.5 * BEAT) == []
    assert machine.time == pytest.approx(1020 + 3.5 * BEAT)


def test_a_pause_that_ends_with_an_event_uses_up_no_more(machine):
    before, machine.pause, machine.event_after = machine.clock.now(), 20.0, BEAT / 2
    assert machine.wait(before + 5) == pytest.approx(before + BEAT)


def test_a_pause_while_the_loop_works_uses_up_no_time_either(machine):
    before = machine.clock.now()
    assert machine.pass_time(20.0) == before
    assert machine.clock.paused(10) == "paused for 20 s"
    assert machine.pass_time(LATE / 2) == before + LATE / 2


def test_what_was_before_it_is_used_is_no_pause(machine):
    machine.time += 20.0
    machine.clock.begin()
    assert machine.clock.pause is None


def test_a_busy_machine_is_no_pause_and_what_it_is_late_does_not_add_up(machine):
    deadline = machine.clock.now() + 100.0
    machine.event_after = BEAT
    for _ in range(100):
        machine.pause = LATE / 2
        machine.wait(deadline)
    assert machine.clock.now() == pytest.approx(machine.time)
    assert machine.clock.pause is None


def test_a_machine_that_is_late_each_time_reaches_every_deadline(machine):
    deadline, sleeps = machine.clock.now() + 3.5 * BEAT, 0
    while machine.clock.now() < deadline:
        machine.pause, sleeps = 2 * LATE, sleeps + 1
        machine.wait(deadline)
    assert sleeps == 4


def test_without_a_deadline_time_passes_as_it_is(machine):
    before, machine.event_after = machine.clock.now(), 3600.0
    assert machine.wait(inf) == before + 3600


def test_it_is_said_for_a_while_how_long_the_pause_was(machine):
    assert not machine.clock.paused(10)
    machine.pause = 20.2
    machine.wait(machine.clock.now() + 1)
    assert machine.clock.paused(10) == "paused for 20 s"
    deadline = machine.clock.now() + 10
    while machine.wait(deadline) < deadline:
        pass
    assert not machine.clock.paused(10)


def test_a_time_that_is_no_deadline_is_reached_in_one_sleep(machine):
    now = machine.clock.now()
    assert machine.wait(inf, now + 30) == now + 30
    assert machine.wait(inf, now) == now + 30
    assert machine.wait(now + 300, now + 30.5) == now + 30.5
