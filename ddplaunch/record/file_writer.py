"""The process that writes the files of a run, and may hang with their disk in place of the agent. Decides nothing.

It takes the messages of `record/file_queue.py` in their order, does what each asks for, and notes that it has. It ends at
the agent's request or with the agent, after all that was handed over or left to it; one that hangs then outlives the agent.
"""

from __future__ import annotations

import errno
import json
import marshal
import os
import select
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from ddplaunch.record import file_queue, folders, old_runs, run_socket
from ddplaunch.record.log import BoundedLog, LogTimes

if TYPE_CHECKING:
    from io import BufferedReader

TIDY_AFTER = 1.0  # seconds: most jobs have started all their workers by then

_WHY_MISSING = "the log folder did not answer"


def run(sock: int, shared: int, listener: int = -1) -> None:
    """Be the writer: take messages from this socket until there are no more, and note in the file `shared` what is done.

    `listener` is the socket of the run, which the agent has too. `sock` is closed at once at the end, which the agent waits for:
    this process may take another while to end.
    """
    writer = _Writer(sock, shared, listener)
    try:
        writer.run()
    except Exception as error:  # noqa: BLE001 - a bug of ours, which this process has no stderr to show
        import traceback  # takes a few ms

        found = "".join(traceback.format_exception(error))
        writer.reply(problem=f"the process that writes the logs has failed: {found}")
    os.close(sock)


