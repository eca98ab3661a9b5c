"""Reads, replaces and removes files and folders that others write to or the user names, on disks that may hang.

A file is opened only if it is a regular one, a folder is removed whatever a program has put there, and a disk that may hang is
asked by a child. Only a file that the user names may be a pipe, as of `<(...)`.

A program may leave a million files, 3,000 folders in each other, links to the home. So a removal follows no link, enters no
mount, does not recurse, builds no path, and holds no descriptor for each level.
"""

from __future__ import annotations

import errno
import os
import select
import stat
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import islice
from typing import BinaryIO, TypeVar

from ddplaunch.system.errors import LaunchError, say
from ddplaunch.system.process.linux import find_in_cache
from ddplaunch.system.words import size, why_failed

LONGEST_JSON = 32 << 20  # bytes: a plan of 65,536 workers is shorter
_MOST_TIMES_ITS_TEXT = 10  # how much more memory than its text the values of such a file may take
_FOLDER_FLAGS = os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC  # to open a folder, and nothing else
_AT_ONCE = 1000  # names that one step reads
_ANSWERS_WITHIN = 3.0  # seconds that a disk gets to answer

T = TypeVar("T")


def open_regular(path: str, *, dir_fd: int | None = None) -> BinaryIO:
    """Open a regular file to read it, from `dir_fd` if the path is relative.

    Raises OSError: it cannot be opened, or is a link, a pipe, a device or a folder; none of these is waited for.
    """
    # O_NONBLOCK: a pipe may have no writer
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_NOCTTY | os.O_CLOEXEC, dir_fd=dir_fd)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "not a regular file", path)
    return open(fd, "rb")


def content(path: str, most: int) -> bytes | None:
    """Return the first bytes of a regular file; None if the file cannot be read."""
    try:
        with open_regular(path) as file:
            return file.read(most)
    except OSError:
        return None


def tail(path: str, most: int) -> bytes | None:
    """Return the last bytes of a regular file; None if the file cannot be read."""
    try:
        with open_regular(path) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - most))
            return file.read(most)
    except OSError:
        return None


def check_replaceable(path: str) -> None:
    """Refuse what a new file must not take the place of.

    Raises OSError: a folder, a device or a pipe is there. Root could replace /dev/null.
    """
    if os.path.isdir(path):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    if os.path.exists(path) and not os.path.isfile(path):
        raise OSError(errno.EINVAL, "not a regular file", path)


