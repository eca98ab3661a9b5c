"""Takes the stacks of the workers of a node, and of their children, all at once, in a child of the agent.

A process gets the signal only where it is proven that it will write its stack: it handles the signal, and has our file open
under the number that it was given. Any other would be killed by it.
"""

from __future__ import annotations

import fcntl
import os
import signal
import time
from collections.abc import Iterator, Sequence
from functools import partial

from msgspec import Struct
from msgspec.structs import replace

from ddplaunch.process.child import STACKS_FD, STACKS_SIGNAL
from ddplaunch.process.linux import memory_file, signal_at_end_of
from ddplaunch.process.tree import Process, descendants, look, signal_process
from ddplaunch.stacks import Group, Sample, dump
from ddplaunch.stacks.kernel import Status, place_in_kernel, read_status
from ddplaunch.stacks.ras import ask as ask_ras
from ddplaunch.stacks.recorder import ask

_PACE = 0.001  # seconds between two looks
_SETTLING = 0.5  # seconds after the fork of a child
_MOST_CHILDREN = 64  # of a worker
_LONGEST = 1 << 20  # bytes of the stacks of a worker, which is more than faulthandler writes
_LONGEST_CHILD = 1 << 16  # of each of its children
_LONGEST_NATIVE = 20_000  # bytes
_RAS = 1.0  # seconds for NCCL's RAS service, which waits longer for ranks that are dead
_NAME = "/memfd:ddplaunch-stacks"


class Target(Struct, frozen=True):
    """A worker that has been started."""

    rank: int
    pid: int
    file: int | None  # where it writes its stacks; None: it is no Python
    recorder: str = ""  # path of the socket where torch tells of its collectives, once it has a process group


def take(
    targets: Sequence[Target],
    *,
    until: float,
    host: str = "",
    native: bool = False,
    stacks: bool = True,
    ras: bool = False,
) -> list[Sample]:
    """Take the stacks of these and of their children, until this time (CLOCK_MONOTONIC) at the latest.

    Without `stacks` it is only found out what torch tells of their collectives. `ras`: NCCL is asked too, on the node of rank 0:
    it tells of all ranks.
    """
    found = [] if stacks else [Sample(rank=target.rank, pid=target.pid, host=host) for target in targets]
    groups: dict[int, list[list[Group]]] = {target.rank: [] for target in targets}
    pending = (
        [_contained(_of_worker(target, until, host, found), target, found) for target in targets] if stacks else []
    )
    # at the same time: two answers that do not belong together differ in their numbers
    pending += [_contained(ask(target.recorder, groups[target.rank])) for target in targets if target.recorder]
    of_native: dict[int, str] = {}
    of_ras: dict[int, str] = {}
    ranks = {target.rank: target.pid for target in targets}
    if ras and 0 in ranks:
        pending.append(_contained(ask_ras(ranks, of_ras, until=min(until, time.monotonic() + _RAS))))
    pending += [_contained(_native(target, until, of_native)) for target in targets if native]
    while pending:
        is_last = time.monotonic() >= until  # looked at first: each notes once more what it has not learned
        pending = [one for one in pending if next(one, None) is not None]
        if is_last:
            break
        time.sleep(_PACE)
    complete = (
        replace(one, groups=tuple(groups[one.rank][0])) if groups[one.rank] and not one.child else one for one in found
    )
    complete = (
        one if one.child else replace(one, native=of_native.get(one.rank, ""), ras=of_ras.get(one.rank, ""))
        for one in complete
    )
    return sorted(complete, key=lambda sample: (sample.rank, bool(sample.child), sample.pid))


def _contained(
    asking: Iterator[bool], target: Target | None = None, found: list[Sample] | None = None
) -> Iterator[bool]:
    """Ask, and let nothing that fails with one worker keep the others from being asked; say of a stack that it failed."""
    try:
        yield from asking
    except Exception as error:  # noqa: BLE001 - a worker may have done anything to what is read of it
        if target is not None and found is not None:
            state = f"its stack cannot be read ({type(error).__name__})"
            found.append(Sample(rank=target.rank, pid=target.pid, state=state))


def _of_worker(target: Target, until: float, host: str, found: list[Sample]) -> Iterator[bool]:
    """Take one worker's, and then, since they share a file, those of its children one after another; yields to wait."""
    worker = look(target.pid)
    if worker is None or worker.state in "ZX":
        found.append(Sample(rank=target.rank, pid=target.pid, host=host, state="it has ended", ended=True))
        return
    if target.file is None:
        yield from _of_process(target, worker, until, host, found, is_child=False)
        return
    # opened anew, for a lock of our own: what it was inherited from has one for all
    with open(f"/proc/self/fd/{target.file}", "rb", buffering=0) as file:
        while not _is_locked(file.fileno()):
            if time.monotonic() >= until:
                found.append(Sample(rank=target.rank, pid=target.pid, host=host, state=_unanswered(target.pid)))
                return
            yield True
        yield from _of_process(target, worker, until, host, found, is_child=False)
        for child in list(descendants(target.pid))[:_MOST_CHILDREN]:
            if _has_settled(child) and has_file(child.pid, target.file):
                yield from _of_process(target, child, until, host, found, is_child=True)


