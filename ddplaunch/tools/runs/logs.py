"""`ddplaunch logs`: what workers wrote, from the folder of a run that goes on or has ended.

Where a job was typed here that runs on other hosts, each of those hosts is asked over ssh to show what lies there.
"""

from __future__ import annotations

import os
import re
import selectors
import shlex
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack

from msgspec import Struct
from msgspec.structs import replace

from ddplaunch.record.folders import goes_on, node_folders_of
from ddplaunch.record.log_reader import LogFile, LogReader, logs_of
from ddplaunch.record.run import LONGEST, NO_END, EventRow, Run, lines_of
from ddplaunch.record.window import requests
from ddplaunch.record.window.questions import NodeStatus
from ddplaunch.spec.options.parsers import BadValue, duration
from ddplaunch.system.console.lines import Lines
from ddplaunch.system.console.screen import moves
from ddplaunch.system.errors import LaunchError, say
from ddplaunch.system.exitcodes import NOT_WRITTEN, OK, of_signal
from ddplaunch.system.fields import line as printable
from ddplaunch.system.process.apart import disk_watch_paused
from ddplaunch.system.process.files import content
from ddplaunch.system.process.linux import raise_open_files
from ddplaunch.system.words import compress, some, these_ranks
from ddplaunch.tools.runs import choice, find
from ddplaunch.tools.runs.find import Known, heading, newest_first

_TIME_OF_DAY = re.compile(r"\d\d?:\d\d(:\d\d)?")
_LONGEST_NUMBER = 9  # digits of -n: so many lines are all lines
_LOOK_EVERY = 0.2  # seconds between two looks for what is new


class Wanted(Struct, frozen=True, kw_only=True):
    """What is to be shown: the values of the options of `ddplaunch logs`."""

    ranks: frozenset[int] | None = None  # None: all
    pattern: re.Pattern[bytes] | None = None  # None: all lines
    tail: int | None = None  # how many lines of each log at most, of those that are there at first; None: all
    since: float | None = None  # seconds since 1970; None: from the beginning
    # a time of day that was asked for, is still to come today, and so means yesterday's; "": not so
    of_yesterday: str = ""
    follow: bool = False
    typed: tuple[str, ...] = ()  # the options as they were typed, with -r first


def wanted(
    *,
    now: float,
    ranks: str | None = None,
    pattern: str | None = None,
    tail: str | None = None,
    since: str | None = None,
    follow: bool = False,
) -> Wanted:
    """Return what the values of -r, --grep, -n, --since and -f ask for at this time (`now`, seconds since 1970); None: not typed.

    Raises:
        LaunchError: a value cannot be read.
    """
    try:
        compiled = re.compile(os.fsencode(pattern)) if pattern is not None else None
    except re.error as error:
        raise LaunchError(f"--grep {pattern}: {error}", hint="a regular expression of Python's is expected") from None
    if tail is not None and not (tail.isascii() and tail.isdigit() and len(tail) <= _LONGEST_NUMBER):
        raise LaunchError(f"-n {tail}: expected a number of lines", hint="type for example `-n 50`")
    begins = beginning(since, now) if since is not None else None
    # who types a span or a date knows the day; a time of day may be taken for today's
    is_time_of_day = since is not None and _TIME_OF_DAY.fullmatch(since) is not None
    is_of_yesterday = is_time_of_day and time.localtime(begins).tm_yday != time.localtime(now).tm_yday
    values = {"-r": ranks, "--grep": pattern, "-n": tail, "--since": since}
    typed = [word for option, value in values.items() if value is not None for word in (option, value)]
    return Wanted(
        typed=(*typed, *(["-f"] if follow else [])),
        ranks=choice.ranks_meant(ranks),
        pattern=compiled,
        tail=int(tail) if tail is not None else None,
        since=begins,
        of_yesterday=(since or "") if is_of_yesterday else "",
        follow=follow,
    )


def beginning(since: str, now: float) -> float:
    """Read a time span until now, a time of day (the last such time), or a date; return seconds since 1970."""
    from datetime import datetime, timedelta  # few commands need it

    try:
        if _TIME_OF_DAY.fullmatch(since):
            today = datetime.fromtimestamp(now)  # noqa: DTZ006 - times are those of the time zone here, as its clocks show them
            width = len("09:05") if since.count(":") == 1 else len("09:05:30")
            at = datetime.fromisoformat(f"{today:%Y-%m-%d}T{since:0>{width}}")  # which takes 09:05, and no 9:05
            return (at if at <= today else at - timedelta(days=1)).timestamp()
        is_date = re.match(r"\d{4}-\d\d-\d\d", since)
        then = datetime.fromisoformat(since).timestamp() if is_date else now - duration(since)
    except (ValueError, BadValue):
        raise LaunchError(f"--since {since}: expected a time span, a time of day or a date", hint=_TIMES_HINT) from None
    if then > now:
        raise LaunchError(f"--since {since}: that time is still to come", hint=_TIMES_HINT)
    return then


