"""What an agent has answered, and whether it is given up; pipes, but no agent and no time."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from math import inf

import pytest
from msgspec.structs import replace

from ddplaunch.launcher.node.child import AgentProcess, Question, Watch
from ddplaunch.reach.pipes import ASKING_SIGNAL, GOES_ON, HANDLER_ANSWERS, LOOP_ANSWERS, STOPPED, FrontPipes, Replies
from ddplaunch.system.process import clock
from ddplaunch.system.process.tree import Process


@pytest.fixture
def pipes() -> Iterator[FrontPipes]:
    """Both sides in one process."""
    pipes = FrontPipes.make()
    yield pipes
    for fd in (*pipes.signals, *pipes.requests, *pipes.replies, pipes.lease):
        try:
            os.close(fd)
        except OSError:  # closed by the test
            pass
    for sock in (*pipes.output, *pipes.spared):
        sock.close()


@pytest.fixture
def agent(pipes: FrontPipes) -> AgentProcess:
    return AgentProcess(os.getpid(), pipes)  # the signal means nothing here


@pytest.fixture
def replies(agent: AgentProcess) -> Replies:
    return agent.replies


@pytest.fixture
def question(agent: AgentProcess) -> Question:
    return Question(agent)


def test_an_agent_that_does_not_answer_is_given_up_after_some_questions(question):
    assert not question.has_answer()
    assert [question.repeat() for _ in range(4)] == [True, True, True, False]


def test_one_answer_of_the_loop_is_enough(pipes, question):
    assert question.repeat()
    os.write(pipes.replies[1], LOOP_ANSWERS)
    assert question.has_answer()


def test_an_agent_whose_handler_answers_has_time_but_not_for_ever(pipes, question):
    questions = 0
    while question.repeat():
        os.write(pipes.replies[1], HANDLER_ANSWERS)
        assert not question.has_answer()
        questions += 1
    assert questions == 59


def test_an_answer_to_an_earlier_question_does_not_count(pipes, agent):
    os.write(pipes.replies[1], LOOP_ANSWERS)
    assert not Question(agent).has_answer()


@pytest.fixture
def watch(pipes: FrontPipes, agent: AgentProcess) -> Watch:
    """Of an agent that was heard once, and may be silent for 10 s."""
    watch = Watch(agent, 10.0)
    os.write(pipes.replies[1], LOOP_ANSWERS + HANDLER_ANSWERS)
    assert watch.look()
    return watch


def looks(pipes: FrontPipes, watch: Watch, reply: bytes) -> int:
    """How many questions an agent survives that always replies so."""
    asked = 0
    while asked < 100 and watch.look():
        os.write(pipes.replies[1], reply)
        asked += 1
    return asked


def test_a_watched_agent_may_be_silent_for_somewhat_longer_than_the_heartbeat_timeout(pipes, watch):
    assert watch.interval == 5
    assert looks(pipes, watch, b"") == 2


def test_a_watched_agent_whose_loop_does_not_come_by_has_half_a_minute(pipes, watch):
    assert looks(pipes, watch, HANDLER_ANSWERS) == 5


def test_a_watched_agent_gets_a_signal_only_if_its_loop_has_not_answered(pipes, watch):
    came: list[int] = []
    before = signal.signal(ASKING_SIGNAL, lambda signum, _: came.append(signum))
    try:
        os.write(pipes.replies[1], LOOP_ANSWERS)
        assert (watch.look(), came) == (True, [])
        assert (watch.look(), came) == (True, [ASKING_SIGNAL])
    finally:
        signal.signal(ASKING_SIGNAL, before)


def test_a_watched_agent_is_asked_less_often_while_it_answers(pipes, watch):
    waited = [watch.wait()]
    while watch.look():
        waited.append(watch.wait())
    assert (waited, watch.silent) == ([10, 5, 5], 20)


def test_an_agent_whose_workers_live_longer_than_their_lease_is_given_up_within_half_a_second(pipes, watch):
    pipes.note_lease(3600.0)
    assert watch.keeps_lease()
    pipes.note_lease(0.0)
    assert [(watch.keeps_lease(), watch.wait()) for _ in range(3)] == [(True, 0.25), (True, 0.25), (False, 0.25)]
    assert watch.silent == 10


@pytest.mark.parametrize("left", [3600.0, inf], ids=["a renewal", "the end of the workers"])
def test_an_agent_that_goes_on_after_a_pause_says_so_in_time(pipes, watch, left):
    pipes.note_lease(0.0)
    assert watch.keeps_lease()
    pipes.note_lease(left)
    assert [watch.keeps_lease() for _ in range(3)] == [True] * 3


def test_an_agent_is_looked_at_when_the_lease_of_its_workers_ends(pipes, watch):
    pipes.note_lease(4.0)
    assert 3.9 < watch.wait() <= 4


@pytest.mark.parametrize("reply", [LOOP_ANSWERS, LOOP_ANSWERS + HANDLER_ANSWERS])
def test_a_watched_agent_that_runs_is_never_given_up(pipes, watch, reply):
    assert looks(pipes, watch, reply) == 100


def test_an_agent_that_still_imports_its_modules_is_not_given_up_yet(pipes, agent):
    assert looks(pipes, Watch(agent, 10.0), b"") == 100


@pytest.mark.parametrize("reply", [STOPPED, GOES_ON])
def test_a_reply_that_is_waited_for_is_given_at_once(pipes, replies, reply):
    os.write(pipes.replies[1], LOOP_ANSWERS + reply)
    assert replies.wait(STOPPED + GOES_ON, clock.now() + 3600)
    assert replies.has(reply)


def test_no_reply_is_waited_for_when_the_agent_has_ended(pipes, replies):
    os.close(pipes.replies[1])
    began = clock.now()
    assert not replies.wait(STOPPED + GOES_ON, began + 20)
    assert clock.now() - began < 10


def test_a_reply_is_waited_for_until_the_deadline_only(replies):
    assert not replies.wait(STOPPED, clock.now())
    assert not replies.wait(STOPPED, -inf)


def test_what_the_agent_leaves_is_that_very_process_however_often_it_is_asked(pipes: FrontPipes) -> None:
    writer = Process(7, "python", "S", 1, group=7, threads=1, started=1000)
    assert not pipes.is_spared(writer)
    pipes.spare(6, 999)
    pipes.spare(writer.pid, writer.started)
    pipes.spared[1].close()
    assert pipes.is_spared(writer)
    assert pipes.is_spared(writer)
    assert not pipes.is_spared(replace(writer, started=1001))
    assert not pipes.is_spared(replace(writer, pid=8))
