"""The stream between agents, cut into frames."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddplaunch.reach.channel.handshake import LIMIT, LIMIT_UNAUTHENTICATED, SIGNATURE, Decoder, pack
from ddplaunch.system.loop.stream import FrameError


def taken(decoder: Decoder, stream: bytes, size: int) -> list[bytes]:
    frames = []
    for start in range(0, len(stream), size):
        decoder.feed(stream[start : start + size])
        while (frame := decoder.take()) is not None:
            frames.append(frame)
    return frames


@given(payloads=st.lists(st.binary(max_size=LIMIT_UNAUTHENTICATED), max_size=5), size=st.sampled_from([1, 7, 4096]))
def test_payloads_arrive_as_they_were_packed_however_the_stream_was_cut(payloads: list[bytes], size: int) -> None:
    assert taken(Decoder(), b"".join(map(pack, payloads)), size) == payloads


@given(payloads=st.lists(st.binary(max_size=9000), max_size=3), size=st.sampled_from([1, 7, 4096]))
def test_a_trusted_peer_may_send_longer_frames_which_bear_a_signature(payloads: list[bytes], size: int) -> None:
    decoder = Decoder()
    decoder.trust()
    signature = b"s" * SIGNATURE
    stream = b"".join(pack(payload, signature) for payload in payloads)
    assert taken(decoder, stream, size) == [payload + signature for payload in payloads]


def test_trust_counts_from_the_next_frame_on_even_within_one_piece() -> None:
    decoder = Decoder()
    decoder.feed(pack(b"welcome") + pack(b"x" * 9000, b"s" * SIGNATURE))
    assert decoder.take() == b"welcome"
    decoder.trust()
    assert decoder.take() == b"x" * 9000 + b"s" * SIGNATURE


@given(stream=st.binary(max_size=20_000), size=st.sampled_from([1, 7, 4096]), trusted=st.booleans())
def test_arbitrary_bytes_give_frames_or_a_frame_error(stream: bytes, size: int, trusted: bool) -> None:
    decoder = Decoder()
    if trusted:
        decoder.trust()
    try:
        frames = taken(decoder, stream, size)
    except FrameError as error:
        assert "bytes, at most" in str(error)
    else:
        assert sum(map(len, frames)) <= len(stream)


def test_a_gigabyte_is_refused_by_its_length_word_alone() -> None:
    decoder = Decoder()
    decoder.trust()
    decoder.feed((1 << 30).to_bytes(4))
    with pytest.raises(FrameError, match=r"^sent a frame of 1073741824 bytes, at most 4194304 are allowed$"):
        decoder.take()


@pytest.mark.parametrize(
    ("trusted", "limit"), [(False, LIMIT_UNAUTHENTICATED), (True, LIMIT)], ids=["stranger", "peer"]
)
def test_the_longest_frame_passes_and_one_byte_more_does_not(trusted: bool, limit: int) -> None:
    decoder = Decoder()
    if trusted:
        decoder.trust()
    decoder.feed(limit.to_bytes(4))
    assert decoder.take() is None
    other = Decoder()
    if trusted:
        other.trust()
    other.feed((limit + 1).to_bytes(4))
    with pytest.raises(FrameError):
        other.take()


def test_what_no_peer_would_take_is_not_packed() -> None:
    with pytest.raises(ValueError, match="4194305"):
        pack(bytes(LIMIT + 1))
