"""A question whose answer may never come."""

from __future__ import annotations

import os
import signal
import time

import pytest

from ddplaunch.process.ask import ask


def test_the_answer_and_the_error_are_those_of_the_question():
    assert ask(lambda: {"a": [1, b"x" * 200_000]}, 60) == {"a": [1, b"x" * 200_000]}
    with pytest.raises(ValueError, match="boom"):
        ask(lambda: int("boom"), 60)


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


def test_who_ends_without_an_answer_is_like_one_who_gives_none():
    with pytest.raises(TimeoutError):
        ask(lambda: os.kill(os.getpid(), signal.SIGKILL), 60)
