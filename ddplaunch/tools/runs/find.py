"""Finds runs, those that go on and those that have left their folders, and which of them is meant by what was typed.

Believes no file: who does not answer does not run. Guesses nothing: of several runs that fit it lists all. Whatever a run says of
itself, and whatever its folder is called, takes one line of printable characters here.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress

from msgspec import Struct
from msgspec.structs import replace

from ddplaunch.reach import other_host
from ddplaunch.record import old_runs, run_socket
from ddplaunch.record.folders import OF_A_NODE, first_that_goes_on, runs_folder, short
from ddplaunch.record.log_reader import logs_of
from ddplaunch.record.run import Node, Run
from ddplaunch.record.run_socket import SocketPath
from ddplaunch.record.window.questions import AskStatus, NoAnswer, WorkerStatus
from ddplaunch.record.window.requests import NodeReply
from ddplaunch.spec.options.parsers import BadValue
from ddplaunch.spec.options.parsers import ranks as parse_ranks
from ddplaunch.system.errors import LaunchError
from ddplaunch.system.fields import host as host_name
from ddplaunch.system.fields import line
from ddplaunch.system.words import compress, did_you_mean, duration, some, these_ranks, why_failed
from ddplaunch.tools.runs.client import RunReplies, ask, ask_all

ANSWER_WITHIN = 1.0  # seconds that the nodes of a job get
_SHOWN_NODES = 5  # that have a line each
_SHOWN_RUNS = 8  # that an error lists
_SHORTEST_END = 3  # characters: every tenth name ends with a given letter
_SHORTEST_NUMBER = 4  # digits: a shorter number is a rank, and no beginning of a date
_SHOWS = "`ddplaunch ps` shows what runs"
_IN_SHELLS = re.compile(r"[\w.+:@%=-]+")


# --- runs, as they are known here


class Known(Struct, frozen=True, kw_only=True):
    """A run that goes on here, or that has left its folder, or that only another host can be asked about."""

    run_id: str
    script: str = ""  # the program, as it was named; "": not known
    began: float = 0.0  # seconds since 1970
    folder: str = ""  # of the whole run; "": nothing is kept
    replies: RunReplies | None = None  # None: it does not run here
    host: str = ""  # where it is to be asked about; "": here
    slurm_job: str = ""  # its id in Slurm, of a run of another host; "" for none, or while that is not known

    @property
    def name(self) -> str:
        """The name that people see and type."""
        return short(self.run_id)

    @property
    def program(self) -> str:
        """The name of the script alone."""
        return os.path.basename(self.script) or self.script

    @property
    def keeps_elsewhere(self) -> bool:
        """Whether the hosts of a run that was typed here keep its logs on disks of their own."""
        run = self.replies.run if self.replies is not None else None
        return run is not None and bool(run.over_ssh) and not any(logs_of(self.folder))

    def line_there(self, words: Sequence[str]) -> str:
        """Return the line to be typed here that runs `ddplaunch WORDS` on the host of this run."""
        script = os.path.join(os.path.dirname(sys.executable), "ddplaunch")
        return other_host.line(self.host, self.slurm_job, words, (script,) if os.access(script, os.X_OK) else ())

    def age(self, now: float) -> str:
        """Say for how long the run has been running, or how long ago it began."""
        if self.replies is not None and self.replies.run is None:
            return "does not answer"
        if not self.began:
            return ""
        for_how_long = duration(now - self.began)
        return f"running for {for_how_long}" if self.replies is not None else f"began {for_how_long} ago"


def name_of(replies: RunReplies) -> str:
    """Return the whole name of a run that runs here, as that of its folder, which no other has, unless --log-dir has another."""
    if replies.socket_path.name == run_socket.NAME:
        return line(os.path.basename(whole(replies.socket_path.folder)))
    return line(replies.run.run_id if replies.run is not None else replies.socket_path.name.rpartition(".")[0])


def whole(folder: str) -> str:
    """Return the folder of a run, given that of one of its nodes."""
    above, name = os.path.split(folder)
    # a run may have the name node-1 itself
    return above if name.startswith(OF_A_NODE) and os.path.basename(above) != "runs" else folder


def of_running(replies: RunReplies) -> Known:
    """Return a run that has answered, or did not in time."""
    run = replies.run
    if run is None:
        return replace(of_folder(whole(replies.socket_path.folder)), run_id=name_of(replies), replies=replies)
    known = Known(run_id=name_of(replies), replies=replies, folder=whole(run.folder))
    try:
        script = shlex.split(run.command)[0]
    except (ValueError, IndexError):  # the command was cut
        script = run.command.partition(" ")[0]
    return replace(known, script=line(script), began=time.time() - run.seconds)


def of_folder(folder: str) -> Known:
    """Return the run of this folder, which may be that of one node; without events, its name and the time of the folder."""
    script, began, start = "", 0.0, Run(folder).start
    if start is not None:
        script, began = line(start.program), start.at
    if not 0 < began < time.time():
        with suppress(OSError):
            began = os.stat(folder).st_mtime
    return Known(run_id=line(os.path.basename(whole(folder))), script=script, began=began, folder=folder)


# --- finding them


def socket_paths(env: Mapping[str, str]) -> Iterator[SocketPath]:
    """Return the paths of the sockets of this user's runs: in the folders of runs, and in the runtime folder."""
    for folder in folders(env):
        if os.path.lexists(f"{folder}/{run_socket.NAME}"):
            yield SocketPath(folder, run_socket.NAME)
    with suppress(OSError):
        runtime = run_socket.open_runtime_folder()
        try:
            for name in sorted(os.listdir(runtime)):
                if not name.startswith("."):
                    yield SocketPath(run_socket.runtime_folder(os.getuid()), name)
        finally:
            os.close(runtime)


