"""What an agent and the coordinator say to each other survives the way over the network."""

from __future__ import annotations

from signal import SIGINT, SIGTERM, SIGUSR1

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from ddplaunch.control import messages
from ddplaunch.control.questions import AskStatus, NodeStatus, WorkerStatus
from ddplaunch.coordinator import wire
from ddplaunch.coordinator.link import Answered, Ask, Forget, ForwardToAll, Generation, JobEnd, NodeEnd, Order, Report
from ddplaunch.plan import Agreed, Seat
from ddplaunch.stacks import Call, Group, Sample, Thread
from ddplaunch.supervise import node
from ddplaunch.supervise.outcome import Frame, StartFailure, Traces, Why, WorkerExit

NOW = 7.5
END = WorkerExit(
    rank=3, local_rank=1, host="b", pid=9, device="cpu", code=3, signal=None, at=5.0, seconds=1.0, cpu_seconds=0.5
)
AGREED = Agreed(
    run_id="run-1",
    place=1,
    seats=(Seat("", 2), Seat("", 2), Seat("", 1)),  # the hosts of others are not sent
    address="a",
    backend="gloo",
    backend_reason="no accelerator",
)
SAMPLE = Sample(
    rank=3,
    pid=7,
    host="b",
    child="python",
    threads=(Thread(frames=(Frame(file="/a.py", line=3, function="f"),), name="main", is_main=True),),
    state="stopped",
    groups=(
        Group(name="0", members=(0, 3), calls=(Call(number=4, operation="barrier", inputs="", outputs="", done=True),)),
    ),
)
REPORTS: list[Report] = [
    node.ReportStopping(Why.FAILED, SIGTERM),
    node.ReportStopping(Why.FRONT_LOST, 0),
    node.ReportStopping(Why.SIGNALLED, SIGTERM, by_cluster=True),
    node.ReportNotice(SIGUSR1),
    node.Escalate(SIGINT),
    node.ReportStill(1.5),
    node.HoldTimeout(True),
    node.RequestStore(),
    ForwardToAll(SIGUSR1),
    Answered(1, NodeStatus((WorkerStatus(3, 1, 9, "cpu", "ended", "exit status 3", 1.0, 0.5, 0, None),))),
    NodeEnd(4, (END,), None, (), Traces(oom_kills=1, shm=(64, 8), log_folder="/runs/1"), (SAMPLE,)),
    NodeEnd(
        0,
        (),
        StartFailure(3, "b", "no such file", 127, 2),
        ("pid 7 (python) in uninterruptible sleep",),
        Traces(oom_kills=0, shm=None, log_folder=None),
    ),
]
ORDERS: list[Order] = [
    Generation(number=1, restarts=1, port=29500, ranks=frozenset({2, 3}), alone=False, agreed=AGREED),
    JobEnd(138, "signalled", "ddplaunch: stopped\n", SIGUSR1, True),
    node.StopOrdered(SIGTERM, NOW),
    node.StopOrdered(SIGTERM, NOW, time_is_up=True),
    node.StopOrdered(SIGTERM, NOW, by_cluster=True),
    node.KillOrdered(NOW),
    Ask(1, AskStatus()),
    Forget(1),
    node.SignalReceived(SIGUSR1, NOW, escalates=False),
]


@pytest.mark.parametrize("report", REPORTS, ids=lambda report: type(report).__name__)
def test_a_report_arrives_as_it_was_sent(report: Report) -> None:
    message = wire.encode_report(report)
    assert message is not None
    assert wire.decode_report(messages.for_coordinator(messages.encode(message)), "b", 0.0) == report


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: type(order).__name__)
def test_an_order_arrives_as_it_was_sent(order: Order) -> None:
    message = messages.for_agent(messages.encode(wire.encode_order(order)))
    assert wire.decode_order(message, NOW) == order


@pytest.mark.parametrize("report", [node.Suspend(), node.Resume()], ids=repr)
def test_only_where_the_coordinator_is_does_a_pause_stop_the_clock(report: Report) -> None:
    assert wire.encode_report(report) is None


odd = st.text(max_size=40)  # with control characters and halves of characters, which stand for bytes that are no UTF-8


@given(odd, odd)
def test_whatever_names_and_paths_hold_a_report_can_be_sent(text: str, other: str) -> None:
    failed = StartFailure(0, "b", text, 127)
    traces = Traces(oom_kills=0, shm=None, log_folder=other)
    message = wire.encode_report(NodeEnd(0, (), failed, (text, other), traces))
    assert message is not None
    assert wire.decode_report(messages.for_coordinator(messages.encode(message)), "b", 0.0) is not None


@given(odd, odd)
def test_whatever_names_and_paths_hold_an_order_can_be_sent(text: str, other: str) -> None:
    agreed = replace(AGREED, seats=(Seat(text, 2), Seat(other, 2)), address=other, backend_reason=text)
    for order in (replace(ORDERS[0], agreed=agreed), JobEnd(1, "failed", text)):
        assert wire.decode_order(messages.for_agent(messages.encode(wire.encode_order(order))), NOW) is not None


def test_of_what_node_0_says_of_the_end_only_the_first_lines_look_like_ours() -> None:
    said = "error: a\nddplaunch: b\n\nhint: c\nerror: d\n"
    order = wire.decode_order(messages.Quit(1, "failed", said, 0, False), NOW)
    assert isinstance(order, JobEnd)
    assert order.text == "error: a\n  ddplaunch: b\n\nhint: c\n  error: d\n"
