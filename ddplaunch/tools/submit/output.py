"""The files to which Slurm writes the output of a job: finds their paths from sbatch's patterns, and reads them as they grow."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import NamedTuple

from ddplaunch.reach.slurm.scontrol import JobRecord

_SYMBOL = re.compile(r"%(\d*)([%AaJjNnstux])")
_NUMERIC_LETTERS = "AaJjnst"  # a width pads these with zeros, and is ignored for the others
_PIECE = 1 << 16  # bytes
_LONGEST_CHARACTER = 4  # bytes of a character in UTF-8

# --- their paths


def expand(pattern: str, known: Mapping[str, str]) -> str:
    """Replace % and its letter by the value in `known`: "%x-%j.out" gives "train-84.out". Unknown letters stay."""

    def replace(found: re.Match[str]) -> str:
        width, letter = found.groups()
        value = known.get(letter)
        if value is None:
            return found[0]
        return value.zfill(int(width or 0)) if letter in _NUMERIC_LETTERS else value

    return _SYMBOL.sub(replace, pattern)


def is_complete(pattern: str) -> bool:
    """Whether all of it is expanded."""
    return _SYMBOL.search(pattern) is None


def output_files(job: JobRecord) -> dict[str, int]:
    """Return the output files of a job whose paths are known, and what goes there: 1 stdout, or both; 2 stderr.

    scontrol expands most symbols of the patterns, but not the node, padded numbers and %%.
    """
    # a batch script is task 0 (%t) on node 0 (%n) of its job
    known = {"j": job.id, "n": "0", "t": "0", "x": job.name, "%": "%", "A": job.array_id or job.id}
    if job.array_index.isdecimal():
        known["a"] = job.array_index
    short_host_name = job.batch_host.partition(".")[0]
    if short_host_name:
        known["N"] = short_host_name
    found: dict[str, int] = {}
    for stream, pattern in ((1, job.stdout), (2, job.stderr)):
        path = expand(pattern, known)
        if is_complete(path) and path not in ("", "/dev/null"):
            found.setdefault(path, stream)
    return found


def shown(path: str, folder: str) -> str:
    """Return the path, relative to this folder if it is inside."""
    inside = os.path.relpath(path, folder)
    return path if inside.startswith(os.pardir) else inside


# --- what they hold


class _Version(NamedTuple):
    """What tells whether a file was written."""

    size: int
    changed_at: int  # nanoseconds


class Tail:
    """A file that is read as it grows.

    It is opened for each read: a network file system guarantees to show what other hosts wrote only after an open.
    """

    def __init__(self, path: str, begin: int = 0, before_job: _Version | None = None) -> None:
        """Read from this offset; nothing as long as the file is as `before_job`: Slurm will truncate it."""
        self.path = path
        self._offset = begin
        self._before_job = before_job
        self._inode: int | None = None  # of the file that was read last
        self._part_of_character = b""  # at the end of what was read: its other bytes are still to come

    def read(self, *, is_last: bool = False) -> bytes:
        """Return new data, up to _PIECE bytes; an incomplete last character is held back unless nothing follows."""
        new = self._read_new()  # which may find that the file was replaced
        data = self._part_of_character + new
        cut = len(data) if is_last else length_of_whole_characters(data)
        self._part_of_character = data[cut:]
        return data[:cut]

    def _read_new(self) -> bytes:
        """Return what was appended to the file since the last call; start again if another file has its name."""
        try:
            file = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:  # it does not exist yet, or not on this host
            return b""
        try:
            now = os.fstat(file)
            is_as_before_job = self._before_job == _Version(now.st_size, now.st_mtime_ns)
            if is_as_before_job:
                return b""
            self._before_job = None
            was_truncated = now.st_size < self._offset
            was_replaced = self._inode is not None and self._inode != now.st_ino
            if was_truncated or was_replaced:
                self._offset, self._part_of_character = 0, b""
            self._inode = now.st_ino
            data = os.pread(file, _PIECE, self._offset)
        except OSError:  # a folder, a terminal, a file server that went away
            return b""
        finally:
            os.close(file)
        self._offset += len(data)
        return data

    @property
    def is_there(self) -> bool:
        """Whether the file has been seen."""
        return self._inode is not None


def length_of_whole_characters(data: bytes) -> int:
    """Return how many bytes are complete characters, as far as the data is UTF-8."""
    for back in range(1, min(len(data), _LONGEST_CHARACTER) + 1):
        byte = data[-back]
        if byte < 0x80:
            break
        if byte >= 0xC0:  # the first byte of a character says how many it has
            length = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return len(data) - back if length > back else len(data)
    return len(data)


def tail_of_existing(path: str, *, append: bool) -> Tail:
    """Return the tail of a file from before the job, without what it holds by now; `append`: Slurm will not truncate the file."""
    try:
        now = os.stat(path)
    except OSError:
        return Tail(path)
    if append:
        return Tail(path, begin=now.st_size)
    return Tail(path, before_job=_Version(now.st_size, now.st_mtime_ns))
