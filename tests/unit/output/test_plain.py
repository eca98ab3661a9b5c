"""What the log of a worker that writes for a terminal gets: all of its text, none of its escape sequences, bars now and then."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddplaunch.launcher.output.sinks import PlainText


def kept(written: bytes, size: int) -> bytes:
    plain = PlainText()
    pieces = (plain.feed(written[start : start + size], 0.0) for start in range(0, len(written), size))
    return b"".join(pieces) + plain.end()


@pytest.mark.parametrize("size", [1, 7, 4096])
@pytest.mark.parametrize(
    ("written", "log"),
    [
        (b"a line\nand no newline", b"a line\nand no newline"),
        (b"\x1b[1;31mred\x1b[0m and \x1b[38:5:9mnot\x1b[m\n", b"red and not\n"),
        (b"a \x1b]8;id=1;http://x/y\x1b\\link\x1b]8;;\x1b\\ here\n", b"a link here\n"),
        (b"\x1b[?25l\x1b[32mone\x1b[0m\n10%\r\x1b[2K\x1b[1A\x1b[2Kone\n90%\n\x1b[?25hafter", b"one\n90%\nafter"),
        (b"\xff\x00 no text\n", b"\xff\x00 no text\n"),
    ],
    ids=["plain", "colours", "link", "rich", "bytes"],
)
def test_text_stays_and_sequences_go(written: bytes, log: bytes, size: int) -> None:
    assert kept(written, size) == log


def test_the_beginning_of_a_line_is_kept_at_once() -> None:
    plain = PlainText()
    assert plain.feed(b"half", 0.0) == b"half"
    assert plain.feed(b" a line\nnext", 0.0) == b" a line\nnext"
    assert plain.feed(b"\rover", 0.0) == b""
    assert plain.feed(b"\n", 0.0) == b"\rover\n"


def test_a_bar_is_kept_now_and_then_and_at_its_end() -> None:
    plain = PlainText()
    assert plain.feed(b"\r\x1b[32m10%", 0.0) == b""
    assert plain.flush(1.0) == b"10%\r"
    assert plain.feed(b"\r90%", 2.0) == b""
    assert plain.deadline == 12.0
    assert plain.end() == b"90%\n"


@given(st.lists(st.sampled_from(["ab", "\n", "\r\n", "x y", "訓練"])), st.integers(1, 5))
def test_what_is_plain_stays_as_it_is(pieces: list[str], size: int) -> None:
    written = "".join(pieces).encode()
    assert kept(written, size) == written.replace(b"\r\n", b"\n")


@given(st.lists(st.sampled_from(["ab", "\n", "\r", "\x1b[A", "\x1b[31m", "\x1b[K", "\x1b[?25l", "\x1b[?25h", "50%"])))
def test_no_escape_sequence_is_ever_kept(pieces: list[str]) -> None:
    assert not re.search(rb"\x1b\[", kept("".join(pieces).encode(), 4096))
