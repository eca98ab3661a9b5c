"""`ddplaunch logs`: what workers wrote, read from the folder of a run that goes on or has ended."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from msgspec import Struct

from ddplaunch.record.folders import goes_on, parts_of, short
from ddplaunch.record.log import offset_at
from ddplaunch.spec.options.parsers import BadValue, duration
from ddplaunch.system.console.lines import Lines
from ddplaunch.system.console.screen import moves
from ddplaunch.system.errors import LaunchError
from ddplaunch.system.exitcodes import OK
from ddplaunch.system.fields import line as printable
from ddplaunch.system.process.files import open_regular, read_json
from ddplaunch.system.process.linux import raise_open_files
from ddplaunch.system.words import compress, some, these_ranks, why_failed
from ddplaunch.tools.runs import find, remote_logs
from ddplaunch.tools.runs.find import Known, heading, meant, newest_first, of_folder, of_running, several

_TIME_OF_DAY = re.compile(r"\d\d?:\d\d(:\d\d)?")
_INTERVAL = 0.2  # seconds between two looks for what is new


class Wanted(Struct, frozen=True, kw_only=True):
    """What is to be shown."""

    ranks: frozenset[int] | None = None
    pattern: re.Pattern[bytes] | None = None
    since: float | None = None  # seconds since 1970
    yesterday: str = ""  # the time of day that was asked for, which is still to come today
    follow: bool = False
    typed: tuple[str, ...] = ()  # the options, for hints


def wanted(ranks: str | None, pattern: str | None, since: str | None, follow: bool, now: float) -> Wanted:
    """Read the values of the options."""
    try:
        compiled = re.compile(os.fsencode(pattern)) if pattern is not None else None
    except re.error as error:
        raise LaunchError(f"--grep {pattern}: {error}", hint="a regular expression of Python's is expected") from None
    begins = beginning(since, now) if since is not None else None
    # of the spans and dates, which may lie long ago, the user knows
    is_time = since is not None and begins is not None and _TIME_OF_DAY.fullmatch(since)
    is_before = is_time and time.localtime(begins).tm_yday != time.localtime(now).tm_yday
    values = {"-r": ranks, "--grep": pattern, "--since": since}
    typed = [word for option, value in values.items() if value is not None for word in (option, value)]
    return Wanted(
        typed=(*typed, *(["-f"] if follow else [])),
        ranks=find.ranks_meant(ranks),
        pattern=compiled,
        since=begins,
        yesterday=(since or "") if is_before else "",
        follow=follow,
    )


def beginning(since: str, now: float) -> float:
    """Read a time span until now, a time of day (the last such time), or a date; return seconds since 1970."""
    from datetime import datetime, timedelta  # few commands need it

    try:
        if _TIME_OF_DAY.fullmatch(since):
            today = datetime.fromtimestamp(now)  # noqa: DTZ006 - times are those of the time zone here, as its clocks show them
            at = datetime.fromisoformat(f"{today:%Y-%m-%d}T{since:0>{5 if since.count(':') == 1 else 8}}")
            return (at if at <= today else at - timedelta(days=1)).timestamp()
        is_date = re.match(r"\d{4}-\d\d-\d\d", since)
        then = datetime.fromisoformat(since).timestamp() if is_date else now - duration(since)
    except (ValueError, BadValue):
        raise LaunchError(f"--since {since}: expected a time span, a time of day or a date", hint=_TIMES) from None
    if then > now:
        raise LaunchError(f"--since {since}: that time is still to come", hint=_TIMES)
    return then


_TIMES = "type for example `--since 5m`, `--since 14:05`, `--since 14:05:30` or `--since 2026-11-22T14:05`"


def show(env: Mapping[str, str], named: str | None, want: Wanted, say: Callable[[str], None]) -> int:
    """Write the logs that are meant to stdout, and return the exit status; `say` writes a line to stderr.

    Raises:
        LaunchError: there is no such run, or it has no such logs.
        BrokenPipeError: the reader of stdout has gone.
    """
    if want.yesterday:
        say(f"since {want.yesterday} yesterday")
    run, others = _run(env, named, "logs", want.typed, want.follow)
    folder = run.folder
    if remote_logs.is_elsewhere(run):
        say(f"logs of {heading(run)}")
        return remote_logs.show(run, want.ranks, _without_ranks(want.typed), follow=want.follow, say=say)
    logs = _chosen(folder, logs_of(folder), want)
    say(_heading(run, others))
    several = len({log.rank for log in logs}) > 1 or (want.follow and want.ranks is None)
    readers = {log: _ShownLog(log, want.since) for log in logs}
    out = sys.stdout.buffer
    raise_open_files()  # logs that are followed stay open, and there may be thousands
    while True:
        # looked at first: what is written before the end is read after it
        going = want.follow and goes_on(folder)
        for log, reader in readers.items():
            _write(out.write, reader.lines(time.monotonic()) if going else reader.rest(), log, want, several)
        out.flush()
        if not going:
            break
        time.sleep(_INTERVAL)
        for log in logs_of(folder):  # of workers that have started meanwhile, or of the next generation
            if log not in readers and (want.ranks is None or log.rank in want.ranks):
                readers[log] = _ShownLog(log, want.since)
    how = how_it_ended(folder)
    if want.follow or (how == _KILLED and not goes_on(folder)):
        say(f"{run.name} {how}" + ("; its logs end here" if how == _KILLED else ""))
    return OK


_KILLED = "was killed"  # the command and its agent


def _without_ranks(typed: tuple[str, ...]) -> tuple[str, ...]:
    return typed[2:] if typed[:1] == ("-r",) else typed


class _ShownLog:
    """The lines of a log; of a progress bar only the last state, or, while the log is followed, a state now and then."""

    def __init__(self, log: LogFile, since: float | None) -> None:
        self._reader = LogReader(log, since)
        self._drawn = Lines()

    def lines(self, at: float) -> Iterator[bytes]:
        """Return the lines that are new at this time, each with its newline."""
        yield from self._draw(self._reader.lines(), at)
        yield from _split(self._drawn.flush(at))

    def rest(self) -> Iterator[bytes]:
        """Return all that is left, and close the log."""
        yield from self._draw(self._reader.lines(), 0.0)
        # it may be a bar, which ends its line itself
        yield from self._draw((last[:-1] for last in self._reader.rest()), 0.0)
        yield from _split(self._drawn.end())
        self._reader.close()

    def _draw(self, pieces: Iterator[bytes], at: float) -> Iterator[bytes]:
        for piece in pieces:
            if self._drawn.is_idle and piece.endswith(b"\n") and not moves(piece):
                yield piece  # as most logs are, from the first line to the last
            else:
                yield from _split(self._drawn.feed(piece, at))


def _split(block: bytes) -> list[bytes]:
    return [line + b"\n" for line in block.split(b"\n")[:-1]]


def _write(write: Callable[[bytes], object], lines: Iterator[bytes], log: LogFile, want: Wanted, several: bool) -> None:
    prefix = b"[%d] " % log.rank if several else b""
    for line in lines:
        if want.pattern is None or want.pattern.search(line, 0, len(line) - 1):
            write(prefix + line)


def _chosen(folder: str, logs: list[LogFile], want: Wanted) -> list[LogFile]:
    """The logs of the ranks that are wanted."""
    may_come = want.follow and goes_on(folder)  # that of a worker which has not started yet
    if want.ranks is None:
        if not logs and not may_come:
            is_run = _read(folder, "plan.json", "world_size") is not None
            hint = (
                _WHY_NONE if is_run else "that is no folder of a run; `ddplaunch logs` alone shows those of the latest"
            )
            raise LaunchError(f"there are no logs in {folder}", hint=hint)
        return logs
    _check_ranks(folder, want.ranks)
    missing = want.ranks - {log.rank for log in logs}
    if missing and not may_come:
        raise _missing(folder, missing, logs)
    return [log for log in logs if log.rank in want.ranks]


_WHY_NONE = "one worker has the command's own stdout and stderr, and no logs, unless an option about output is given"


def _check_ranks(folder: str, ranks: Collection[int]) -> None:
    world_size = _read(folder, "plan.json", "world_size")
    if isinstance(world_size, int) and max(ranks) >= world_size:
        unknown = [rank for rank in ranks if rank >= world_size]
        raise find.no_such_ranks(short(os.path.basename(folder)), unknown, world_size)


def _missing(folder: str, ranks: Collection[int], logs: list[LogFile]) -> LaunchError:
    what = f"{these_ranks(ranks)} of {short(os.path.basename(folder))}"
    if not logs:
        return LaunchError(f"there is no log of {what} in {folder}", hint=_WHY_NONE)
    here = f"here are those of {compress(log.rank for log in logs)}; the others are on the hosts of their nodes"
    return LaunchError(f"there is no log of {what} here", hint=here)


def kept_run(env: Mapping[str, str], named: str | None, verb: str) -> Known:
    """Return the run that is meant, running or ended, whose folder is here; without a name the latest.

    Raises:
        LaunchError: there is no such run, or its folder is on other hosts.
    """
    run, _ = _run(env, named, verb)
    if remote_logs.is_elsewhere(run):
        raise LaunchError(
            f"the folder of {run.name} is on the hosts of its nodes", hint=f"type `ddplaunch {verb} {run.name}` there"
        )
    return run


def _run(
    env: Mapping[str, str], named: str | None, verb: str, typed: Collection[str] = (), follow: bool = False
) -> tuple[Known, list[Known]]:
    """Return the run that is meant, and other jobs that run here where none was named.

    Without a name it is the latest; of those to be followed, the latest that runs, if one does. `verb` and `typed`, the
    options, are for hints.
    """
    if named is not None and os.sep in named:
        try:
            os.listdir(named)
        except OSError as error:
            raise LaunchError(f"{named}: {(error.strerror or '').lower()}", hint="name the folder of a run") from None
        return of_folder(os.path.abspath(named)), []
    running = [of_running(replies) for replies in find.running(env) if replies.run is not None]
    ids = {run.run_id for run in running}
    runs = [*running, *(of_folder(folder) for folder in find.folders(env) if os.path.basename(folder) not in ids)]
    if named is None:
        if not (with_logs := [run for run in runs if run.folder or remote_logs.is_elsewhere(run)]):
            raise LaunchError("there is no run with logs", hint=f"`ddplaunch {verb} FOLDER` reads those of --log-dir")
        latest = newest_first(with_logs)[0] if follow else max(with_logs, key=lambda run: run.began)
        return latest, [run for run in running if run is not latest]
    found = meant(named, runs)
    if not any(named in (run.run_id, run.name) for run in found):
        if removed := find.removed_run(env, named, exactly=True):
            raise removed
        found = [run for run in found if run.replies is not None] or found
    if len(found) > 1:
        raise several(f"{printable(named)} may be any of {len(found)} runs", found, verb, *typed)
    if not found:
        raise find.removed_run(env, named) or find.no_such_run(env, named, runs, verb)
    if not found[0].folder and not remote_logs.is_elsewhere(found[0]):
        hint = "see `--log-dir`, and what the command said at its start"
        raise LaunchError(f"run {found[0].name} keeps no logs", hint=hint)
    return found[0], []


def _heading(run: Known, others: list[Known]) -> str:
    """Say which run's logs are shown: people have several runs, and the logs do not name theirs."""
    text = f"logs of {heading(run)}"
    if run.replies is None and not goes_on(run.folder):
        text += f"; {how_it_ended(run.folder)}"
    if others:
        names = some((f"{other.name} ({other.program})" for other in newest_first(others)), 3)
        text += f"; not those of {names}, which {'runs' if len(others) == 1 else 'run'} here too"
    return text


