"""A stream of bytes cut into frames: a length word, then as many bytes. Opens no socket and looks into no frame.

A frame above the limit is refused by its length word alone, so that the buffer never grows beyond one frame.
"""

from __future__ import annotations

WORD = 4  # bytes of the length word, big-endian


class FrameError(Exception):
    """What the other side did wrong, as a predicate."""


def head(length: int) -> bytes:
    """Return what comes before so many bytes."""
    return length.to_bytes(WORD)


def pack(*pieces: bytes) -> bytes:
    """Return these pieces as one frame."""
    return b"".join((head(sum(map(len, pieces))), *pieces))


class Decoder:
    """The receiving end of a stream."""

    __slots__ = ("_buffer", "limit", "tail")

    def __init__(self, limit: int) -> None:
        self._buffer = bytearray()
        self.limit = limit  # bytes of a frame
        self.tail = 0  # bytes that follow each frame and that its length does not count

    def feed(self, data: bytes) -> None:
        """Add what has arrived."""
        self._buffer += data

    @property
    def beginning(self) -> bytes:
        """The first bytes that were not taken, to show what came in place of a frame."""
        return bytes(self._buffer[:20])

    def take(self) -> bytes | None:
        """Return the next frame with its tail, None if it is not all there.

        Raises:
            FrameError: the next frame is longer than it may be.
        """
        buffer = self._buffer
        if len(buffer) < WORD:
            return None
        length = int.from_bytes(buffer[:WORD])
        if length > self.limit:
            raise FrameError(f"sent a frame of {length} bytes, at most {self.limit} are allowed")
        end = WORD + length + self.tail
        if len(buffer) < end:
            return None
        frame = bytes(buffer[WORD:end])
        del buffer[:end]
        return frame