class _Writer:
    """Carries out the agent's messages, one after the other: the files that are open, and how much is done."""

    def __init__(self, sock: int, shared: int, listener: int) -> None:
        """Take messages from `sock`; `shared` is the file in memory in which the agent reads how far the writer is.

        `listener` is the socket of the run, which this process binds, since the disk with its path may hang.
        """
        self._sock = sock
        self._shared_file = shared
        self._listener_fd = listener
        self._bytes_done = 0  # bytes of messages
        self._steps_done = 0  # which rise with each message, and with each piece of a long copy
        self._path = ""  # of the run's folder, for people
        # -1 while there is no folder. All is done by descriptors, never by a path: others may put a folder in its place
        self._folder_fd = -1
        self._events_fd = -1
        self._sample_fds: dict[str, int] = {}  # by name
        self._logs: dict[int, BoundedLog] = {}  # by the number that the agent has given
        self._log_times: LogTimes | None = None
        # where the socket of the run lies: a descriptor of the folder, and the name
        self._socket_place: tuple[int, str] | None = None
        # step by step; None: there is nothing to remove, or that is done
        self._old_runs_removal: Iterator[str | None] | None = None
        self._removal_begins_at = 0.0  # monotonic seconds

    def run(self) -> None:
        """Carry out every message: those of the socket, then those that an agent that has ended left in the shared file."""
        with open(os.dup(self._sock), "rb") as messages, open(os.dup(self._shared_file), "rb") as left:
            os.lseek(left.fileno(), file_queue.PROGRESS, os.SEEK_SET)  # the file begins with our progress

            def read(size: int) -> bytes:
                data = messages.read(size)
                # a message may begin in the socket and end in the file
                return data if len(data) == size else data + left.read(size - len(data))

            while True:
                self._remove_old_runs_until_next(messages)
                if len(header := read(file_queue.HEADER)) < file_queue.HEADER:
                    break
                kind, log, size = file_queue.parse(header)
                if kind == file_queue.END:
                    break
                data = read(size)
                if len(data) == size:  # else the agent was killed before it had handed over the whole message
                    self._carry_out(kind, log, data)
                self._note_done(file_queue.HEADER + size)
        if self._socket_place is not None:
            folder_fd, name = self._socket_place
            with suppress(OSError):
                os.unlink(name, dir_fd=folder_fd)
        for number in tuple(self._logs):
            self._close_log(number)

    def _note_done(self, size: int) -> None:
        self._bytes_done += size
        self._steps_done += 1
        os.pwrite(self._shared_file, self._bytes_done.to_bytes(8, "little") + self._steps_done.to_bytes(8, "little"), 0)

    def _carry_out(self, kind: bytes, log: int, data: bytes) -> None:
        """Carry out one message of the agent; an error of the disk is reported, and the job goes on.

        `kind` says what the message is, and what `data` holds (see file_queue); `log` is the number of a log, 0 for none. What
        needs the folder, or a log that could not be opened, is dropped: the agent has been told why.
        """
        try:
            if kind == file_queue.MAKE:
                self._make_folder(**marshal.loads(data))
            elif kind == file_queue.OPEN and self._folder_fd >= 0:
                self._open_log(log, **marshal.loads(data))
            elif kind == file_queue.WRITE and log in self._logs:
                self._write_log(log, lambda file: file.write(data))
            elif kind == file_queue.MISSING and log in self._logs:
                self._write_log(log, lambda file: file.note_missing(int(data), _WHY_MISSING))
            elif kind == file_queue.CLOSE and log in self._logs:
                self._close_log(log)
            elif kind == file_queue.EVENT:
                self._append(self._events_fd, "events.jsonl", json.dumps(marshal.loads(data)))
            elif kind == file_queue.SAMPLE:
                name, values = marshal.loads(data)
                if name not in self._sample_fds and self._folder_fd >= 0:
                    self._sample_fds[name] = self._create(name, os.O_APPEND)
                self._append(self._sample_fds.get(name, -1), name, json.dumps(values, separators=(",", ":")))
            elif kind == file_queue.LISTEN:
                self._listen(**marshal.loads(data))
            elif kind == file_queue.REMOVE:
                with suppress(OSError):
                    os.unlink(data)
            elif kind == file_queue.JSON:
                name, values = marshal.loads(data)
                self._replace(name, json.dumps(values, indent=1).encode() + b"\n")
            elif kind == file_queue.REPLACE:
                file_name, _, content = data.partition(b"\n")
                self._replace(file_name.decode(), content)
        except OSError as error:
            path = os.path.join(self._path, error.filename or "").rstrip("/")
            self.reply(problem=f"{error.strerror}: {path}: the run folder will not be complete")

    def reply(self, **values: Any) -> None:
        """Send the agent a reply, if it is there."""
        with suppress(OSError):  # the agent has ended
            os.write(self._sock, file_queue.reply(**values))

    # --- the folder

    def _make_folder(self, root: str, name: str, runs: str | None, keep: int) -> None:
        """Make the folder of this run; old ones in `runs` are removed after `keep` days, None: there are none to remove."""
        try:
            self._path, self._folder_fd, self._events_fd = folders.make(root, name)
            unsafe = folders.replaceable_by(self._path)
        except OSError as error:
            self._folder_fd = self._events_fd = -1
            self.reply(none=f"{error.strerror}: {error.filename}")
            return
        folders.lock(self._events_fd)  # which shows that the run goes on
        self._log_times = LogTimes(self._folder_fd)
        self.reply(made=self._path, unsafe=unsafe)
        if runs is not None:
            # jobs that end within TIDY_AFTER remove nothing; after a day in which all did, this one begins at once
            is_overdue = time.time() - old_runs.last_tidied(runs) > old_runs.DAY
            self._removal_begins_at = time.monotonic() + (0 if is_overdue else TIDY_AFTER)
            self._old_runs_removal = old_runs.tidy(runs, keep)

    def _remove_old_runs_until_next(self, messages: BufferedReader) -> None:
        """Remove old runs, one file at a time, until the next message is there: no job begins or ends later because of that."""
        if self._old_runs_removal is None:
            return
        sock = messages.fileno()
        os.set_blocking(sock, False)  # for peek(), which looks into the socket if its buffer is empty
        try:
            while not messages.peek(1):
                not_before = max(0.0, self._removal_begins_at - time.monotonic())
                message_comes, _, _ = select.select([sock], [], [], not_before)
                if message_comes:
                    break
                if (said := next(self._old_runs_removal)) is not None:
                    self.reply(notice=said)
        except Exception:  # noqa: BLE001 - StopIteration, or a bug in the tidying, which must not cost this run its logs
            self._old_runs_removal = None
        os.set_blocking(sock, True)

    def _listen(self, name: str, in_folder: bool) -> None:
        """Listen at the socket of the run in its folder, or, where that fails, under this name in the folder of all sockets.

        Without `in_folder`, only there. Where that fails too, the agent is told why only if a user could do anything about it.
        """
        listener = socket.socket(fileno=self._listener_fd)
        if in_folder and self._folder_fd >= 0:
            with suppress(OSError):  # the file system has no sockets
                run_socket.listen(listener, self._folder_fd, run_socket.NAME)
                self._socket_place = self._folder_fd, run_socket.NAME
        if self._socket_place is None:
            with suppress(OSError):
                runtime_folder_fd = run_socket.open_runtime_folder(make=True)
                run_socket.listen(listener, runtime_folder_fd, name)
                self._socket_place = runtime_folder_fd, name
        listener.close()  # the agent has it too, and is to be the last to close it
        if self._socket_place is not None:
            folder_fd, name = self._socket_place
            self.reply(listening=True, folder=os.readlink(f"/proc/self/fd/{folder_fd}"), name=name)
        elif why := run_socket.why_unsafe():
            self.reply(listening=False, why=why)

    def _create(self, name: str, flags: int = 0) -> int:
        """Create a file of the folder, which is not there yet, and give its descriptor."""
        new = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        return os.open(name, new | flags, 0o600, dir_fd=self._folder_fd)

    def _make_above(self, name: str) -> None:
        """Make the folders in which this file lies. The whole folder, if it was removed, stays removed."""
        for depth, character in enumerate(name):
            if character == "/":
                with suppress(FileExistsError):
                    os.mkdir(name[:depth], 0o700, dir_fd=self._folder_fd)

    def _append(self, file: int, name: str, text: str) -> None:
        """Append a line to a file."""
        if file < 0:
            return
        line = text.encode() + b"\n"
        written = os.write(file, line)
        if written < len(line):  # the disk is full; readers of the file find whole lines only
            os.ftruncate(file, os.fstat(file).st_size - written)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), f"{self._path}/{name}")

    def _replace(self, name: str, content: bytes) -> None:
        """Write one file, whole or not at all: under another name first, then renamed."""
        if self._folder_fd < 0:
            return
        self._make_above(name)
        new = f"{name}.new"
        try:
            with open(self._create(new), "wb") as file:
                file.write(content)
            os.replace(new, name, src_dir_fd=self._folder_fd, dst_dir_fd=self._folder_fd)
        except OSError:
            with suppress(OSError):
                os.unlink(new, dir_fd=self._folder_fd)
            raise

    # --- logs

    def _open_log(self, number: int, name: str, limit: int | None) -> None:
        self._make_above(name)
        self._logs[number] = log = BoundedLog(name, limit, folder=self._folder_fd)
        self._note_error(log)

    def _write_log(self, number: int, write: Callable[[BoundedLog], None]) -> None:
        log = self._logs[number]
        if self._log_times is not None:
            self._log_times.note(*log.end, time.time())
        before = log.error
        write(log)
        if before is None:
            self._note_error(log)

    def _close_log(self, number: int) -> None:
        log = self._logs.pop(number)
        before = log.error
        log.close(after_piece=lambda: self._note_done(0))  # which is progress: a disk that is slow does not hang
        if before is None:
            self._note_error(log)

    def _note_error(self, log: BoundedLog) -> None:
        if log.error is not None:
            where = f"{self._path}/{log.path}"
            self.reply(problem=f"{log.error.strerror}: {where}: output is shown, but no longer kept", fails=True)
