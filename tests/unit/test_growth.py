"""Twice as many ranks, lines or bytes take twice the work, and not four times: counted, however busy the machine is."""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from ddplaunch.launcher.decide import node
from ddplaunch.launcher.decide.first_failure import first_failure
from ddplaunch.launcher.output.collapse import Collapse
from ddplaunch.launcher.output.display import Display
from ddplaunch.launcher.tell.failure import FailureReport, render
from ddplaunch.reach.pipes import FULL, MESSAGE, STDOUT, FrontPipes, OutputQueue
from ddplaunch.spec.outcome import WorkerError, WorkerExit
from ddplaunch.system.console.streams import Stream
from tests.loops import FakeLoop
from tests.unit.builders import shown_workers, worker_exit

FEW, MANY = 64, 256
LOST_PEER = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:9634"


def work(call: Callable[[], object]) -> int:
    """Return the number of instructions of Python that a call takes; what is in C counts as one."""
    number = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal number
        frame.f_trace_opcodes = True
        number += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return number


def failed(rank: int, message: str = "", tail: str = "") -> WorkerExit:
    error = WorkerError(type="RuntimeError", message=message, traceback="") if message else None
    return worker_exit(rank, 1, at=float(rank), seconds=1.0, error=error, stderr_tail=tail)


class Rank(int):
    """One that is noticed when it is looked up, from C too."""

    def __hash__(self) -> int:
        return super().__hash__()


def show_equal_lines(ranks: int) -> None:
    everyone = [*map(Rank, range(ranks))]
    collapse = Collapse((rank, stream) for rank in everyone for stream in Stream)
    for line in range(4):
        for rank in everyone:
            collapse.feed(rank, Stream.OUT, b"line %d\n" % line, 0.0)


def draw_bars(ranks: int) -> None:
    display = Display(mode="prefix", ranks=shown_workers(*range(ranks)))
    for percent in range(4):
        for rank in range(ranks):
            display.feed(rank, Stream.ERR, b"\r %d%%" % percent, 0.0)
            assert display.deadline() is not None
            display.flush(0.0)


def report_failures(message: str) -> Callable[[int], None]:
    def report(ranks: int) -> None:
        exits = tuple(failed(rank, message.format("x" * rank)) for rank in range(ranks))
        first = first_failure(exits)
        assert first is not None
        render(FailureReport(first=first, exits=exits))

    return report


def lose_peers(ranks: int) -> None:
    everyone = frozenset(range(ranks))
    state = node.State(policy=node.Policy(ranks=everyone, stop_signals=frozenset()))
    events: list[node.Event] = [node.GenerationBegun(0, everyone, 0.0)]
    events += (node.WorkerStarted(rank, 0.0) for rank in range(ranks))
    lost = [failed(rank, LOST_PEER) for rank in range(ranks)]
    events += (node.WorkerRaised(end.rank, end.error, 1.0) for end in lost if end.error is not None)
    events += (node.WorkerExited(end, 1.0) for end in lost)
    for event in events:
        state, _ = node.step(state, event)
    assert state.phase is node.Phase.SETTLING


@pytest.mark.parametrize(
    "of",
    [
        pytest.param(show_equal_lines, id="equal-lines"),
        pytest.param(draw_bars, id="progress-bars"),
        pytest.param(report_failures("boom"), id="equal-failures"),
        pytest.param(report_failures("boom {}"), id="different-failures"),
        pytest.param(report_failures(LOST_PEER), id="lost-peers"),
        pytest.param(lose_peers, id="lost-peers-one-by-one"),
    ],
)
def test_what_is_done_for_a_rank_does_not_depend_on_how_many_there_are(of):
    few, many = work(lambda: of(FEW)), work(lambda: of(MANY))
    assert many / MANY < 1.25 * few / FEW


def test_of_failures_only_the_first_are_searched_for_signs_that_they_follow():
    exits = [failed(rank, tail="some words of a log\n") for rank in range(MANY)]
    searched = work(lambda: first_failure(exits[:1]))
    assert work(lambda: first_failure(exits)) < MANY * searched / 2


def test_output_of_single_characters_waits_for_the_front_in_few_messages():
    pipes = FrontPipes.make()
    front, agent = pipes.output
    loop = FakeLoop()
    queue, put = OutputQueue(loop, agent), 0
    while queue.size < FULL // 16:
        queue.put(STDOUT, b"%d\n" % (put % 10))
        put += 1
    in_socket = queue.sent // 3  # the stream, a digit, the end of a line
    received, messages = bytearray(), 0
    while queue.size or len(received) < 2 * put:
        received += front.recv(MESSAGE + 1)[1:]
        messages += 1
        loop.turn(0.0)
    for end in (front, agent, *pipes.spared):
        end.close()
    assert received == b"".join(b"%d\n" % (number % 10) for number in range(put))
    assert messages <= in_socket + 2 * put / MESSAGE + 1
