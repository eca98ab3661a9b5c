from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from ddplaunch.launcher.node.start_notice import StartNotice
from ddplaunch.launcher.node.workers import Workers
from ddplaunch.launcher.output.bars import Bar
from ddplaunch.launcher.output.display import Display
from ddplaunch.launcher.output.sinks import Output
from ddplaunch.system.console.streams import BOTH, Screen, Stream
from tests.loops import FakeLoop
from tests.unit.builders import shown_workers
from tests.written import KeptOutput

RANKS = (0, 1)


class Bed:
    """Two workers on a terminal, and the rows that stand on it."""

    def __init__(self, waiting: tuple[int, ...] = RANKS) -> None:
        """`waiting` are the ranks that have no process yet."""
        self.loop = FakeLoop()
        self.front = KeptOutput()
        screen = Screen(terminals=BOTH, live=BOTH)
        display = Display(mode="prefix", ranks=shown_workers(*RANKS), screen=screen)
        self.output = Output(display, self.front)
        self.notice = StartNotice(self.loop)
        workers = cast(Workers, SimpleNamespace(waiting=waiting))
        for rank in RANKS:
            self.output.open(rank, None)
        self.notice.begin(workers, self.output, RANKS, "starting")

    @property
    def rows(self) -> tuple[Bar, ...]:
        return self.front.bars

    def wait(self, seconds: float) -> str:
        """Let so much time pass; return the row."""
        self.loop.pass_time(seconds)
        return self.rows[0].text if self.rows else ""


def test_the_first_two_seconds_are_silent_and_then_a_row_counts_them() -> None:
    bed = Bed()
    assert bed.wait(1.9) == ""
    assert bed.wait(0.2) == "starting, 2 s"
    assert bed.wait(10.0) == "starting, 12 s"
    assert bed.rows[0].ranks == RANKS


def test_the_row_is_gone_before_the_first_line_and_comes_no_more() -> None:
    bed = Bed(waiting=())
    assert bed.wait(3.0) == "running, nothing printed yet, 3 s"
    bed.output.on_output(1, Stream.OUT, b"hello\n", bed.loop.now())
    assert (bed.rows, bed.front.lines) == ((), b"[1] hello\n")
    assert bed.wait(100.0) == ""
    assert bed.loop.is_idle


@pytest.mark.parametrize("seconds", [0.0, 5.0])
def test_an_exit_a_group_or_a_stop_ends_it_and_leaves_no_timer(seconds: float) -> None:
    bed = Bed()
    bed.wait(seconds)
    bed.notice.end()
    assert bed.rows == ()
    assert bed.loop.is_idle


def test_torch_is_imported_from_the_first_worker_that_begins_to_the_last_that_has_it() -> None:
    bed = Bed(waiting=())
    bed.notice.note_imports(1, 0)
    assert bed.wait(2.0) == "importing torch, 2 s"
    bed.notice.note_imports(1, 1)
    assert bed.wait(1.0) == "importing torch, 3 s"
    bed.notice.note_imports(0, 1)
    assert bed.wait(1.0) == "running, nothing printed yet, 4 s"


def test_a_minute_later_it_counts_tens() -> None:
    bed = Bed()
    assert bed.wait(61.0) == "starting, 1 min"
    assert bed.wait(5.0) == "starting, 1 min"
    assert bed.wait(6.0) == "starting, 1 min 10 s"


def test_a_debugger_that_has_the_terminal_is_not_disturbed() -> None:
    bed = Bed()
    bed.output.hide(True)
    assert bed.wait(5.0) == ""
