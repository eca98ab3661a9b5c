"""Reads what a worker wrote for its agent: the exception that ended it, how far its training is, which imports were slow.

Runs in the node's agent, and in the command that has started the agent, which removes the files if the agent is killed. The
program may damage these files, and none is trusted: whatever is wrong with one, no more is lost than what it would have said.
"""

from __future__ import annotations

import fcntl
import math
import os
import re
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TypeGuard

from ddplaunch.spec.outcome import Frame, Progress, WorkerError
from ddplaunch.system.fields import bounded_duration, bounded_size, piece
from ddplaunch.system.process.files import open_regular, remove_within

LIMIT = 1 << 20  # bytes; the bootstrap never writes more
_SHM = "/dev/shm"
_FOLDER_PREFIX = (
    "ddplaunch-errors-"  # how the names of such folders begin, and of no others: abandoned ones are removed
)
_FOLDER_OF_TORCH = "torch"
# what a worker notifies of, see worker/lifecycle.py: an exception in its file, a process group, an import of torch and its end,
# no store of torch, the end of its script, an exception after which nothing of the program runs any more
RAISED, JOINED, IMPORTING, IMPORTED, STORE_WANTED, SCRIPT_ENDED, FINAL = b"rjtisef"
# how the names of the files end that a worker makes for the last two of them
_ENDED = ".json.ended"
_FINAL = ".json.final"
_LONGEST_METRIC_NAME = 40  # characters of the name of a metric
_MOST_METRICS = 16
_PROGRESS_LIMIT = 16 << 10  # bytes; worker/progress.py writes 6 KiB at most
_LONGEST_RUN = 32  # characters of the name of a run in that of its folder: paths of sockets have 107 at most
# seconds for removing folders: a program may have put a million files there; the next job continues
_REMOVED_WITHIN = 1.0
_LOCKED_WITHIN = 60.0  # seconds, far more than pass between making a folder and locking it
_ROOM_NEEDED = 8 << 20  # bytes that should be free there
UNKNOWN = "Exception"  # the type, where the file does not name it


