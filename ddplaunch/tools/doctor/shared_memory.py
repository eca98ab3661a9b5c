"""/dev/shm: whether it has room, and which files of this user lie there though no process has them open.

Most names there are random, and only take room. A name that a program has chosen cannot be made again while it is there.
"""

from __future__ import annotations

import os
import re
import shlex
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress

from msgspec import Struct

from ddplaunch.plan.devices.sysfs import SHM
from ddplaunch.system.process.tree import content
from ddplaunch.system.words import count, duration, size, some
from ddplaunch.tools.doctor import Check, Finding, Subject, Verdict, broken, note, slow

# NCCL takes about 10 MiB for each pair of GPUs without peer-to-peer; one batch of a data loader is as large as its tensors
_SMALL = 1 << 30  # bytes; docker gives 64 MiB
_LITTLE = 64 << 20  # bytes that are free
_YOUNG = 60.0  # seconds: a process may be about to open the file
_NOTABLE = 1 << 20  # bytes; less lies about after many a program that was killed, and hurts nobody
# torch's tensors, NCCL's and UCX's segments, multiprocessing.shared_memory, POSIX semaphores, Open MPI, OpenMP, and ours
_KINDS = re.compile(
    r"torch_|nccl-|psm_|sem\.|mp-|pym-|ucx|vader_segment|btl_vader|osc_rdma|__KMP_|ddplaunch-|cuda\.shm|wnsm_"
)
_PRIVATE = 0o600  # the mode with which multiprocessing.shared_memory makes a file; copies of data have the umask's
_HOST_PIDS = "pid:[4026531836]"  # the first namespace of processes, include/linux/proc_ns.h


class Segment(Struct, frozen=True, kw_only=True):
    """A file of this user in /dev/shm that no process has open."""

    path: str
    size: int  # bytes that it takes
    age: float  # seconds since it was written
    is_chosen: bool = False  # the name is none that a library makes


class SharedMemory(Struct, frozen=True, kw_only=True):
    """/dev/shm."""

    size: int  # bytes; 0: there is none, or it is not writable
    free: int
    why: str = ""  # it cannot be used
    unused: tuple[Segment, ...] = ()
    sees_all: bool = True  # all processes of the machine, not those of one container


def read(_subject: Subject) -> SharedMemory:
    """Look at /dev/shm, and at the open files of all processes of this user if files lie there."""
    try:
        room = os.statvfs(SHM)
    except OSError as error:
        return SharedMemory(size=0, free=0, why=error.strerror or str(error))
    if not os.access(SHM, os.W_OK | os.X_OK):
        return SharedMemory(size=0, free=0, why="it is not writable")
    left = list(_of_user(SHM))
    if left:
        used = set(_in_use(f"{SHM}/"))
        left = [one for one in left if one.path not in used]
    return SharedMemory(
        size=room.f_blocks * room.f_frsize,
        free=room.f_bavail * room.f_frsize,
        unused=tuple(sorted(left, key=lambda one: (-one.size, one.path))),
        sees_all=_link("/proc/self/ns/pid") in ("", _HOST_PIDS),
    )


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


def _of_user(folder: str, youngest: float = _YOUNG) -> Iterator[Segment]:
    """Yield this user's files that are older than `youngest` seconds, and named or made as training programs do."""
    now = time.time()
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            with suppress(OSError):
                found = entry.stat(follow_symlinks=False)
                age = now - max(found.st_mtime, found.st_ctime)
                is_chosen = _KINDS.match(entry.name) is None
                if (
                    stat.S_ISREG(found.st_mode)
                    and found.st_uid == os.geteuid()
                    and age > youngest
                    and (not is_chosen or stat.S_IMODE(found.st_mode) == _PRIVATE)
                ):
                    yield Segment(path=entry.path, size=found.st_blocks * 512, age=age, is_chosen=is_chosen)


def _in_use(prefix: str) -> Iterator[str]:
    """Yield the paths below `prefix` that processes map or have open, as far as this user may see that."""
    wanted = os.fsencode(prefix)
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):  # it has ended, or belongs to another user
            for line in content(f"/proc/{pid}/maps").splitlines():
                at = line.find(wanted)
                if at >= 0:
                    yield os.fsdecode(line[at:])
            for file in os.listdir(f"/proc/{pid}/fd"):
                target = _link(f"/proc/{pid}/fd/{file}")
                if target.startswith(prefix):
                    yield target


def judge(shm: SharedMemory) -> Verdict:
    """Judge the size of /dev/shm, its free room, and the files that ended programs have left there."""
    if shm.why:
        finding = broken(
            f"{SHM} cannot be used",
            f"{shm.why}\ndata loaders and NCCL share memory there",
            "`mount -t tmpfs -o size=50% tmpfs /dev/shm` as root\na container gets one by `docker run --shm-size 8g`",
        )
        return Verdict(shm.why, (finding,))
    facts = f"{size(shm.free)} of {size(shm.size)} free"
    unused = f", {count(len(shm.unused), 'file')} of yours without a process" if shm.unused else ""
    return Verdict(f"{facts}{unused}", tuple(_findings(shm)))


def _findings(shm: SharedMemory) -> Iterator[Finding]:
    if shm.size < _SMALL:
        yield slow(
            f"{SHM} has {size(shm.size)} only, and {size(shm.free)} of them are free",
            "workers end with SIGBUS once data loaders or NCCL have filled it",
            "`docker run --shm-size 8g` or `--ipc host`\nin a pod an emptyDir with `medium: Memory` at /dev/shm",
        )
    elif shm.free < _LITTLE:
        yield broken(
            f"{SHM} is full: {size(shm.free)} of {size(shm.size)} are free",
            "workers end with SIGBUS where they share memory",
            "`ls -lS /dev/shm` shows the largest files",
        )
    random = [one for one in shm.unused if not one.is_chosen]
    taken = sum(one.size for one in random)
    if taken >= _NOTABLE:
        yield Finding(
            severity="slow" if taken > (shm.size - taken) // 2 else "note",
            title=f"{size(taken)} of {SHM} belong to files of yours that a program has left",
            evidence=_evidence(random, shm),
            hint=_remedy(random),
        )
    if chosen := [one for one in shm.unused if one.is_chosen]:
        yield note(
            f"{count(len(chosen), 'name')} in {SHM} may be left by a program, which cannot make them again (FileExistsError)",
            _evidence(chosen, shm),
            f"{_remedy(chosen)}, unless a program of yours comes back to them",
        )


def _evidence(left: Sequence[Segment], shm: SharedMemory) -> str:
    """Name files that no process has open."""
    who = "no process has them open" if shm.sees_all else "no process of this container has them open"
    youngest = min(one.age for one in left)
    return f"{some(one.path for one in left)}: {who}, and the latest was written {duration(youngest)} ago"


def _remedy(left: Sequence[Segment]) -> str:
    """Return the line that removes these files."""
    paths = [shlex.quote(one.path) for one in left]
    more = f"; then {len(paths) - 20} more" if len(paths) > 20 else ""
    return f"`rm {' '.join(paths[:20])}`{more}"


CHECKS = (Check(id="shm", examine=lambda subject: judge(read(subject)), within=5.0),)