def how_it_ended(folder: str) -> str:
    """Say how the run that has left this folder ended."""
    status = _summary(folder).get("status")
    return f"has ended with status {status}" if isinstance(status, int) else _KILLED


def first_failure(folder: str) -> str:
    """Say what failed first in that run, and where; "" if nothing did, or nothing is known of it."""
    failure = _summary(folder).get("first_failure")
    if not isinstance(failure, dict):
        return ""
    rank, how, error, host = (failure.get(name) for name in ("rank", "how", "error", "host"))
    there = f" on {printable(str(host))}" if host and host != os.uname().nodename else ""
    return f"rank {rank}{there} failed: {printable(str(error or how))}" if isinstance(rank, int) else ""


def _summary(folder: str) -> dict[str, Any]:
    """The summary of the first node that was there at the last start: others may have been lost or left before."""
    found = [read_json(f"{part}/summary.json") for part in sorted(parts_of(folder))]
    kept = [each for each in found if isinstance(each, dict)]
    return max(kept, key=lambda each: starts if isinstance(starts := each.get("restarts"), int) else 0, default={})


def _read(folder: str, name: str, key: str) -> object:
    """A value of one of the JSON files of a run, or of its first node; None if there is none."""
    for root in (folder, f"{folder}/node-0"):
        found = read_json(f"{root}/{name}")
        if isinstance(found, dict) and key in found:
            return found[key]
    return None


