"""Reads what a worker's bootstrap, or torch's `@record`, wrote about the exception that ended it. Trusts none of it.

The program may damage the file: whatever is wrong with it, no more is lost than what it would have reported.
"""

from __future__ import annotations

import math
import os
import stat

from ddplaunch.supervise.outcome import Frame, WorkerError

LIMIT = 1 << 20  # bytes; the bootstrap never writes more
UNKNOWN = "Exception"  # the type, where the file does not name it


def read(path: str) -> WorkerError | None:
    """Return the exception that the error file at `path` describes, or None if it holds none that can be read.

    The form of torch's own files: torch.distributed.elastic.multiprocessing.errors.error_handler.
    """
    import json  # slow to import, and most jobs do not fail

    try:
        content = json.loads(_content(path))
    except (OSError, ValueError, RecursionError):
        return None
    message = content.get("message") if isinstance(content, dict) else None
    if isinstance(message, str):  # what torch calls the old format
        return _from_text(message, "")
    if not isinstance(message, dict):
        return None
    extra = _mapping(message.get("extraInfo"))
    traceback = _text(extra.get("py_callstack"))
    ours = _mapping(extra.get("ddplaunch"))
    if not isinstance(ours.get("type"), str):
        summary = message.get("message")
        return _from_text(summary, traceback) if isinstance(summary, str) else None
    return WorkerError(
        type=_text(ours["type"]),
        message=_text(ours.get("message")),
        traceback=traceback,
        frames=_frames(ours.get("frames")),
        at=_seconds(ours.get("monotonic")),
    )


def _content(path: str) -> bytes:
    """Return the bytes of a regular file of at most LIMIT bytes. Raises: OSError, ValueError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a FIFO must not block us
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError("not a regular file")
        content = file.read(LIMIT + 1)
    if len(content) > LIMIT:
        raise ValueError("too large")
    return content


def _from_text(summary: str, traceback: str) -> WorkerError:
    """Take apart "RuntimeError: boom", which is all that torch writes."""
    kind, colon, message = _text(summary).partition(": ")
    if colon and all(part.isidentifier() for part in kind.split(".")):
        return WorkerError(type=kind, message=message, traceback=traceback)
    return WorkerError(type=UNKNOWN, message=_text(summary), traceback=traceback)


def _frames(value: object) -> tuple[Frame, ...]:
    frames = []
    for entry in map(_mapping, value if isinstance(value, list) else []):
        file, line = entry.get("file"), entry.get("line")
        if isinstance(file, str) and isinstance(line, int) and not isinstance(line, bool):
            function, source = _text(entry.get("function")), _text(entry.get("source"))
            frames.append(Frame(file=_text(file), line=line, function=function, source=source))
    return tuple(frames)


def _mapping(value: object) -> dict[str, object]:
    return value if isinstance(value, dict) else {}


def _text(value: object) -> str:
    """Return the text without lone surrogates, which cannot be written to a terminal or a file."""
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else ""


def _seconds(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        seconds = float(value)
    except OverflowError:  # JSON has no largest number
        return None
    return seconds if math.isfinite(seconds) else None
