"""Which runs stay on the disk, and for how long: removes the others and remembers when. Other jobs may be doing the same.

A run goes once it is older than `--keep-runs` days. Of those older than a day, so many go that the others have 2 GiB together:
first short ones that did not fail, then the oldest. A younger one goes only where the disk is almost full.

Only a folder that is a run ever goes: what a user keeps beside runs, or has renamed, is not ours.

One node with a wrong clock would remove the runs of all that share its home. So nothing goes for its age unless two clocks agree:
that of this node and that of the disk. These may be the same one, so that a leap of many days since a job looked here last has to
be confirmed by a job on a later day.
"""

from __future__ import annotations

import fcntl
import os
import stat
import time
from collections.abc import Generator, Mapping
from contextlib import suppress

from msgspec import Struct
from msgspec.structs import replace

from ddplaunch.record.folders import goes_on, short
from ddplaunch.record.run import Run
from ddplaunch.system.process.files import content, remove, replaced, time_of_disk
from ddplaunch.system.words import count, duration

DAY = 86400.0  # seconds
ROOM = 2 << 30  # bytes of all runs older than a day
AGAIN_AFTER = 3600.0  # seconds: no job needs to look again at thousands of runs that another has just looked at

SKEW = 3600.0  # seconds by which two clocks may differ that agree
LEAP = 14 * DAY  # a time in which no job has looked here, which is as likely that of a clock that is wrong
_KEEP_ALL = "`--keep-runs 0` keeps all runs at any time"

_COUNTED_AT_LEAST = (
    256 << 10
)  # bytes for each run: so many that they are slow to list are too many however small each is
_LONG_RUN = 600.0  # seconds: a run that took so long stays longer, even if it ended well
_FREE = 1 << 30  # bytes that should be free on the disk, or a twentieth of it if that is less
_LEAST_TO_MAKE_ROOM = 1 << 20  # bytes of a run: to remove smaller ones would not help a full disk
_ENDED_WELL = ("finished", "signalled")  # how a job ends (`why` of job_ended) that did not fail
_BEING_REMOVED = ".removed-"  # how the name of a run begins that is being removed; no name of a run begins with a dot
_LIST = "removed-runs"
_LONGEST_LIST = 1 << 20  # bytes


class Candidate(Struct, frozen=True, kw_only=True):
    """A run that may go."""

    name: str
    written: float  # when, in seconds since 1970
    failed_or_took_long: bool
    size: int = 0  # bytes, _COUNTED_AT_LEAST or more


class Removal(Struct, frozen=True):
    """When a run was removed, and why."""

    name: str
    date: str
    why: str


def last_tidied(runs: str) -> float:
    """Return when a job has last looked at all runs in this folder, in seconds since 1970; 0: never."""
    try:
        return os.stat(_marker(runs)).st_mtime
    except OSError:
        return 0.0


class Looks(Struct, frozen=True):
    """When jobs have looked here, by the clock of the disk, in seconds since 1970: what the marker file holds."""

    last_at: float = 0.0  # 0: never
    # the first look after a leap of the clock, which one on a later day confirms; 0: there was none
    leapt_at: float = 0.0


def why_clocks_are_doubted(now: float, of_disk: float, looks: Looks) -> tuple[str, Looks]:
    """Return why nothing may be removed for its age ("": the clocks agree), and the looks with this one. Pure.

    `now` is the time by the clock of this node, `of_disk` that by the clock of the disk.
    """
    ahead = now - of_disk
    if abs(ahead) > SKEW:
        which = "ahead of" if ahead > 0 else "behind"
        return f"the clock of this node is {duration(abs(ahead))} {which} that of their disk", looks
    since_last = of_disk - looks.last_at
    has_leapt = looks.last_at > 0 and not -SKEW <= since_last <= LEAP
    if has_leapt:
        since = f"{duration(abs(since_last))} {'after' if since_last > 0 else 'before'} the last job here, by its clock"
        why = f"this is {since}. If the clock is right, old runs go from tomorrow on"
        return why, Looks(last_at=of_disk, leapt_at=of_disk)
    is_unconfirmed = looks.leapt_at > 0 and 0 <= of_disk - looks.leapt_at < DAY
    if is_unconfirmed:
        return "the clock has leapt by many days since yesterday", Looks(last_at=of_disk, leapt_at=looks.leapt_at)
    return "", Looks(last_at=of_disk)


