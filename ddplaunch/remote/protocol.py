"""What goes through the pipes of a command that runs elsewhere: a line by which its speaker is known, then frames.

A frame is a tag of one byte, the length of its data in four, big-endian, and the data. Pure: it opens no pipe and looks into
no data. What a remote shell prints at login comes before the line, and is skipped.
"""

from __future__ import annotations

import re

from ddplaunch import __version__
from ddplaunch.agent.pipes import CONTROL, STDERR, STDOUT

PROTOCOL = 1

# to a host
ORDER = b"j"  # what it is to do
MEET = b"m"  # where it finds the coordinator
SIGNAL = b"s"  # the number of a signal to pass on
NUDGE = b"n"  # the same, but a second one is no reason to hurry
FEWER = b"f"  # to the first: a host was given up, and will not come
# both ways
BEAT = b"b"  # I am there

TO_HOST = ORDER + MEET + SIGNAL + NUDGE + FEWER + BEAT
FROM_HOST = STDOUT + STDERR + CONTROL + BEAT

LIMIT = 16 << 20  # bytes of data in one frame; variables and words of a command line are the most there is
LONGEST_LOGIN = 1 << 20  # bytes of what a shell prints before

_HEAD = 5  # bytes
_MARK = b"\0ddplaunch-remote "
_GREETING = re.compile(re.escape(_MARK) + rb"(\d{1,9}) ([0-9A-Za-z.+-]{1,40})\n")


class FrameError(Exception):
    """What the other side did wrong, as it reads after its name."""


def pack(tag: bytes, data: bytes) -> bytes:
    """Make a frame."""
    if len(data) > LIMIT:
        raise ValueError(f"a frame of {len(data)} bytes, and nobody takes more than {LIMIT}")
    return tag + len(data).to_bytes(_HEAD - 1) + data


def greeting() -> bytes:
    """The line that comes before the first frame."""
    return b"%s%d %s\n" % (_MARK, PROTOCOL, __version__.encode())


class Decoder:
    """The receiving end of a stream of frames."""

    def __init__(self, tags: bytes) -> None:
        self._tags = tags
        self._buffer = bytearray()

    def feed(self, data: bytes) -> None:
        """Add what has arrived."""
        self._buffer += data

    def take(self) -> tuple[bytes, bytes] | None:
        """Give the next frame's tag and data, None if it is not all there.

        Raises:
            FrameError: this is no frame of ours.
        """
        buffer = self._buffer
        if not buffer:
            return None
        if buffer[:1] not in self._tags:
            raise FrameError(f"sent {bytes(buffer[:20])!r}, which is no frame")
        length = int.from_bytes(buffer[1:_HEAD])
        if len(buffer) >= _HEAD and length > LIMIT:
            raise FrameError(f"sent a frame of {length} bytes, at most {LIMIT} are allowed")
        if len(buffer) < _HEAD + length:
            return None
        tag, data = bytes(buffer[:1]), bytes(buffer[_HEAD : _HEAD + length])
        del buffer[: _HEAD + length]
        return tag, data


class Reception:
    """Waits for the greeting. Afterwards the rest of what was fed belongs to a decoder."""

    def __init__(self) -> None:
        self._buffer = b""
        self.rest = b""

    def feed(self, data: bytes) -> tuple[int, str] | None:
        """Give the protocol and the version that the other side speaks, once they are there.

        Raises:
            FrameError: what comes before has no end.
        """
        self._buffer += data
        found = _GREETING.search(self._buffer)
        if found is not None:
            self.rest = self._buffer[found.end() :]
            return int(found[1]), found[2].decode()
        if len(self._buffer) > LONGEST_LOGIN:
            raise FrameError(f"printed {len(self._buffer)} bytes before ddplaunch had started there")
        return None

    @property
    def skipped(self) -> str:
        """What was printed instead of a greeting, the end of it."""
        return self._buffer[-1000:].decode(errors="replace")
