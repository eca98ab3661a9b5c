"""The command that has started all agents: what it does for the whole job, beside coordinating them."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from signal import SIGINT, SIGTERM
from typing import Any

import pytest
from msgspec.structs import replace

from ddplaunch.launcher.decide.job.restarts import Generation as Started
from ddplaunch.launcher.elsewhere.lead import Lead, LeadJob, inputs_of_lead
from ddplaunch.launcher.job import messages
from ddplaunch.launcher.job.orders import Generation, Goodbye, JobEnd
from ddplaunch.launcher.node.events import NoticeSeen
from ddplaunch.launcher.node.signals import SignalOrigin
from ddplaunch.plan import Agreed, PlannedAgent, agent_runs
from ddplaunch.plan.cluster import AllocatedJob, Allocation, Endpoint
from ddplaunch.plan.cluster.hostlist import Host
from ddplaunch.reach.channel.handshake import Client, Key
from ddplaunch.reach.channel.peer import Greeting
from ddplaunch.reach.pipes import FrontPipes
from ddplaunch.record.events import Event
from ddplaunch.record.file_queue import PROGRESS, FileQueue
from ddplaunch.spec.job import JobSpec
from ddplaunch.spec.outcome import CLOSED
from ddplaunch.system.process.linux import memory_file
from tests.loops import FakeLoop
from tests.peers import PeerRecorder
from tests.unit.builders import spec
from tests.unit.coordinator.test_incoming import HELLO

HOSTS = ("gpu01", "gpu02")
ALLOCATION = Allocation(
    cluster="local",
    nnodes=(1, 2),
    hosts=HOSTS,
    endpoint=Endpoint(None, "", None, ""),
    hosts_to_start_on=tuple(Host(name=host) for host in HOSTS),
    starter="ssh",
)
KEY = Key(b"key")
BEGUN = Generation(
    number=0,
    term=7,
    restarts=0,
    port=29500,
    agreed=Agreed(
        run_id="run-1",
        index=0,
        agent_runs=agent_runs([PlannedAgent(host, 1) for host in HOSTS]),
        address="gpu01",
        backend="gloo",
        backend_reason="",
    ),
)


class PlayedLead(Lead):
    """A command whose agents the test plays."""

    is_over = False

    def begin(self, opened: ExitStack) -> None:
        """There is nothing to start."""

    def status(self) -> int:
        return 0


class Bed:
    """A command over a fake loop, whose disk never answers."""

    def __init__(self, asked: JobSpec) -> None:
        self.loop = FakeLoop()
        self.pipes = FrontPipes.make()
        ours, self.writer = socket.socketpair()
        ours.setblocking(False)
        shared = memory_file("test")
        os.pwrite(shared, bytes(PROGRESS), 0)
        self.files = FileQueue(ours, shared)
        allocated = AllocatedJob(spec=asked, env={"HOME": "/home/ann"}, allocation=ALLOCATION)
        inputs = inputs_of_lead(allocated, run_id="run-1", python="python")
        job = LeadJob(inputs=inputs, key=KEY, ports=None, python="python", signals=frozenset((SIGINT, SIGTERM)))
        self.lead = PlayedLead(self.loop, job, self.files, self.pipes)
        self.loop.handle = self.loop.events.append  # the test hands over what it means to
        self.told: list[Event] = []
        self.lead._reporter.add_reader(self.told.append)

    def pass_time(self, seconds: float) -> None:
        end = self.loop.now() + seconds
        while self.loop.now() < end:
            self.loop.run_once()

    def close(self) -> None:
        self.lead._link.close()
        self.files.close()
        self.writer.close()
        for end in (*self.pipes.output, *self.pipes.spared):
            end.close()
        pairs = (self.pipes.signals, self.pipes.requests, self.pipes.replies, self.pipes.start)
        for fd in (*(fd for pair in pairs for fd in pair), self.pipes.lease):
            os.close(fd)
        self.loop.close()


@pytest.fixture
def asked() -> JobSpec:
    return spec()


@pytest.fixture
def bed(asked: JobSpec) -> Iterator[Bed]:
    bed = Bed(asked)
    yield bed
    bed.close()


def test_a_stop_file_that_comes_after_signals_leaves_the_workers_their_time_to_save(bed: Bed) -> None:
    for signum in (SIGTERM, SIGINT):
        bed.lead._signals.received(signum, SignalOrigin.FRONT)
        bed.pass_time(10.0)
    bed.lead.handle(NoticeSeen("--stop-file stop", SIGTERM, "", stops_job=True))
    bed.loop.run_once()
    signals: list[Any] = bed.loop.events  # and nothing else: no worker is here that has a lease
    assert [event.signum for event in signals] == [SIGTERM, SIGINT, SIGTERM]
    assert not signals[2].is_request


def test_a_job_that_ends_before_its_folder_is_made_has_begun_before_all_the_same(bed: Bed) -> None:
    coordinator = bed.lead.coordinator
    coordinator.state = replace(coordinator.state, generation=Started(number=0))
    bed.lead.handle(BEGUN)
    bed.lead.before_sleep()
    assert not bed.told  # where the folder lies is said with it
    bed.lead._link.on_order(JobEnd(1, "failed"))
    bed.lead.handle(bed.lead._link.end)
    bed.lead.before_sleep()
    assert [event.name for event in bed.told] == ["job_started", "generation_started", "job_ended"]


@pytest.mark.parametrize("asked", [spec(local_addr="10.0.0.1"), spec()], ids=["given", "not given"])
def test_the_address_of_the_command_is_not_where_workers_meet(bed: Bed) -> None:
    assert bed.lead.incoming._terms.address is None


def test_the_last_words_of_an_agent_that_has_ended_come_before_its_end(bed: Bed) -> None:
    ours, its = socket.socketpair()
    connections = bed.lead.incoming.agents.connections
    agents = PeerRecorder()
    connections.adopt(ours, "gpu01", connections)
    Greeting(bed.loop, its, ("", 0), Client(KEY), agents)
    while not (connections.ids and agents.peers):
        bed.loop.run_once()
    (known,), (agent,) = connections.ids, agents.peers
    agent.send(messages.encode(HELLO))
    while not bed.lead.coordinator.state.members:
        bed.loop.run_once()
    agent.send(messages.encode(Goodbye("its health check failed: a GPU is gone", has_ended=True)))
    agent.close()
    bed.lead.incoming.lose(known, CLOSED, has_ended=True)
    left = [event.fields["reason"] for event in bed.told if event.name == "node_left"]
    assert left == ["its health check failed: a GPU is gone"]


def test_who_asks_again_for_the_end_does_not_wait_for_the_disk(bed: Bed) -> None:
    def interrupted() -> None:
        bed.lead._signals.received(os.read(bed.pipes.signals[0], 1)[0], SignalOrigin.FRONT)

    bed.loop.watch(bed.pipes.signals[0], interrupted)
    bed.pipes.pass_on(SIGINT)
    bed.lead._finish_files_and_output()
    assert bed.files.is_busy
    assert not bed.files.has_hung


def test_once_the_job_has_ended_nobody_is_warned_that_no_stop_file_can_come(bed: Bed) -> None:
    warnings: list[str] = []
    bed.lead.handle(BEGUN)
    bed.lead._reporter.tell_all = lambda text, is_warning: warnings.append(text)
    bed.lead.handle(NoticeSeen("--stop-file stop", SIGTERM, "there is no folder /tmp/run yet", stops_job=True))
    bed.lead._link.on_order(JobEnd(0, "finished"))
    bed.lead.handle(NoticeSeen("--stop-file stop", SIGTERM, "it is a folder, and only a file counts", stops_job=True))
    assert warnings == ["--stop-file stop: there is no folder /tmp/run yet"]
