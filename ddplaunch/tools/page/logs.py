"""The ends of a run's logs, and its stacks and exceptions, as short texts."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import islice

from ddplaunch.system.process.files import open_regular, read_json
from ddplaunch.tools.runs.logs import LogFile, logs_of, segments_of

_LONGEST_EXCEPTION = 1 << 18


def end_of(path: str, size: int) -> str:
    """Return at most the last `size` bytes of a file, from the beginning of a line, as text; "" if the file cannot be read."""
    with suppress(OSError), open_regular(path) as file:
        length = os.fstat(file.fileno()).st_size
        file.seek(max(0, length - size))
        data = file.read(size)
        if length > size and b"\n" in data:
            data = data.partition(b"\n")[2]
        text = data.decode(errors="replace").replace("\r\n", "\n")
        # of a progress bar only the last state is left on a screen
        return "\n".join(line.removesuffix("\r").rpartition("\r")[2] for line in text.split("\n"))
    return ""


def ends(folder: str, size: int, *, most: int) -> dict[int, str]:
    """Return the ends of the logs of the first ranks that have any, at most `most`.

    These are stdout and stderr of the last generation of the rank, together at most `size` bytes.
    """
    return dict(islice(_ends(folder, size), most))


def end_of_rank(folder: str, rank: int, size: int) -> str:
    """Return the ends of the logs of one rank, as `ends` does; "" for none."""
    return dict(_ends(folder, size, rank)).get(rank, "")


def _ends(folder: str, size: int, only: int | None = None) -> Iterator[tuple[int, str]]:
    """Yield the rank and the text, rank by rank, in the order of `logs_of`."""
    latest: dict[int, dict[str, LogFile]] = {}
    for log in logs_of(folder):
        if only is None or log.rank == only:
            latest.setdefault(log.rank, {})[log.stream] = log
    for rank, of_rank in latest.items():
        if text := "\n\n".join(_ends_of(of_rank, size)):
            yield rank, text


def _ends_of(streams: Mapping[str, LogFile], size: int) -> Iterator[str]:
    for stream, log in streams.items():
        path = _last_segment(f"{log.folder}/{log.name}")
        if text := end_of(path, size // 2).rstrip():
            yield f"--- {stream} ---\n{text}"


def _last_segment(path: str) -> str:
    """Return the file in which a log has its end: a long one is continued in segments while it is written."""
    numbers = segments_of(path)
    return f"{path}.tail-{max(numbers)}" if numbers else path


def stacks(part: str, generation: int, size: int) -> str:
    """Return the stacks that one node kept of a generation; "" for none."""
    paths = (f"{part}/stacks/{generation}.txt", f"{part}/attempt_{generation}/stacks.txt")
    return next((text for path in paths if (text := end_of(path, size))), "")


def exception(part: str, generation: int, rank: int, local_rank: int) -> str:
    """Return the traceback that one worker recorded in a generation; "" for none."""
    for path in (f"{part}/errors/{generation}/{rank}.json", f"{part}/attempt_{generation}/{local_rank}/error.json"):
        found = read_json(path)
        message = found.get("message") if isinstance(found, dict) else None
        if isinstance(message, str):
            return message[-_LONGEST_EXCEPTION:]
        if isinstance(message, dict):
            more = message.get("extraInfo")
            stack = more.get("py_callstack") if isinstance(more, dict) else None
            text = stack if isinstance(stack, str) else message.get("message")
            return (text if isinstance(text, str) else json.dumps(message))[-_LONGEST_EXCEPTION:]
    return ""
