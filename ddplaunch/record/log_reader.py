"""Reads what the workers of a run have written: their logs, line by line or only the ends, their stacks and exceptions.

A long log is continued in segments beside it.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import groupby

from msgspec import Struct

from ddplaunch.record.folders import node_folders_of
from ddplaunch.record.log import offset_at
from ddplaunch.record.run import Node
from ddplaunch.system.errors import LaunchError
from ddplaunch.system.process.files import open_regular, read_json
from ddplaunch.system.words import why_failed

CHUNK = 1 << 20  # bytes read at once, and the longest line that is kept in one piece
STREAMS = ("out", "err")
_GAP_NOTE = b"[ddplaunch: a part is left out here: the log had reached its limit]\n"
_OUR_NAME = re.compile(r"rank-(\d{1,9})\.(out|err)")
_ATTEMPT = re.compile(r"attempt_(\d{1,9})")
_TORCHRUN_NAMES = {"stdout.log": "out", "stderr.log": "err"}
# seconds after which a change of a folder has another time than the one before, on any file system
_SETTLED_AFTER = 2.0
_LONGEST_EXCEPTION = 1 << 18  # characters


class LogFile(Struct, frozen=True):
    """One log of a rank."""

    rank: int
    attempt: int  # the generation, with --log-dir; else 0: a rank has one log for all generations
    stream: str  # of STREAMS
    folder: str  # of the run, or of the node
    name: str  # the path in that folder

    @property
    def order(self) -> tuple[int, int, int]:
        """By rank, then as they were written, stdout first."""
        return self.rank, self.attempt, STREAMS.index(self.stream)

    @property
    def paths(self) -> list[str]:
        """Its file, and the segments in which it is continued, in their order."""
        path = f"{self.folder}/{self.name}"
        return [path, *(f"{path}.tail-{number}" for number in sorted(segments_of(path)))]


def logs_of(run: str) -> list[LogFile]:
    """Return all logs in the folder of a run: of one node, or, where the nodes share a home, of all nodes."""
    roots = dict.fromkeys((run, *node_folders_of(run)))  # in order: the latest log of a rank is that of the last node
    return sorted((log for root in roots for log in _logs_in(root)), key=lambda log: log.order)


def _names(folder: str) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def _logs_in(root: str) -> Iterator[LogFile]:
    """Yield the log files in a folder: rank-3.out, or as torchrun lays them, attempt_0/3/stdout.log for a local rank."""
    names = _names(root)
    attempts = [found for name in names if (found := _ATTEMPT.fullmatch(name))]
    ranks = _ranks_by_local_rank(root) if attempts else {}
    for found in attempts:
        attempt = found[0]
        for local_rank in filter(str.isdigit, _names(f"{root}/{attempt}")):
            rank = ranks.get(int(local_rank), int(local_rank))
            for file in _names(f"{root}/{attempt}/{local_rank}"):
                if file in _TORCHRUN_NAMES:
                    path = f"{attempt}/{local_rank}/{file}"
                    yield LogFile(
                        rank=rank, attempt=int(found[1]), stream=_TORCHRUN_NAMES[file], folder=root, name=path
                    )
    for name in names:
        if found := _OUR_NAME.fullmatch(name):
            yield LogFile(rank=int(found[1]), attempt=0, stream=found[2], folder=root, name=name)


def _ranks_by_local_rank(root: str) -> dict[int, int]:
    """Return the ranks in the plan of a node by their local ranks; {} if it cannot be read."""
    with suppress(ValueError, KeyError, TypeError, OverflowError):
        return {int(worker["local_rank"]): int(worker["rank"]) for worker in Node(root).object("plan")["workers"]}
    return {}


def segments_of(path: str) -> Sequence[int]:
    """Return the numbers of the segments in which a log is continued beside itself, PATH.tail-1 and so on.

    Thousands of logs share one listing of their folder, until the folder changes.
    """
    folder, base = os.path.split(path)
    try:
        changed = os.stat(folder).st_mtime
    except OSError:
        return ()
    now = time.time()
    # a change right after a listing may have the same time as the change before: such a listing is not used again
    version = changed if now - changed >= _SETTLED_AFTER else now
    return _segments_in(folder, version).get(base, ())


@lru_cache(maxsize=1 << 10)
def _segments_in(folder: str, version: float) -> Mapping[str, Sequence[int]]:
    """Return the segments in a folder, by the names of their logs; `version` only tells two states of the folder apart."""
    found = dict[str, list[int]]()
    for name in _names(folder):
        base, tail, number = name.rpartition(".tail-")
        if tail and number.isascii() and number.isdigit():
            found.setdefault(base, []).append(int(number))
    return found


class LogReader:
    """Gives the lines of a log that are new each time, and goes on to the segments that a long log is continued in."""

    def __init__(self, log: LogFile, since: float | None = None) -> None:
        """`since`: leave out what was written before this time, as far as that is known."""
        self._segment = 0  # the one that is read; 0: the log itself
        self._fd = -1  # of that segment; -1: it is not open
        self._rest = b""  # what was read behind the last line
        self.why_unreadable = ""  # the log is there, and cannot be opened
        self._since = since
        self._log = log

    def lines(self) -> Iterator[bytes]:
        """Yield whole lines up to the end that the log has now, each with its newline.

        A progress bar writes its states over each other, each with a return at its end: these are yielded as they are.

        Raises:
            LaunchError: the disk of the log fails.
        """
        while self._fd >= 0 or self._open():
            while data := self._read():
                *whole, self._rest = (self._rest + data).split(b"\n")
                for line in whole:
                    yield line + b"\n"
                if end_of_states := self._rest.rfind(b"\r") + 1:
                    yield self._rest[:end_of_states]
                    self._rest = self._rest[end_of_states:]
                if len(self._rest) >= CHUNK:  # a line that is too long to be kept until it ends
                    yield from self.rest()
            if (following := self._next_segment()) is None:
                return
            is_part_dropped = following > self._segment + 1
            if is_part_dropped:
                yield from self.rest()
                yield _GAP_NOTE
            self.close()
            self._segment = following

    def rest(self) -> Iterator[bytes]:
        """Yield what stands behind the last newline, if anything, as a line."""
        rest, self._rest = self._rest, b""
        if rest:
            yield rest + b"\n"

    def _open(self) -> bool:
        """Open the current segment, at the first line since the time that was asked for; return whether there is that segment."""
        name = f"{self._log.name}.tail-{self._segment}" if self._segment else self._log.name
        try:
            with open_regular(f"{self._log.folder}/{name}") as file:
                self._fd = os.dup(file.fileno())
            if self._since is not None:
                os.lseek(self._fd, offset_at(self._log.folder, name, self._since), os.SEEK_SET)
        except FileNotFoundError:
            return False
        except OSError as error:
            self.why_unreadable = why_failed(error)
            return False
        return True

    def _read(self) -> bytes:
        try:
            return os.read(self._fd, CHUNK)
        except OSError as error:
            raise LaunchError(f"{self._log.folder}/{self._log.name}: {why_failed(error)}") from None

    def _next_segment(self) -> int | None:
        found = segments_of(f"{self._log.folder}/{self._log.name}")
        return min((number for number in found if number > self._segment), default=None)

    def close(self) -> None:
        """Close the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


