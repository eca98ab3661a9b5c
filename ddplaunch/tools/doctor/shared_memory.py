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
_SMALL_SIZE = 1 << 30  # bytes; docker gives 64 MiB
_LITTLE_ROOM = 64 << 20  # bytes that are free
_LEAST_AGE = 60.0  # seconds: a process may be about to open the file
_NOTABLE_SIZE = 1 << 20  # bytes; less lies about after many a program that was killed, and hurts nobody
# torch's tensors, NCCL's and UCX's segments, multiprocessing.shared_memory, POSIX semaphores, Open MPI, OpenMP, and ours
_NAMES_OF_LIBRARIES = re.compile(
    r"torch_|nccl-|psm_|sem\.|mp-|pym-|ucx|vader_segment|btl_vader|osc_rdma|__KMP_|ddplaunch-|cuda\.shm|wnsm_"
)
_MODE_OF_SEGMENTS = 0o600  # with which multiprocessing.shared_memory makes a file; copies of data have the umask's
_HOST_PIDS = "pid:[4026531836]"  # the first namespace of processes, include/linux/proc_ns.h


class Segment(Struct, frozen=True, kw_only=True):
    """A file of this user in /dev/shm that no process has open."""

    path: str
    size: int  # bytes that it takes
    age: float  # seconds since it was written
    is_named_by_program: bool = False  # the user's program has chosen the name; else a library made it at random


class SharedMemory(Struct, frozen=True, kw_only=True):
    """/dev/shm."""

    size: int  # bytes; 0: there is none, or it is not writable
    free: int
    problem: str = ""  # why it cannot be used; "" if it can
    unused: tuple[Segment, ...] = ()
    sees_all_processes: bool = True  # of the machine; False: of this container, and others may have the files open


def read(_subject: Subject) -> SharedMemory:
    """Look at /dev/shm, and at the open files of all processes of this user if files lie there."""
    try:
        room = os.statvfs(SHM)
    except OSError as error:
        return SharedMemory(size=0, free=0, problem=error.strerror or str(error))
    if not os.access(SHM, os.W_OK | os.X_OK):
        return SharedMemory(size=0, free=0, problem="it is not writable")
    leftovers = list(_left_by_user(SHM))
    if leftovers:
        used = set(_in_use(f"{SHM}/"))
        leftovers = [one for one in leftovers if one.path not in used]
    return SharedMemory(
        size=room.f_blocks * room.f_frsize,
        free=room.f_bavail * room.f_frsize,
        unused=tuple(sorted(leftovers, key=lambda one: (-one.size, one.path))),
        # "": without /proc nobody can tell that this is a container, which has a namespace of its own
        sees_all_processes=_link("/proc/self/ns/pid") in ("", _HOST_PIDS),
    )


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


def _left_by_user(folder: str, least_age: float = _LEAST_AGE) -> Iterator[Segment]:
    """Yield this user's files that are older than `least_age` seconds, and have the name or the mode of shared memory."""
    now = time.time()
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            with suppress(OSError):
                found = entry.stat(follow_symlinks=False)
                age = now - max(found.st_mtime, found.st_ctime)
                is_own_file = stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid()
                is_named_by_program = _NAMES_OF_LIBRARIES.match(entry.name) is None
                # a file whose name a program has chosen may be anything; multiprocessing.shared_memory makes its with this mode
                may_be_segment = not is_named_by_program or stat.S_IMODE(found.st_mode) == _MODE_OF_SEGMENTS
                if is_own_file and may_be_segment and age > least_age:
                    size = found.st_blocks * 512
                    yield Segment(path=entry.path, size=size, age=age, is_named_by_program=is_named_by_program)


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
    if shm.problem:
        finding = broken(
            f"{SHM} cannot be used",
            f"{shm.problem}\ndata loaders and NCCL share memory there",
            "`mount -t tmpfs -o size=50% tmpfs /dev/shm` as root\na container gets one by `docker run --shm-size 8g`",
        )
        return Verdict(shm.problem, (finding,))
    facts = f"{size(shm.free)} of {size(shm.size)} free"
    unused = f", {count(len(shm.unused), 'file')} of yours without a process" if shm.unused else ""
    return Verdict(f"{facts}{unused}", tuple(_space_findings(shm)))


def _space_findings(shm: SharedMemory) -> Iterator[Finding]:
    """Yield that there is little room, that files which no process uses take it, or have names that a program may want again."""
    if shm.size < _SMALL_SIZE:
        yield slow(
            f"{SHM} has {size(shm.size)} only, and {size(shm.free)} of them are free",
            "workers end with SIGBUS once data loaders or NCCL have filled it",
            "`docker run --shm-size 8g` or `--ipc host`\nin a pod an emptyDir with `medium: Memory` at /dev/shm",
        )
    elif shm.free < _LITTLE_ROOM:
        yield broken(
            f"{SHM} is full: {size(shm.free)} of {size(shm.size)} are free",
            "workers end with SIGBUS where they share memory",
            "`ls -lS /dev/shm` shows the largest files",
        )
    with_random_names = [one for one in shm.unused if not one.is_named_by_program]
    taken = sum(one.size for one in with_random_names)
    takes_a_third = 3 * taken > shm.size
    if taken >= _NOTABLE_SIZE:
        yield Finding(
            severity="slow" if takes_a_third else "note",
            title=f"{size(taken)} of {SHM} belong to files of yours that a program has left",
            evidence=_evidence(with_random_names, shm),
            hint=_remedy(with_random_names),
        )
    with_chosen_names = [one for one in shm.unused if one.is_named_by_program]
    if with_chosen_names:
        yield note(
            f"{count(len(with_chosen_names), 'name')} in {SHM} may be left by a program, which cannot make them again "
            "(FileExistsError)",
            _evidence(with_chosen_names, shm),
            f"{_remedy(with_chosen_names)}, unless a program of yours comes back to them",
        )


def _evidence(left: Sequence[Segment], shm: SharedMemory) -> str:
    """Name files that no process has open."""
    who = "no process has them open" if shm.sees_all_processes else "no process of this container has them open"
    youngest = min(one.age for one in left)
    return f"{some(one.path for one in left)}: {who}, and the latest was written {duration(youngest)} ago"


def _remedy(left: Sequence[Segment]) -> str:
    """Return the line that removes these files."""
    paths = [shlex.quote(one.path) for one in left]
    more = f"; then {len(paths) - 20} more" if len(paths) > 20 else ""
    return f"`rm {' '.join(paths[:20])}`{more}"


CHECKS = (Check(id="shm", examine=lambda subject: judge(read(subject)), within=5.0),)