def folders(env: Mapping[str, str]) -> list[str]:
    """Return the folders of this user's runs, except for --log-dir, by name."""
    runs = runs_folder(env)
    try:
        names = sorted(os.listdir(runs)) if runs is not None else []
    except OSError:
        return []
    return [f"{runs}/{name}" for name in names if not name.startswith(".")]  # such a one is being removed


class Found(Struct, frozen=True):
    """The runs of this user that go on."""

    here: list[RunReplies]  # that are asked here
    there: list[Known]


def running(env: Mapping[str, str]) -> list[RunReplies]:
    """Return the status of all runs of this user that can be asked on this host."""
    return [replies for replies in _asked(env) if replies.elsewhere is None]


def look(env: Mapping[str, str]) -> Found:
    """Ask all runs of this user on this host for their status, and find the runs of other hosts."""
    asked = _asked(env)
    here = [replies for replies in asked if replies.elsewhere is None]
    known = {name_of(replies) for replies in here}
    there = {run.run_id: run for run in _by_folders(env, known)}
    for replies in asked:
        if (said := replies.elsewhere) is not None and said.run_id and said.run_id not in known:
            run = Known(run_id=line(said.run_id), host=said.host, slurm_job=said.slurm_job)
            there.setdefault(run.run_id, run)
    return Found(here, list(there.values()))


def _asked(env: Mapping[str, str]) -> list[RunReplies]:
    return ask_all(list(socket_paths(env)), AskStatus(), ANSWER_WITHIN)


def _by_folders(env: Mapping[str, str], known: Collection[str]) -> list[Known]:
    """Return the runs of other hosts that have not ended, by their folders; `known` are asked on this host."""
    import socket

    found = []
    for folder in folders(env):
        if os.path.basename(folder) in known or (part := first_that_goes_on(folder)) is None:
            continue
        start = Node(part).start  # of the command, or of node 0 first
        if start is not None and start.host and start.host != socket.gethostname():
            job = Run(folder).plan.get("slurm_job")
            slurm_job = job if isinstance(job, str) and job.isdecimal() else ""
            found.append(replace(of_folder(folder), host=host_name(start.host), slurm_job=slurm_job))
    return found


def every_run(env: Mapping[str, str]) -> list[Known]:
    """Return all runs of this user that are known on this host: running here or elsewhere, and ended ones with a folder."""
    found = look(env)
    going = [*map(of_running, found.here), *found.there]
    known = {run.run_id for run in going}
    return [*going, *(of_folder(folder) for folder in folders(env) if os.path.basename(folder) not in known)]


