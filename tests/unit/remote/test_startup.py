"""Which hosts are waited for at the start, and that it is said."""

from __future__ import annotations

import os
import selectors
from contextlib import ExitStack
from typing import cast

from ddplaunch.process import clock
from ddplaunch.remote.connection import HostConnection, HostPhase
from ddplaunch.remote.dispatcher import Dispatcher
from ddplaunch.remote.remote_job import AgentStart
from ddplaunch.remote.startup import NOTICE_AFTER, Startup


def hosts(*phases: HostPhase) -> list[HostConnection]:
    made = []
    for number, phase in enumerate(phases):
        agent = AgentStart(node_rank=number, host=f"ann@node{number}", argv=("/usr/bin/ssh", "-T"), order=bytes)
        made.append(HostConnection(agent, selectors.DefaultSelector(), cast(Dispatcher, None)))
        made[-1].phase = phase
    return made


def startup(*phases: HostPhase) -> Startup:
    return Startup(hosts(*phases), env={}, open_files=(0, 0), rdzv_timeout=60, quit_timeout=5, has_failed=lambda: False)


def test_hosts_without_an_agent_are_named_after_a_while_once() -> None:
    told: list[str] = []
    before = clock.now()
    start = startup(HostPhase.CONNECTED, HostPhase.STARTING, HostPhase.STARTING, HostPhase.CLOSED, HostPhase.WAITING)
    assert start.deadline is not None
    assert before + NOTICE_AFTER <= start.deadline <= clock.now() + NOTICE_AFTER
    start.expire(before, told.append, is_read=True)
    assert told == []
    start.expire(start.deadline, told.append, is_read=True)
    assert told == [
        "waiting for node1, node2: ssh has not started ddplaunch there yet: "
        "a slow login, or a start-up file such as ~/.bashrc that reads stdin?"
    ]
    assert start.deadline == start.connect_by


def test_where_all_agents_have_started_there_is_nothing_to_say() -> None:
    told: list[str] = []
    startup(HostPhase.CONNECTED, HostPhase.CLOSED).expire(clock.now() + NOTICE_AFTER, told.append, is_read=True)
    assert told == []


def test_an_agent_that_may_have_begun_as_it_has_sent_what_is_not_read_yet_is_left_to_its_signal() -> None:
    made = hosts(HostPhase.CONNECTED, HostPhase.CONNECTED, HostPhase.STARTING, HostPhase.CONNECTED)
    start = Startup(made, env={}, open_files=(0, 0), rdzv_timeout=60, quit_timeout=5, has_failed=lambda: False)
    with ExitStack() as files:
        for host in made[:3]:  # the output of the last one is closed
            host._stdout, writer = os.pipe()
            files.callback(os.close, host._stdout)
            files.callback(os.close, writer)
            if host is not made[1]:
                os.write(writer, b"frames")
        start.stop_starting()
        assert [host.given_up for host in made] == [False, True, True, True], "the third one has no order"
