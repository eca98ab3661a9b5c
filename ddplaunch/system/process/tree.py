"""The processes below this one, by /proc: what they are, what they use, and their end. Knows nothing of workers.

psutil reads all processes of the machine to find the children of one, calls a process dead whose first thread is, and takes five
times as long, while the agent's loop waits.
"""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Collection, Iterator
from contextlib import suppress

from msgspec import Struct

_TICK = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


class Process(Struct, frozen=True):
    """One process as /proc shows it."""

    pid: int
    name: str
    state: str  # "R", "S", "D" (uninterruptible sleep), "Z" (no thread lives, not yet reaped), ...
    parent: int
    group: int  # its process group
    threads: int
    started: int  # clock ticks after boot: tells it from a later process with the same pid

    def __str__(self) -> str:
        sleep = " in uninterruptible sleep" if self.state == "D" else ""
        return f"pid {self.pid} ({self.name}){sleep}"


def content(path: str) -> bytes:
    """Read a file of /proc, with half the system calls of a file of Python's: thousands are read in a row.

    Raises OSError.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return b"".join(iter(lambda: os.read(fd, 1 << 16), b""))
    finally:
        os.close(fd)


def look(pid: int) -> Process | None:
    """Read one process's /proc/PID/stat (proc(5)); None if it is gone.

    The first thread of a process may be dead while others still end, and these keep its files, a listening socket among them:
    then the state is that of a thread which lives.
    """
    name, fields = _stat(f"/proc/{pid}/stat")
    if not fields:
        return None
    state = fields[0].decode()
    if state in "ZX":
        with suppress(OSError):
            for thread in os.listdir(f"/proc/{pid}/task"):
                _, of_thread = _stat(f"/proc/{pid}/task/{thread}/stat")
                if of_thread and (found := of_thread[0].decode()) not in "ZX":
                    state = found
                    break
    parent, group, threads, started = (int(fields[at]) for at in (1, 2, 17, 19))
    return Process(pid, name.decode(errors="replace"), state, parent, group, threads, started)


def state_of(pid: int) -> str:
    """Return the state of a process as in proc_pid_stat(5): "T" if it is stopped, "t" if a debugger holds it; "" if gone."""
    process = look(pid)
    return process.state if process is not None else ""


def _stat(path: str) -> tuple[bytes, list[bytes]]:
    """Return the name in a stat file of /proc and the fields behind that name, the state first; no fields if it is gone."""
    try:
        stat = content(path)
    except OSError:
        return b"", []
    name, _, rest = stat.partition(b"(")[2].rpartition(b")")
    return name, rest.split()


def children(pid: int) -> list[int]:
    """Return the direct children of `pid`, dead and unreaped ones included."""
    found: list[int] = []
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            found.extend(map(int, content(f"/proc/{pid}/task/{thread}/children").split()))
    except FileNotFoundError:
        # a kernel without CONFIG_PROC_CHILDREN has the task but no such file; else the process is gone
        if os.path.exists(f"/proc/{pid}") and not os.path.exists("/proc/thread-self/children"):
            processes = (look(int(entry)) for entry in os.listdir("/proc") if entry.isdigit())
            return [process.pid for process in processes if process is not None and process.parent == pid]
    except OSError:
        pass
    return found


def is_orphaned_group() -> bool:
    """Whether no shell could continue our process group once it stops: no ancestor outside it is in its session (POSIX 3.264)."""
    group, process = os.getpgrp(), look(os.getpid())
    while process is not None and process.parent > 1:
        try:
            if os.getpgid(process.parent) != group:
                return os.getsid(process.parent) != os.getsid(0)
        except ProcessLookupError:  # it has just ended
            return True
        process = look(process.parent)
    return True


def descendants(pid: int, but_for: Collection[int] = ()) -> Iterator[Process]:
    """Return all living processes below `pid`, except for the processes `but_for` and all below those."""
    seen: set[int] = set()
    # no recursion: a chain of processes may be deeper than Python's stack is. A parent that ends before its children are read
    # leaves them to `pid`, if that is a subreaper: so the children of this one are read until there is no new one
    while below := [child for child in reversed(children(pid)) if child not in seen]:
        while below:
            child = below.pop()
            seen.add(child)
            if child in but_for or (process := look(child)) is None:
                continue
            if process.state not in "ZX":
                yield process
            below += reversed(children(child))


def ended_children(pid: int) -> Iterator[tuple[Process, int]]:
    """Return the dead children, of `pid` and of the living processes below it, that their parent has not waited for.

    Beside each stands how it ended: the exit status, or below 0 the signal (proc_pid_stat(5), exit_code).
    """
    for parent in (pid, *(process.pid for process in descendants(pid))):
        for child in children(parent):
            process, (_, fields) = look(child), _stat(f"/proc/{child}/stat")
            if process is not None and process.state == "Z" and fields:
                yield process, os.waitstatus_to_exitcode(int(fields[49]))


def has_ended(child: int) -> bool:
    """Whether a child has ended, reaped or not; it is not reaped here."""
    try:
        return os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None
    except ChildProcessError:
        return True


def ends_within(child: int, seconds: float) -> bool:
    """Wait until a child has ended, at most so long; return whether it has. It is not reaped."""
    with suppress(OSError):  # no descriptor is left, or it was reaped: it is only looked then
        pidfd = os.pidfd_open(child)
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        poll.poll(seconds * 1000)
        os.close(pidfd)
    return has_ended(child)


def signal_process(process: Process, signum: int) -> bool:
    """Send a signal to this very process, never to a later process with its pid; return whether that was allowed."""
    try:
        fd = os.pidfd_open(process.pid)
    except OSError:
        return True
    try:
        now = look(process.pid)
        if now is not None and now.started == process.started:
            signal.pidfd_send_signal(fd, signum)
    except PermissionError:
        return False
    except OSError:
        pass
    finally:
        os.close(fd)
    return True


def reap(keep: Collection[int] = ()) -> None:
    """Reap every dead child of this process but those in `keep`."""
    for child in children(os.getpid()):
        if child not in keep:
            try:
                os.waitpid(child, os.WNOHANG)
            except ChildProcessError:
                pass


class ProcessUsage(Struct, frozen=True):
    """What a process uses at this moment, by /proc/PID/stat (proc(5)): that waits for no lock which the process may hold."""

    state: str
    cpu_seconds: float  # user and system, of it and the children that it waited for
    rss: int  # bytes


def usage(pid: int) -> ProcessUsage | None:
    """Return what a process uses; None if it is gone."""
    _, fields = _stat(f"/proc/{pid}/stat")
    if not fields:
        return None
    return ProcessUsage(fields[0].decode(), sum(map(int, fields[11:15])) / _TICK, int(fields[21]) * _PAGE)


def transferred(pid: int) -> tuple[int, int]:
    """Return the bytes that a process has read and written so far; (0, 0) if it is gone, or another user's."""
    with suppress(OSError, ValueError):
        # "rchar: 1948", "wchar: 12", ...: what was asked of the kernel by read(2), write(2) and their kin, from wherever it came
        read, written = (int(line.split()[1]) for line in content(f"/proc/{pid}/io").splitlines()[:2])
        return read, written
    return 0, 0


class Footprint(Struct, frozen=True):
    """What a process and all below it have done so far."""

    pids: frozenset[int]
    cpu_seconds: float
    transferred: int  # bytes
    is_held: bool  # the process itself is stopped, by a signal or a debugger


def footprint(pid: int) -> Footprint:
    """Return the footprint of a process and of all processes below it; an empty one if the process is gone."""
    pids = frozenset({pid, *(process.pid for process in descendants(pid))})
    used = {each: found for each in pids if (found := usage(each)) is not None}
    return Footprint(
        pids=pids,
        cpu_seconds=sum(each.cpu_seconds for each in used.values()),
        transferred=sum(sum(transferred(each)) for each in pids),
        is_held=pid in used and used[pid].state in "Tt",
    )