def completions(env: Mapping[str, str], typed: str, verb: str) -> list[tuple[str, str]]:
    """Return the names that complete what was typed, with a description: running jobs first, newest first.

    Runs that have ended are offered to `logs` and `report` only, which alone show them.
    """
    runs = every_run(env) if verb in ("logs", "report") else [*map(of_running, running(env))]
    now, found = time.time(), []
    for run in newest_first(runs):
        name = next((name for name in (run.name, run.run_id, run.program) if name.startswith(typed)), "")
        # a shell reads the answer line by line, takes a blank for the end of a word, and click's script for fish a comma
        if _IN_SHELLS.fullmatch(name):
            found.append((name, " ".join(filter(None, (run.program, run.age(now))))))
    return found


def workers(env: Mapping[str, str], named: str | None) -> list[tuple[NodeReply, WorkerStatus]]:
    """Return the workers of the named run, or of the only run, by rank, each with its node; none if several runs may be meant."""
    runs = [*map(of_running, running(env))]
    found = runs if named is None else meant(named, runs)
    if len(found) != 1 or found[0].replies is None:
        return []
    return sorted(found[0].replies.workers, key=lambda pair: pair[1].rank)


def silent(nodes: Iterable[NodeReply]) -> list[str]:
    """Return which nodes have not answered, and why; more than a few nodes with one reason share a line."""
    by_reason: dict[str, list[NodeReply]] = {}
    for node in nodes:
        if isinstance(node.answer, NoAnswer):
            by_reason.setdefault(node.answer.reason, []).append(node)
    lines = []
    for reason, those in by_reason.items():
        ranks = [node.node_rank for node in those if node.node_rank is not None]
        if len(those) <= _SHOWN_NODES:
            lines += [f"{_node(node)} {reason}" for node in those]
        elif len(ranks) == len(those):
            lines.append(f"each of nodes {compress(ranks)} {reason}")
        else:
            lines.append(f"each of {some(map(_node, those), _SHOWN_NODES)} {reason}")
    return lines


def _node(node: NodeReply) -> str:
    return node.host if node.node_rank is None else f"node {node.node_rank} ({node.host})"


# --- which is meant


def meant(typed: str, runs: Sequence[Known]) -> list[Known]:
    """Return the runs that fit best: by their whole name, their short name, the script, or a part of the name, in this order.

    A script fits by its path, its name, or that without `.py`; a part is a beginning, or an end of three characters or more. A
    number of up to three digits is no part: whoever types it means a rank.
    """
    is_part = not (typed.isdigit() and len(typed) < _SHORTEST_NUMBER)
    kinds: tuple[Callable[[Known], bool], ...] = (
        lambda run: run.run_id == typed,
        lambda run: run.name == typed.lower(),
        lambda run: bool(run.script) and typed in _names_of(run),
        lambda run: is_part and (run.run_id.startswith(typed) or run.name.startswith(typed.lower())),
        lambda run: is_part and len(typed) >= _SHORTEST_END and run.run_id.endswith(typed.lower()),
    )
    for fits in kinds:
        if found := [run for run in runs if fits(run)]:
            return found
    return []


def _names_of(run: Known) -> tuple[str, ...]:
    """Return what a script is called by; of a function of `launch()`, "train.py:main", its file and its name, too."""
    return run.script, run.program, run.program.removesuffix(".py"), *run.program.split(":")


def newest_first(runs: Iterable[Known]) -> list[Known]:
    """Return the runs as they are listed: running ones, then ended ones, each with the newest first."""
    return sorted(runs, key=lambda run: (run.replies is None, -run.began, run.run_id))


def several(what: str, runs: Iterable[Known], verb: str, *options: str) -> LaunchError:
    """Return the error that lists name, script and age of each run that could be meant; `options` were typed, too."""
    listed, now = newest_first(runs), time.time()
    names = _unlike(listed)
    rows = [(name, run.program, run.age(now)) for name, run in zip(names, listed, strict=True)][:_SHOWN_RUNS]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    lines += [f"and {len(listed) - _SHOWN_RUNS} more"] if len(listed) > _SHOWN_RUNS else []
    typed = shlex.join(("ddplaunch", verb, names[0], *options))
    return LaunchError("\n  ".join([f"{what}:", *lines]), hint=f"name one: `{typed}`")


