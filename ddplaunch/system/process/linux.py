"""Calls of Linux beyond the standard library, and its limits: parent-death signals, subreapers, pipe sizes. Decides nothing."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import resource
import signal
import sys
import termios
from contextlib import suppress

from ddplaunch.system.errors import LaunchError
from ddplaunch.system.exitcodes import NOT_EXECUTABLE
from ddplaunch.system.words import why_failed

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_PR_SET_CHILD_SUBREAPER = 36
_MFD_CLOEXEC, _MFD_ALLOW_SEALING = 1, 2  # linux/memfd.h
_F_ADD_SEALS, _F_SEAL_SHRINK, _F_SEAL_GROW = 1033, 2, 4  # linux/fcntl.h
_F_SETPIPE_SZ = 1031  # fcntl.h; in the fcntl module since Python 3.10

# openat2(2): asm-generic/unistd.h, the same on all architectures; linux/openat2.h
_OPENAT2, _RESOLVE_CACHED, _AT_FDCWD = 437, 0x20, -100

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h

OPEN_FILES = 1 << 20
_KEPT_MEMORY = 1 << 21  # bytes

_libc = ctypes.CDLL(None, use_errno=True)
_prctl = _libc.prctl
_prctl.argtypes = [ctypes.c_int, ctypes.c_ulong, ctypes.c_ulong, ctypes.c_ulong, ctypes.c_ulong]


def check_kernel() -> None:
    """Check that there are process descriptors, by which supervision knows processes.

    Raises:
        LaunchError: the kernel is too old for them, or a filter forbids them.
        OSError: the process is at a limit.
    """
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.EPERM):
            raise
        raise LaunchError(
            f"the system call pidfd_open, without which ddplaunch cannot supervise, fails here: {why_failed(error)}",
            hint=f"it takes Linux 5.3 or newer (this is {os.uname().release}), and in a container or sandbox a seccomp "
            "profile that allows it",
            status=NOT_EXECUTABLE,
        ) from None


def become_subreaper() -> None:
    """Adopt every descendant whose parent dies, so that none can escape by double-forking."""
    if _prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def signal_at_end_of(parent: int, signum: int) -> None:
    """Have the kernel send this process a signal when `parent`, who forked it, ends: the thread of it that did."""
    _prctl(_PR_SET_PDEATHSIG, signum, 0, 0, 0)
    if os.getppid() != parent:  # it ended before the call
        os.kill(os.getpid(), signum)


def detach(*fds: int) -> None:
    """Be out of reach, after a fork: no signal but SIGKILL, no terminal, and of the descriptors only these, as 3, 4, ..."""
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    os.setsid()
    devnull = os.open(os.devnull, os.O_RDWR)
    # duplicates above all targets first, so that no dup2 overwrites a descriptor that is still to be copied
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD, 3 + len(fds)) for fd in (devnull, devnull, devnull, *fds)]
    for target, fd in enumerate(high):
        os.dup2(fd, target)
    # another process may wait for the end of a pipe, or for a port
    os.closerange(len(high), os.sysconf("SC_OPEN_MAX"))


def end_within(seconds: float) -> None:
    """Have the kernel end this process after so many seconds, whatever it does then."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.001))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})


def return_freed_memory() -> None:
    """Give all memory that is free back to the kernel, 0.8 MB after the imports of a start; glibc keeps most. Takes 0.2 ms."""
    if (malloc_trim := getattr(_libc, "malloc_trim", None)) is not None:
        malloc_trim(0)


def keep_freed_memory() -> None:
    """Keep some memory that is freed, for what passes through soon takes as much again: glibc gives 128 KiB back at once.

    See mallopt(3). Other C libraries have no such call, and keep what they keep.
    """
    if (mallopt := getattr(_libc, "mallopt", None)) is not None:
        mallopt(_M_MMAP_THRESHOLD, _KEPT_MEMORY // 2)
        mallopt(_M_TRIM_THRESHOLD, _KEPT_MEMORY)


def grow_pipe(fd: int, size: int) -> None:
    """Ask for a larger pipe buffer; the kernel's limit for users may refuse, which does no harm."""
    with suppress(OSError):
        fcntl.fcntl(fd, _F_SETPIPE_SZ, size)


def find_in_cache(path: str) -> bool | None:
    """Return whether there is anything at a path, as far as the kernel knows without asking the disk; None: it does not know.

    Nor does a kernel before Linux 5.12. A link counts itself.
    """
    flags = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
    how = (ctypes.c_uint64 * 3)(flags, 0, _RESOLVE_CACHED)
    opened = _libc.syscall(_OPENAT2, _AT_FDCWD, os.fsencode(path), how, ctypes.sizeof(how))
    if opened >= 0:
        os.close(opened)
        return True
    return False if ctypes.get_errno() in (errno.ENOENT, errno.ENOTDIR) else None


def memory_file(name: str, flags: int = 0) -> int:
    """Make a file in memory, which no program inherits by exec; give its descriptor.

    Raises OSError: there are too many open files.
    """
    # os.memfd_create is missing where Python was built with a glibc before 2.27, as conda's may be
    fd: int = _libc.memfd_create(os.fsencode(name), _MFD_CLOEXEC | flags) if hasattr(_libc, "memfd_create") else -1
    if fd < 0:
        error = ctypes.get_errno() or errno.ENOSYS
        raise OSError(error, os.strerror(error))
    return fd


def bounded_file(name: str, size: int) -> int:
    """Make a file in memory that cannot grow beyond so many bytes; give its descriptor.

    Raises OSError: there are too many open files.
    """
    fd = memory_file(name, _MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, _F_ADD_SEALS, _F_SEAL_GROW | _F_SEAL_SHRINK)
    except BaseException:
        os.close(fd)
        raise
    return fd


def unread(fd: int) -> int:
    """How many bytes wait in a pipe (FIONREAD, pipe(7))."""
    return int.from_bytes(fcntl.ioctl(fd, termios.FIONREAD, bytes(4)), sys.byteorder)


def of_open_files(number: int | None) -> str:
    """Say how many files may be open if a system call failed with EMFILE: ", and no more than 14 are allowed"; else ""."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return f", and no more than {soft} are allowed" if number == errno.EMFILE else ""


def raise_open_files() -> tuple[int, int]:
    """Raise our soft limit of open files, which workers inherit, to the hard one; give (soft, hard) as they were.

    Tensors that processes share are open files each. Above OPEN_FILES there is no use, and programs that close all
    files there might be take minutes.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, OPEN_FILES)), hard))
    return soft, hard


class _Timex(ctypes.Structure):
    """The beginning of struct timex, adjtimex(2), and room for the rest."""

    _fields_ = (
        ("modes", ctypes.c_uint),  # 0: change nothing
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),  # microseconds
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_char * 400),
    )


_UNSYNCHRONISED = 0x40  # STA_UNSYNC, linux/timex.h


def clock_state() -> tuple[bool, float] | None:
    """Return whether something synchronises the clock of the machine, and its largest error in seconds; None: not known."""
    state = _Timex()
    if not hasattr(_libc, "adjtimex") or _libc.adjtimex(ctypes.byref(state)) < 0:
        return None
    return not state.status & _UNSYNCHRONISED, state.maxerror / 1e6