_TIMES_HINT = "type for example `--since 5m`, `--since 14:05`, `--since 14:05:30` or `--since 2026-11-22T14:05`"


def show(env: Mapping[str, str], named: str | None, want: Wanted) -> int:
    """Write the logs that are meant to stdout, and return the exit status: 1 if one of them cannot be read.

    Raises:
        LaunchError: there is no such run, or it has no such logs.
        BrokenPipeError: the reader of stdout has gone.
    """
    if want.of_yesterday:
        say(f"since {want.of_yesterday} yesterday")
    run, others = choice.choose_kept(env, named, "logs", want.typed, follow=want.follow)
    if run.keeps_elsewhere:
        say(f"logs of {heading(run)}")
        return _show_elsewhere(run, want)
    logs = _chosen(run, logs_of(run.folder), want)
    say(_heading(run, others))
    raise_open_files()  # logs that are followed stay open, and there may be thousands
    are_all_read = _write_logs(run.folder, logs, want)
    how = Run(run.folder).how_it_ended
    if want.follow or (how == NO_END and not goes_on(run.folder)):
        say(f"{run.name} {how}" + ("; its logs end here" if how == NO_END else ""))
    return OK if are_all_read else NOT_WRITTEN


def _write_logs(folder: str, logs: Sequence[LogFile], want: Wanted) -> bool:
    """Write these logs of the run in this folder to stdout; follow them, and those that come, until the run ends, if wanted.

    Say which of them cannot be read, and why; return whether all could.
    """
    has_several_ranks = len({log.rank for log in logs}) > 1 or (want.follow and want.ranks is None)
    readers = {log: _ShownLog(log, want.since) for log in logs}
    out = sys.stdout.buffer
    tail = want.tail
    unreadable: set[LogFile] = set()
    while True:
        # the run is looked at before its logs are read: what was written up to its end is read after that
        is_followed = want.follow and goes_on(folder)
        for log, reader in readers.items():
            lines = _matching(reader.lines(time.monotonic()) if is_followed else reader.rest(), want.pattern)
            _write(out.write, lines if tail is None else deque(lines, tail), log, with_rank=has_several_ranks)
            if reader.why_unreadable and log not in unreadable:
                unreadable.add(log)
                say(f"warning: {log.folder}/{log.name} cannot be read: {reader.why_unreadable}")
        out.flush()
        tail = None  # what comes from now on is shown whole
        if not is_followed:
            return not unreadable
        time.sleep(_LOOK_EVERY)
        for log in logs_of(folder):  # of workers that have started meanwhile, or of the next generation
            if log not in readers and (want.ranks is None or log.rank in want.ranks):
                readers[log] = _ShownLog(log, want.since)


class _ShownLog:
    """The lines of a log; of a progress bar only the last state, or, while the log is followed, a state now and then."""

    def __init__(self, log: LogFile, since: float | None) -> None:
        self._reader = LogReader(log, since)
        self._drawn = Lines()

    @property
    def why_unreadable(self) -> str:
        """Why the log, which is there, cannot be opened; "": it can, or is not there."""
        return self._reader.why_unreadable

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


def _matching(lines: Iterator[bytes], pattern: re.Pattern[bytes] | None) -> Iterator[bytes]:
    """Yield the lines in which the pattern is found, or all."""
    return (line for line in lines if pattern is None or pattern.search(line, 0, len(line) - 1))


def _write(write: Callable[[bytes], object], lines: Iterable[bytes], log: LogFile, *, with_rank: bool) -> None:
    prefix = b"[%d] " % log.rank if with_rank else b""
    for line in lines:
        write(prefix + line)


_WHY_NO_LOGS = "a single worker has the command's own stdout and stderr, and no logs. `--output prefix` keeps some"


