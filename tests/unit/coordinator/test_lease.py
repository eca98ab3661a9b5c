"""A lease runs from when a renewal was sent that the coordinator has echoed, and from no later one."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddplaunch.launcher.job.link import Lease
from ddplaunch.system.fields import Malformed


class Time:
    """A clock that a test sets."""

    at = 100.0

    def now(self) -> float:
        return self.at


def test_it_begins_with_the_first_renewal_and_goes_on_with_each_that_is_echoed() -> None:
    clock = Time()
    lease = Lease(10.0, clock)
    assert lease.left == inf
    lease.renew(1.0)
    assert lease.left == 10.0
    clock.at += 4
    lease.renew(2.0)
    assert lease.left == 6.0, "this renewal may not come"
    clock.at += 3
    lease.extend(0.0)  # none has come when this was sent
    assert lease.left == 3.0
    lease.extend(2.0)
    assert lease.left == 7.0
    clock.at += 8
    lease.extend(2.0)
    assert lease.left == 0.0, "that is no newer one"


def test_a_renewal_whose_echo_is_lost_is_passed_over() -> None:
    clock = Time()
    lease = Lease(10.0, clock)
    for number in (1.0, 2.0, 3.0):
        lease.renew(number)
        clock.at += 1
    lease.extend(3.0)
    assert lease.left == 9.0
    with pytest.raises(Malformed):
        lease.extend(2.0)


@pytest.mark.parametrize("number", [0.5, 1.5, 3.0], ids=["from before", "between two", "to come"])
def test_an_echo_of_what_was_not_sent_is_malformed(number: float) -> None:
    lease = Lease(10.0, Time())
    lease.renew(1.0)
    lease.renew(2.0)
    with pytest.raises(Malformed, match="echoes a renewal that was not sent"):
        lease.extend(number)


def test_another_coordinator_gives_another_lease() -> None:
    clock = Time()
    lease = Lease(10.0, clock)
    lease.renew(1.0)
    clock.at += 20
    lease.begin()
    assert lease.left == inf
    lease.extend(0.0)
    lease.renew(2.0)
    assert lease.left == 10.0
    with pytest.raises(Malformed):
        lease.extend(1.0)


def test_a_job_that_needs_all_its_nodes_has_a_lease_without_an_end() -> None:
    clock = Time()
    lease = Lease(inf, clock)
    lease.renew(1.0)
    clock.at += 1e9
    assert lease.left == inf


@given(st.lists(st.floats(0.01, 5.0), min_size=1, max_size=30), st.data())
def test_it_runs_from_the_sending_of_what_was_echoed(steps: list[float], data: st.DataObject) -> None:
    clock = Time()
    lease, sent, last = Lease(10.0, clock), list[tuple[float, float]](), 0
    for number, step in enumerate(steps, 1):
        clock.at += step
        lease.renew(float(number))
        sent.append((float(number), clock.at))
        last = data.draw(st.integers(last, number - 1)) if number > 1 else last
        if last:
            lease.extend(sent[last - 1][0])
        began = sent[last - 1][1] if last else sent[0][1]
        assert lease.left == pytest.approx(max(0.0, began + 10.0 - clock.at))
