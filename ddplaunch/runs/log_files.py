"""The logs in the folder of a run: which there are, and what is new in one. Trusts no name and no size."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from msgspec import Struct

from ddplaunch.errors import LaunchError
from ddplaunch.process.files import open_regular, read_json
from ddplaunch.runlog.log import offset_at
from ddplaunch.words import why_failed

CHUNK = 1 << 20  # bytes read at once, and the longest line that is kept in one piece
STREAMS = ("out", "err")
_GAP = b"[ddplaunch: a part is left out here: the log had reached its limit]\n"
_OURS = re.compile(r"rank-(\d{1,9})\.(out|err)")
_NODE = re.compile(r"(?:node|rank)-\d+(?:\.\d+)?")
_ATTEMPT = re.compile(r"attempt_(\d{1,9})")
_TORCHRUNS = {"stdout.log": "out", "stderr.log": "err"}


class LogFile(Struct, frozen=True):
    """One log of a rank."""

    rank: int
    attempt: int  # with --log-dir each generation has logs of its own
    stream: str
    folder: str  # of the run, or of the node
    name: str  # in it

    @property
    def order(self) -> tuple[int, int, int]:
        """By rank, then as they were written, stdout first."""
        return self.rank, self.attempt, STREAMS.index(self.stream)


def logs_of(run: str) -> list[LogFile]:
    """Return all logs of a run whose folder this is: its own and, where the nodes share a home, those of all nodes."""
    roots = [run, *(f"{run}/{name}" for name in _names(run) if _NODE.fullmatch(name))]
    return sorted((log for root in roots for log in _logs_in(root)), key=lambda log: log.order)


def _names(folder: str) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def _logs_in(root: str) -> Iterator[LogFile]:
    ranks: dict[int, int] | None = None
    for name in _names(root):
        if found := _OURS.fullmatch(name):
            yield LogFile(int(found[1]), 0, found[2], root, name)
        elif found := _ATTEMPT.fullmatch(name):
            ranks = _ranks_by_local_rank(root) if ranks is None else ranks
            for local_rank in filter(str.isdigit, _names(f"{root}/{name}")):
                for file in _names(f"{root}/{name}/{local_rank}"):
                    if file in _TORCHRUNS:
                        rank = ranks.get(int(local_rank), int(local_rank))
                        path = f"{name}/{local_rank}/{file}"
                        yield LogFile(rank, int(found[1]), _TORCHRUNS[file], root, path)


def _ranks_by_local_rank(root: str) -> dict[int, int]:
    plan: Any = read_json(f"{root}/plan.json")
    with suppress(ValueError, KeyError, TypeError, OverflowError):
        return {int(worker["local_rank"]): int(worker["rank"]) for worker in plan["workers"]}
    return {}


class LogReader:
    """Gives the lines of a log that are new each time, by way of the segments that a long one is continued in."""

    def __init__(self, log: LogFile, since: float | None = None) -> None:
        """`since`: leave out what was written before this time, as far as that is known."""
        self._segment = 0  # the one that is read; 0: the log itself
        self._fd = -1
        self._rest = b""
        self._since = since
        self._log = log

    def lines(self) -> Iterator[bytes]:
        """Return whole lines up to the end that the log has now, each with its newline; of a bar, what a return ends.

        Raises:
            LaunchError: its disk fails.
        """
        while self._fd >= 0 or self._open():
            while data := self._read():
                *whole, self._rest = (self._rest + data).split(b"\n")
                for line in whole:
                    yield line + b"\n"
                if cut := self._rest.rfind(b"\r") + 1:
                    yield self._rest[:cut]
                    self._rest = self._rest[cut:]
                if len(self._rest) >= CHUNK:
                    yield from self.rest()
            if (following := self._next_segment()) is None:
                return
            if following > self._segment + 1:
                yield from self.rest()
                yield _GAP
            self.close()
            self._segment = following

    def rest(self) -> Iterator[bytes]:
        """Return what stands behind the last newline, if anything, as a line."""
        rest, self._rest = self._rest, b""
        if rest:
            yield rest + b"\n"

    def _open(self) -> bool:
        name = f"{self._log.name}.tail-{self._segment}" if self._segment else self._log.name
        try:
            with open_regular(f"{self._log.folder}/{name}") as file:
                self._fd = os.dup(file.fileno())
            if self._since is not None:
                os.lseek(self._fd, offset_at(self._log.folder, name, self._since), os.SEEK_SET)
        except OSError:
            return False
        return True

    def _read(self) -> bytes:
        try:
            return os.read(self._fd, CHUNK)
        except OSError as error:
            raise LaunchError(f"{self._log.folder}/{self._log.name}: {why_failed(error)}") from None

    def _next_segment(self) -> int | None:
        folder, base = os.path.split(f"{self._log.folder}/{self._log.name}")
        found = [
            int(name.removeprefix(f"{base}.tail-"))
            for name in _names(folder)
            if name.startswith(f"{base}.tail-") and name.removeprefix(f"{base}.tail-").isdigit()
        ]
        return min((number for number in found if number > self._segment), default=None)

    def close(self) -> None:
        """Close the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