def _chosen(run: Known, logs: list[LogFile], want: Wanted) -> list[LogFile]:
    """Return those of a run's `logs` whose ranks are wanted.

    Raises:
        LaunchError: the run has no such rank, or a log that is wanted is not here, and no worker that starts later brings it.
    """
    world_size = Run(run.folder).plan.get("world_size")  # what no ddplaunch wrote has none
    if isinstance(world_size, int) and (never := {rank for rank in want.ranks or () if rank >= world_size}):
        raise choice.no_such_ranks(run.name, never, world_size)
    found_ranks = {log.rank for log in logs}
    has_missing = not logs if want.ranks is None else not want.ranks <= found_ranks
    may_appear = want.follow and goes_on(run.folder)
    if has_missing and may_appear:
        started_without_log = _started_in(run.folder) - found_ranks
        wanted_of_them = started_without_log if want.ranks is None else started_without_log & want.ranks
        may_appear = not wanted_of_them
    if has_missing and not may_appear:
        raise _why_missing(run, want.ranks, found_ranks)
    return [log for log in logs if want.ranks is None or log.rank in want.ranks]


def _started_in(folder: str) -> set[int]:
    """Return the ranks that have been started: a log is made before its worker, and none that is missing then comes later."""
    events = (
        row for part in node_folders_of(folder) for row in lines_of(content(f"{part}/events.jsonl", LONGEST), EventRow)
    )
    return {row.rank for row in events if row is not None and row.event == "worker_started" and row.rank is not None}


def _why_missing(run: Known, ranks: Collection[int] | None, found_ranks: Collection[int]) -> LaunchError:
    """Return the error for logs that are wanted (of `ranks`; None: of all) and not in the run's folder: it has `found_ranks`."""
    plan = Run(run.folder).plan
    is_of_command = plan.get("workers") == []  # which has started all agents, and has no workers itself
    if not found_ranks and is_of_command:
        return _on_its_hosts(run)
    if ranks is None:
        is_no_run = plan.get("world_size") is None
        no_run = "that is no folder of a run; `ddplaunch logs` alone shows those of the latest"
        return LaunchError(f"there are no logs in {run.folder}", hint=no_run if is_no_run else _WHY_NO_LOGS)
    what = f"there is no log of {these_ranks({*ranks}.difference(found_ranks))} of {run.name}"
    if not found_ranks:
        return LaunchError(f"{what} in {run.folder}", hint=_WHY_NO_LOGS)
    hint = f"here are those of {compress(found_ranks)}; the others are on the hosts of their nodes"
    return LaunchError(f"{what} here", hint=hint)


def _on_its_hosts(run: Known) -> LaunchError:
    """Return the error for the logs of a run that was typed here, ended, and had hosts with disks of their own."""
    joined = (row.host for row in Run(run.folder).nodes[0].head if row.event == "node_joined")
    hosts = sorted({printable(host) for host in joined if host})
    what = f"the logs of {run.name} are on its hosts"
    if not hosts:
        return LaunchError(what, hint=f"`ddplaunch logs {run.name}` shows them there")
    there = replace(run, host=hosts[0]).line_there(("logs", run.name))
    return LaunchError(f"{what}: {some(hosts)}", hint=f"`{there}` shows those of {hosts[0]}")


def _heading(run: Known, others: list[Known]) -> str:
    """Say which run's logs are shown: people have several runs, and the logs do not name theirs."""
    text = f"logs of {heading(run)}"
    if run.replies is None and not goes_on(run.folder):
        text += f"; {Run(run.folder).how_it_ended}"
    if others:
        names = some((f"{other.name} ({other.program})" for other in newest_first(others)), 3)
        text += f"; not those of {names}, which {'runs' if len(others) == 1 else 'run'} here too"
    return text


# --- of a run that was typed here and runs on other hosts


_PIECE = 1 << 16  # bytes
_SSH = ("ssh", "-T", "-x", "-o", "ClearAllForwardings=yes", "-o", "RemoteCommand=none")


class _OnHost(Struct, frozen=True):
    """The logs of a node that are to be shown, and the host that shows them."""

    host: str  # as ssh is to be given it, perhaps with a user before an @
    folder: str  # of the node's logs, on that host; "": it keeps none
    ranks: list[int]  # sorted


