"""The file systems of the run folder, the home and /tmp: room, locks, sockets, speed, clock. Leaves no file behind."""

from __future__ import annotations

import fcntl
import os
import socket
import tempfile
import time
from collections.abc import Iterator

from msgspec import Struct

from ddplaunch.plan.devices.sysfs import Mount, mounts, read
from ddplaunch.record import run_socket
from ddplaunch.record.folders import replaceable_by
from ddplaunch.system.words import duration, size, why_failed
from ddplaunch.tools.doctor import Check, Finding, Subject, Verdict, note, slow

_SAMPLE_SIZE = 4 << 20  # bytes that are written to measure the speed
_SLOW_DISK = 10 << 20  # bytes per second: the logs of a few chatty workers
_SLOW_SYNC = 1.0  # seconds
_LITTLE_ROOM = 256 << 20  # bytes
_FEW_INODES = 1000
_HINT_ELSEWHERE = "`--log-dir` names another folder for runs, TMPDIR one for temporary files"


class Place(Struct, frozen=True, kw_only=True):
    """A folder, or the lowest one above it that exists, and what files in it can do; a problem is "" where all works."""

    name: str  # "the run folder"
    path: str
    kind: str = ""  # of its file system: "ext4", "nfs4"
    write_problem: str = ""  # why nothing can be written
    free: int = 0  # bytes for this user
    size: int = 0
    free_inodes: int | None = None  # None: the file system has no fixed number
    lock_problem: str = ""  # why a file cannot be locked
    socket_problem: str = ""  # why no socket can be made
    bytes_per_second: float = 0.0  # to disk
    fsync_seconds: float = 0.0  # that one fsync took
    replaceable_by: str = ""  # who else may put another folder in its place


def read_place(name: str, path: str, subject: Subject) -> Place:
    """Write a file in the folder, lock it, make a socket beside it, and remove both.

    Where the folder does not exist yet, the lowest one above it is tried. `name` is how findings call it.
    """
    there = os.path.realpath(path)
    while not os.path.isdir(there) and there != "/":
        there = os.path.dirname(there)
    kind = kind_of(there, list(mounts((read(subject.root, "/proc/self/mountinfo") or "").splitlines())))
    try:
        room = os.statvfs(there)
        found = Place(
            name=name,
            path=path,
            kind=kind,
            free=room.f_bavail * room.f_frsize,
            size=room.f_blocks * room.f_frsize,
            free_inodes=room.f_favail if room.f_files else None,
            replaceable_by=replaceable_by(there) or "",
        )
        return _try_folder(found, there)
    except OSError as error:
        return Place(name=name, path=path, kind=kind, write_problem=why_failed(error))


def kind_of(path: str, mounted: list[Mount]) -> str:
    """Return the kind of the file system that holds a path: that of the longest mount point above; "" if none is known."""
    above = [one for one in mounted if f"{path}/".startswith(f"{one.point.rstrip('/')}/")]
    return max(above, key=lambda one: len(one.point)).kind if above else ""


def _try_folder(place: Place, folder: str) -> Place:
    """Return the place with what came of a lock, a socket and some MiB that were written in this folder of it."""
    from msgspec.structs import replace

    fd, path = tempfile.mkstemp(prefix=".ddplaunch-doctor-", dir=folder)
    try:
        os.unlink(path)  # at once: this process may be killed
        lock_problem = ""
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            lock_problem = why_failed(error)
        began = time.monotonic()
        written = _write_sample(fd)
        sync_began = time.monotonic()
        os.fsync(fd)
        ended = time.monotonic()
        return replace(
            place,
            lock_problem=lock_problem,
            socket_problem=_bind(folder),
            bytes_per_second=written / max(ended - began, 1e-6),
            fsync_seconds=ended - sync_began,
        )
    finally:
        os.close(fd)


def _write_sample(fd: int) -> int:
    """Write `_SAMPLE_SIZE` bytes that no file system can compress; return how many were written."""
    block = os.urandom(1 << 16)
    written = 0
    while written < _SAMPLE_SIZE:
        written += os.write(fd, block)
    return written


def _bind(folder: str) -> str:
    """Make a socket as a run does, by the descriptor of its folder, since paths of sockets must be short.

    Return why that fails, "" if it works.
    """
    name = f".ddplaunch-doctor-{os.getpid()}"
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.bind(run_socket.address(opened, name))
            os.unlink(name, dir_fd=opened)
    except OSError as error:
        return why_failed(error)
    finally:
        os.close(opened)
    return ""


