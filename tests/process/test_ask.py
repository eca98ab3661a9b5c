"""A question whose answer may never come."""

import itertools
import os
import signal
import time

import pytest

from ddplaunch.system.process.ask import AskedEnded, ask


def test_the_answer_and_the_error_are_those_of_the_question():
    assert ask(lambda: {"a": [1, b"x" * 200_000]}, 60) == {"a": [1, b"x" * 200_000]}
    assert ask(lambda: (signal.SIGTERM, None), 60) == (signal.SIGTERM, None)
    assert isinstance(ask(lambda: signal.SIGTERM, 60), signal.Signals)  # and no plain number
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
