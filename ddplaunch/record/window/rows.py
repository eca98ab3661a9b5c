"""What the front of a job with --live and its viewer say to each other. Pure: bytes to values and back.

The viewer is a process beside the front: an observer of the run, as `ddplaunch top` is, which makes the rows below the lines. The
front alone writes to the terminal. Each message is one packet of their socket. The front sends `Follow` first, `DrawRows` once a
second, and `TakeSnapshot` at a key; the viewer replies with `Rows` to the one, and with `SnapshotPart`s to the other.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from ddplaunch.record.run_socket import SocketPath
from ddplaunch.system.fields import Number, Text, decoder, text

LONGEST = 1 << 17  # bytes of a message
_PART = 1 << 14  # characters of a snapshot in one message: JSON makes at most six bytes of each


class Follow(Struct, frozen=True, tag="follow"):
    """Ask the run at this socket from now on; it is the same run after another place, where another node has taken over."""

    place: Annotated[bytes, Meta(max_length=1 << 13)]  # as an agent tells it to its front: FOLDER, a null byte, NAME

    @property
    def socket_path(self) -> SocketPath:
        """The place as a path."""
        folder, _, name = os.fsdecode(self.place).partition("\0")
        return SocketPath(folder, name)


class DrawRows(Struct, frozen=True, tag="draw"):
    """Look at the run if a look is due, and send the rows for a terminal of this size."""

    columns: Number
    lines: Number


class TakeSnapshot(Struct, frozen=True, tag="snapshot"):
    """Send where all workers are, for a terminal of this width."""

    columns: Number


class Rows(Struct, frozen=True, tag="rows"):
    """The rows, in place of those before."""

    rows: tuple[Text, ...]

    @classmethod
    def of(cls, written: str) -> Rows:
        """Return the rows that were written as one text."""
        return cls(tuple(map(text, written.split("\n"))))


class SnapshotPart(Struct, frozen=True, tag="part"):
    """Some of the text of a snapshot, which follows the part before."""

    text: Text

    @classmethod
    def parts_of(cls, written: str) -> list[SnapshotPart]:
        """Return the parts of a snapshot, each as long as a message may be."""
        return [cls(text(written[start : start + _PART])) for start in range(0, len(written), _PART)]


ToViewer = Follow | DrawRows | TakeSnapshot
ToFront = Rows | SnapshotPart

encode = msgspec.json.Encoder().encode
for_viewer: Callable[[bytes], ToViewer] = decoder(ToViewer)
for_front: Callable[[bytes], ToFront] = decoder(ToFront)