# --- the logs of a run, and what is new in one


CHUNK = 1 << 20  # bytes read at once, and the longest line that is kept in one piece
STREAMS = ("out", "err")
_GAP = b"[ddplaunch: a part is left out here: the log had reached its limit]\n"
_OURS = re.compile(r"rank-(\d{1,9})\.(out|err)")
_NODE = re.compile(r"(?:node|rank)-\d+(?:\.\d+)?")
_ATTEMPT = re.compile(r"attempt_(\d{1,9})")
_TORCHRUNS = {"stdout.log": "out", "stderr.log": "err"}


class LogFile(Struct, frozen=True):
    """One log of a rank."""

    rank: int
    attempt: int  # with --log-dir each generation has logs of its own
    stream: str
    folder: str  # of the run, or of the node
    name: str  # in it

    @property
    def order(self) -> tuple[int, int, int]:
        """By rank, then as they were written, stdout first."""
        return self.rank, self.attempt, STREAMS.index(self.stream)


def logs_of(run: str) -> list[LogFile]:
    """Return all logs in the folder of a run: of one node, or, where the nodes share a home, of all nodes."""
    roots = [run, *(f"{run}/{name}" for name in _names(run) if _NODE.fullmatch(name))]
    return sorted((log for root in roots for log in _logs_in(root)), key=lambda log: log.order)


