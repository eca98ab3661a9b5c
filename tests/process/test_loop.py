"""A loop with real children, and asleep."""

import errno
import os
import posix
import resource
import time

import pytest

from ddplaunch.system.loop.loop import Loop
from ddplaunch.system.process.ask import ask
from ddplaunch.system.process.tree import look
from tests.conftest import PATIENCE, until


@pytest.fixture
def loop():
    loop = Loop()
    yield loop
    loop.close()


def test_a_loop_is_given_the_answer_when_it_has_come(loop):
    answers: list[object] = []
    asked = loop.ask(lambda: {"a": [1, b"x" * 200_000]}, {}, answers.append)
    assert loop.asked_pids == {asked.pid}
    give_up = time.monotonic() + PATIENCE
    while not answers:
        assert time.monotonic() < give_up
        loop.run_once()
    assert answers == [asked.answer] == [{"a": [1, b"x" * 200_000]}]
    assert not loop.asked_pids


def test_a_loop_that_does_not_wait_is_given_something_else_and_who_was_asked_ends_with_those_whom_it_asks(
    loop, tmp_path
):
    def never() -> int:
        def slow() -> int:
            (tmp_path / "pid").write_text(str(os.getpid()))
            time.sleep(600)
            return 1

        return ask(slow, 600)

    answers: list[int] = []
    asked = loop.ask(never, 7, answers.append)
    until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text(), "the question to be asked")
    pid = asked.pid
    asked.give_up()
    asked.give_up()
    assert answers == [asked.answer] == [7]
    assert look(pid) is None
    below = int((tmp_path / "pid").read_text())
    until(lambda: (process := look(below)) is None or process.state == "Z", "who was asked last to end")


def test_a_loop_that_is_closed_gives_up_what_it_asked(loop):
    answers: list[int] = []
    pid = loop.ask(lambda: time.sleep(600), 7, answers.append).pid
    loop.close()
    assert answers == [7]
    assert look(pid) is None


def test_the_kernel_ends_a_child_whose_time_is_up_and_the_loop_goes_on_without_an_answer(loop):
    answers: list[int] = []

    def never() -> int:
        while True:
            pass

    asked = loop.ask(never, 7, answers.append, within=0.2)
    pid = asked.pid
    while not answers:
        loop.run_once()
    assert answers == [7]
    assert look(pid) is None


def test_a_question_that_raises_is_answered_by_what_stands_for_an_answer_and_its_error_is_told(loop):
    answers: list[int] = []
    errors: list[Exception] = []
    loop.question_failed = errors.append
    loop.ask(lambda: 1 // 0, 7, answers.append)
    while not answers:
        loop.run_once()
    assert answers == [7]
    assert [type(error) for error in errors] == [ZeroDivisionError]


def test_without_room_for_a_process_a_question_is_answered_at_once(loop, monkeypatch):
    def refuse():
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    answers: list[int] = []
    monkeypatch.setattr(posix, "fork", refuse)
    fds = os.listdir("/proc/self/fd")
    assert loop.ask(lambda: 1, 7, answers.append).answer == 7
    assert answers == [7]
    assert os.listdir("/proc/self/fd") == fds


def test_a_loop_asleep_uses_no_cpu(loop):
    woken = []
    loop.timer(loop.now() + 0.5, lambda: woken.append(True))
    before = resource.getrusage(resource.RUSAGE_THREAD)  # there are threads of those who run the tests
    while not woken:
        loop.run_once()
    after = resource.getrusage(resource.RUSAGE_THREAD)
    assert after.ru_nvcsw - before.ru_nvcsw <= 2
