"""The last line that a worker wrote, as commands that look into the job show it."""

from __future__ import annotations

import pytest

from ddplaunch.launcher.output.display import Display
from ddplaunch.launcher.output.sinks import Output
from ddplaunch.system.console.streams import Stream
from tests.unit.builders import shown_workers
from tests.written import KeptOutput


@pytest.mark.parametrize(
    ("pieces", "last"),
    [
        ([], ""),
        ([b"one\ntwo\n"], "two"),
        ([b"one\n", b"half a li", b"ne"], "half a line"),
        ([b"\rloss: 10%", b"\rloss: 20%\r"], "loss: 20%"),
        ([b"\x1b[31mred\x1b[0m \n\n"], "red"),
        ([b"x" * 10_000], "x" * 500),
        ([b"one\n", b"\xff\n"], "\ufffd"),
    ],
)
def test_it_is_a_whole_line_the_state_of_a_bar_or_the_end_of_a_long_one(pieces: list[bytes], last: str) -> None:
    output = Output(Display(mode="none", ranks=shown_workers(0)), KeptOutput())
    output.open(0, None)
    for piece in pieces:
        output.on_output(0, Stream.OUT, piece, 1.0)
    assert output.last_line(0) == last
    assert output.written[0] == sum(map(len, pieces))
    output.open(0, None)  # of the next generation
    assert (output.last_line(0), output.written[0]) == ("", 0)


def test_two_streams_are_not_joined_into_one_line() -> None:
    output = Output(Display(mode="none", ranks=shown_workers(0)), KeptOutput())
    output.open(0, None)
    output.on_output(0, Stream.OUT, b"to stdout", 1.0)
    output.on_output(0, Stream.ERR, b"to stderr", 1.0)
    assert output.last_line(0) == "to stderr"
