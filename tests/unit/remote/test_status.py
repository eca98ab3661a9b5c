"""What the ends of the hosts mean for the job."""

from __future__ import annotations

import pytest

from ddplaunch.launcher.elsewhere.statuses import HostStatuses, Verdict
from ddplaunch.reach.diagnose import UNRESOLVED, HostError

LOST = HostError("it was lost", None, 122)


@pytest.fixture
def statuses():
    return HostStatuses(["a", "b", "c"], min_nodes=2)


def verdict(statuses, *, signum=0, front_lost=False):
    return statuses.verdict(signum=signum, front_lost=front_lost)


def test_the_first_host_gives_the_status(statuses):
    statuses.ended[1] = 9
    statuses.ended[0] = 3
    statuses.lost[2] = LOST
    assert verdict(statuses).status == 3
    assert not verdict(statuses).error


def test_without_the_first_any_other_gives_it_and_the_loss_is_told(statuses):
    statuses.has_begun = True
    statuses.ended[2] = 122
    statuses.lost[0] = LOST
    assert verdict(statuses).status == 122
    assert verdict(statuses).error == "error: a: it was lost\n"


def test_one_that_has_taken_over_gives_it_if_the_coordinator_does_not(statuses):
    statuses.has_begun = True
    statuses.lost[0] = LOST
    statuses.ended[1], statuses.ended[2] = 122, 130
    assert statuses.verdict([0, 2, 1], signum=0, front_lost=False) == Verdict(130)
    statuses.ended[0] = 122
    assert statuses.verdict([0, 2, 1], signum=0, front_lost=False) == Verdict(130)
    assert statuses.verdict([0, 1], signum=0, front_lost=False) == Verdict(122)
    statuses.ended[0] = 3
    assert statuses.verdict([0, 2, 1], signum=0, front_lost=False) == Verdict(3)


def test_without_any_a_node_was_lost(statuses):
    statuses.has_begun = True
    assert verdict(statuses).status == 122
    assert verdict(statuses).error == "error: a: it has not reported how the job ended\n"


def test_a_host_on_which_the_job_cannot_run_decides(statuses):
    statuses.ended[0] = 143
    statuses.errors[1] = HostError("down", "up")
    assert verdict(statuses).status == 121
    assert verdict(statuses).error == "error: b: down\n\nhint: up\n"


def test_others_are_tried_as_long_as_all_that_is_wrong_are_names(statuses):
    assert statuses.may_try_others
    statuses.errors[1] = HostError(UNRESOLVED)
    assert statuses.may_try_others
    statuses.errors[2] = HostError("down")
    assert not statuses.may_try_others


def test_no_agent_reports_how_a_job_ended_that_a_host_prevents(statuses):
    assert not statuses.is_prevented
    statuses.errors[1] = HostError("down", "up")
    assert statuses.is_prevented
    statuses.has_begun = True
    assert not statuses.is_prevented


def test_a_signal_before_the_start_gives_its_status(statuses):
    assert verdict(statuses, signum=15).status == 143
    assert verdict(statuses, signum=15).note == "stopped by SIGTERM before the workers were started"
    assert verdict(statuses, signum=2).note == "stopped by SIGINT (Ctrl-C) before the workers were started"


def test_a_signal_later_is_told_by_the_agents(statuses):
    statuses.has_begun = True
    statuses.ended[0] = 130
    assert verdict(statuses, signum=2).note == ""


def test_only_the_first_host_is_needed_where_others_suffice(statuses):
    assert statuses.can_go_on_without(2, left=2)
    assert not statuses.can_go_on_without(2, left=1)
    assert not statuses.can_go_on_without(0, left=2)


def test_nothing_is_printed_when_the_front_is_lost(statuses):
    statuses.errors[1] = HostError("down")
    assert verdict(statuses, front_lost=True).error == ""
