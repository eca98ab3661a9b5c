"""Histories of a whole agent, with its coordinator and workers that are played: what it does, and in which order."""

from __future__ import annotations

import os
import signal

from ddplaunch.launcher.decide import node
from ddplaunch.launcher.job import orders
from ddplaunch.launcher.node import events
from ddplaunch.reach.pipes import MAY_STOP, STOPPED
from ddplaunch.record.window.questions import Ask, AskStatus, Forget
from ddplaunch.record.window.requests import Attach
from ddplaunch.system.console.streams import Stream
from ddplaunch.system.errors import LaunchError


def test_a_job_ends_when_all_its_workers_have(make_bed):
    bed = make_bed(2)

    def work() -> None:
        bed.workers[0].writes("hello\n")
        bed.workers[1].exits()
        bed.after(1.0, bed.workers[0].exits)

    bed.once_started(0, work)
    assert bed.run() == 0
    assert bed.story == ["generation 0: ranks 0, 1 started"]
    assert "[0] hello\n" in bed.shown


def test_what_a_worker_wrote_before_it_ended_is_shown_before_its_end_is_told(make_bed):
    bed = make_bed(2)

    def fail() -> None:
        # more than is read at once
        bed.workers[0].writes("a line of many\n" * 10_000 + "OSError: the last words\n", Stream.ERR)
        bed.workers[0].exits(3)

    bed.once_started(0, fail)
    assert bed.run() == 3
    output, report = bed.shown.split("error: rank 0", 1)
    assert "[0] OSError: the last words\n" in output
    assert "OSError: the last words" in report
    assert bed.story == ["generation 0: ranks 0, 1 started", "SIGTERM to rank 1"]


def test_of_two_that_end_in_one_round_the_first_is_blamed(make_bed):
    bed = make_bed(3)

    def fail() -> None:
        bed.workers[2].exits(5)
        bed.workers[0].exits(7)

    bed.once_started(0, fail)
    assert bed.run() == 5
    assert "rank 2" in bed.shown


def test_a_second_signal_kills_those_that_do_not_end(make_bed):
    bed = make_bed(1)

    def stubborn() -> None:
        bed.workers[0].dies_of = {signal.SIGKILL: 0.0}
        bed.press()
        bed.after(2.0, bed.press)

    bed.once_started(0, stubborn)
    assert bed.run() == 130
    assert bed.story[1:] == ["the user sends SIGINT", "SIGINT to rank 0", "the user sends SIGINT", "SIGKILL to rank 0"]


def test_the_grace_period_ends_those_that_do_not_end(make_bed):
    bed = make_bed(1, grace_period=12.0)

    def stubborn() -> None:
        bed.workers[0].dies_of = {signal.SIGKILL: 0.0}
        bed.press(signal.SIGTERM)
        bed.after(11.9, lambda: bed.note("almost 12 s"))
        bed.after(12.1, lambda: bed.note("over 12 s"))

    bed.once_started(0, stubborn)
    assert bed.run() == 143
    assert bed.story[2:] == ["SIGTERM to rank 0", "almost 12 s", "SIGKILL to rank 0"]


def test_a_job_that_may_restarts_once_all_have_ended(make_bed):
    bed = make_bed(2, max_restarts=1)

    def fail() -> None:
        bed.workers[1].dies_of = {signal.SIGTERM: 3.0}
        bed.workers[0].exits(1)

    def work() -> None:
        for worker in bed.workers.values():
            worker.exits()

    bed.once_started(0, fail)
    bed.once_started(1, work)
    assert bed.run() == 0
    assert bed.story == ["generation 0: ranks 0, 1 started", "SIGTERM to rank 1", "generation 1: ranks 0, 1 started"]


def test_the_loss_of_the_front_ends_the_workers(make_bed):
    bed = make_bed(1)

    def lose() -> None:
        bed.note("the front ends")
        os.close(bed.pipes.signals[1])

    bed.once_started(0, lose)
    bed.run()
    assert bed.story[1:] == ["the front ends", "SIGTERM to rank 0"]
    assert bed.agent._context.queue.broken


def test_where_the_workers_are_is_found_out_before_they_are_stopped(make_bed):
    bed = make_bed(2)

    def fail() -> None:
        bed.workers[1].exits(3)
        bed.after(0.5, answer)

    def answer() -> None:
        (asked,) = bed.loop.questions
        bed.note("stacks are known")
        asked.answer_with(())

    bed.once_started(0, fail)
    bed.agent._job.inputs.error_files.has_recorder = lambda _generation: True
    assert bed.run() == 3
    assert bed.story[1:] == ["stacks are known", "SIGTERM to rank 0"]


def test_workers_that_do_not_say_where_they_are_in_time_are_stopped_all_the_same(make_bed):
    bed = make_bed(2)
    bed.agent._job.inputs.error_files.has_recorder = lambda _generation: True
    bed.once_started(0, lambda: bed.workers[1].exits(3))
    bed.after(0.9, lambda: bed.note("almost a second"))
    bed.after(2.0, lambda: bed.note("later"))
    assert bed.run() == 3
    assert bed.story[1:3] == ["almost a second", "SIGTERM to rank 0"]


