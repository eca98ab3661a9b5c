"""What the agent and the process that writes files say to each other. Knows neither what they mean nor how they go.

A message is HEADER bytes, then its content; a reply is its length, then packed values.
"""

from __future__ import annotations

import marshal
from collections.abc import Mapping
from typing import Any

PROGRESS = 16  # bytes at the beginning of the shared file: what the writer has done so far, in bytes and in steps
HEADER = 13  # bytes: what it is, for which log, and how long what follows is

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
_LENGTH = 4  # bytes, of a reply


def pack(values: Any) -> bytes:
    """Pack values that JSON can hold for a fork of this process, which writes them as JSON: that takes longer to import."""
    try:
        return marshal.dumps(values)
    except ValueError:  # some are of a class of their own, as signals are
        import json

        return marshal.dumps(json.loads(json.dumps(values)))


def reply(**values: Any) -> bytes:
    """Make a reply."""
    packed = pack(values)
    return len(packed).to_bytes(_LENGTH, "little") + packed


def replies(data: bytes) -> tuple[list[Mapping[str, Any]], bytes]:
    """Take the whole replies off the beginning of what was received; give them and the rest."""
    found = []
    while len(data) >= _LENGTH and len(data) >= (end := _LENGTH + int.from_bytes(data[:_LENGTH], "little")):
        found.append(marshal.loads(data[_LENGTH:end]))
        data = data[end:]
    return found, data
