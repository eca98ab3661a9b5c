"""What an agent and the coordinator say to each other survives the way over the network."""

from __future__ import annotations

from signal import SIGINT, SIGTERM, SIGUSR1

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from ddplaunch.launcher.decide import node
from ddplaunch.launcher.job import messages
from ddplaunch.launcher.job.orders import (
    CannotLead,
    Forward,
    Generation,
    GroupMade,
    JobEnd,
    Lead,
    MeetAt,
    NodeEnd,
    Reached,
    SentOrder,
    SentReport,
    Warned,
)
from ddplaunch.plan import AgentRun, Agreed
from ddplaunch.reach.channel.streams import Chunk
from ddplaunch.record.seen import Group, Sample
from ddplaunch.record.window.questions import (
    Answered,
    Ask,
    AskStatus,
    Forget,
    NodeStacks,
    NodeStatus,
    StacksAtEnd,
    WorkerStatus,
)
from ddplaunch.spec.outcome import StartFailure, Traces, Why, WorkerExit
from ddplaunch.system.fields import Malformed

NOW = 7.5
END = WorkerExit(
    rank=3, local_rank=1, host="b", pid=9, device="cpu", code=3, signal=None, at=5.0, seconds=1.0, cpu_seconds=0.5
)
AGREED = Agreed(
    run_id="run-1",
    index=1,
    agent_runs=(AgentRun(2, 2), AgentRun(1, 1)),
    address="a",
    backend="gloo",
    backend_reason="no accelerator",
)
REPORTS: list[SentReport | Answered | StacksAtEnd | Chunk] = [
    node.ReportStopping(Why.FAILED, SIGTERM),
    node.ReportStopping(Why.FRONT_LOST, 0),
    node.ReportStopping(Why.SIGNALLED, SIGTERM, by_cluster=True),
    node.ReportNotice(SIGUSR1),
    node.Escalate(SIGINT),
    node.ReportStacksRead(),
    node.ReportIdle(1.5),
    node.PauseLimits(True),
    node.RequestStore(),
    Forward(SIGUSR1),
    Warned("no logs are kept: the disk is full"),
    Chunk(1, b"said", 2),
    Answered(1, NodeStatus((WorkerStatus(3, 1, 9, "cpu", "ended", "exit status 3", 1.0, 0.5, 0, None),))),
    StacksAtEnd(
        4,
        NodeStacks.of(
            [Sample(rank=3, pid=7, child="python", state="stopped", groups=(Group(name="0", members="0,3"),))],
            threads=True,
        ),
    ),
    NodeEnd(4, (END,), None, (), Traces(oom_kills=1, shm=(64, 8), log_folder="/runs/1")),
    NodeEnd(
        0,
        (),
        StartFailure(3, "b", "no such file", 127, 2),
        ("pid 7 (python) in uninterruptible sleep",),
        Traces(oom_kills=0, shm=None, log_folder=None),
    ),
    GroupMade(),
    MeetAt(meeting=1, master_port=29500, addresses=("a", "10.0.0.1"), listen_port=2000),
    CannotLead(meeting=1, is_taken=False, reason="port 80: this user may not bind it", hint="another one", status=1),
    CannotLead(meeting=1, is_taken=True),
    Reached(meeting=1, address="10.0.0.1"),
    Reached(meeting=1, address="", reason="a: no route to host"),
]
ORDERS: list[SentOrder | Ask | Forget | Chunk] = [
    Generation(number=1, term=7, restarts=1, port=29500, agreed=AGREED),
    JobEnd(138, "signalled", "ddplaunch: stopped\n", SIGUSR1),
    node.StopOrdered(SIGTERM, NOW),
    node.StopOrdered(SIGTERM, NOW, why=Why.TIMED_OUT),
    node.StopOrdered(SIGTERM, NOW, by_cluster=True),
    node.StopOrdered(SIGTERM, NOW, job_stands_still=True),
    node.KillOrdered(NOW),
    node.AllStacksRead(NOW),
    node.StoreOrdered(NOW),
    Ask(1, AskStatus()),
    Forget(1),
    Chunk(1, b"said", 2),
    Forward(SIGUSR1),
]


