"""What goes through the pipes of an agent that runs elsewhere."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddplaunch import __version__
from ddplaunch.reach.protocol import (
    FROM_HOST,
    HEARTBEAT,
    LIMIT,
    LOGIN_LIMIT,
    ORDER,
    PROTOCOL,
    TO_HOST,
    GreetingDecoder,
    PipeDecoder,
    greeting,
    pack,
)
from ddplaunch.system.loop.stream import FrameError

FRAMES = st.lists(st.tuples(st.sampled_from([bytes([tag]) for tag in FROM_HOST]), st.binary(max_size=300)), max_size=8)


def decoded(decoder: PipeDecoder, data: bytes, size: int) -> list[tuple[bytes, bytes]]:
    """What comes out when the bytes arrive in pieces of this size."""
    frames = []
    for start in range(0, len(data), size):
        decoder.feed(data[start : start + size])
        while (frame := decoder.take()) is not None:
            frames.append(frame)
    return frames


@pytest.mark.parametrize("size", [1, 7, 4096])
@given(frames=FRAMES)
def test_frames_come_out_as_they_went_in_however_they_are_cut(frames, size):
    data = b"".join(pack(tag, content) for tag, content in frames)
    assert decoded(PipeDecoder(FROM_HOST), data, size) == frames


@given(data=st.binary(max_size=200))
def test_anything_else_is_refused_or_waited_for(data):
    decoder = PipeDecoder(TO_HOST)
    try:
        frames = decoded(decoder, data, 64)
    except FrameError:
        return
    assert data.startswith(b"".join(pack(*frame) for frame in frames))


def test_a_frame_that_is_too_long_is_refused_by_its_length():
    decoder = PipeDecoder(TO_HOST)
    decoder.feed((LIMIT + 2).to_bytes(4))
    with pytest.raises(FrameError, match="no frame"):
        decoder.take()


def test_what_another_program_prints_between_frames_is_quoted():
    decoder = PipeDecoder(FROM_HOST)
    decoder.feed(b"Connection to node1 closed.")
    with pytest.raises(FrameError, match="sent b'Connection to node1 ', which is no frame"):
        decoder.take()


def test_a_frame_of_the_other_direction_is_refused():
    decoder = PipeDecoder(FROM_HOST)
    decoder.feed(pack(ORDER, b""))
    with pytest.raises(FrameError, match="no frame"):
        decoder.take()


@pytest.mark.parametrize("size", [1, 7, 4096])
@pytest.mark.parametrize("login", [b"", b"Welcome!\n", b"no newline", b"\0\xff\n\0ddplaunch-remote\n"])
def test_the_greeting_is_found_behind_the_words_of_a_login(login, size):
    data = login + greeting() + pack(HEARTBEAT, b"")
    decoder, found, at = GreetingDecoder(), None, 0
    while found is None:
        found = decoder.feed(data[at : at + size])
        at += size
    assert found == (PROTOCOL, __version__)
    assert decoder.rest + data[at:] == pack(HEARTBEAT, b"")


def test_a_login_without_end_is_refused():
    with pytest.raises(FrameError, match="before ddplaunch had started"):
        GreetingDecoder().feed(b"y\n" * LOGIN_LIMIT)


def test_what_is_printed_instead_of_a_greeting_can_be_shown():
    decoder = GreetingDecoder()
    assert decoder.feed(b"This account is not available.\n") is None
    assert decoder.skipped == "This account is not available.\n"