def judge(check: str, place: Place) -> Verdict:
    """Judge a folder for the check of this name; slow is the worst, since a job goes on without its files."""
    if place.write_problem:
        where = f"{place.path}{f' ({place.kind})' if place.kind else ''}"
        hint = f"{_HINT_ELSEWHERE}\n`ls -ld {place.path}` shows whose it is"
        finding = slow(f"nothing can be written to {place.name}: {place.write_problem}", where, hint)
        return Verdict(place.write_problem, (finding,))
    inodes = "" if place.free_inodes is None else f", {place.free_inodes} inodes"
    speed = f"{size(int(place.bytes_per_second))}/s to disk"
    facts = f"{place.path}: {place.kind or 'unknown'}, {size(place.free)}{inodes} free, {speed}"
    return Verdict(facts, tuple(_place_findings(check, place)))


def _place_findings(check: str, place: Place) -> Iterator[Finding]:
    """Yield what is wrong with a place, as far as the check with this name is about it."""
    where, name = f"{place.path} ({place.kind or 'unknown file system'})", place.name
    if place.free < _LITTLE_ROOM:
        title = f"{size(place.free)} of {size(place.size)} are free in {name}"
        yield slow(title, where, f"`df -h {place.path}`; {_HINT_ELSEWHERE}")
    elif place.free_inodes is not None and place.free_inodes < _FEW_INODES:
        title = f"{place.free_inodes} inodes are free in {name}, so that few files can be made"
        yield slow(title, where, f"`df -i {place.path}`; {_HINT_ELSEWHERE}")
    if place.lock_problem:
        hint = "the lock daemon of the file server does not answer, or its client is mounted with nolock"
        yield slow(f"files in {name} cannot be locked: {place.lock_problem}", where, f"{hint}\n{_HINT_ELSEWHERE}")
    if place.socket_problem and check == "tmp":
        yield slow(
            f"no socket can be made in {name}: {place.socket_problem}", where, "set TMPDIR to a folder on a local disk"
        )
    if place.bytes_per_second < _SLOW_DISK or place.fsync_seconds > _SLOW_SYNC:
        speed = f"{size(int(place.bytes_per_second))}/s to disk, one fsync takes {duration(place.fsync_seconds)}"
        yield slow(f"{name} is slow: {speed}", where, f"logs and checkpoints there hold workers up\n{_HINT_ELSEWHERE}")
    if place.replaceable_by and check == "runs":
        yield note(f"another user may replace {name}: {place.replaceable_by}", where, _HINT_ELSEWHERE)


def _check_runs(subject: Subject) -> Verdict:
    """Judge the folder in which runs get their folders."""
    if subject.runs is None:
        finding = note(
            "runs get no folder: you have no home",
            "neither XDG_STATE_HOME nor HOME names a folder, nor does the database of users",
            "`ddplaunch --log-dir FOLDER train.py` keeps logs there",
        )
        return Verdict("none", (finding,))
    return judge("runs", read_place("the folder of runs", subject.runs, subject))


def _check_home(subject: Subject) -> Verdict:
    """Judge the home of the workers' user."""
    home = subject.env.get("HOME", "")
    if not os.path.isabs(home):
        return Verdict("HOME is not set")
    if os.path.isdir(home):
        return judge("home", read_place("your home", home, subject))
    finding = note(
        "your home is no folder of this machine",
        f"HOME={home}\ncaches of torch, Triton and Hugging Face lie there, and programs fail that cannot write them",
        "mount it, or `export HOME=/scratch/$USER`",
    )
    return Verdict(f"{home}: no folder", (finding,))


def _check_tmp(subject: Subject) -> Verdict:
    """Judge the folder of temporary files, and ddplaunch's own in /tmp, where runs on other disks have their sockets."""
    folder = subject.env.get("TMPDIR") or "/tmp"
    verdict = judge("tmp", read_place("the folder of temporary files", folder, subject))
    problem = run_socket.why_unsafe()  # "" if the folder is ours, or not there yet
    if not problem:
        return verdict
    finding = note(
        "ddplaunch's folder in /tmp is not yours alone, so runs with their logs on another machine's disk have no socket",
        f"{problem}\n`ps`, `logs` and `stop` may not find them",
        "have its owner or an administrator remove that folder",
    )
    return Verdict(verdict.facts, (*verdict.findings, finding))


# a file server that does not answer stops a job wherever it reads its script or writes
CHECKS = (
    Check(id="runs", examine=_check_runs, if_late="broken"),
    Check(id="home", examine=_check_home, if_late="broken"),
    Check(id="tmp", examine=_check_tmp, if_late="broken"),
)