def test_a_front_that_is_to_stop_is_let_to_once_the_workers_have(make_bed):
    bed = make_bed(1)

    def suspend() -> None:
        bed.pipes.pass_on(signal.SIGTSTP)
        bed.pipes.request(MAY_STOP)
        bed.after(0.5, still)

    def still() -> None:
        bed.note("they are not stopped")
        bed.workers[0].played.has_stopped = True
        bed.loop.post(events.ChildEnded())
        bed.pipes.request(MAY_STOP)
        bed.after(0.5, go_on)

    def go_on() -> None:
        bed.note(f"the front is told {os.read(bed.pipes.replies[0], 10)!r}")
        bed.pipes.pass_on(signal.SIGCONT)
        bed.workers[0].exits()

    bed.once_started(0, suspend)
    assert bed.run() == 0
    assert bed.story[1:] == ["SIGSTOP to rank 0", "they are not stopped", f"the front is told {STOPPED!r}"]


class Visitor:
    """A client that wants to debug a worker."""

    number = 1

    def __init__(self) -> None:
        self.refused: list[str] = []

    def refuse(self, reason: str) -> None:
        self.refused.append(reason)


def test_a_debugger_is_refused_for_a_worker_that_has_ended_or_is_not_there(make_bed):
    bed, visitor = make_bed(2), Visitor()
    bed.agent._run_socket.client = lambda number: visitor if number == 1 else None

    def ask() -> None:
        bed.workers[0].exits()
        bed.after(0.1, lambda: [bed.loop.post(events.AttachAsked(1, Attach(rank))) for rank in (0, 7)])
        bed.after(0.1, lambda: bed.loop.post(events.AttachAsked(2, Attach(1))))  # a client that has gone
        bed.after(0.2, bed.workers[1].exits)

    bed.once_started(0, ask)
    assert bed.run() == 0
    assert visitor.refused == ["rank 0 has ended", "rank 7 has not been started yet"]


def test_what_a_signal_means_is_decided_once_for_all_workers_and_passed_on(make_bed):
    bed = make_bed(2)

    def usr1() -> None:
        bed.press(signal.SIGUSR1)
        for worker in bed.workers.values():
            bed.after(0.1, worker.exits)

    bed.once_started(0, usr1)
    assert bed.run() == 0
    assert bed.story[1:] == ["the user sends SIGUSR1", "SIGUSR1 to rank 0", "SIGUSR1 to rank 1"]


def test_a_job_at_rest_sleeps_without_waking(make_bed):
    bed = make_bed(1)

    def rest() -> None:
        before = bed.loop.slept
        bed.agent._lax_deadline_timer.cancel()  # the look after a minute, to which nothing is closer
        bed.loop.timer(
            bed.loop.now() + 3600,
            lambda: [bed.note(f"slept {bed.loop.slept - before} times"), bed.workers[0].exits()],
            may_come_late=True,
        )

    bed.once_started(0, rest)
    assert bed.run() == 0
    assert bed.story[1:] == ["slept 1 times"]


def test_a_question_that_fails_is_answered_with_the_reason_and_the_next_one_is_tried(make_bed):
    bed = make_bed(1)
    asked = []

    def fail(workers: object) -> None:
        asked.append(workers)
        raise OSError(24, "Too many open files")

    def ask() -> None:
        bed.agent._generations.sampler.gpus = fail
        for number in (1, 2):
            bed.loop.post(orders.ClientOrder(Ask(number, AskStatus())))
        bed.loop.post(orders.ClientOrder(Forget(1)))
        bed.after(1.0, bed.workers[0].exits)

    bed.once_started(0, ask)
    assert bed.run() == 0
    assert len(asked) == 2
    assert bed.shown.count("warning: a question could not be answered: OSError: [Errno 24] Too many open files") == 2


def test_an_attach_that_fails_costs_the_socket_of_the_run_and_not_the_job(make_bed):
    bed = make_bed(1)

    def fail(*_: object) -> None:
        raise OSError(24, "Too many open files")

    def attach() -> None:
        bed.agent._generations.debuggers.attach = fail
        bed.agent._run_socket.client = lambda _: object()
        bed.loop.post(events.AttachAsked(7, Attach(0)))
        bed.after(1.0, bed.workers[0].exits)

    bed.once_started(0, attach)
    assert bed.run() == 0
    assert "no longer reach this run: OSError: [Errno 24] Too many open files" in bed.shown


def test_a_signal_while_a_node_that_found_no_coordinator_leaves_is_no_bug(make_bed):
    bed = make_bed(1)

    def connect(*_: object) -> None:
        bed.loop.post(node.SignalReceived(signal.SIGINT, bed.loop.now()))
        bed.loop.post(node.FrontLost(bed.loop.now()))
        raise LaunchError("port 29500 is taken", status=121)

    bed.agent._leave = bed.loop.run_once  # as while the files are written
    bed.agent._connect = connect
    assert bed.agent.run() == 121
