"""Frames between agents: how long they may be, by whom, and signed once there is a key. Opens no socket and knows no key."""

from __future__ import annotations

from ddplaunch.loop import frames

LIMIT_UNAUTHENTICATED = 4 << 10  # bytes of payload that an unauthenticated peer may send
LIMIT_UNKNOWN = 64 << 10  # bytes of payload that an authenticated peer may send before it takes part
LIMIT = 4 << 20  # bytes of payload that it may send then
SIGNATURE = 16  # bytes, of 32 that HMAC-SHA256 gives, which follow the payload


def pack(payload: bytes, signature: bytes = b"") -> bytes:
    """Make a frame."""
    if len(payload) > LIMIT:
        raise ValueError(f"a payload of {len(payload)} bytes, and no peer takes more than {LIMIT}")
    return frames.pack(payload) + signature


class Decoder(frames.Decoder):
    """The receiving end of a stream. At first it takes what an unauthenticated peer may send: short, unsigned frames."""

    def __init__(self, limit: int = LIMIT_UNAUTHENTICATED) -> None:
        super().__init__(limit)

    def trust(self, limit: int = LIMIT) -> None:
        """Take, from the next frame on, what an authenticated peer may send: signed frames of up to so many bytes of payload."""
        self.limit, self.tail = limit, SIGNATURE
