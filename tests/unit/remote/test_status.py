"""What keeps a job from running on its hosts."""

from __future__ import annotations

import pytest

from ddplaunch.launcher.elsewhere.dispatcher import HostStatuses
from ddplaunch.reach.diagnose import UNRESOLVED, HostError


@pytest.fixture
def statuses() -> HostStatuses:
    return HostStatuses(["a", "b", "c"], min_nodes=2)


def test_a_host_on_which_the_job_cannot_run_gives_the_error(statuses: HostStatuses) -> None:
    assert statuses.error() is None
    statuses.ended[0] = 143
    statuses.errors[1] = HostError("down", "up")
    error = statuses.error()
    assert error is not None
    assert (error.status, error.render()) == (121, "error: b: down\n\nhint: up\n")


def test_others_are_tried_as_long_as_all_that_is_wrong_are_names(statuses: HostStatuses) -> None:
    assert statuses.only_names_failed
    statuses.errors[1] = HostError(UNRESOLVED)
    assert statuses.only_names_failed
    statuses.errors[2] = HostError("down")
    assert not statuses.only_names_failed


def test_any_host_can_be_done_without_where_others_suffice(statuses: HostStatuses) -> None:
    assert statuses.can_begin_with(others=2)
    assert not statuses.can_begin_with(others=1)
    statuses.errors[1] = HostError("down")
    assert not statuses.can_begin_with(others=2)