def tidy(runs: str, days: int) -> Generator[str | None, None, None]:
    """Remove the runs in this folder that are no longer kept, in small steps; all are kept if `days` is 0.

    Yield what the user is to be told: what was removed, or why nothing was; None between.

    The time of the marker file says when a job last looked at all runs. A job may end in the middle of this, so the time changes
    only at the end.

    Raises OSError.
    """
    tidied_at = last_tidied(runs)
    others_have_just_done_it = 0 <= time.time() - tidied_at < AGAIN_AFTER
    if not days or (others_have_just_done_it and not _is_full(runs)):
        return
    marker = os.open(_marker(runs), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(marker, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return  # another job is at it
        except OSError:
            pass  # a file system without locks: two jobs may do the same at once
        _shorten_list(runs)
        why, looks = why_clocks_are_doubted(time.time(), time_of_disk(os.path.dirname(runs)), _looks(marker, tidied_at))
        if why:
            yield f"no old runs are removed: {why}. {_KEEP_ALL}"
        os.pwrite(marker, b"%017.3f %017.3f\n" % (looks.last_at, looks.leapt_at), 0)
        # That write has set the time of the marker to now, as if all were tidied. In doubt this stays, so that the doubt is not
        # said again within AGAIN_AFTER; but where no job has ever tidied, the next one whose clock is right is to do so at once.
        time_stays = bool(why) and tidied_at > 0
        if not time_stays:
            os.utime(marker, (tidied_at, tidied_at))
        removed = yield from _remove_by_rules(runs, days, by_age=not why)
        if removed:
            yield f"removed {count(removed, 'run')} no longer kept (--keep-runs {days}); `ddplaunch logs RUN` says why"
        if not why:
            os.utime(marker)
    finally:
        os.close(marker)


def _looks(marker: int, tidied: float) -> Looks:
    """Return the content of the marker; of an empty one, as an older version leaves it, the time when that has `tidied`."""
    with suppress(ValueError):
        if found := os.pread(marker, 100, 0).split()[:2]:
            return Looks(*map(float, found))
    return Looks(last_at=tidied)


def _remove_by_rules(runs: str, days: int, *, by_age: bool) -> Generator[None, None, int]:
    """Remove runs that are too old, too large together, or in the way of a full disk; return how many. Yield between steps.

    Without `by_age`, only a full disk is a reason: which runs go then, the clock of the disk alone decides.
    """
    now, removed = time.time(), 0
    names = os.listdir(runs)
    # from another one each time: jobs that are too short to look at all of them look at some
    first = int.from_bytes(os.urandom(4), "little") % max(1, len(names))
    young, old = [], []  # runs that stay: written to within a day, and all others
    for name in names[first:] + names[:first]:
        yield
        if name.startswith(_BEING_REMOVED):  # a job ended while it removed this
            yield from remove(f"{runs}/{name}")
        elif (run := find_candidate(runs, name)) is None:
            continue
        elif now - run.written <= DAY:
            young.append(run)
        elif not goes_on(f"{runs}/{name}"):
            run = yield from _measure(runs, run)
            if now - run.written <= DAY:  # a lock that another host holds is not seen on every file system
                young.append(run)
            elif by_age and now - run.written > days * DAY:
                removed += yield from _remove(runs, run, f"it was older than {days} days")
            else:
                old.append(run)
    old.sort(key=_last_to_go)
    excess = sum(run.size for run in old) - ROOM if by_age else 0
    while excess > 0:
        run = old.pop()
        excess -= run.size
        removed += yield from _remove(runs, run, f"runs older than a day had more than {ROOM >> 30} GiB")
    young.sort(key=_last_to_go)
    for run in reversed([*young, *old]):  # old runs go first
        if not _is_full(runs):
            break
        if not goes_on(f"{runs}/{run.name}") and (yield from _measure(runs, run)).size >= _LEAST_TO_MAKE_ROOM:
            removed += yield from _remove(runs, run, "the disk was almost full")
    return removed


def _last_to_go(run: Candidate) -> tuple[bool, float]:
    """Return what sorts runs so that the last one goes first: failed and long ones before others, young ones before old ones."""
    return not run.failed_or_took_long, -run.written


def find_candidate(runs: str, name: str) -> Candidate | None:
    """Return the run in the folder of this name, as one that may go; None if it is no run of ours, or was renamed by the user.

    A run of ours has for each node a file of events that begins with an event of ours, and its name is what its first event says,
    or, before there is one, of the form that we make.
    """
    folder = f"{runs}/{name}"
    if os.path.islink(folder) or not os.path.isdir(folder):  # a link may lead to where the user has moved a run
        return None
    began, written, ended_well = [], [], []
    is_name_of_run = short(name) != name  # only names of the form that we make have a short one
    for node in Run(folder).nodes:
        events = _own_file(f"{node.folder}/events.jsonl")
        if events is None:
            return None
        written.append(events.st_mtime)
        if not events.st_size:  # a node was killed before it wrote anything
            continue
        if not node.head or not node.head[0].is_complete:
            return None
        if node.start is not None:
            base, _, number = name.rpartition(".")
            is_second_of_name = number.isdecimal() and node.start.run_id == base
            if node.start.run_id != name and not is_second_of_name:
                return None
            is_name_of_run = True
        began.append(node.head[0].at)
        summary = node.object("summary") if _own_file(f"{node.folder}/summary.json") is not None else {}
        ended_well.append(summary.get("why") in _ENDED_WELL)
    if not began or not is_name_of_run:
        return None
    failed_or_took_long = not all(ended_well) or max(written) - min(began) >= _LONG_RUN
    return Candidate(name=name, written=max(written), failed_or_took_long=failed_or_took_long)


def _own_file(path: str) -> os.stat_result | None:
    """Return what is known of a regular file of this user; None if none is there: others may write into a shared folder."""
    try:
        found = os.lstat(path)
    except OSError:
        return None
    return found if found.st_uid == os.geteuid() and stat.S_ISREG(found.st_mode) else None


def _measure(runs: str, run: Candidate) -> Generator[None, None, Candidate]:
    """Return the run with its size and the time of the last write to any of its files; yield after each file.

    Recent writes show that a job of another host goes on, whose lock may not be seen here.
    """
    folders, size, written = [f"{runs}/{run.name}"], 0, run.written
    while folders:
        with suppress(OSError), os.scandir(folders.pop()) as entries:
            for entry in entries:
                found = entry.stat(follow_symlinks=False)
                size += found.st_blocks * 512  # the unit of st_blocks, see stat(3type)
                if stat.S_ISDIR(found.st_mode):
                    folders.append(entry.path)
                else:
                    written = max(written, found.st_mtime)
                yield
    return replace(run, size=max(size, _COUNTED_AT_LEAST), written=written)


def _remove(runs: str, run: Candidate, why: str) -> Generator[None, None, bool]:
    """Remove a run and note why in the list of removed runs; yield between files. Return False if the run stays."""
    if goes_on(f"{runs}/{run.name}"):  # a job of the same name may have begun since the run was looked at
        return False
    going = f"{runs}/{_BEING_REMOVED}{run.name}"
    try:
        os.rename(f"{runs}/{run.name}", going)  # at once, so that no half of a run is ever shown
    except OSError:
        return False  # another job has done that, or it is a mount
    line = f"{time.strftime('%Y-%m-%d')} {run.name} {why}\n".encode()
    with suppress(OSError):  # the disk is full
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(_list(runs), flags, 0o600), "ab", buffering=0) as file:
            file.write(line)
    yield from remove(going)
    return True


def _is_full(folder: str) -> bool:
    """Whether the disk of a folder is almost full."""
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize < min(_FREE, found.f_blocks * found.f_frsize // 20)


# --- what was removed


def removals(runs: str) -> Mapping[str, Removal]:
    """Return the latest removals in this folder by the name of the run."""
    found = {}
    for line in _content_of_list(runs).decode(errors="replace").splitlines():
        date, _, rest = line.partition(" ")
        name, _, why = rest.partition(" ")
        found[name] = Removal(name, date, why)
    return found


def _content_of_list(runs: str) -> bytes:
    path = _list(runs)
    return (content(path, 2 * _LONGEST_LIST) or b"") if _own_file(path) is not None else b""


def _shorten_list(runs: str) -> None:
    """Forget the older half of a long list."""
    lines = _content_of_list(runs)
    if len(lines) > _LONGEST_LIST:
        with replaced(_list(runs), 0o600) as file:
            file.write(lines[-_LONGEST_LIST // 2 :].partition(b"\n")[2])


def _list(runs: str) -> str:
    return f"{os.path.dirname(runs)}/{_LIST}"


def _marker(runs: str) -> str:
    return f"{os.path.dirname(runs)}/runs-tidied"