def _unlike(runs: Sequence[Known]) -> list[str]:
    """Return for each run a name that no other run has: the shortest such name, or the folder."""
    used = Counter(name for run in runs for name in {run.name, run.run_id})
    return [
        next((name for name in (run.name, run.run_id) if used[name] == 1), run.folder or run.run_id) for run in runs
    ]


def heading(run: Known) -> str:
    """Say which run is shown: "k7qx, train.py, running for 3 min"."""
    return ", ".join(filter(None, (run.name, run.program, run.age(time.time()))))


def choose(env: Mapping[str, str], named: str | None, verb: str, *options: str) -> Known:
    """Return the running job that was named: by name, script, part of the name, or folder. Without a name: the only job.

    `verb` and `options` are what was typed besides, for hints.
    """
    if named == "":
        raise LaunchError("no run is named: the argument is empty", hint=_SHOWS)
    found_runs = look(env)
    here = [*map(of_running, found_runs.here)]
    if named is None:
        if len(here) == 1:
            return here[0]
        if not here:
            raise _none("none of your jobs runs here", found_runs.there, verb, options)
        raise several(f"{len(here)} of your jobs run here", here, verb, *options)
    if os.sep in named:
        return _by_folder(named, here)
    exact = [run for run in here if named in (run.run_id, run.name)]
    known = {run.run_id for run in (*here, *found_runs.there)}
    ended = [folder for folder in folders(env) if os.path.basename(folder) not in known]
    others = [*map(os.path.basename, ended), *(run.run_id for run in found_runs.there)]
    is_another = any(named in (name, short(name)) for name in others)
    removed = removed_run(env, named, exactly=True)
    # whoever types the whole name of a run that does not run here does not mean a job whose name begins so
    if found := exact or ([] if is_another or removed else meant(named, here)):
        if len(found) == 1:
            return found[0]
        raise several(f"{line(named)} may be any of {len(found)} jobs that run here", found, verb, *options)
    fitting = meant(named, [*found_runs.there, *map(of_folder, ended)])
    if there := [run for run in fitting if run.host]:
        raise _none(f"there is no run {line(named)} here", there, verb, options)
    if fitting:
        last = newest_first(fitting)[0]
        what = f"run {last.name} has ended: {', '.join(filter(None, (last.program, last.age(time.time()))))}"
        raise LaunchError(what, hint=f"`ddplaunch logs {last.name}` shows its output")
    if removed := removed or removed_run(env, named):
        raise removed
    raise no_such_run(env, named, here, verb)


def kept(
    env: Mapping[str, str], named: str | None, verb: str, typed: Collection[str] = (), *, follow: bool = False
) -> tuple[Known, list[Known]]:
    """Return the run that is meant, running or ended, and other jobs that run here where none was named.

    Without a name it is the latest; of those to be followed, the latest that runs, if one does. `verb` and `typed`, the
    options, are for hints.
    """
    if named is not None and os.sep in named:
        try:
            os.listdir(named)
        except OSError as error:
            raise LaunchError(f"{named}: {(error.strerror or '').lower()}", hint="name the folder of a run") from None
        return of_folder(os.path.abspath(named)), []
    here = [of_running(replies) for replies in running(env) if replies.run is not None]
    ids = {run.run_id for run in here}
    runs = [*here, *(of_folder(folder) for folder in folders(env) if os.path.basename(folder) not in ids)]
    if named is None:
        if not (with_logs := [run for run in runs if run.folder]):
            raise LaunchError("there is no run with logs", hint=f"`ddplaunch {verb} FOLDER` reads those of --log-dir")
        latest = newest_first(with_logs)[0] if follow else max(with_logs, key=lambda run: run.began)
        return latest, [run for run in here if run is not latest]
    found = meant(named, runs)
    if not any(named in (run.run_id, run.name) for run in found):
        if removed := removed_run(env, named, exactly=True):
            raise removed
        found = [run for run in found if run.replies is not None] or found
    if len(found) > 1:
        raise several(f"{line(named)} may be any of {len(found)} runs", found, verb, *typed)
    if not found:
        raise removed_run(env, named) or no_such_run(env, named, runs, verb)
    if not found[0].folder:
        hint = "see `--log-dir`, and what the command said at its start"
        raise LaunchError(f"run {found[0].name} keeps no logs", hint=hint)
    return found[0], []


