"""What the front of a job with --live asks its viewer for. Pure: bytes to values and back.

The viewer is a process beside the front: an observer of the run, as `ddplaunch top` is, which draws the rows below the lines. The
front alone writes to the terminal, and asks for rows once a second, for a snapshot at a key. Each request is one packet. A reply
is a message to the front as the agent's are: `ROWS`, or a part of a snapshot for `STDERR`, see `reach/pipes.py`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from ddplaunch.record.run_socket import SocketPath
from ddplaunch.system.fields import Number, decoder

LONGEST = 1 << 14  # bytes of a request


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


encode = msgspec.json.Encoder().encode
decode_draw: Callable[[bytes], Draw] = decoder(Draw)
