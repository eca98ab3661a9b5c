"""Captures the stacks of the workers of a node, and of their children, all at once; runs in a child of the agent.

Functions that return an iterator ask one process each: each step says that the answer has not come yet. Each worker has a file
of ours as descriptor STACKS_FD, which its children inherit; the handler of STACKS_SIGNAL writes the stacks of a process there.

A process gets the signal only where it is proven that it will write its stack: it handles the signal, and has our file open
under the number that it was given. Any other would be killed by it.
"""

from __future__ import annotations

import fcntl
import os
import re
import signal
import time
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice

from msgspec import Struct
from msgspec.structs import replace

from ddplaunch.launcher.look.recorder import WAITS, ask_ras, ask_recorders
from ddplaunch.record.seen import NOT_BEGUN, Group, Sample
from ddplaunch.record.seen.dump import parse_dump
from ddplaunch.record.seen.stack import exit_state
from ddplaunch.spec.program import working_directory
from ddplaunch.system.fields import line, piece
from ddplaunch.system.process.child import STACKS_FD, STACKS_SIGNAL
from ddplaunch.system.process.linux import memory_file, signal_at_end_of
from ddplaunch.system.process.tree import Process, descendants, ended_children, look, signal_process
from ddplaunch.system.words import signal_name

_PACE = 0.001  # seconds from one step of all questions to the next
_SETTLING = 0.5  # seconds after its fork in which a child may execute another program
_MOST_CHILDREN = 64  # of a worker
_LONGEST_OF_WORKER = 1 << 20  # bytes of the stacks of a worker, which is more than faulthandler writes
_LONGEST_OF_CHILD = 1 << 16  # of each of its children
_LONGEST_NATIVE = 20_000  # bytes
_RAS_WITHIN = 1.0  # seconds for NCCL's RAS service, which waits longer for ranks that are dead
_FILE_NAME = "/memfd:ddplaunch-stacks"  # of the files into which workers write their stacks, as /proc shows it
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


class Target(Struct, frozen=True):
    """A worker that has been started."""

    rank: int
    pid: int
    stacks_file: int | None  # our descriptor of the file where it writes its stacks; None: it is no Python
    recorder: str = ""  # path of the socket where torch tells of its collectives, once it has a process group


def capture_stacks(
    targets: Sequence[Target],
    *,
    until: float,
    host: str = "",
    native: bool = False,
    stacks: bool = True,
    ras: bool = False,
) -> list[Sample]:
    """Return the stacks of `targets` and of their children, captured until the time `until` (CLOCK_MONOTONIC) at the latest.

    `native`: with the frames of C that py-spy sees. Without `stacks`, only ask torch's recorders about collectives. With `ras`,
    ask NCCL too, on the node of rank 0 alone: NCCL knows about all ranks.
    """
    found: list[Sample] = []
    pending: list[Iterator[bool]] = []  # questions, each of which adds its answer to `found` or to a dict below
    if stacks:
        pending += [_contain_errors(_capture_worker(target, until, host, found), target, found) for target in targets]
    else:
        found += [Sample(rank=target.rank, pid=target.pid, host=host) for target in targets]
    # by rank: no list of groups if no recorder answers, else one
    groups: dict[int, list[list[Group]]] = {target.rank: [] for target in targets}
    with_recorder = [target for target in targets if target.recorder]
    # at the same time as the stacks, so that both show the worker at the same collective
    pending += [_contain_errors(ask_recorders(target.recorder, groups[target.rank])) for target in with_recorder]
    of_native: dict[int, str] = {}  # by rank, as `of_ras`
    of_ras: dict[int, str] = {}
    pids = {target.rank: target.pid for target in targets}
    if ras and 0 in pids:
        pending.append(_contain_errors(ask_ras(pids, of_ras, until=min(until, time.monotonic() + _RAS_WITHIN))))
    pending += [_contain_errors(_capture_native(target, until, of_native)) for target in targets if native]
    while pending:
        is_last = time.monotonic() >= until  # in the last round, too, each may note what it has not learned
        pending = [asking for asking in pending if next(asking, None) is WAITS]
        if is_last:
            break
        time.sleep(_PACE)

    def complete(sample: Sample) -> Sample:  # the other answers are about the worker, not about a child of it
        rank = sample.rank
        if sample.child:
            return sample
        called = tuple(groups[rank][0]) if groups[rank] else sample.groups
        return replace(sample, groups=called, native=of_native.get(rank, ""), ras=of_ras.get(rank, ""))

    return sorted(map(complete, found), key=lambda sample: (sample.rank, bool(sample.child), sample.pid))


