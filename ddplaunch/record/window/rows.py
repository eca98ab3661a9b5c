"""What the front of a job with --live asks its viewer for, and the reply. Pure: bytes to values and back.

The viewer is a process beside the front: an observer of the run, as `ddplaunch top` is, which draws the rows below the lines. The
front alone writes to the terminal, and asks for rows once a second, for a snapshot at a key. Each message is one packet.
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


class Draw(Struct, frozen=True):
    """Draw the rows for a terminal of this size, or a snapshot of this width, which says where all workers are."""

    # of the run's socket, as the agent tells it: FOLDER, a null byte, NAME
    place: Annotated[bytes, Meta(max_length=1 << 13)]
    columns: Number
    lines: Number
    snapshot: bool = False

    @property
    def socket_path(self) -> SocketPath:
        """The place as a path."""
        folder, _, name = os.fsdecode(self.place).partition("\0")
        return SocketPath(folder, name)


class Drawn(Struct, frozen=True):
    """The rows, in place of those before; or a part of a snapshot, which follows the part before."""

    text: Text
    snapshot: bool = False


def snapshot_parts(written: str) -> list[Drawn]:
    """Return the replies that carry a snapshot."""
    return [Drawn(text(written[at : at + _PART]), snapshot=True) for at in range(0, len(written), _PART)]


encode = msgspec.json.Encoder().encode
decode_draw: Callable[[bytes], Draw] = decoder(Draw)
decode_drawn: Callable[[bytes], Drawn] = decoder(Drawn)