@contextmanager
def replaced(path: str, mode: int = 0o666) -> Iterator[BinaryIO]:
    """Open a file beside `path` that takes its place at the end, whole: a reader finds the old file or the new file.

    After an error the old one is as it was, and nothing else is left. A link is followed. `mode` is for a new file; a file that
    is there keeps its own.

    Raises OSError: it cannot be written, or a folder, a device or a pipe is there.
    """
    check_replaceable(path)
    path = os.path.realpath(path)
    with suppress(FileNotFoundError):
        mode = stat.S_IMODE(os.stat(path).st_mode)
    beside = f"{path}.{os.urandom(4).hex()}.part"
    fd = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        with open(fd, "wb") as file:
            if os.path.exists(path):
                os.fchmod(fd, mode)  # the umask has taken some of it
            yield file
        os.replace(beside, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(beside)
        raise


def time_of_disk(folder: str) -> float:
    """Return the time that the disk of a folder gives a file now, in seconds since 1970: a file server's by its own clock.

    Raises OSError.
    """
    path = f"{folder}/.clock-{os.urandom(8).hex()}"
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        os.utime(fd)
        return os.fstat(fd).st_mtime
    finally:
        os.close(fd)
        os.unlink(path)


def read_json(path: str) -> object:
    """Return the content of a JSON file; None if the file cannot be read, is no JSON, is too long, or holds too many values."""
    import json  # no job needs it before it has something to write

    from ddplaunch.system.fields import Malformed, check_density

    try:
        with open_regular(path) as file:
            content = file.read(LONGEST_JSON + 1)
        # before it is parsed: many short values take far more memory than text
        check_density(content, times=_MOST_TIMES_ITS_TEXT)
        return json.loads(content) if len(content) <= LONGEST_JSON else None
    except (OSError, Malformed, ValueError, RecursionError):
        return None


def remove(folder: str) -> Iterator[None]:
    """Remove a folder as far as possible; yield after each small step, so that the caller can stop. Raises no OSError."""
    with suppress(OSError):
        if (fd := _remove_or_enter(folder, None)) is None:
            return
        try:
            # the folders above the one that is open: each, the names left in it, and the name of the folder that was entered
            above: list[tuple[os.stat_result, list[str], str]] = []
            names = yield from _names(fd)
            while names or above:
                if names:
                    name = names.pop()
                    if (inner := _unlink_or_enter(name, fd)) is not None:
                        above.append((os.fstat(fd), names, name))
                        os.close(fd)
                        fd = inner
                        names = yield from _names(fd)
                else:  # the folder is empty: remove it from the one above
                    folder_above, names, name = above.pop()
                    outer = os.open("..", _FOLDER_FLAGS, dir_fd=fd)
                    os.close(fd)
                    fd = outer
                    if not os.path.samestat(os.fstat(fd), folder_above):
                        return  # the program has moved the folder: the one above it is not ours to remove
                    with suppress(OSError):
                        os.rmdir(name, dir_fd=fd)
                yield
        finally:
            os.close(fd)
        os.rmdir(folder)


def remove_within(folder: str, seconds: float) -> None:
    """Remove a folder as far as possible in this time."""
    end = time.monotonic() + seconds
    for _ in remove(folder):
        if time.monotonic() > end:
            break


def _names(fd: int) -> Generator[None, None, list[str]]:
    """Return the names in a folder."""
    names: list[str] = []
    with os.scandir(fd) as entries:
        while some := [entry.name for entry in islice(entries, _AT_ONCE)]:
            names += some
            yield
    return names


def _unlink_or_enter(name: str, within: int) -> int | None:
    """Remove a file, a link or an empty folder; return the descriptor of a folder that is not empty."""
    with suppress(OSError):  # a file may be immutable
        try:
            os.unlink(name, dir_fd=within)
        except IsADirectoryError:
            return _remove_or_enter(name, within)
    return None


def _remove_or_enter(name: str, within: int | None) -> int | None:
    """Remove a folder that is empty, or return its descriptor; None if it is removed, or something is mounted there.

    `name` is relative to the open folder `within`, if there is one. Raises OSError.
    """
    try:
        os.rmdir(name, dir_fd=within)
    except OSError as error:
        # for a mount the kernel says EBUSY before it looks whether the folder is empty, a bind mount of the same device included
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            return None
    else:
        return None
    try:
        fd = os.open(name, _FOLDER_FLAGS, dir_fd=within)
    except PermissionError:  # a program may have taken its own folder's permissions
        path = os.open(name, _FOLDER_FLAGS | os.O_PATH, dir_fd=within)
        try:
            os.chmod(f"/proc/self/fd/{path}", 0o700)
        finally:
            os.close(path)
        fd = os.open(name, _FOLDER_FLAGS, dir_fd=within)
    with suppress(OSError):
        os.fchmod(fd, 0o700)  # or made it read-only
    is_mount = within is not None and os.fstat(fd).st_dev != os.fstat(within).st_dev
    if is_mount:
        os.close(fd)
        return None
    return fd


# --- disks that may hang


def exists_on_disk(paths: Sequence[str], what: str) -> bool:
    """Return whether there is anything at one of these paths; `what` names the files in an error.

    The kernel knows of many paths without asking the disk: so a start on a disk that works costs no child.

    Raises:
        LaunchError: the disk of a path hangs.
    """
    known = {path: find_in_cache(path) for path in paths}
    unknown = [path for path, found in known.items() if found is None]
    return any(known.values()) or (bool(unknown) and ask_disk(partial(_exist, unknown), unknown[0], what))


def _exist(paths: Sequence[str]) -> bool:
    return any(map(os.path.lexists, paths))


def ask_disk(question: Callable[[], T], path: str, what: str, hint: str | None = None) -> T:
    """Call `question` in a child, which can be left behind, and return or raise what the call did.

    `what` names the file at `path` in an error.

    Raises:
        LaunchError: the disk hangs.
    """
    from ddplaunch.system.process.ask import AskedEnded, ask  # most starts ask nothing

    try:
        return ask(question, _ANSWERS_WITHIN)
    except TimeoutError:
        why = f"its disk does not answer, or not within {_ANSWERS_WITHIN:g} s"
    except AskedEnded as error:
        why = str(error)
    except BlockingIOError:  # there is no room for a child
        return question()
    raise LaunchError(f"{what} cannot be used: {path}: {why}", hint=hint)


_SLOW = 3.0  # seconds after which a line says what is waited for


def read_text(path: str, limit: int, *, errors: str = "strict") -> str:
    """Return the text of the file or pipe, which has `limit` characters at most; `errors` is that of `open`.

    Raises:
        OSError: there is no such file, it cannot be read, or is longer.
        UnicodeDecodeError: it is not UTF-8 text.
    """
    if stat.S_ISFIFO(os.stat(path).st_mode):
        from ddplaunch.system.process.apart import disk_watch_paused  # few files are pipes

        with disk_watch_paused():  # for the program that writes
            text = _read(path, limit + 1, errors)
    else:
        text = _read(path, limit + 1, errors)
    if len(text) > limit:
        raise OSError(errno.EFBIG, f"it is larger than {size(limit)}")
    return text


def _read(path: str, most: int, errors: str) -> str:
    """Return the first `most` characters of a file."""
    with open(path, encoding="utf-8", errors=errors, opener=_opener) as file:
        return file.read(most)


def _opener(path: str, flags: int) -> int:
    """Open a file, as `open` calls its `opener`. Wait until something was written to a pipe, and say so if that takes long."""
    # a pipe without a writer would have the open wait, silently
    fd = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)
    if stat.S_ISFIFO(os.fstat(fd).st_mode):
        poll = select.poll()
        poll.register(fd, select.POLLIN)  # it is ready, too, when the last writer has gone
        if not poll.poll(_SLOW * 1000):  # ms
            say(f"waiting for {path}: it is a pipe, and nothing was written to it yet")
            poll.poll()
    os.set_blocking(fd, True)
    return fd


@contextmanager
def result_file(path: str, hint: str, *, private: bool = False, may_be_pipe: bool = False) -> Iterator[BinaryIO]:
    """Open the file for the result of a command, which takes the place of `path` at the end, whole.

    `private`: only the user may read it, and a link is not followed. `may_be_pipe`: a pipe or terminal at `path` is written to.

    Raises LaunchError, with this hint: the file cannot be written.
    """
    # a folder counts as a file, since it cannot be replaced, which is an error
    is_file = not os.path.exists(path) or os.path.isfile(path) or os.path.isdir(path)
    try:
        if private and os.path.islink(path):
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
        if may_be_pipe and not is_file:
            from ddplaunch.system.process.apart import disk_watch_paused

            with disk_watch_paused(), open(path, "wb") as pipe:  # its reader may come late
                yield pipe
            return
        with replaced(path, 0o600 if private else 0o666) as file:
            yield file
    except OSError as error:
        raise LaunchError(f"cannot write {path}: {why_failed(error)}", hint=hint) from None