class ErrorFiles:
    """Where the workers of this node write their exceptions: in memory, so that neither they nor we wait for a disk."""

    def __init__(self, run_id: str, tmp: str) -> None:
        """Choose the folder for this run: in shared memory, or in `tmp` where that has no room.

        The command calls this before it forks the agent, since the command removes the folder, and so has to know its name.
        """
        with suppress(OSError):  # there is no shared memory
            found = os.statvfs(_SHM)
            has_room = found.f_bavail * found.f_frsize >= _ROOM_NEEDED and os.access(_SHM, os.W_OK | os.X_OK)
            tmp = _SHM if has_room else tmp
        self._path = f"{tmp}/{_FOLDER_PREFIX}{run_id[:_LONGEST_RUN]}-{os.urandom(4).hex()}"
        self._made_folder: str | None = None  # "": there is no place for one; None: none was asked for yet
        self._lock = -1  # the descriptor by which this process holds the folder; -1: none
        self._pipe: tuple[int, int] | None = None  # for notifications; None: not made yet

    @property
    def folder(self) -> str:
        """The folder of the error files, made at the first call; "" if there is no place for one."""
        if self._made_folder is None:
            _remove_abandoned(os.path.dirname(self._path))
            try:
                os.mkdir(self._path, 0o700)
                os.mkdir(f"{self._path}/{_FOLDER_OF_TORCH}", 0o700)
                # locked until this process ends, so that no other job takes the folder for an abandoned one
                self._lock = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                fcntl.flock(self._lock, fcntl.LOCK_EX)
                self._made_folder = self._path
            except OSError:
                self._made_folder = ""
        return self._made_folder

    @property
    def _pipe_ends(self) -> tuple[int, int]:
        if self._pipe is None:
            try:
                # both for as long as this process lives: it has no end when no worker has it open
                self._pipe = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
            except OSError:  # too many open files: what is written is found later
                self._pipe = -1, -1
        return self._pipe

    @property
    def notify(self) -> str:
        """The path by which workers of this process open the pipe to say that there is something to look for.

        No name in a folder, which the program may remove or replace. Not inotify(7): to close its descriptor takes up to 15 ms,
        at the end of each job.
        """
        return f"/proc/{os.getpid()}/fd/{self._pipe_ends[1]}"

    @property
    def notified(self) -> int:
        """A descriptor that is readable while there are notifications; -1 if there can be none."""
        return self._pipe_ends[0]

    def take_notifications(self) -> bytes:
        """Take what workers have written there: RAISED or another of these bytes, or anything."""
        try:
            return os.read(self._pipe_ends[0], 1 << 16)
        except OSError:  # nothing, or no pipe
            return b""

    def path(self, generation: int, rank: int) -> str:
        """Return the path of the file of a worker; "" if there is no place for it."""
        return f"{self.folder}/{generation}-{rank}.json" if self.folder else ""

    def recorder(self, generation: int, rank: int) -> str:
        """Return the path of the socket at which a worker's torch tells of its collectives; "" if there is no place for it.

        It lies in a folder of its own: what lies beside exceptions would be taken for one.
        """
        return f"{self.folder}/{_FOLDER_OF_TORCH}/{generation}-{rank}" if self.folder else ""

    def progress(self, generation: int, rank: int) -> Progress | None:
        """Return how far a worker is, as its script says by `ddplaunch.progress()`, or its Trainer; None if neither does."""
        for source, suffix in (("script", "progress"), ("trainer", "trainer")):
            if text := content(f"{self._path}/{generation}-{rank}.{suffix}", _PROGRESS_LIMIT):
                return parse_progress(text, time.monotonic(), source)
        return None

    @property
    def slow_imports(self) -> str:
        """The path of the file in which the first worker notes what takes long to import; "" if there is no place for it."""
        return f"{self.folder}/imports" if self.folder else ""

    def has_recorder(self, generation: int) -> bool:
        """Whether there is any such socket."""
        try:
            return any(name.startswith(f"{generation}-") for name in os.listdir(f"{self._path}/{_FOLDER_OF_TORCH}"))
        except OSError:
            return False

    def written(self, generation: int) -> set[int]:
        """Return the ranks that have written an error file in this generation; one listing, not a look for each rank."""
        with suppress(OSError):
            names = (name.removesuffix(".json").partition("-") for name in os.listdir(self._path))
            return {int(rank) for of, _, rank in names if of == str(generation) and rank.isdecimal()}
        return set()

    def scripts_ended(self, generation: int) -> set[int]:
        """Return the ranks whose script has ended in this generation, whether their processes have or not."""
        return self._marked(generation, _ENDED)

    def final(self, generation: int) -> set[int]:
        """Return the ranks of whose program nothing runs any more after an exception, whether their processes do or not."""
        return self._marked(generation, _FINAL)

    def _marked(self, generation: int, suffix: str) -> set[int]:
        """Return the ranks that have made the file of this generation whose name ends so."""
        with suppress(OSError):
            names = (name.partition("-") for name in os.listdir(self._path) if name.endswith(suffix))
            ranks = (rank.removesuffix(suffix) for of, _, rank in names if of == str(generation))
            return {int(rank) for rank in ranks if rank.isdecimal()}
        return set()

    def forget_all_but(self, generation: int) -> None:
        """Remove the files of all other generations (starts of all workers): they take memory, and a job may run for months."""
        self.take_notifications()  # so that none is read later that speaks of these files
        for folder in (self._path, f"{self._path}/{_FOLDER_OF_TORCH}"):
            with suppress(OSError), _opened(folder) as fd:
                for name in os.listdir(fd):
                    of_generation = name.partition("-")[0]
                    if of_generation.isdecimal() and of_generation != str(generation):
                        with suppress(OSError):  # the program has made a folder of such a name
                            os.unlink(name, dir_fd=fd)

    def remove(self) -> None:
        """Remove them all, whichever process has made them."""
        remove_within(self._path, _REMOVED_WITHIN)


