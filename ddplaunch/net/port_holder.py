"""Names the process that holds a TCP port, from /proc, as far as this user may see it. Signals nobody."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from functools import partial

from ddplaunch.process.tree import content, look

_LISTENS = b"0A"  # TCP_LISTEN, include/net/tcp_states.h
# seconds to find who holds a port: a busy machine needs more than one; the command ends for it, and other nodes wait for its word
_TIMEOUT = 5.0
_COMMAND = 200  # characters that are shown


def sockets(port: int) -> dict[bytes, bool]:
    """Return the sockets with this local port: each inode, and whether that listens (proc_net_tcp in the kernel's documentation).

    A socket of no process, as in TIME_WAIT, has the inode 0. A socket that is bound and does not listen is not listed.
    """
    found: dict[bytes, bool] = {}
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with suppress(OSError):  # a kernel without IPv6
            for line in content(table).splitlines()[1:]:
                fields = line.split()
                if int(fields[1].rpartition(b":")[2], 16) == port:
                    found[fields[9]] = found.get(fields[9], False) or fields[3] == _LISTENS
    return found


def holder(port: int) -> str:
    """Return who holds a port, as it reads after "is taken": " by pid 4711 (python train.py)"; "" if that cannot be known."""
    from ddplaunch.process.ask import ask  # only an error needs it

    try:
        # it reads the memory of a process, which may wait for that process's disk
        return ask(partial(_look_for_holder, port), _TIMEOUT)
    except Exception:  # noqa: BLE001 - that the port is taken is to be said all the same
        return ""


def _look_for_holder(port: int) -> str:
    listed = sockets(port)
    if not listed:
        return ": a process holds it without listening, as ddplaunch does for another job"
    wanted = {f"socket:[{inode.decode()}]": listens for inode, listens in listed.items()}
    found = [(not wanted[target], task) for task, target in _open_files() if target in wanted]
    if not found:
        return ""
    _, task = min(found)
    pid = int(task.split("/")[2])
    command = content(f"{task}/cmdline").rstrip(b"\0").replace(b"\0", b" ").decode(errors="replace")
    process = look(pid)
    return f" by pid {pid} ({command[:_COMMAND] or (process.name if process else '?')})"


def _open_files() -> Iterator[tuple[str, str]]:
    """Return each open file of each process: the thread that has it, as its folder in /proc, and the file.

    The first thread of a process may be dead while another one still has its files.
    """
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):  # it has ended, or belongs to another user
            for thread in os.listdir(f"/proc/{pid}/task"):
                task = f"/proc/{pid}/task/{thread}"
                if files := os.listdir(f"{task}/fd"):
                    for file in files:
                        with suppress(OSError):
                            yield task, os.readlink(f"{task}/fd/{file}")
                    break
