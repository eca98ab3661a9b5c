"""Process 1 of a host: makes the places that are the host's own, starts its daemons, and lives as long as its bed.

Runs as `python -I -S host_init.py` inside new namespaces, with a socket to the bed as its stdin. It says `here` (the kernel
adds which pid that is outside), gets what to do as one line of JSON, says `up`, and ends when the other end of the socket is
gone, however that came about; with process 1 the kernel ends all that runs on the host. It decides nothing.
"""

import ctypes
import json
import os
import signal
import socket
import subprocess
import time
from typing import Any

# linux/mount.h
MS_BIND, MS_MOVE, MS_REC = 4096, 8192, 16384
MNT_DETACH = 2

_libc = ctypes.CDLL(None, use_errno=True)


def mount(source: str, target: str, kind: str = "none", flags: int = 0, options: str = "") -> None:
    """mount(2)."""
    if _libc.mount(source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), options.encode()) != 0:
        raise OSError(ctypes.get_errno(), f"mount {kind} {source}", target)


def own_places() -> None:
    """Give the host its own /run, /dev/shm, /srv (its local disk), /etc and sockets of runs, and a /sys of its own network."""
    mount("run", "/run", "tmpfs", options="mode=755")
    mount("shm", "/dev/shm", "tmpfs", options="mode=1777")
    mount("local", "/srv", "tmpfs", options="mode=1777")
    sockets = f"/tmp/ddplaunch-{os.getuid()}"  # of runs: /tmp is shared, which a host's is not
    os.makedirs(sockets, 0o700, exist_ok=True)
    mount("sockets", sockets, "tmpfs", options="mode=700")
    subprocess.run(["cp", "-a", "/etc", "/run/etc"], check=True)
    mount("/run/etc", "/etc", flags=MS_BIND)
    os.mkdir("/run/cgroup")
    mount("/sys/fs/cgroup", "/run/cgroup", flags=MS_BIND | MS_REC)
    _libc.umount2(b"/sys", MNT_DETACH)  # nothing of the old one would be seen below the new one anyway
    mount("sysfs", "/sys", "sysfs")
    mount("/run/cgroup", "/sys/fs/cgroup", flags=MS_MOVE)


def write(path: str, content: str, mode: int) -> None:
    """Put a file in the place of whatever is there, a link to elsewhere included; or set what the kernel shows as a file."""
    setting = path.startswith("/proc/")
    os.makedirs(os.path.dirname(path), exist_ok=True)
    if os.path.lexists(path) and not setting:
        os.unlink(path)
    with open(path, "wb") as file:
        file.write(content.encode("latin-1"))
        if not setting:
            os.fchmod(file.fileno(), mode)


def start_daemon(argv: list[str], pid_file: str) -> None:
    """Start a daemon and wait until it serves, which is when it writes its pid."""
    subprocess.run(argv, stdin=subprocess.DEVNULL, check=True)
    give_up = time.monotonic() + 10
    while not os.path.exists(pid_file):
        if time.monotonic() > give_up:
            raise TimeoutError(f"{argv[0]} does not start")
        time.sleep(0.002)


def main() -> None:
    """Be process 1."""
    channel = socket.socket(fileno=0)
    channel.sendall(b"here\n")
    with channel.makefile("rb") as orders:
        wanted: dict[str, Any] = json.loads(orders.readline())
        os.chdir("/")
        socket.sethostname(wanted["name"])
        own_places()
        for path, (content, mode) in wanted["files"].items():
            write(path, content, mode)
        subprocess.run(["ip", "-batch", "-"], input=wanted["network"].encode(), check=True)
        for argv, pid_file in wanted["daemons"]:
            start_daemon(argv, pid_file)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # orphans come to process 1: the kernel reaps them for us
        channel.sendall(b"up\n")
        orders.readline()
    if wanted["remove"]:
        subprocess.run(["rm", "-rf", wanted["remove"]], check=False)


if __name__ == "__main__":
    main()
