"""Finds the processes below this one in /proc, says what they use, and ends them, except for those that tidy up.

Knows nothing of workers.

psutil reads all processes of the machine to find the children of one, calls a process dead whose first thread is, and takes five
times as long, while the agent's loop waits.
"""

from __future__ import annotations

import os
import re
import select
import signal
from collections.abc import Callable, Collection, Iterable, Iterator
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
    """Return a process by its /proc/PID/stat (proc(5)); None if the process is gone.

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
    parent, group, threads, started = (int(fields[at]) for at in (1, 2, 17, 19))  # counted from the state, 0
    return Process(pid, name.decode(errors="replace"), state, parent, group, threads, started)


def state_of(pid: int) -> str:
    """Return the state of a process as in proc_pid_stat(5): "T" for stopped, "t" for held by a debugger; "" for gone."""
    process = look(pid)
    return process.state if process is not None else ""


def _stat(path: str) -> tuple[bytes, list[bytes]]:
    """Return the name in a stat file of /proc and the fields behind that name, the state first; no fields if the file is gone."""
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
    """Return whether no shell could continue our process group once the group stops.

    That is so if no ancestor of this process is in the session and outside the group (POSIX 3.264).
    """
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
    """Yield all living processes below `pid`, except for the processes `but_for` and all below those."""
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


class ProcessUsage(Struct, frozen=True):
    """What a process uses at this moment, by /proc/PID/stat (proc(5)): that waits for no lock which the process may hold."""

    state: str
    cpu_seconds: float  # user and system, of it and the children that it waited for
    rss: int  # bytes


def usage(pid: int) -> ProcessUsage | None:
    """Return what a process uses; None if the process is gone."""
    _, fields = _stat(f"/proc/{pid}/stat")
    if not fields:
        return None
    return ProcessUsage(fields[0].decode(), sum(map(int, fields[11:15])) / _TICK, int(fields[21]) * _PAGE)


def transferred(pid: int) -> tuple[int, int]:
    """Return the bytes that a process has read and written so far; (0, 0) if the process is gone, or is another user's."""
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
        is_held=pid in used and used[pid].state in "Tt",  # by a signal or by a debugger
    )


# --- their end


def has_ended(child: int) -> bool:
    """Return whether a child has ended. A dead child is not reaped here."""
    try:
        return os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None
    except ChildProcessError:
        return True


def ends_within(child: int, seconds: float) -> bool:
    """Wait at most so long for the end of a child, and return whether the child has ended. A dead child is not reaped here."""
    with suppress(OSError):  # no descriptor is left, or the child was reaped already: then nothing is waited for
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
    except OSError:  # it is gone, or no descriptor is left
        return True
    try:
        now = look(process.pid)
        is_the_same = now is not None and now.started == process.started
        if is_the_same:
            signal.pidfd_send_signal(fd, signum)
    except PermissionError:
        return False
    except OSError:  # it has ended meanwhile
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


# Some processes tidy up: they remove the names that other processes have shared, such as a file in /dev/shm, once these have
# ended. Then they end by themselves, so signals spare them: killed with the others, they leave the names behind, and a restart
# that makes the same names fails. The caller decides how long they have.

# torch's manager of shared memory (torch/lib/libshm/manager.cpp) ends 2 s after the last process that it serves. NVIDIA's MPS
# ends on `quit`. A name in /proc has 15 characters.
_TIDYING_PROGRAMS = ("torch_shm_manag", "nvidia-cuda-mps")
# of Python, loky and multiprocess: ends when no process can write to its pipe, removes first what was not unregistered there
_RESOURCE_TRACKER = re.compile(rb"\0-c\0from [\w.]*resource_tracker import main; ?main\(")
# a tracker ignores SIGTERM and SIGINT; the others are for all of a group, or do nothing to a program that does not handle them
HARMLESS = frozenset((signal.SIGTERM, signal.SIGINT, signal.SIGSTOP, signal.SIGCONT, signal.SIGWINCH))


def tidies(process: Process) -> bool:
    """Return whether a process tidies up: removes what processes that have ended left in /dev/shm, and then ends by itself."""
    if process.name in _TIDYING_PROGRAMS:
        return True
    # The kernel reads the command line from the memory of the process, and would wait where a page fault that hangs, or another
    # thread, has locked that. The resource tracker of multiprocessing has one thread, which reads its pipe.
    if process.threads != 1 or process.state not in "SRT":
        return False
    try:
        return _RESOURCE_TRACKER.search(content(f"/proc/{process.pid}/cmdline")) is not None
    except OSError:
        return False


def signal_leftovers(signum: int, left: Iterable[Process], *, sparing: bool) -> None:
    """Send each of these processes a signal; with `sparing`, only let the processes go on that tidy up."""
    for process in left:
        if sparing and tidies(process):
            let_tidy(process)
        else:
            signal_process(process, signum)


def let_tidy(process: Process) -> None:
    """Continue a process that tidies up, if something has stopped the process."""
    if process.state == "T":
        signal_process(process, signal.SIGCONT)


def kill_at_once(find: Callable[[], Iterable[Process]]) -> None:
    """Kill the processes that `find` finds, except for those that tidy up. Stop all first, so that none starts another."""
    for process in find():
        signal_process(process, signal.SIGSTOP)
    signal_leftovers(signal.SIGKILL, find(), sparing=True)


def end_all(left: Collection[Process], within: float) -> None:
    """Kill processes, and wait for each so many seconds at most. Processes that tidy up are killed only after that time."""
    for sparing in (True, False):
        signal_leftovers(signal.SIGKILL, left, sparing=sparing)
        for process in left:
            ends_within(process.pid, within)


def others_by_group(processes: Iterable[Process]) -> dict[int, tuple[Process, ...]]:
    """Return the process groups in which a process tidies, each with its other members, as far as `processes` has them."""
    members: dict[int, list[Process]] = {}
    for process in processes:
        members.setdefault(process.group, []).append(process)
    others = {group: tuple(one for one in found if not tidies(one)) for group, found in members.items()}
    return {group: found for group, found in others.items() if len(found) < len(members[group])}
