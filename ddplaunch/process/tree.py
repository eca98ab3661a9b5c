"""The processes below this one, by /proc: what they are, and ending them. Knows nothing of workers."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress

from ddplaunch.record import record

# torch's manager of shared memory (torch/lib/libshm/manager.cpp) ends when the last process that it serves has; ended before, it
# leaves what that shared in /dev/shm. NVIDIA's MPS ends on `quit`. A name in /proc has 15 characters.
_TIDYING = ("torch_shm_manag", "nvidia-cuda-mps")


@record
class Process:
    """One process as /proc shows it."""

    pid: int
    name: str
    state: str  # "R", "S", "D" (uninterruptible sleep), "Z" (dead, not yet reaped), ...
    parent: int
    started: int  # clock ticks after boot: tells it from a later process with the same pid

    @property
    def tidies_up(self) -> bool:
        """Whether it cleans up after others, and then exits by itself."""
        return self.name in _TIDYING

    def __str__(self) -> str:
        sleep = " in uninterruptible sleep" if self.state == "D" else ""
        return f"pid {self.pid} ({self.name}){sleep}"


def look(pid: int) -> Process | None:
    """Read one process's /proc/PID/stat (proc(5)); None if it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            stat = file.read()
    except OSError:
        return None
    name, _, rest = stat.partition(b"(")[2].rpartition(b")")
    fields = rest.split()
    return Process(pid, name.decode(errors="replace"), fields[0].decode(), int(fields[1]), int(fields[19]))


def children(pid: int) -> list[int]:
    """Give the direct children of `pid`, dead and unreaped ones included."""
    found: list[int] = []
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children", "rb") as file:
                found.extend(map(int, file.read().split()))
    except FileNotFoundError:
        # a kernel without CONFIG_PROC_CHILDREN has the task but no such file; else the process is gone
        if os.path.exists(f"/proc/{pid}") and not os.path.exists("/proc/thread-self/children"):
            return _children_by_scan(pid)
    except OSError:
        pass
    return found


def _children_by_scan(pid: int) -> list[int]:
    processes = (look(int(entry)) for entry in os.listdir("/proc") if entry.isdigit())
    return [process.pid for process in processes if process is not None and process.parent == pid]


def is_orphaned_group() -> bool:
    """Whether nothing could continue our process group once stopped: no ancestor outside it is in its session (POSIX 3.264)."""
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
    """Give every process below `pid`, but for these and what is below them; dead ones that wait to be reaped are left out."""
    for child in children(pid):
        process = look(child)
        if process is None or child in but_for:
            continue
        if process.state not in "ZX":
            yield process
        yield from descendants(child, but_for)


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
    """Send a signal to this very process, never to another one that got its pid since; False if that is not allowed."""
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


def signal_left(signum: int, left: Iterable[Process], *, sparing: bool) -> None:
    """Send each of these a signal; `sparing`: but for those that clean up and then exit by themselves."""
    for process in left:
        if not (sparing and process.tidies_up):
            signal_process(process, signum)


def reap(keep: Collection[int] = ()) -> None:
    """Reap every dead child of this process but those in `keep`."""
    for child in children(os.getpid()):
        if child not in keep:
            try:
                os.waitpid(child, os.WNOHANG)
            except ChildProcessError:
                pass