def _names(folder: str) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def segments_of(path: str) -> Sequence[int]:
    """Return the numbers of the segments in which a log is continued beside itself, PATH.tail-1 and so on."""
    folder, base = os.path.split(path)
    try:
        changed = os.stat(folder).st_mtime
    except OSError:
        return ()
    known = _listed.get(folder)
    # a change may have come right after the listing, at the same time as the one before
    if known is None or known.changed != changed or known.at - changed < _SETTLED:
        _listed[folder] = known = _list_segments(folder, changed)
    return known.segments.get(base, ())


class _Listed(Struct, frozen=True):
    """The segments in a folder, by the names of their logs: one listing for thousands of logs."""

    changed: float  # when the folder had changed last, by the clock of its disk
    at: float  # when it was listed, by ours
    segments: Mapping[str, Sequence[int]]


_SETTLED = 2.0  # seconds
_listed: dict[str, _Listed] = {}


def _list_segments(folder: str, changed: float) -> _Listed:
    at, found = time.time(), dict[str, list[int]]()
    for name in _names(folder):
        base, tail, number = name.rpartition(".tail-")
        if tail and number.isascii() and number.isdigit():
            found.setdefault(base, []).append(int(number))
    return _Listed(changed, at, found)


def _logs_in(root: str) -> Iterator[LogFile]:
    """Yield the log files in a folder: those of ddplaunch, or of torchrun, which has a folder for each rank."""
    ranks: dict[int, int] | None = None
    for name in _names(root):
        if found := _OURS.fullmatch(name):
            yield LogFile(int(found[1]), 0, found[2], root, name)
        elif found := _ATTEMPT.fullmatch(name):
            ranks = _ranks_by_local_rank(root) if ranks is None else ranks
            for local_rank in filter(str.isdigit, _names(f"{root}/{name}")):
                for file in _names(f"{root}/{name}/{local_rank}"):
                    if file in _TORCHRUNS:
                        rank = ranks.get(int(local_rank), int(local_rank))
                        path = f"{name}/{local_rank}/{file}"
                        yield LogFile(rank, int(found[1]), _TORCHRUNS[file], root, path)


def _ranks_by_local_rank(root: str) -> dict[int, int]:
    plan: Any = read_json(f"{root}/plan.json")
    with suppress(ValueError, KeyError, TypeError, OverflowError):
        return {int(worker["local_rank"]): int(worker["rank"]) for worker in plan["workers"]}
    return {}


class LogReader:
    """Gives the lines of a log that are new each time, by way of the segments that a long one is continued in."""

    def __init__(self, log: LogFile, since: float | None = None) -> None:
        """`since`: leave out what was written before this time, as far as that is known."""
        self._segment = 0  # the one that is read; 0: the log itself
        self._fd = -1
        self._rest = b""
        self._since = since
        self._log = log

    def lines(self) -> Iterator[bytes]:
        """Return whole lines up to the end that the log has now, each with its newline; of a bar, what a return ends.

        Raises:
            LaunchError: its disk fails.
        """
        while self._fd >= 0 or self._open():
            while data := self._read():
                *whole, self._rest = (self._rest + data).split(b"\n")
                for line in whole:
                    yield line + b"\n"
                if cut := self._rest.rfind(b"\r") + 1:
                    yield self._rest[:cut]
                    self._rest = self._rest[cut:]
                if len(self._rest) >= CHUNK:
                    yield from self.rest()
            if (following := self._next_segment()) is None:
                return
            if following > self._segment + 1:
                yield from self.rest()
                yield _GAP
            self.close()
            self._segment = following

    def rest(self) -> Iterator[bytes]:
        """Return what stands behind the last newline, if anything, as a line."""
        rest, self._rest = self._rest, b""
        if rest:
            yield rest + b"\n"

    def _open(self) -> bool:
        """Open the current segment of the log, at the first line since the time that was asked for."""
        name = f"{self._log.name}.tail-{self._segment}" if self._segment else self._log.name
        try:
            with open_regular(f"{self._log.folder}/{name}") as file:
                self._fd = os.dup(file.fileno())
            if self._since is not None:
                os.lseek(self._fd, offset_at(self._log.folder, name, self._since), os.SEEK_SET)
        except OSError:
            return False
        return True

    def _read(self) -> bytes:
        try:
            return os.read(self._fd, CHUNK)
        except OSError as error:
            raise LaunchError(f"{self._log.folder}/{self._log.name}: {why_failed(error)}") from None

    def _next_segment(self) -> int | None:
        found = segments_of(f"{self._log.folder}/{self._log.name}")
        return min((number for number in found if number > self._segment), default=None)

    def close(self) -> None:
        """Close the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
