"""What the agent and the process that writes files say to each other. Knows neither what they mean nor how they go.

Both are frames: of a message what it is, for which log, and the content; of a reply packed values.
"""

from __future__ import annotations

import marshal
from collections.abc import Mapping
from typing import Any

from ddplaunch.loop.frames import WORD, head
from ddplaunch.loop.frames import pack as frame

PROGRESS = 16  # bytes at the beginning of the shared file: what the writer has done so far, in bytes and in steps
HEADER = WORD + 5  # bytes: the length word, what it is, and for which log

# what a message is; the number of a log is 0 where there is none
MAKE = b"m"  # the folder of the run; packed
OPEN = b"o"  # a log; packed: its name and limit
WRITE = b"w"
MISSING = b"d"  # so many bytes of a log were dropped
CLOSE = b"c"
EVENT = b"e"  # for events.jsonl; packed
JSON = b"j"  # a file of JSON as a whole; packed: its name and its content
REPLACE = b"r"  # a file as a whole: its name, a newline, its content
REMOVE = b"u"  # a file elsewhere; its path
LISTEN = b"l"  # at the socket of the run; packed
END = b"."
LONGEST_REPLY = 1 << 20  # bytes


def pack(values: Any) -> bytes:
    """Pack values that JSON can hold for a fork of this process, which writes them as JSON: that takes longer to import."""
    try:
        return marshal.dumps(values)
    except ValueError:  # some are of a class of their own, as signals are
        import json

        return marshal.dumps(json.loads(json.dumps(values)))


def header(kind: bytes, log: int, size: int) -> bytes:
    """Return what comes before the content of a message."""
    return head(5 + size) + kind + log.to_bytes(4)


def parse(data: bytes) -> tuple[bytes, int, int]:
    """Return what a header says: what the message is, for which log, and how long the content."""
    return data[WORD : WORD + 1], int.from_bytes(data[WORD + 1 :]), int.from_bytes(data[:WORD]) - 5


def reply(**values: Any) -> bytes:
    """Make a reply."""
    return frame(pack(values))


def values_of(reply: bytes) -> Mapping[str, Any]:
    """Return what a reply says."""
    values: Mapping[str, Any] = marshal.loads(reply)
    return values
