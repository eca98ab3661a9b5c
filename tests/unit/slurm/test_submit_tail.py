"""The output file of a job, read while it grows."""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddplaunch.tools.submit.output import Tail, length_of_whole_characters, tail_of_existing


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "out"


def test_a_file_is_shown_as_it_grows(file: Path) -> None:
    tail = Tail(str(file))
    assert (tail.read(), tail.is_there) == (b"", False)
    file.write_bytes(b"a\n")
    assert (tail.read(), tail.read(), tail.is_there) == (b"a\n", b"", True)
    with file.open("ab") as more:
        more.write(b"b")
    assert tail.read() == b"b"


def test_a_file_that_begins_anew_is_shown_from_its_beginning(file: Path) -> None:
    tail = Tail(str(file))
    file.write_bytes("long \u00fc".encode()[:-1])
    assert tail.read() == b"long "
    file.write_bytes(b"new")
    assert tail.read() == b"new"
    other = file.with_name("other")
    other.write_bytes(b"a longer one")
    other.rename(file)
    assert tail.read() == b"a longer one"


def test_what_was_there_before_the_job_is_not_its_output(file: Path) -> None:
    file.write_bytes(b"of another\n")
    appended, truncated = tail_of_existing(str(file), append=True), tail_of_existing(str(file), append=False)
    assert (appended.read(), truncated.read()) == (b"", b"")
    with file.open("ab") as more:
        more.write(b"mine\n")
    assert appended.read() == b"mine\n"
    file.write_bytes(b"mine alone, and longer\n")
    assert truncated.read() == b"mine alone, and longer\n"
    assert tail_of_existing(str(file.with_name("none")), append=True).read() == b""


def test_a_character_is_shown_whole(file: Path) -> None:
    data = "a\u20ac".encode()
    tail = Tail(str(file))
    file.write_bytes(data[:-1])
    assert tail.read() == b"a"
    file.write_bytes(data)
    assert tail.read() == data[1:]


def test_what_never_becomes_a_character_is_shown_at_the_end(file: Path) -> None:
    file.write_bytes(b"a\xe2\x82")
    tail = Tail(str(file))
    assert (tail.read(), tail.read(is_last=True), tail.read(is_last=True)) == (b"a", b"\xe2\x82", b"")


def test_a_large_file_comes_in_pieces(file: Path) -> None:
    data = os.urandom(200_000)
    file.write_bytes(data)
    tail, got = Tail(str(file)), b""
    while piece := tail.read(is_last=True):
        got += piece
    assert got == data


@pytest.mark.parametrize("kind", ["folder", "fifo"])
def test_what_is_no_file_gives_nothing(file: Path, kind: str) -> None:
    file.mkdir() if kind == "folder" else os.mkfifo(file)
    assert Tail(str(file)).read(is_last=True) == b""


@given(st.text(), st.integers(0, 40))
def test_text_is_cut_between_characters(text: str, at: int) -> None:
    data = text.encode()[:at]
    end = length_of_whole_characters(data)
    data[:end].decode()  # no error
    assert len(data) - end < 4
    assert not any(data[end:].startswith(character.encode()) for character in text)


@given(st.binary())
def test_of_any_bytes_at_most_the_beginning_of_a_character_is_held_back(data: bytes) -> None:
    held = data[length_of_whole_characters(data) :]
    assert not held or (held[0] >= 0xC0 and len(held) < 4)
