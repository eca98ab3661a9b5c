"""What the fates of the hosts make of a job."""

from __future__ import annotations

import pytest

from ddplaunch.remote.diagnose import HostError
from ddplaunch.remote.status import HostStatuses

LOST = HostError("it was lost", None, 122)


@pytest.fixture
def fates():
    return HostStatuses(["a", "b", "c"], least=2)


def verdict(fates, *, signum=0, front_lost=False):
    return fates.verdict(signum=signum, front_lost=front_lost)


def test_the_first_host_gives_the_status(fates):
    fates.ended(1, 9)
    fates.ended(0, 3)
    fates.lost(2, LOST)
    assert verdict(fates).status == 3
    assert not verdict(fates).error


def test_without_the_first_any_other_gives_it_and_the_loss_is_told(fates):
    fates.has_begun = True
    fates.ended(2, 122)
    fates.lost(0, LOST)
    assert verdict(fates).status == 122
    assert verdict(fates).error == "error: a: it was lost\n"


def test_without_any_a_node_was_lost(fates):
    fates.has_begun = True
    assert verdict(fates).status == 122
    assert verdict(fates).error == "error: a: it has not said how the job ended\n"


def test_a_host_on_which_the_job_cannot_run_decides(fates):
    fates.ended(0, 143)
    fates.troubles[1] = HostError("down", "up")
    assert verdict(fates).status == 121
    assert verdict(fates).error == "error: b: down\n\nhint: up\n"


def test_a_signal_before_the_start_gives_its_status(fates):
    assert verdict(fates, signum=15).status == 143
    assert verdict(fates, signum=15).remark == "stopped by SIGTERM before the workers were started"


def test_a_signal_later_is_told_by_the_agents(fates):
    fates.has_begun = True
    fates.ended(0, 130)
    assert verdict(fates, signum=2).remark == ""


def test_only_the_first_host_is_needed_where_others_suffice(fates):
    assert fates.is_bearable(2, left=2)
    assert not fates.is_bearable(2, left=1)
    assert not fates.is_bearable(0, left=2)


def test_nobody_is_told_when_the_front_is_gone(fates):
    fates.troubles[1] = HostError("down")
    assert verdict(fates, front_lost=True).error == ""