def no_such_run(env: Mapping[str, str], named: str, runs: Sequence[Known], verb: str) -> LaunchError:
    """Return the error that no run has this name; it suggests one of `runs` with a similar name."""
    what = f"there is no run {line(named)} here"
    if named.isdigit():
        option = {"logs": "-r", "stacks": "-r", "attach": "-r", "profile": "-r"}.get(verb)
        return LaunchError(what, hint=f"for rank {named} type `ddplaunch {verb} -r {named}`" if option else _SHOWS)
    like = did_you_mean(named, [name for run in runs for name in (run.name, run.run_id, run.program) if name])
    if not like and verb in ("logs", "report", "ps"):
        return LaunchError(what, hint="`ddplaunch ps --all` lists your runs")
    return _none(what, (), verb, (), like)


def _by_folder(named: str, here: Sequence[Known]) -> Known:
    """Return the running job whose folder is `named`; ask the socket in a folder that no listing shows."""
    path = os.path.realpath(named)
    for known in here:
        run = known.replies.run if known.replies is not None else None
        if run is not None and run.folder and path in map(os.path.realpath, (known.folder, run.folder)):
            return known
    try:
        owner = os.stat(path).st_uid
    except OSError as error:
        raise LaunchError(f"{named}: {why_failed(error)}", hint=_SHOWS) from None
    socket_path = SocketPath(path, run_socket.NAME)
    if os.path.lexists(socket_path.path):  # a folder below another home, as that of another XDG_STATE_HOME
        if (replies := ask(socket_path, AskStatus(), ANSWER_WITHIN)) is not None:
            return of_running(replies)
    elif owner not in (os.getuid(), 0) and os.getuid() != 0:
        raise LaunchError(f"{named} is of another user ({owner})", hint="only that user, or root, can look into it")
    raise LaunchError(f"no job runs in {named}", hint=_SHOWS)


def removed_run(env: Mapping[str, str], named: str, *, exactly: bool = False) -> LaunchError | None:
    """Return the error for a removed run with this name, or, unless `exactly`, this beginning; None if there is none."""
    runs = runs_folder(env)
    removed = old_runs.removals(runs) if runs is not None else {}
    found = [one for name, one in removed.items() if named in (name, short(name))]
    if not found and not exactly:
        found = [one for name, one in removed.items() if name.startswith(named) or short(name).startswith(named)]
    if not found:
        return None
    latest = found[-1]
    what = f"run {line(latest.name)} was removed on {latest.date}: {latest.why}"
    if len(found) > 1:
        what = f"{line(named)} may be any of {len(found)} runs that were removed, the latest on {latest.date}"
    return LaunchError(what, hint="`--keep-runs DAYS` or DDPLAUNCH_KEEP_RUNS keeps runs longer, 0 forever")


def ranks_meant(text: str | None) -> frozenset[int] | None:
    """Read the value of -r; None: all ranks."""
    try:
        return parse_ranks(text) if text is not None else None
    except BadValue as error:
        raise LaunchError(f"-r {text}: {error}", hint="type for example `-r 3` or `-r 0-2,4`") from None


def no_such_ranks(run: str, ranks: Collection[int], world_size: int) -> LaunchError:
    """Say that a run of so many workers has none of these ranks."""
    has = "rank 0 only" if world_size == 1 else f"ranks 0-{world_size - 1}"
    return LaunchError(f"there is no {these_ranks(ranks)} in {run}: it has {has}", hint="type for example `-r 0`")


def _none(
    what: str, there: Sequence[Known], verb: str, options: Sequence[str], meant: str | None = None
) -> LaunchError:
    """Return the error for a verb that found no job, with a hint to the job that was probably meant."""
    if there:
        run = there[-1]
        hint = f"`{run.line_there((verb, run.name, *options))}`"
        return LaunchError(f"{what}; {run.name} runs on {run.host}", hint=hint)
    if why := run_socket.problem():
        return LaunchError(
            f"{what}, and {why}", hint="only root can remove it: jobs with --log-dir are reached through it"
        )
    return LaunchError(what, hint=f"did you mean {meant}?" if meant else _SHOWS)