def _contain_errors(
    asking: Iterator[bool], target: Target | None = None, found: list[Sample] | None = None
) -> Iterator[bool]:
    """Ask one worker; whatever fails with it, go on with the others. Add to `found` that its stack cannot be read."""
    try:
        yield from asking
    except Exception as error:  # noqa: BLE001 - a worker may have done anything to what is read of it
        if target is not None and found is not None:
            state = f"its stack cannot be read ({type(error).__name__})"
            found.append(Sample(rank=target.rank, pid=target.pid, state=state))


def _capture_worker(target: Target, until: float, host: str, found: list[Sample]) -> Iterator[bool]:
    """Add the stacks of a worker to `found`, then those of its children in turn, since all share one file; yield to wait."""
    worker = look(target.pid)
    if worker is None or worker.state in "ZX":  # a zombie, or dead: proc(5)
        found.append(Sample(rank=target.rank, pid=target.pid, host=host, state="it has ended", ended=True))
        return
    if target.stacks_file is None:  # it is no Python, and writes none: only why is noted
        yield from _capture_process(target, worker, until, host, found, is_child=False)
        return
    # flock counts for an open file, which the worker shares with us: only what we open ourselves has a lock of our own
    with open(f"/proc/self/fd/{target.stacks_file}", "rb", buffering=0) as file:
        while not _try_lock(file.fileno()):  # another child of the agent captures the stacks just now
            if time.monotonic() >= until:
                found.append(Sample(rank=target.rank, pid=target.pid, host=host, state=_why_unanswered(target.pid)))
                return
            yield WAITS
        yield from _capture_process(target, worker, until, host, found, is_child=False)
        for child in list(descendants(target.pid))[:_MOST_CHILDREN]:
            if _is_past_exec(child) and has_our_handler(child.pid, target.stacks_file):
                yield from _capture_process(target, child, until, host, found, is_child=True)
    # zombies: nobody has waited for them, so that how they ended can be told
    found += (
        sample_of(target.rank, child.pid, host, child=child.name or "?", state=_how_ended(code), ended=True)
        for child, code in islice(ended_children(target.pid), _MOST_CHILDREN)
    )


def sample_of(
    rank: int, pid: int, host: str, *, child: str = "", state: str = "", dump: str = "", ended: bool = False
) -> Sample:
    """Return the sample of a process; its name and `dump`, the stacks that it has written, may be any text."""
    threads = parse_dump(dump)
    state = state or ("" if child else exit_state(threads, working_directory() or ""))
    return Sample(rank=rank, pid=pid, host=host, child=line(child), threads=threads, state=piece(state), ended=ended)


def _how_ended(code: int) -> str:
    return f"killed by {signal_name(-code)}" if code < 0 else f"exit status {code}"


def _is_past_exec(child: Process) -> bool:
    """Whether a child is old enough not to execute another program just now, which the signal would kill."""
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - child.started / os.sysconf("SC_CLK_TCK")
    return age > _SETTLING


def _try_lock(file: int) -> bool:
    """Try to lock the file, so that no other process captures stacks until the file is closed. Return whether that succeeded."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _capture_process(
    target: Target, process: Process, until: float, host: str, found: list[Sample], *, is_child: bool
) -> Iterator[bool]:
    """Signal a process for its stacks and add them to `found`; yield while it has not answered, until `until`.

    Adds why there are none if it cannot be asked or does not answer, and nothing for a process that has ended meanwhile.
    """

    def add_sample(dump: str = "", state: str = "") -> None:
        child = (process.name or "?") if is_child else ""
        found.append(sample_of(target.rank, process.pid, host, child=child, state=state, dump=dump))

    status = read_status(process.pid)
    if status is None:
        return
    if (why := _why_unaskable(process.pid, status, target.stacks_file)) is not None:
        add_sample(state=why)
        return
    assert target.stacks_file is not None
    os.lseek(target.stacks_file, 0, os.SEEK_SET)  # we share the offset with the worker, which writes from there
    # a process that could not answer the last time still has the signal pending: a second one would be a second answer
    if not status.has_pending(STACKS_SIGNAL) and not signal_process(process, STACKS_SIGNAL):
        add_sample(state="it belongs to another user")
        return
    while not _has_answered(process.pid, target.stacks_file):
        now = look(process.pid)
        has_ended = now is None or now.started != process.started or now.state in "ZX"
        if has_ended:
            return
        if time.monotonic() >= until:
            add_sample(state=_why_unanswered(process.pid))
            return
        yield WAITS
    written = os.lseek(target.stacks_file, 0, os.SEEK_CUR)
    length = min(written, _LONGEST_OF_CHILD if is_child else _LONGEST_OF_WORKER)
    add_sample(os.pread(target.stacks_file, length, 0).decode(errors="replace"))  # leaves the shared offset where it is


def _capture_native(target: Target, until: float, found: dict[int, str]) -> Iterator[bool]:
    """Have py-spy add a worker's stacks to `found`, with the frames of C between those of Python; yield to wait."""
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
                    yield WAITS
                asked.kill()
            out.seek(0)
            found[target.rank] = out.read(_LONGEST_NATIVE).decode(errors="replace").strip()
    except FileNotFoundError:
        found[target.rank] = "py-spy is not installed on this node"
    except OSError as error:
        found[target.rank] = f"py-spy cannot be run: {error.strerror}"


