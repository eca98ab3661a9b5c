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

_SAMPLE = 4 << 20  # bytes that are written to measure the speed
_SLOW = 10 << 20  # bytes per second: the logs of a few chatty workers
_SLOW_SYNC = 1.0  # seconds
_LITTLE = 256 << 20  # bytes
_FEW_INODES = 1000
_ELSEWHERE = "`--log-dir` names another folder for runs, TMPDIR one for temporary files"


class Place(Struct, frozen=True, kw_only=True):
    """A folder, or the lowest one above it that exists, and what a file in it can do; "" where something works."""

    name: str  # "the run folder"
    path: str
    kind: str = ""  # of its file system: "ext4", "nfs4"
    missing: str = ""  # why nothing can be written
    free: int = 0  # bytes for this user
    size: int = 0
    free_inodes: int | None = None  # None: the file system has no fixed number
    lock: str = ""  # why a file cannot be locked
    sock: str = ""  # why no socket can be made
    write: float = 0.0  # bytes per second, to disk
    sync: float = 0.0  # seconds that one fsync took
    replaceable: str = ""  # who else may put another folder in its place


def read_place(name: str, path: str, subject: Subject) -> Place:
    """Write a file in the folder, lock it, make a socket beside it, and remove both."""
    there = os.path.realpath(path)
    while not os.path.isdir(there) and there != "/":
        there = os.path.dirname(there)
    kind = kind_of(there, list(mounts((read(subject.root, "/proc/self/mountinfo") or "").splitlines())))
    try:
        room = os.statvfs(there)
        replaceable = replaceable_by(there) or ""
        found = Place(
            name=name,
            path=path,
            kind=kind,
            free=room.f_bavail * room.f_frsize,
            size=room.f_blocks * room.f_frsize,
            free_inodes=room.f_favail if room.f_files else None,
            replaceable=replaceable,
        )
        return _tried(found, there)
    except OSError as error:
        return Place(name=name, path=path, kind=kind, missing=why_failed(error))


def kind_of(path: str, mounted: list[Mount]) -> str:
    """Return the kind of the file system that holds a path: that of the longest mount point above; "" if none is known."""
    above = [one for one in mounted if f"{path}/".startswith(f"{one.point.rstrip('/')}/")]
    return max(above, key=lambda one: len(one.point)).kind if above else ""


def _tried(place: Place, folder: str) -> Place:
    """Write, lock and bind in the folder."""
    from msgspec.structs import replace

    fd, path = tempfile.mkstemp(prefix=".ddplaunch-doctor-", dir=folder)
    try:
        os.unlink(path)  # at once: this process may be killed
        lock = ""
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            lock = why_failed(error)
        began = time.monotonic()
        written = _write(fd, os.urandom(1 << 16))
        between = time.monotonic()
        os.fsync(fd)
        ended = time.monotonic()
        return replace(
            place, lock=lock, sock=_bind(folder), write=written / max(ended - began, 1e-6), sync=ended - between
        )
    finally:
        os.close(fd)


def _write(fd: int, block: bytes) -> int:
    written = 0
    while written < _SAMPLE:
        written += os.write(fd, block)
    return written


def _bind(folder: str) -> str:
    """Make a socket as a run does, by the descriptor of its folder; return why that fails, "" if it works."""
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
    """Judge a folder: of the run folder and the home no failure is fatal, since a job goes on without its files."""
    if place.missing:
        where = f"{place.path}{f' ({place.kind})' if place.kind else ''}"
        hint = f"{_ELSEWHERE}\n`ls -ld {place.path}` shows whose it is"
        return Verdict(place.missing, (slow(f"nothing can be written to {place.name}: {place.missing}", where, hint),))
    inodes = "" if place.free_inodes is None else f", {place.free_inodes} inodes"
    facts = (
        f"{place.path}: {place.kind or 'unknown'}, {size(place.free)}{inodes} free, {size(int(place.write))}/s to disk"
    )
    return Verdict(facts, tuple(_findings(check, place)))


def _findings(check: str, place: Place) -> Iterator[Finding]:
    """Yield what is wrong with a place, as far as the check with this name is about it."""
    where, name = f"{place.path} ({place.kind or 'unknown file system'})", place.name
    if place.free < _LITTLE:
        left = f"{size(place.free)} of {size(place.size)} are free in {name}"
        yield slow(left, where, f"`df -h {place.path}`; {_ELSEWHERE}")
    elif place.free_inodes is not None and place.free_inodes < _FEW_INODES:
        left = f"{place.free_inodes} inodes are free in {name}, so that few files can be made"
        yield slow(left, where, f"`df -i {place.path}`; {_ELSEWHERE}")
    if place.lock:
        hint = "the lock daemon of the file server does not answer, or its client is mounted with nolock"
        yield slow(f"files in {name} cannot be locked: {place.lock}", where, f"{hint}\n{_ELSEWHERE}")
    if place.sock and check == "tmp":
        yield slow(f"no socket can be made in {name}: {place.sock}", where, "set TMPDIR to a folder on a local disk")
    if place.write < _SLOW or place.sync > _SLOW_SYNC:
        speed = f"{size(int(place.write))}/s to disk, one fsync takes {duration(place.sync)}"
        yield slow(f"{name} is slow: {speed}", where, f"logs and checkpoints there hold workers up\n{_ELSEWHERE}")
    if place.replaceable and check == "runs":
        yield note(f"another user may replace {name}: {place.replaceable}", where, _ELSEWHERE)


def _runs(subject: Subject) -> Verdict:
    if subject.runs is None:
        finding = note(
            "runs get no folder: you have no home",
            "neither XDG_STATE_HOME nor HOME names a folder, nor does the database of users",
            "`ddplaunch --log-dir FOLDER train.py` keeps logs there",
        )
        return Verdict("none", (finding,))
    return judge("runs", read_place("the folder of runs", subject.runs, subject))


def _home(subject: Subject) -> Verdict:
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


def _tmp(subject: Subject) -> Verdict:
    folder = subject.env.get("TMPDIR") or "/tmp"
    verdict = judge("tmp", read_place("the folder of temporary files", folder, subject))
    problem = run_socket.problem()
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
    Check(id="runs", examine=_runs, if_late="broken"),
    Check(id="home", examine=_home, if_late="broken"),
    Check(id="tmp", examine=_tmp, if_late="broken"),
)
