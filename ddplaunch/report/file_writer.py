"""The process that writes the files of a run, and may hang with their disk: nobody waits for it for ever. Decides nothing.

It takes the messages of `output/file_queue.py` in their order, does what each asks for, and notes that it has. It ends with
the agent: after all that the agent has handed over, and has left to it.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from ddplaunch.output.file_queue import CLOSE, END, EVENT, HEADER, MAKE, MISSING, OPEN, PROGRESS, REPLACE, WRITE
from ddplaunch.output.log import BoundedLog
from ddplaunch.report import folders

_GONE = "the log folder did not answer"


def run(sock: int, shared: int) -> None:
    """Be that process: take messages from this socket until there are no more, and note in this file what is done."""
    _Writer(sock, shared).run()


class _Writer:
    """The files that are open, and how much is done."""

    def __init__(self, sock: int, shared: int) -> None:
        self._sock = sock
        self._shared = shared
        self._done = 0  # bytes
        self._steps = 0
        self._path = ""
        self._events = -1
        self._logs: dict[int, BoundedLog] = {}

    def run(self) -> None:
        """Carry out every message."""
        with open(os.dup(self._sock), "rb") as messages, open(os.dup(self._shared), "rb") as left:
            os.lseek(left.fileno(), PROGRESS, os.SEEK_SET)

            def read(size: int) -> bytes:
                data = messages.read(size)
                return data if len(data) == size else data + left.read(size - len(data))

            while len(header := read(HEADER)) == HEADER and (kind := header[:1]) != END:
                log, size = int.from_bytes(header[1:5], "little"), int.from_bytes(header[5:], "little")
                data = read(size)
                if len(data) == size:
                    self._do(kind, log, data)
                self._note_done(HEADER + size)
        for number in tuple(self._logs):
            self._close_log(number)

    def _note_done(self, size: int) -> None:
        self._done += size
        self._steps += 1
        os.pwrite(self._shared, self._done.to_bytes(8, "little") + self._steps.to_bytes(8, "little"), 0)

    def _do(self, kind: bytes, log: int, data: bytes) -> None:
        try:
            if kind == MAKE:
                self._make(**json.loads(data))
            elif kind == OPEN:
                self._open_log(log, **json.loads(data))
            elif kind == WRITE and log in self._logs:
                self._write_log(log, lambda file: file.write(data))
            elif kind == MISSING and log in self._logs:
                self._write_log(log, lambda file: file.note_missing(int(data), _GONE))
            elif kind == CLOSE and log in self._logs:
                self._close_log(log)
            elif kind == EVENT:
                self._append_event(data)
            elif kind == REPLACE:
                name, _, content = data.partition(b"\n")
                self._replace(name.decode(), content)
        except OSError as error:
            self._reply(problem=f"{error.strerror}: {error.filename or self._path}")

    def _reply(self, **reply: Any) -> None:
        with suppress(OSError):  # the agent has ended
            os.write(self._sock, json.dumps(reply).encode() + b"\n")

    # --- the folder

    def _make(self, root: str, name: str, runs: str | None, kept: int) -> None:
        """Make the folder of this run; of those in `runs` only so many are kept."""
        try:
            self._path = folders.make(root, name)
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            self._events = os.open(f"{self._path}/events.jsonl", flags, 0o600)
        except OSError as error:
            self._path = ""
            self._reply(none=f"no logs are kept: {error.strerror}: {error.filename}")
            return
        folders.lock(self._events)
        self._reply(made=self._path)
        if runs is not None:
            with suppress(OSError):
                folders.keep_newest(runs, kept, lambda: self._note_done(0))

    def _place(self, name: str) -> str:
        """Give the path of a file of the folder, and make those between. A folder that was removed stays removed."""
        *between, _ = name.split("/")
        path = self._path
        for folder in between:
            path = f"{path}/{folder}"
            with suppress(FileExistsError):
                os.mkdir(path, 0o700)
        return f"{self._path}/{name}"

    def _append_event(self, line: bytes) -> None:
        if self._events < 0:
            return
        written = os.write(self._events, line)
        if written < len(line):  # the disk is full; readers of the file find whole lines only
            os.ftruncate(self._events, os.fstat(self._events).st_size - written)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), f"{self._path}/events.jsonl")

    def _replace(self, name: str, content: bytes) -> None:
        """Write one file, whole or not at all."""
        if not self._path:
            return
        path = self._place(name)
        try:
            with open(
                os.open(f"{path}.new", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb"
            ) as file:
                file.write(content)
            os.replace(f"{path}.new", path)
        except OSError:
            with suppress(OSError):
                os.unlink(f"{path}.new")
            raise

    # --- logs

    def _open_log(self, number: int, name: str, limit: int | None) -> None:
        if self._path:
            self._logs[number] = log = BoundedLog(self._place(name), limit)
            self._note_error(log)

    def _write_log(self, number: int, write: Callable[[BoundedLog], None]) -> None:
        log = self._logs[number]
        before = log.error
        write(log)
        if before is None:
            self._note_error(log)

    def _close_log(self, number: int) -> None:
        log = self._logs.pop(number)
        before = log.error
        log.close()
        if before is None:
            self._note_error(log)

    def _note_error(self, log: BoundedLog) -> None:
        if log.error is not None:
            self._reply(problem=f"{log.error.strerror}: {log.path}: output is shown, but no longer kept", fails=True)
