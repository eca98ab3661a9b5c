"""Which host has the coordinator, and when an agent that has taken over is told that the one before it has ended."""

from __future__ import annotations

import pytest

from ddplaunch.launcher.elsewhere.coordinator_host import CoordinatorHost
from ddplaunch.reach.connections import HostConnection
from ddplaunch.reach.protocol import COORDINATOR_ENDED
from tests.loops import FakeLoop

TIMEOUT = 10.0


class Host(HostConnection):
    """A connection that keeps what is sent."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.is_cut_off = False

    def send(self, tag: bytes, data: bytes) -> None:
        self.sent.append(tag)

    def close_stdin(self) -> None:
        self.is_cut_off = True


class Bed:
    """Hosts of a job that needs one of them."""

    def __init__(self, number: int, min_nodes: int = 1) -> None:
        self.loop = FakeLoop()
        self.hosts = [Host() for _ in range(number)]
        self.coordinator = CoordinatorHost(self.loop, self.hosts, min_nodes, TIMEOUT)

    def told(self) -> list[int]:
        return [at for at, host in enumerate(self.hosts) if host.sent == [COORDINATOR_ENDED]]


@pytest.fixture
def bed() -> Bed:
    return Bed(3)


def test_an_agent_that_has_ended_needs_no_time(bed: Bed) -> None:
    bed.coordinator.took_over(bed.hosts[1])
    assert bed.told() == []
    bed.coordinator.agent_ended(bed.hosts[0])
    assert bed.told() == [1]


def test_an_agent_whose_connection_has_ended_has_the_time_to_miss_it(bed: Bed) -> None:
    bed.coordinator.disconnected(bed.hosts[0])
    bed.coordinator.took_over(bed.hosts[1])
    bed.loop.pass_time(TIMEOUT)
    assert bed.told() == []
    bed.loop.pass_time(2)
    assert bed.told() == [1]


def test_one_that_takes_over_later_is_told_at_once_and_once(bed: Bed) -> None:
    bed.coordinator.agent_ended(bed.hosts[0])
    bed.coordinator.took_over(bed.hosts[2])
    assert bed.told() == [2]
    bed.coordinator.agent_ended(bed.hosts[1])
    assert bed.told() == [2]


def test_all_that_were_before_it_have_to_have_ended(bed: Bed) -> None:
    bed.coordinator.took_over(bed.hosts[1])
    bed.coordinator.took_over(bed.hosts[2])
    bed.coordinator.agent_ended(bed.hosts[0])
    assert bed.told() == [1]
    bed.coordinator.agent_ended(bed.hosts[1])
    assert bed.told() == [1, 2]


def test_a_host_is_followed_once_a_generation_begins_there(bed: Bed) -> None:
    first, second, third = bed.hosts
    bed.coordinator.took_over(second)
    bed.coordinator.took_over(third)
    assert bed.coordinator.current is first
    assert list(bed.coordinator.speakers) == [first, third, second]
    bed.coordinator.begun(third)
    assert list(bed.coordinator.speakers) == [third]
    assert all(map(bed.coordinator.speaks_for_job, bed.hosts)), "what is still on its way is no lie"


def test_a_host_that_has_not_taken_over_does_not_speak_for_the_job(bed: Bed) -> None:
    assert [*map(bed.coordinator.speaks_for_job, bed.hosts)] == [True, False, False]


def test_a_job_that_needs_all_its_hosts_is_not_taken_over() -> None:
    assert not Bed(2, min_nodes=2).coordinator.may_change


@pytest.mark.parametrize("order", ["takes over, ends", "ends, takes over"])
@pytest.mark.parametrize("status", [0, 1, 130])
def test_nobody_takes_over_a_job_that_has_had_its_end(bed: Bed, order: str, status: int) -> None:
    """Two nodes have lost each other, not this side: the first has gone on alone."""
    for step in order.split(", "):
        if step == "ends":
            bed.coordinator.agent_ended(bed.hosts[0], status)
        else:
            bed.coordinator.took_over(bed.hosts[1])
    bed.coordinator.disconnected(bed.hosts[0])
    bed.loop.pass_time(TIMEOUT + 2)
    assert bed.told() == []
    assert [host.is_cut_off for host in bed.hosts] == [False, True, False]


def test_one_that_the_job_has_gone_on_without_does_not_take_over(bed: Bed) -> None:
    """Nodes have lost each other, and not this side. Another one may go on with the generation that has begun since."""
    for host in bed.hosts:
        bed.coordinator.generation_begun(host, 0)
    bed.coordinator.took_over(bed.hosts[1])
    for host in (bed.hosts[0], bed.hosts[2]):
        bed.coordinator.generation_begun(host, 1)
    bed.coordinator.agent_ended(bed.hosts[0])
    assert bed.told() == []
    bed.coordinator.took_over(bed.hosts[2])
    assert bed.told() == []  # the one before it may still go on
    bed.coordinator.agent_ended(bed.hosts[1])
    assert bed.told() == [2]