def _why_unaskable(pid: int, status: Status, stacks_file: int | None) -> str | None:
    """Return why a process cannot be asked for its stacks, None if it can be; one that is no Python has no `stacks_file`."""
    if status.is_stopped:
        return "suspended" if status.state == "T" else "held by a debugger"
    has_handler = status.catches(STACKS_SIGNAL)  # ours is set before the program begins
    if stacks_file is None or not has_handler:
        return NOT_BEGUN + place_in_kernel(pid, status)
    if not has_our_handler(pid, stacks_file):
        return f"the program itself handles signal {STACKS_SIGNAL}, so its stack cannot be taken"
    if status.blocks(STACKS_SIGNAL):
        return f"the program blocks signal {STACKS_SIGNAL}, so its stack cannot be taken"
    return None


def has_our_handler(pid: int, file: int) -> bool:
    """Whether a process handles STACKS_SIGNAL, and has our `file` open as STACKS_FD, to which that handler writes.

    False of a process that is gone or may not be looked at.
    """
    path = f"/proc/{pid}/fd/{STACKS_FD}"
    try:
        if not os.readlink(path).startswith(_FILE_NAME):  # else `stat` may hang, with the disk of the program's file
            return False
        theirs, ours = os.stat(path), os.fstat(file)
    except OSError:
        return False
    is_ours = (theirs.st_dev, theirs.st_ino) == (ours.st_dev, ours.st_ino)
    status = read_status(pid)
    return is_ours and status is not None and status.catches(STACKS_SIGNAL)


def _has_answered(pid: int, file: int) -> bool:
    """Whether the stacks are complete: the handler has written, and has returned; while it runs its signal is blocked."""
    if os.lseek(file, 0, os.SEEK_CUR) == 0:
        return False
    status = read_status(pid)
    return status is not None and not status.has_pending(STACKS_SIGNAL) and not status.blocks(STACKS_SIGNAL)


def _why_unanswered(pid: int) -> str:
    """Return why a process has not written its stacks in time."""
    status = read_status(pid)
    if status is None:
        return "it has just ended"
    if status.state == "D":
        return f"in uninterruptible sleep{place_in_kernel(pid, status)}"
    return f"it does not answer{place_in_kernel(pid, status)}"


# --- what the kernel says of a process that cannot be asked; nothing of this can block


class Status(Struct, frozen=True):
    """What /proc/PID/status says of a process and its main thread."""

    state: str  # "R", "S", "D", "T", ...
    caught: int  # masks of signals: those with a handler,
    blocked: int  # that the main thread blocks,
    pending: int  # that wait to be delivered

    @property
    def is_stopped(self) -> bool:
        """Whether the process is stopped: by SIGSTOP, or by a debugger."""
        return self.state in "Tt"

    def catches(self, signum: int) -> bool:
        """Whether the process has a handler of this signal."""
        return bool(self.caught >> (signum - 1) & 1)

    def blocks(self, signum: int) -> bool:
        """Whether the main thread blocks this signal, as it does while the handler runs."""
        return bool(self.blocked >> (signum - 1) & 1)

    def has_pending(self, signum: int) -> bool:
        """Whether this signal waits to be delivered."""
        return bool(self.pending >> (signum - 1) & 1)


def read_status(pid: int) -> Status | None:
    """Return the status of a process; None if the process is gone."""
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            return parse_status(file.read())
    except OSError:
        return None


def parse_status(content: bytes) -> Status | None:
    """Return the status in /proc/PID/status; None without these fields: the process is being made, or has ended."""
    fields = dict(line.split(b":\t", 1) for line in content.splitlines() if b":\t" in line)
    try:
        caught, blocked = int(fields[b"SigCgt"], 16), int(fields[b"SigBlk"], 16)
        pending = int(fields[b"SigPnd"], 16) | int(fields[b"ShdPnd"], 16)
        return Status(fields[b"State"][:1].decode(), caught, blocked, pending)
    except (KeyError, ValueError):
        return None


def place_in_kernel(pid: int, status: Status) -> str:
    """Return where in the kernel a process sleeps, as far as we may know: ", in nfs_wait_on_request (read)"; "" if it runs."""
    if status.state == "R":
        return ""
    channel, call = _read(pid, "wchan"), call_name(_read(pid, "syscall"), os.uname().machine)
    channel = "" if channel == "0" else channel
    if channel and call:
        return f", in {channel} ({call})"
    return f", in {channel or call}" if channel or call else ""


def call_name(text: str, machine: str) -> str:
    """Return the name of the system call in /proc/PID/syscall; "" where there is none, or we may not read it."""
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
