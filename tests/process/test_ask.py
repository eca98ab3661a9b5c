"""A question whose answer may never come."""

import errno
import itertools
import os
import selectors
import signal
import time

import pytest

from ddplaunch.process.ask import Asked, AskedEnded, ask
from ddplaunch.process.tree import look
from tests.conftest import PATIENCE, until


def test_the_answer_and_the_error_are_those_of_the_question():
    assert ask(lambda: {"a": [1, b"x" * 200_000]}, 60) == {"a": [1, b"x" * 200_000]}
    with pytest.raises(ValueError, match="boom"):
        ask(lambda: int("boom"), 60)


def test_a_pause_of_everything_gives_no_answer_up(monkeypatch):
    looks, clock_gettime = itertools.count(), time.clock_gettime
    monkeypatch.setattr(time, "clock_gettime", lambda which: clock_gettime(which) + 1000.0 * next(looks))
    monkeypatch.setattr(time, "monotonic", lambda: time.clock_gettime(time.CLOCK_MONOTONIC))
    assert ask(lambda: "an answer", 60) == "an answer"


def test_no_answer_is_not_waited_for_and_no_signal_reaches_who_is_asked(tmp_path):
    def never() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        (tmp_path / "pid").write_text(str(os.getpid()))
        time.sleep(600)

    with pytest.raises(TimeoutError, match="no answer in 2 s"):
        ask(never, 2)
    pid = int((tmp_path / "pid").read_text())
    while os.path.exists(f"/proc/{pid}"):  # it was killed; it is ours to reap
        os.waitpid(pid, 0)


class Unfinished:
    """Ends the process that answers with it, in the middle of the answer."""

    def __reduce__(self):
        os.write(3, (1 << 20).to_bytes(8, "little") + bytes(100))
        os._exit(0)


@pytest.mark.parametrize("question", [lambda: os.kill(os.getpid(), signal.SIGKILL), Unfinished], ids=["none", "a part"])
def test_who_ends_before_the_answer_is_told_from_one_who_gives_none(question):
    with pytest.raises(AskedEnded, match="the process that was asked has ended"):
        ask(question, 60)


# --- in a loop


def test_a_loop_is_given_the_answer_when_it_has_come():
    answers: list[object] = []
    with selectors.DefaultSelector() as selector:
        asked = Asked(lambda: {"a": [1, b"x" * 200_000]}, {}, selector, answers.append)
        give_up = time.monotonic() + PATIENCE
        while not answers:
            assert time.monotonic() < give_up
            for key, _ in selector.select(1.0):
                key.data()
        assert not selector.get_map()
    assert answers == [asked.answer] == [{"a": [1, b"x" * 200_000]}]
    assert asked.pid == 0


def test_a_loop_that_does_not_wait_is_given_something_else_and_who_was_asked_ends_with_those_whom_it_asks(tmp_path):
    def never() -> int:
        def slow() -> int:
            (tmp_path / "pid").write_text(str(os.getpid()))
            time.sleep(600)
            return 1

        return ask(slow, 600)

    answers: list[int] = []
    with selectors.DefaultSelector() as selector:
        asked = Asked(never, 7, selector, answers.append)
        until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text(), "the question to be asked")
        pid = asked.pid
        asked.give_up()
        asked.give_up()
        assert not selector.get_map()
    assert answers == [asked.answer] == [7]
    assert look(pid) is None
    below = int((tmp_path / "pid").read_text())
    until(lambda: (process := look(below)) is None or process.state == "Z", "who was asked last to end")


def test_the_kernel_ends_a_child_whose_time_is_up_and_the_loop_goes_on_without_an_answer():
    answers: list[int] = []

    def never() -> int:
        while True:
            pass

    with selectors.DefaultSelector() as selector:
        asked = Asked(never, 7, selector, answers.append, within=0.2)
        pid = asked.pid
        while not answers:
            for key, _ in selector.select(PATIENCE):
                key.data()
    assert answers == [7]
    assert look(pid) is None


def test_without_room_for_a_process_a_question_is_answered_at_once(monkeypatch):
    def refuse():
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    answers: list[int] = []
    monkeypatch.setattr(os, "fork", refuse)
    fds = os.listdir("/proc/self/fd")
    with selectors.DefaultSelector() as selector:
        assert Asked(lambda: 1, 7, selector, answers.append).answer == 7
    assert answers == [7]
    assert os.listdir("/proc/self/fd") == fds