# --- how they end


def ends_of(logs: Iterable[LogFile], size: int) -> Iterator[tuple[int, str]]:
    """Yield for each rank that has written anything its number, and the ends of its logs as a text.

    These are stdout and stderr of the last generation of the rank, together at most `size` bytes. `logs` are in their order.
    """
    for rank, of_rank in groupby(logs, key=lambda log: log.rank):
        latest = {log.stream: log for log in of_rank}
        texts = ((stream, end_of(log.paths[-1], size // 2).rstrip()) for stream, log in latest.items())
        if text := "\n\n".join(f"--- {stream} ---\n{text}" for stream, text in texts if text):
            yield rank, text


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


# --- what workers have left besides


def stacks(node_folder: str, generation: int, size: int) -> str:
    """Return the stacks that one node kept of a generation; "" for none."""
    paths = (f"{node_folder}/stacks/{generation}.txt", f"{node_folder}/attempt_{generation}/stacks.txt")
    return next((text for path in paths if (text := end_of(path, size))), "")


def exception(node_folder: str, generation: int, rank: int, local_rank: int) -> str:
    """Return the traceback that one worker recorded in a generation, in our form or in torch elastic's; "" for none."""
    for path in (
        f"{node_folder}/errors/{generation}/{rank}.json",
        f"{node_folder}/attempt_{generation}/{local_rank}/error.json",
    ):
        found = read_json(path)
        message = found.get("message") if isinstance(found, dict) else None
        if isinstance(message, str):
            return message[-_LONGEST_EXCEPTION:]
        if isinstance(message, dict):  # as torch.distributed.elastic.multiprocessing.errors writes it
            more = message.get("extraInfo")
            stack = more.get("py_callstack") if isinstance(more, dict) else None
            text = stack if isinstance(stack, str) else message.get("message")
            return (text if isinstance(text, str) else json.dumps(message))[-_LONGEST_EXCEPTION:]
    return ""
