"""A stream of bytes cut into frames: a length word, as many bytes of payload, a signature once there is a key.

Packs, buffers and cuts; it opens no socket, knows no key and parses no payload. A frame above the limit is refused by
its length word alone, so that the buffer never grows beyond one frame.
"""

from __future__ import annotations

LIMIT_UNAUTHENTICATED = 4 << 10  # bytes of payload that an unauthenticated peer may send
LIMIT_UNKNOWN = 64 << 10  # bytes of payload that an authenticated peer may send before it takes part
LIMIT = 4 << 20  # bytes of payload that it may send then
SIGNATURE = 16  # bytes, of 32 that HMAC-SHA256 gives

_WORD = 4  # bytes of the length word, big-endian


class FrameError(Exception):
    """What the other side did wrong, as a predicate."""


def pack(payload: bytes, signature: bytes = b"") -> bytes:
    """Make a frame."""
    if len(payload) > LIMIT:
        raise ValueError(f"a payload of {len(payload)} bytes, and no peer takes more than {LIMIT}")
    return len(payload).to_bytes(_WORD) + payload + signature


class Decoder:
    """The receiving end of a stream. At first it takes what an unauthenticated peer may send: short, unsigned frames."""

    __slots__ = ("_buffer", "_limit", "_signature")

    def __init__(self, limit: int = LIMIT_UNAUTHENTICATED) -> None:
        self._buffer = bytearray()
        self._limit = limit
        self._signature = 0

    def trust(self, limit: int = LIMIT) -> None:
        """Take, from the next frame on, what an authenticated peer may send: signed frames of up to so many bytes of payload."""
        self._limit = limit
        self._signature = SIGNATURE

    def feed(self, data: bytes) -> None:
        """Add what has arrived."""
        self._buffer += data

    def take(self) -> bytes | None:
        """Return the next frame's payload with its signature, None if it is not all there.

        Raises:
            FrameError: the next frame is longer than it may be.
        """
        buffer = self._buffer
        if len(buffer) < _WORD:
            return None
        length = int.from_bytes(buffer[:_WORD])
        if length > self._limit:
            raise FrameError(f"sent a frame of {length} bytes, at most {self._limit} are allowed")
        end = _WORD + length + self._signature
        if len(buffer) < end:
            return None
        frame = bytes(buffer[_WORD:end])
        del buffer[:end]
        return frame