@contextmanager
def _opened(folder: str) -> Iterator[int]:
    """Open a folder that lies there itself: behind a link, which the program may have put in its place, are files of others."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


def _remove_abandoned(parent: str) -> None:
    """Remove the folders of this user that no agent holds any more: the agent was killed, and the command that started it too."""
    deadline = time.monotonic() + _REMOVED_WITHIN
    with suppress(OSError), os.scandir(parent) as entries:
        for entry in entries:
            if not entry.name.startswith(_FOLDER_PREFIX):
                continue
            with suppress(OSError):  # another job has removed it meanwhile
                found = entry.stat(follow_symlinks=False)
                is_ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
                has_had_time_to_be_locked = time.time() - found.st_mtime > _LOCKED_WITHIN
                if is_ours and has_had_time_to_be_locked and _is_unlocked(entry.path):
                    remove_within(entry.path, deadline - time.monotonic())


def _is_unlocked(folder: str) -> bool:
    try:
        with _opened(folder) as fd:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def read(path: str) -> WorkerError | None:
    """Return the exception that the error file at `path` describes, or None if it holds none that can be read."""
    return parse(content(path))


def parse(text: bytes) -> WorkerError | None:
    """Return the exception that the content of an error file describes, or None if it describes none.

    The form is that of torch's own files (torch.distributed.elastic.multiprocessing.errors.error_handler), to which our worker
    adds the key "ddplaunch":

        {"message": {"message": "RuntimeError: boom", "extraInfo": {"py_callstack": "Traceback ...", "ddplaunch": {...}}}}
    """
    message = _values(text).get("message")
    if isinstance(message, str):  # in torch's older form the summary stands here
        return _from_text(message, "")
    if not isinstance(message, dict):
        return None
    extra = _mapping(message.get("extraInfo"))
    traceback = _text(extra.get("py_callstack"))
    ours = _mapping(extra.get("ddplaunch"))
    was_written_by_torch = not isinstance(ours.get("type"), str)
    if was_written_by_torch:
        summary = message.get("message")
        return _from_text(summary, traceback) if isinstance(summary, str) else None
    return WorkerError(
        type=_text(ours["type"]),
        message=_text(ours.get("message")),
        traceback=traceback,
        frames=_frames(ours.get("frames")),
        at=_seconds(ours.get("monotonic")),
    )


def content(path: str, limit: int = LIMIT) -> bytes:
    """Return the bytes of a regular file of at most `limit` bytes; empty for any other file."""
    try:
        with open_regular(path) as file:
            found = file.read(limit + 1)
    except (OSError, ValueError):
        return b""
    return found if len(found) <= limit else b""


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


def _values(text: bytes) -> dict[str, object]:
    """Return the values of a JSON object by name; none if it is no such text."""
    if not text:
        return {}
    import json  # slow to import, and most jobs do not fail

    try:
        return _mapping(json.loads(text))
    except (ValueError, RecursionError):
        return {}


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


# --- how far the training is

_NUMBER = r"(\d[\d,]{0,24})"
_BARS = (
    re.compile(rf"(?<![\d.,/-]){_NUMBER}/{_NUMBER}(?= ?\[)", re.ASCII),  # "12/400 [", as tqdm writes it
    re.compile(
        rf"[━╸╺] +(?:\d{{1,3}}% +)?{_NUMBER}/{_NUMBER}(?!\S)", re.ASCII
    ),  # "━━━╸━━ 12/400", as rich and Lightning do
)


def parse_progress(text: bytes, now: float, source: str = "script") -> Progress | None:
    """Return what worker/progress.py wrote, as of `now` (monotonic seconds); None if that cannot be read.

    That is {"step": 7, "total": 100, "at": 12.5, "first": [1, 3.2], "metrics": {"loss": 0.3}}: "at" is when the worker told of a
    step last (monotonic seconds), "first" the step of which it told first, and when.
    """
    found = _values(text)
    step, total, first = found.get("step"), found.get("total"), found.get("first")
    first_step, first_at = first if isinstance(first, list) and len(first) == 2 else (None, None)
    last_told_at, first_told_at = _seconds(found.get("at")), _seconds(first_at)
    if not _is_count(step) or not _is_count(first_step) or last_told_at is None or first_told_at is None:
        return None
    metrics = list(_mapping(found.get("metrics")).items())[:_MOST_METRICS]
    return Progress(
        step=bounded_size(step),
        total=bounded_size(total) if _is_count(total) else None,
        source=source,
        metrics=tuple(
            (piece(name, _LONGEST_METRIC_NAME), f"{value:.4g}") for name, value in metrics if isinstance(value, float)
        ),
        first_step=bounded_size(first_step),
        seconds=bounded_duration(last_told_at - first_told_at),
        age=bounded_duration(now - last_told_at),
    )


def progress_of_bar(line: str, age: float) -> Progress | None:
    """Return how far a worker is whose last line, written `age` seconds ago, is a progress bar; None for other lines."""
    found = next(filter(None, (form.search(line) for form in _BARS)), None)
    if found is None:
        return None
    step, total = (bounded_size(int(text.replace(",", ""))) for text in found.groups())
    return Progress(step=step, total=total, source="bar", age=bounded_duration(age))


def _is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


# --- the modules that each worker imports


_SLOW_IMPORT = r"(\w[\w.]{0,99}) (\d{1,5}\.\d)"
_MOST_NAMED_IMPORTS = 4


def advice_on_imports(path: str, preload: Sequence[str]) -> str:
    """Return the line for a run with --keep-warm about what each worker imported itself, and the --preload that spares that.

    worker/imports.py has noted it at `path`; "" if there is nothing to say.
    """
    lines = content(path).decode(errors="replace").splitlines()
    found = {match[1]: float(match[2]) for line in lines if (match := re.fullmatch(_SLOW_IMPORT, line, re.ASCII))}
    missing = ((name, seconds) for name, seconds in found.items() if name not in preload)
    slow = sorted(missing, key=lambda one: -one[1])[:_MOST_NAMED_IMPORTS]
    if not slow:
        return ""
    took = ", ".join(f"{name} ({seconds:.1f} s)" for name, seconds in slow)
    wanted = ",".join([*preload, *(name for name, _ in slow)])
    return f"each worker imported {took} itself; `--preload {wanted}` keeps that warm too"
