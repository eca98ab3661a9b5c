"""When hosts are called whose sshd has no room for so many connections at a time: later, and then fewer at a time."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest

from ddplaunch.reach.connections import AgentStart, HostConnection, HostPhase
from ddplaunch.reach.order import Orders
from ddplaunch.reach.startup import CONNECTED_FOR_ONE_MORE, FIRST_PAUSE, LEAST_AT_ONCE, MAX_REPEATS, Calls, pause
from tests.loops import FakeLoop


class Hosts:
    """Hosts that are called by a process which waits; those whose call has ended are `closed`."""

    def __init__(self, number: int, argv: tuple[str, ...] = ("cat",)) -> None:
        self.loop = FakeLoop()
        self.closed: list[HostConnection] = []
        self.all = [
            HostConnection(
                AgentStart(node_rank=rank, host=f"node{rank}", argv=argv, orders=cast(Orders, None)),
                self.loop,
                self,
            )
            for rank in range(number)
        ]
        self.may_call = True
        self.calls = Calls(self.loop, self.all, os.environ, (1024, 1024), self)
        self.calls.make_next()

    def close(self, host: HostConnection) -> None:
        """End the process that leads to a host."""
        host.kill()
        self.loop.until(lambda: host in self.closed)
        self.closed.remove(host)

    @property
    def starting(self) -> list[int]:
        return [host.agent.node_rank for host in self.all if host.phase is HostPhase.STARTING]

    def disconnected(self, host: HostConnection) -> None:
        self.closed.append(host)

    def connected(self, host: HostConnection, protocol: int, version: str) -> None:
        raise AssertionError

    def output_received(self, host: HostConnection, stream: bytes, data: bytes) -> None:
        raise AssertionError

    def report_received(self, host: HostConnection, data: bytes) -> None:
        raise AssertionError

    def chunk_received(self, host: HostConnection, data: bytes) -> None:
        raise AssertionError


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    hosts = Hosts(LEAST_AT_ONCE + 4)
    yield hosts
    for host in hosts.all:
        if host.phase is HostPhase.STARTING:
            hosts.close(host)


def test_a_host_is_called_again_after_pauses_that_grow_and_some_time_no_more(hosts: Hosts) -> None:
    first, *others = hosts.all
    for host in others:
        hosts.close(host)
    for repeats in range(1, MAX_REPEATS + 1):
        hosts.close(first)
        assert hosts.calls.repeat(first)
        hosts.calls.make_next()
        hosts.loop.pass_time(pause(repeats, 0.0) - 0.01)
        assert 0 not in hosts.starting
        hosts.loop.pass_time(pause(repeats, 1.0) - pause(repeats, 0.0) + 0.02)
        assert 0 in hosts.starting
    hosts.close(first)
    assert not hosts.calls.repeat(first)
    assert first.phase is HostPhase.CLOSED


def test_no_more_hosts_are_called_at_a_time_than_there_was_room_for(hosts: Hosts) -> None:
    for host in hosts.all[:2]:
        hosts.close(host)
        assert hosts.calls.repeat(host)
    hosts.calls.make_next()
    hosts.loop.pass_time(60)
    assert hosts.starting == list(range(2, LEAST_AT_ONCE + 4)), "there was room for these"
    hosts.close(hosts.all[-1])
    hosts.calls.make_next()
    assert hosts.starting == [0, *range(2, LEAST_AT_ONCE + 3)]


def test_a_few_are_called_at_a_time_even_if_all_were_refused(hosts: Hosts) -> None:
    for host in hosts.all:
        hosts.close(host)
        assert hosts.calls.repeat(host)
    hosts.calls.make_next()
    hosts.loop.pass_time(60)
    assert len(hosts.starting) == LEAST_AT_ONCE


def test_a_host_that_waits_for_its_next_call_is_not_called_once_the_job_is_over(hosts: Hosts) -> None:
    first, second = hosts.all[:2]
    for host in (first, second):
        hosts.close(host)
        assert hosts.calls.repeat(host)
    hosts.calls.make_next()
    first.give_up()
    hosts.may_call = False
    hosts.loop.pass_time(60)
    assert (first.phase, second.phase) == (HostPhase.CLOSED, HostPhase.WAITING)


def test_hosts_that_were_refused_at_once_do_not_all_call_again_at_once() -> None:
    pauses = [pause(1, chance / 10) for chance in range(10)]
    assert len(set(pauses)) == 10
    assert min(pauses) == FIRST_PAUSE / 2


@pytest.mark.parametrize(
    ("says", "at_first"),
    [
        ("user me\nproxyjump jump.example", LEAST_AT_ONCE),
        ("proxycommand ssh -W %h:%p jump", LEAST_AT_ONCE),
        ("user me\nproxyjump none\nproxyusefdpass no", LEAST_AT_ONCE + 8),
        ("user me", LEAST_AT_ONCE + 8),
    ],
    ids=["a jump host", "a command", "none", "neither"],
)
def test_of_hosts_behind_a_jump_host_a_few_are_called_at_first_and_more_as_they_connect(
    tmp_path: Path, says: str, at_first: int
) -> None:
    (tmp_path / "says").write_text(f"{says}\n")
    ssh = tmp_path / "ssh"
    ssh.write_text(f'#!/bin/sh\n[ "$*" = "-G -T node" ] && exec cat {tmp_path}/says\nexec cat\n')
    ssh.chmod(0o755)
    hosts = Hosts(LEAST_AT_ONCE + 8, argv=(str(ssh), "-T", "node", "exec it"))
    assert len(hosts.starting) == LEAST_AT_ONCE, "until it is known"
    (asked,) = hosts.loop.questions
    asked.answer_with(asked.question())
    assert len(hosts.starting) == at_first
    for host in hosts.all[:CONNECTED_FOR_ONE_MORE]:
        host.phase = HostPhase.CONNECTED
    hosts.calls.make_next()
    assert len(hosts.starting) == (
        LEAST_AT_ONCE + 1 if at_first == LEAST_AT_ONCE else LEAST_AT_ONCE + 8 - CONNECTED_FOR_ONE_MORE
    )
    for host in hosts.all:
        host.phase = HostPhase.STARTING if host.phase is HostPhase.CONNECTED else host.phase
        if host.phase is HostPhase.STARTING:
            hosts.close(host)
