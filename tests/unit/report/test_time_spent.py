"""Where the time of a job went."""

from __future__ import annotations

import pytest

from ddplaunch.record.time_spent import Attempt, Spent, time_spent


def test_a_job_without_a_restart_spends_its_time_on_start_steps_and_end() -> None:
    assert time_spent([Attempt(0, 100, 10, 90, 1, 81)], 0, 100) == Spent(100, 10, 80, 0, 0, 10)


def test_steps_made_before_the_restart_are_done_again() -> None:
    # a checkpoint at step 40: steps 40 to 60 are made twice, a second each
    spent = time_spent([Attempt(0, 75, 10, 70, 0, 60), Attempt(75, 140, 80, 140, 40, 100)], 0, 140)
    assert spent == Spent(140, 10, 100, 20, 10, 0)
    assert str(spent) == "effective 71%: start 10 s, restarts 10 s, steps done again 20 s"


def test_a_generation_that_does_not_come_as_far_is_all_done_again() -> None:
    attempts = [Attempt(0, 50, 0, 50, 0, 50), Attempt(50, 70, 50, 70, 0, 20), Attempt(70, 130, 70, 130, 0, 60)]
    assert time_spent(attempts, 0, 130) == Spent(130, 0, 60, 70, 0, 0)


def test_a_generation_without_a_step_is_part_of_the_restart() -> None:
    attempts = [Attempt(0, 5), Attempt(5, 50, 10, 40, 0, 30), Attempt(50, 60), Attempt(60, 100, 70, 100, 30, 60)]
    assert time_spent(attempts, 0, 100) == Spent(100, 10, 60, 0, 30, 0)


def test_the_time_in_the_queue_of_the_cluster_counts_where_it_is_known() -> None:
    spent = time_spent([Attempt(0, 75, 10, 70, 0, 60), Attempt(75, 140, 80, 140, 40, 100)], 0, 140, 60)
    assert spent == Spent(200, 10, 100, 20, 10, 0, 60)
    assert str(spent) == "effective 50%: queue 1 min, start 10 s, restarts 10 s, steps done again 20 s"


def test_without_steps_nothing_is_known() -> None:
    assert time_spent([Attempt(0, 5), Attempt(5, 9)], 0, 9) is None


@pytest.mark.parametrize(
    "attempt", [Attempt(0, 9, 500, -3, 9, 1), Attempt(0, 9, -7, 1e9, 5, 5), Attempt(3, 2, 1, 1, 0, 10**18)]
)
def test_figures_that_cannot_be_give_shares_of_the_time(attempt: Attempt) -> None:
    spent = time_spent([attempt, attempt], 0, 9)
    assert spent is not None
    assert min(spent.start, spent.steps, spent.again, spent.restarts, spent.end) >= 0
    assert 0 <= spent.effective <= 1
    assert spent.start + spent.steps + spent.again + spent.restarts + spent.end == pytest.approx(9)