@pytest.mark.parametrize("report", REPORTS, ids=lambda report: type(report).__name__)
def test_a_report_arrives_as_it_was_sent(report: SentReport | Answered | StacksAtEnd | Chunk) -> None:
    arrived = messages.for_coordinator(messages.encode(messages.fitted(report)))
    assert (messages.on_our_clock(arrived, "b", 0.0) if isinstance(arrived, NodeEnd) else arrived) == report


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: type(order).__name__)
def test_an_order_arrives_as_it_was_sent_and_counts_from_then(order: SentOrder | Ask | Forget | Chunk) -> None:
    arrived = messages.for_agent(messages.encode(messages.fitted(order)))
    assert isinstance(arrived, SentOrder | Ask | Forget | Chunk)
    later = messages.as_received(arrived, NOW + 1000.0)
    if isinstance(order, node.StopOrdered | node.AllStacksRead | node.KillOrdered | node.StoreOrdered):
        assert later == replace(order, at=NOW + 1000.0)
    else:
        assert later == order


@pytest.mark.parametrize(
    "order",
    [Lead(meeting=1, master_port=0, port_origin="", again=False), MeetAt(1, 29500, ("a", "10.0.0.1"), 2000)],
    ids=lambda order: type(order).__name__,
)
def test_what_a_node_is_to_do_before_a_generation_arrives_as_it_was_sent(order: Lead | MeetAt) -> None:
    assert messages.for_agent(messages.encode(order)) == order


def test_the_ranks_of_a_node_follow_from_what_all_have_agreed_on() -> None:
    generation = Generation(number=1, term=7, restarts=1, port=29500, agreed=AGREED)
    assert (generation.ranks, generation.alone) == (frozenset({2, 3}), False)
    only = replace(AGREED, index=0, agent_runs=(AgentRun(1, 2),))
    assert replace(generation, agreed=only).alone
    of_draft = Generation(number=1, term=7, restarts=1, port=29500, ranks_of_draft=(4, 5))
    assert (of_draft.ranks, of_draft.alone) == (frozenset({4, 5}), True)


@pytest.mark.parametrize("report", [node.Suspend(), node.Resume()], ids=repr)
def test_a_pause_of_one_node_is_no_message(report: node.Suspend | node.Resume) -> None:
    with pytest.raises(Malformed):
        messages.for_coordinator(messages.encode(report))


odd = st.text(max_size=40)  # with control characters and halves of characters, which stand for bytes that are no UTF-8


@given(odd, odd)
def test_whatever_names_and_paths_hold_a_report_can_be_sent(text: str, other: str) -> None:
    failed = StartFailure(0, text, text, 127)
    traces = Traces(oom_kills=0, shm=None, log_folder=other)
    report = messages.fitted(NodeEnd(0, (), failed, (text, other), traces))
    assert messages.for_coordinator(messages.encode(report)) == report


@given(odd, odd)
def test_whatever_names_and_paths_hold_an_order_can_be_sent(text: str, other: str) -> None:
    agreed = replace(AGREED, address=other, backend_reason=text)
    for order in (replace(ORDERS[0], agreed=agreed), JobEnd(1, "failed", text)):
        fitted = messages.fitted(order)
        assert messages.for_agent(messages.encode(fitted)) == fitted


def test_of_what_node_0_says_of_the_end_only_the_first_lines_look_like_ours() -> None:
    said = "error: a\nddplaunch: b\n\nhint: c\nerror: d\n"
    order = messages.as_received(JobEnd(1, "failed", said), NOW)
    assert order.text == "error: a\n  ddplaunch: b\n\nhint: c\n  error: d\n"
