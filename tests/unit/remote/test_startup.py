"""Which hosts are waited for at the start, and that it is said."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from typing import cast

import pytest
from msgspec.structs import replace

from ddplaunch.cli.job import parse, resolve
from ddplaunch.reach.connections import AgentStart, Handler, HostConnection, HostPhase, RemoteJob
from ddplaunch.reach.order import Orders
from ddplaunch.reach.startup import NOTICE_AFTER, Startup
from tests.loops import FakeLoop

OPTIONS = ["--rdzv-timeout=60s", "--grace-period=5s", "train.py"]
LIMIT = "--heartbeat-timeout=10s"
JOB = RemoteJob(
    spec=resolve(parse([LIMIT, *OPTIONS]), {}, None), agents=(), run_id="run", starter="ssh", python="python", min_nodes=1,
    env={}, open_files=(0, 0),
)  # fmt: skip

NO_ORDERS = cast(Orders, None)


class Bed:
    """Hosts in these phases, and what is said of them."""

    def __init__(self, *phases: HostPhase, job: RemoteJob = JOB) -> None:
        self.loop = FakeLoop()
        self.hosts: list[HostConnection] = []
        for number, phase in enumerate(phases):
            agent = AgentStart(
                node_rank=number, host=f"ann@node{number}", argv=("/usr/bin/ssh", "-T"), orders=NO_ORDERS
            )
            self.hosts.append(HostConnection(agent, self.loop, cast(Handler, None)))
            self.hosts[-1].phase = phase
        self.said: list[str] = []
        self.unconnected: list[HostConnection] = []
        self.startup = Startup(self.loop, job, self.hosts, self)

    may_start_more = True

    def say(self, text: str) -> None:
        self.said.append(text)

    def never_connected(self, hosts: Sequence[HostConnection]) -> None:
        self.unconnected += hosts


def test_hosts_without_an_agent_are_named_after_a_while_once_and_given_up_in_the_end() -> None:
    bed = Bed(HostPhase.CONNECTED, HostPhase.STARTING, HostPhase.STARTING, HostPhase.CLOSED, HostPhase.WAITING)
    bed.loop.pass_time(NOTICE_AFTER - 0.1)
    assert bed.said == []
    bed.loop.pass_time(50)
    assert bed.said == [
        "waiting for node1, node2: ssh has not started ddplaunch there yet: "
        "a slow login, or a start-up file such as ~/.bashrc that reads stdin?"
    ]
    assert bed.unconnected == []
    bed.loop.pass_time(10)
    assert bed.unconnected == [bed.hosts[1], bed.hosts[2], bed.hosts[4]]
    bed.loop.pass_time(100)
    assert len(bed.unconnected) == 3
    assert len(bed.said) == 1


def test_where_all_agents_have_started_there_is_nothing_to_say() -> None:
    bed = Bed(HostPhase.CONNECTED, HostPhase.CLOSED)
    bed.loop.pass_time(NOTICE_AFTER)
    assert bed.said == []


def test_nothing_is_killed_while_its_output_is_not_read() -> None:
    bed = Bed(HostPhase.CONNECTED)
    bed.startup.output_is_read = False
    bed.startup.end_within(5)
    bed.loop.pass_time(20)
    assert bed.said == []
    bed.startup.output_is_read = True
    bed.loop.pass_time(1)
    assert bed.said == ["node0 has not reported that its workers have ended"]


@pytest.mark.parametrize(
    ("limit", "ends", "seconds"),
    [((), False, 10), ((), True, 6), ((LIMIT,), True, 10)],
)
def test_a_host_that_was_lost_is_not_waited_for_longer_once_the_job_is_over(
    limit: tuple[str, ...], ends: bool, seconds: int
) -> None:
    job = replace(JOB, spec=resolve(parse([*limit, *OPTIONS]), {}, None))
    bed = Bed(HostPhase.CLOSED, HostPhase.CONNECTED, job=job)
    if ends:
        bed.startup.end_within(60)
    lost = bed.hosts[1]
    lost._unanswered_heartbeats = 0  # it has answered
    bed.loop.pass_time(seconds)
    assert not lost.fault
    bed.loop.pass_time(1.5)
    assert lost.fault == f"silent for {seconds} s"


def test_an_agent_that_may_have_begun_as_it_has_sent_what_is_not_read_yet_is_left_to_its_signal() -> None:
    bed = Bed(HostPhase.CONNECTED, HostPhase.CONNECTED, HostPhase.STARTING, HostPhase.CONNECTED)
    made = bed.hosts
    with ExitStack() as files:
        for host in made[:3]:  # the output of the last one is closed
            host._stdout, writer = os.pipe()
            files.callback(os.close, host._stdout)
            files.callback(os.close, writer)
            if host is not made[1]:
                os.write(writer, b"frames")
        bed.startup.stop_starting()
        assert [host.given_up for host in made] == [False, True, True, True], "the third one has no order"
