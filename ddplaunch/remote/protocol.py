"""The protocol on the pipes between the dispatcher and the agents on other hosts: a greeting line, then frames.

A frame is a tag of one byte and data. Pure: it opens no pipe and looks into no data. What a remote shell prints at login comes
before the greeting, and is skipped.
"""

from __future__ import annotations

import re

from ddplaunch import __version__
from ddplaunch.agent.pipes import BARS, CONTROL, OURS, STDERR, STDOUT
from ddplaunch.loop import frames
from ddplaunch.loop.frames import FrameError

PROTOCOL = 1

# to a host
ORDER = b"j"  # messages.Order
COORDINATOR = b"m"  # messages.CoordinatorAddress
SIGNAL = b"s"  # the number of a signal to pass on
PLAIN_SIGNAL = b"n"  # the same, but it does not escalate if it is the second
FEWER = b"f"  # to the first: one host fewer will join
CONNECT = b"a"  # messages.Connect, to the first
# both ways
HEARTBEAT = b"b"
STREAM = b"q"  # streams.Chunk: between a command where the job was typed and the first host's agent

TO_HOST = ORDER + COORDINATOR + SIGNAL + PLAIN_SIGNAL + FEWER + CONNECT + HEARTBEAT + STREAM
FROM_HOST = STDOUT + STDERR + OURS + BARS + CONTROL + HEARTBEAT + STREAM

LIMIT = 16 << 20  # bytes of data in one frame; the largest is an order, with variables and arguments
LOGIN_LIMIT = 1 << 20  # bytes that a shell may print before the greeting

_MARK = b"\0ddplaunch-remote "
_LONGEST_GREETING = 100  # bytes
_GREETING = re.compile(re.escape(_MARK) + rb"(\d{1,9}) ([0-9A-Za-z.+-]{1,40})\n")


def pack(tag: bytes, data: bytes) -> bytes:
    """Make a frame."""
    if len(data) > LIMIT:
        raise ValueError(f"a frame of {len(data)} bytes, and the limit is {LIMIT}")
    return frames.pack(tag, data)


def greeting() -> bytes:
    """The line that comes before the first frame."""
    return b"%s%d %s\n" % (_MARK, PROTOCOL, __version__.encode())


class PipeDecoder:
    """The receiving end of a stream of frames."""

    def __init__(self, tags: bytes) -> None:
        self._tags = tags
        self._frames = frames.Decoder(1 + LIMIT)

    def feed(self, data: bytes) -> None:
        """Add what has arrived."""
        self._frames.feed(data)

    def take(self) -> tuple[bytes, bytes] | None:
        """Return the next frame's tag and data, None if it is incomplete.

        Raises:
            FrameError: what arrived is no frame.
        """
        try:
            frame = self._frames.take()
        except FrameError:
            raise FrameError(f"sent {self._frames.beginning!r}, which is no frame") from None
        if frame is None:
            return None
        if frame[:1] not in self._tags or not frame:
            raise FrameError(f"sent {frame[:20]!r}, which is no frame")
        return frame[:1], frame[1:]


class GreetingDecoder:
    """Waits for the greeting. Afterwards `rest` belongs to a PipeDecoder."""

    def __init__(self) -> None:
        self._buffer = b""
        self.rest = b""

    def feed(self, data: bytes) -> tuple[int, str] | None:
        """Return the protocol and the version of the peer, once the greeting is complete.

        Raises:
            FrameError: too much comes before it.
        """
        searched = max(0, len(self._buffer) - _LONGEST_GREETING)
        self._buffer += data
        found = _GREETING.search(self._buffer, searched)
        if found is not None:
            self.rest = self._buffer[found.end() :]
            return int(found[1]), found[2].decode()
        if len(self._buffer) > LOGIN_LIMIT:
            raise FrameError(f"printed {len(self._buffer)} bytes before ddplaunch had started there")
        return None

    @property
    def skipped(self) -> str:
        """What was printed instead of a greeting, the end of it."""
        return self._buffer[-1000:].decode(errors="replace")
