"""When --chaos breaks what; of workers that do not run it says so."""

from __future__ import annotations

import os
from typing import Any, cast

from ddplaunch.launcher.elsewhere.chaos import Chaos
from ddplaunch.spec.job import Fault
from tests.loops import FakeLoop

KILL = Fault(kind="kill", target=5, after=2.0)
HANG = Fault(kind="hang", target=2, after=1.0)
SLOW = Fault(kind="slow", target=3, after=3.0)


class Bed:
    """A job of two workers, rank 0 and 1, and what is said of its faults."""

    def __init__(self, *faults: Fault) -> None:
        self.loop = FakeLoop()
        self.said: list[str] = []
        self.chaos = Chaos(self.loop, faults, (), cast(Any, self))

    def print(self, text: str) -> None:
        self.said.append(text)

    def generation(self) -> None:
        self.chaos.on_first_generation(2)
        for rank in (0, 1):
            self.chaos.started(rank, os.getpid())


def test_nothing_is_due_before_all_workers_run() -> None:
    bed = Bed(KILL)
    bed.chaos.on_first_generation(2)
    bed.chaos.started(0, os.getpid())
    assert bed.loop.deadline is None
    bed.chaos.started(1, os.getpid())
    assert bed.loop.deadline is not None


def test_faults_are_due_in_the_order_of_their_times() -> None:
    bed = Bed(KILL, SLOW, HANG)
    bed.generation()
    bed.loop.pass_time(0.9)
    assert bed.said == []
    bed.loop.pass_time(1.6)
    assert bed.said == ["chaos: hang rank 2: it does not run", "chaos: kill rank 5: it does not run"]
    bed.loop.pass_time(0.5)
    assert bed.said[2:] == ["chaos: slow rank 3: it does not run"]
    assert bed.loop.deadline is None


def test_a_later_generation_does_not_start_the_time_again() -> None:
    bed = Bed(KILL)
    bed.generation()
    bed.loop.pass_time(1.0)
    bed.generation()
    bed.loop.pass_time(1.0)
    assert bed.said == ["chaos: kill rank 5: it does not run"]