def _show_elsewhere(run: Known, want: Wanted) -> int:
    """Have each host of a run that was typed here show its logs over ssh: node by node, or all together as lines come.

    Return the exit status: the largest of those of the commands there.

    Raises:
        LaunchError: there are no such ranks, or it is not known how to reach their hosts.
        BrokenPipeError: the reader of stdout has gone.
    """
    assert run.replies is not None
    assert run.replies.run is not None
    parts = [part for part in _parts_on_hosts(run, run.replies.run, want) if part.ranks]
    has_several_ranks = sum(len(part.ranks) for part in parts) > 1
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(of_signal(signal.SIGTERM)))  # no ssh outlives this
    readers = []
    for part in parts:
        if not part.folder:
            say(f"{printable(part.host)} keeps no logs")
            continue
        # a host puts the rank before its lines only where it shows several, or all that may come
        host_leaves_rank_out = len(part.ranks) == 1 and not (want.follow and want.ranks is None)
        prefix = b"[%d] " % part.ranks[0] if host_leaves_rank_out and has_several_ranks else b""
        readers.append(_HostReader(_ssh_line(run.replies.run.python, part, want), prefix))
        if not want.follow:
            say(f"{these_ranks(part.ranks)}, on {printable(part.host)}:")
            _write_lines(readers[-1:])
    if want.follow:
        _write_lines(readers)
    return max((reader.process.returncode for reader in readers), default=0)


def _parts_on_hosts(run: Known, reply: requests.Run, want: Wanted) -> list[_OnHost]:
    """Return what each node that has answered is to show, by node rank.

    Raises:
        LaunchError: the host of a node, or the node of a wanted rank, is not known.
    """
    assert run.replies is not None
    answered = {node.node_rank: node for node in run.replies.nodes
                if isinstance(node.answer, NodeStatus) and node.node_rank is not None}  # fmt: skip
    if not answered:
        raise LaunchError(
            f"it is not known where the logs of {run.name} are: {'; '.join(find.silent(run.replies.nodes))}"
        )
    # by name, and not by rank: a node that took the place of a lost one has the rank of another host
    ssh_names = {host.rpartition("@")[2]: host for host in reply.over_ssh}
    parts = []
    known: set[int] = set()
    for _, node in sorted(answered.items()):
        assert isinstance(node.answer, NodeStatus)
        if node.host not in ssh_names:
            raise LaunchError(f"the logs of {run.name} are not here, but on {reply.host}, in {printable(run.folder)}")
        ranks = {worker.rank for worker in node.answer.workers}
        known |= ranks
        parts.append(
            _OnHost(
                ssh_names[node.host], node.answer.folder, sorted(ranks if want.ranks is None else ranks & want.ranks)
            )
        )
    if unknown := set(want.ranks or ()) - known:
        if reply.world_size and (never := {rank for rank in unknown if rank >= reply.world_size}):
            raise choice.no_such_ranks(run.name, never, reply.world_size)
        raise LaunchError(f"it is not known where {these_ranks(unknown)} of {run.name} runs: its node does not answer")
    return parts


def _ssh_line(python: str, part: _OnHost, want: Wanted) -> list[str]:
    """Return the command that has a host show its part, with the options of this one; each host is asked for its own ranks."""
    options = want.typed[2:] if want.typed[:1] == ("-r",) else want.typed
    chosen = ["-r", compress(part.ranks)] if want.ranks is not None else []
    # the folder of the node is named, not the run: hosts may share a disk, and have another home than this one
    command = [python, "-m", "ddplaunch", "logs", part.folder, *chosen, *options]
    return [*_SSH, "--", part.host, f"exec {shlex.join(command)}"]


class _HostReader:
    """The ssh to one host that shows its logs, and what it has written, in whole lines."""

    def __init__(self, argv: Sequence[str], prefix: bytes) -> None:
        """Start ssh by this command line; `prefix` is to stand before each of its lines."""
        self.process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
        self.prefix = prefix
        self._rest = b""

    def lines(self) -> list[bytes] | None:
        """Return the lines that have come; None at the end."""
        assert self.process.stdout is not None
        data = os.read(self.process.stdout.fileno(), _PIECE)
        if not data and not self._rest:
            return None
        *lines, self._rest = (self._rest + data).split(b"\n") if data else (self._rest, b"")
        return lines


def _write_lines(readers: Sequence[_HostReader]) -> None:
    """Write the lines of all readers as they come, until every reader has ended and left its exit status."""
    out = sys.stdout.buffer
    with ExitStack() as stack, selectors.DefaultSelector() as selector:
        for reader in readers:
            stack.enter_context(reader.process)
            # what is registered last is called first: the context of a process waits for its end
            stack.callback(reader.process.terminate)
            assert reader.process.stdout is not None
            selector.register(reader.process.stdout, selectors.EVENT_READ, reader)
        while selector.get_map():
            with disk_watch_paused():
                ready = selector.select()
            for key, _ in ready:
                if (lines := key.data.lines()) is None:
                    selector.unregister(key.fileobj)
                    key.data.process.wait()
                else:
                    out.writelines(key.data.prefix + line + b"\n" for line in lines)
            out.flush()
