"""What the kernel says of a process that cannot be asked: its state, its signals, where it sleeps. Reads what cannot block."""

from __future__ import annotations

import os
import re

from msgspec import Struct

# the calls in which a process hangs for long, by the numbers of the architecture (asm/unistd_64.h, asm-generic/unistd.h)
_CALLS = {
    "x86_64": {
        0: "read", 1: "write", 2: "open", 3: "close", 4: "stat", 5: "fstat", 6: "lstat", 7: "poll", 9: "mmap", 11: "munmap",
        16: "ioctl", 17: "pread64", 18: "pwrite64", 23: "select", 34: "pause", 35: "nanosleep", 42: "connect", 43: "accept",
        44: "sendto", 45: "recvfrom", 46: "sendmsg", 47: "recvmsg", 61: "wait4", 72: "fcntl", 73: "flock", 74: "fsync",
        75: "fdatasync", 78: "getdents", 82: "rename", 83: "mkdir", 87: "unlink", 137: "statfs", 162: "sync", 165: "mount",
        202: "futex", 217: "getdents64", 230: "clock_nanosleep", 231: "exit_group", 232: "epoll_wait", 247: "waitid",
        257: "openat", 262: "newfstatat", 270: "pselect6", 271: "ppoll", 281: "epoll_pwait", 332: "statx",
    },
    "aarch64": {
        22: "epoll_pwait", 25: "fcntl", 29: "ioctl", 32: "flock", 40: "mount", 43: "statfs", 56: "openat", 57: "close",
        61: "getdents64", 63: "read", 64: "write", 67: "pread64", 68: "pwrite64", 72: "pselect6", 73: "ppoll", 79: "newfstatat",
        80: "fstat", 81: "sync", 82: "fsync", 83: "fdatasync", 94: "exit_group", 95: "waitid", 98: "futex", 101: "nanosleep",
        115: "clock_nanosleep", 202: "accept", 203: "connect", 206: "sendto", 207: "recvfrom", 211: "sendmsg", 212: "recvmsg",
        222: "mmap", 260: "wait4", 291: "statx",
    },
}  # fmt: skip


class Status(Struct, frozen=True):
    """What /proc/PID/status says of a process and its main thread."""

    state: str  # "R", "S", "D", "T", ...
    caught: int  # masks of signals: those with a handler,
    blocked: int  # that the main thread blocks,
    pending: int  # that wait to be delivered

    @property
    def is_stopped(self) -> bool:
        """Whether it is stopped: by SIGSTOP, or by a debugger."""
        return self.state in "Tt"

    def catches(self, signum: int) -> bool:
        """Whether it has a handler."""
        return bool(self.caught >> (signum - 1) & 1)

    def blocks(self, signum: int) -> bool:
        """Whether the main thread blocks it, as it does while the handler runs."""
        return bool(self.blocked >> (signum - 1) & 1)

    def has_pending(self, signum: int) -> bool:
        """Whether it waits to be delivered."""
        return bool(self.pending >> (signum - 1) & 1)


def read_status(pid: int) -> Status | None:
    """Read it; None if the process is gone."""
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            return parse_status(file.read())
    except OSError:
        return None


def parse_status(content: bytes) -> Status | None:
    """Take the fields out of the file's content; None where they are not there: a process that is being made or has ended."""
    fields = dict(line.split(b":\t", 1) for line in content.splitlines() if b":\t" in line)
    try:
        caught, blocked = int(fields[b"SigCgt"], 16), int(fields[b"SigBlk"], 16)
        pending = int(fields[b"SigPnd"], 16) | int(fields[b"ShdPnd"], 16)
        return Status(fields[b"State"][:1].decode(), caught, blocked, pending)
    except (KeyError, ValueError):
        return None


def place_in_kernel(pid: int, status: Status) -> str:
    """Say where in the kernel a process sleeps, as far as we may know: ", in nfs_wait_on_request (read)"; "" if it runs."""
    if status.state == "R":
        return ""
    channel, call = _read(pid, "wchan"), call_name(_read(pid, "syscall"), os.uname().machine)
    channel = "" if channel == "0" else channel
    if channel and call:
        return f", in {channel} ({call})"
    return f", in {channel or call}" if channel or call else ""


def call_name(text: str, machine: str) -> str:
    """Name the system call of /proc/PID/syscall; "" where there is none, or it may not be read."""
    number = text.partition(" ")[0]
    if not re.fullmatch(r"\d{1,4}", number):
        return ""
    return _CALLS.get(machine, {}).get(int(number), f"system call {number}")


def _read(pid: int, name: str) -> str:
    try:
        with open(f"/proc/{pid}/{name}", "rb") as file:
            return file.read(256).decode(errors="replace").strip()
    except OSError:
        return ""