def _has_settled(child: Process) -> bool:
    """Whether it is old enough not to execute another program just now, which the signal would kill."""
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - child.started / os.sysconf("SC_CLK_TCK")
    return age > _SETTLING


def _is_locked(file: int) -> bool:
    """Keep others who take stacks from the file until it is closed, unless one of them is at it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _of_process(
    target: Target, process: Process, until: float, host: str, found: list[Sample], *, is_child: bool
) -> Iterator[bool]:
    def sample(text: str = "", state: str = "") -> None:
        name = process.name if is_child else ""
        threads = dump.parse(text)
        found.append(Sample(rank=target.rank, pid=process.pid, host=host, child=name, threads=threads, state=state))

    status = read_status(process.pid)
    if status is None:
        return
    if (why := _why_not(process.pid, status, target.file)) is not None:
        sample(state=why)
        return
    assert target.file is not None
    os.lseek(target.file, 0, os.SEEK_SET)
    # of one that could not answer the last time the signal still waits, and would be answered twice
    if not status.has_pending(STACKS_SIGNAL) and not signal_process(process, STACKS_SIGNAL):
        sample(state="it belongs to another user")
        return
    while not _has_written(process.pid, target.file):
        if (now := look(process.pid)) is None or now.started != process.started or now.state in "ZX":
            return
        if time.monotonic() >= until:
            sample(state=_unanswered(process.pid))
            return
        yield True
    # the offset is the worker's to move
    length = min(os.lseek(target.file, 0, os.SEEK_CUR), _LONGEST_CHILD if is_child else _LONGEST)
    sample(os.pread(target.file, length, 0).decode(errors="replace"))


def _native(target: Target, until: float, found: dict[int, str]) -> Iterator[bool]:
    """Have py-spy write a worker's stacks with the frames of C between those of Python; yields to wait."""
    import subprocess  # few want them

    command = ["py-spy", "dump", "--native", "--pid", str(target.pid)]
    try:
        with open(memory_file("native"), "w+b") as out:
            # this process may be ended at any moment, and py-spy is to end with it
            end_too = partial(signal_at_end_of, os.getpid(), signal.SIGKILL)
            with subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                preexec_fn=end_too,  # noqa: PLW1509 - this process has one thread
            ) as asked:
                while asked.poll() is None and time.monotonic() < until:
                    yield True
                asked.kill()
            out.seek(0)
            found[target.rank] = out.read(_LONGEST_NATIVE).decode(errors="replace").strip()
    except FileNotFoundError:
        found[target.rank] = "py-spy is not installed on this node"
    except OSError as error:
        found[target.rank] = f"py-spy cannot be run: {error.strerror}"


def _why_not(pid: int, status: Status, file: int | None) -> str | None:
    """Say why a process cannot be asked, None if it can."""
    if status.is_stopped:
        return "suspended" if status.state == "T" else "held by a debugger"
    if file is None or not status.catches(STACKS_SIGNAL):
        return "no Python, or it has not begun to run its program" + place_in_kernel(pid, status)
    if not has_file(pid, file):
        return f"the program itself handles signal {STACKS_SIGNAL}, so its stack cannot be taken"
    if status.blocks(STACKS_SIGNAL):
        return f"the program blocks signal {STACKS_SIGNAL}, so its stack cannot be taken"
    return None


def has_file(pid: int, file: int) -> bool:
    """Whether a process has our file where the handler writes to."""
    path = f"/proc/{pid}/fd/{STACKS_FD}"
    try:
        if not os.readlink(path).startswith(_NAME):
            return False
        theirs, ours = os.stat(path), os.fstat(file)
    except OSError:
        return False
    status = read_status(pid)
    same = (theirs.st_dev, theirs.st_ino) == (ours.st_dev, ours.st_ino)
    return same and status is not None and status.catches(STACKS_SIGNAL)


def _has_written(pid: int, file: int) -> bool:
    """Whether the dump is complete: the handler has written, and has returned; while it runs its signal is blocked."""
    if os.lseek(file, 0, os.SEEK_CUR) == 0:
        return False
    status = read_status(pid)
    return status is not None and not status.has_pending(STACKS_SIGNAL) and not status.blocks(STACKS_SIGNAL)


def _unanswered(pid: int) -> str:
    status = read_status(pid)
    if status is None:
        return "it has just ended"
    if status.state == "D":
        return f"in uninterruptible sleep{place_in_kernel(pid, status)}"
    return f"it does not answer{place_in_kernel(pid, status)}"
