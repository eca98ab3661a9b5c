"""What a process inherits and cannot change later; an interpreter that is kept warm serves only runs that have the same."""

from __future__ import annotations

import ctypes
import os
import platform
import signal
from collections.abc import Mapping
from typing import NamedTuple

from ddplaunch.launcher.workers.servers import ServerLost

_NAMESPACES = ("cgroup", "ipc", "mnt", "net", "pid", "time", "user", "uts", "pid_for_children", "time_for_children")
# each with the words for a process that has other ones
_FILES = {
    "cgroup": "another control group",
    "limits": "other resource limits (ulimit)",
    "oom_score_adj": "another OOM score adjustment (choom)",
    "loginuid": "another login user (loginuid)",
    "sessionid": "another audit session (sessionid)",
    "attr/current": "another security context (AppArmor profile, SELinux label)",
    "coredump_filter": "another core dump filter",
    "personality": "another execution domain (setarch)",
}
_STATUS = {
    "Uid": "another user",
    "Gid": "another group",
    "Groups": "other supplementary groups",
    **dict.fromkeys(("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"), "other capabilities"),
    "NoNewPrivs": "another no_new_privs",
    **dict.fromkeys(("Seccomp", "Seccomp_filters"), "other seccomp filters"),
    **dict.fromkeys(("Speculation_Store_Bypass", "SpeculationIndirectBranch"), "another speculation control"),
    "THP_enabled": "another setting of transparent huge pages",
    "Cpus_allowed": "other CPUs (taskset, cpuset)",
    "Mems_allowed": "other memory nodes (numactl, cpuset)",
}
# what another value of each means
WORDS = {
    **_FILES,
    **_STATUS,
    **{f"ns/{name}": f"another {name.removesuffix('_for_children')} namespace" for name in _NAMESPACES},
    "root": "another root directory (chroot)",
    "scheduling": "another priority or scheduling policy (nice, chrt)",
}
# fields of /proc/PID/stat, counted from the state, which follows the name: priority, nice; rt_priority, policy
_SCHEDULING = slice(15, 17), slice(37, 39)
# linux/prctl.h: securebits, timer slack, THP, memory-deny-write-execute, memory merging
_PRCTL_OPTIONS = (27, 30, 42, 66, 68)


class _Calls(NamedTuple):
    """The numbers of system calls (unistd.h) that libc has no functions for."""

    keyctl: int
    get_mempolicy: int
    ioprio_get: int


_CALLS: Mapping[str, _Calls] = {"x86_64": _Calls(250, 239, 252), "aarch64": _Calls(219, 236, 31)}
_GET_KEYRING_ID, _SESSION_KEYRING = 0, ctypes.c_int(-3)  # linux/keyctl.h
_PROCESS = 1  # linux/ioprio.h: of one process; the pid 0 is this one
_MOST_NODES = 1024  # of memory


def shown_by_proc(pid: int) -> dict[str, str]:
    """Return what /proc shows of one of our processes, by name (proc(5)); "" for what /proc does not show."""
    found = {name: _read(f"/proc/{pid}/{name}") for name in _FILES}
    for name in (*(f"ns/{name}" for name in _NAMESPACES), "root"):
        try:
            found[name] = os.readlink(f"/proc/{pid}/{name}")
        except OSError:
            found[name] = ""
    lines = dict(line.partition(":")[::2] for line in _read(f"/proc/{pid}/status").splitlines())  # "NAME:\tVALUE"
    found |= {name: lines.get(name, "").strip() for name in _STATUS}
    fields = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()  # "PID (NAME) STATE ..."
    return {**found, "scheduling": " ".join(" ".join(fields[part]) for part in _SCHEDULING)}


def check_same(pid: int) -> None:
    """Raise ServerLost unless a process has inherited what this one has, as far as /proc shows it, and still lives."""
    ours, theirs = shown_by_proc(os.getpid()), shown_by_proc(pid)
    different = [name for name, value in ours.items() if theirs[name] != value]
    if different:
        raise ServerLost(f"it has {WORDS[different[0]]}")


def of_this_process() -> dict[str, str] | None:
    """Return everything that a child of this process inherits, by name; None on machines whose system calls are unknown.

    The values are only compared: of a call that the kernel does not have, each process gets the same error.
    """
    calls = _CALLS.get(platform.machine())
    if calls is None:
        return None
    libc = ctypes.CDLL(None)
    mode, nodes = ctypes.c_int(), (ctypes.c_ulong * (_MOST_NODES // 64))()  # a bit for each node of memory
    libc.syscall(calls.get_mempolicy, ctypes.byref(mode), nodes, ctypes.c_ulong(_MOST_NODES), None, ctypes.c_ulong(0))
    ignored = [signum for signum in signal.valid_signals() if signal.getsignal(signum) is signal.SIG_IGN]
    return {
        **shown_by_proc(os.getpid()),
        "prctl": str([libc.prctl(option, 0, 0, 0, 0) for option in _PRCTL_OPTIONS]),
        "keyring": str(libc.syscall(calls.keyctl, _GET_KEYRING_ID, _SESSION_KEYRING, 0)),
        "memory": f"{mode.value} {[*nodes]}",
        "ioprio": str(libc.syscall(calls.ioprio_get, _PROCESS, 0)),
        "ignored": str(sorted(map(int, ignored))),
    }


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            return file.read()
    except OSError:
        return ""
