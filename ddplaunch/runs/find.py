"""Finds runs: their folders, and the sockets of those that go on. Believes no file: who does not answer is not there."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress

from msgspec import Struct

from ddplaunch.control.questions import AskStatus, NoAnswer, NodeStatus, WorkerStatus
from ddplaunch.control.requests import NodeReply
from ddplaunch.errors import LaunchError, did_you_mean, some, why_failed
from ddplaunch.options.parsers import BadValue
from ddplaunch.options.parsers import ranks as parse_ranks
from ddplaunch.plan.ranks import compress
from ddplaunch.process.regular_file import read_json
from ddplaunch.report import old_runs, other_host, run_socket
from ddplaunch.report.state_folder import runs_folder
from ddplaunch.report.words import these_ranks
from ddplaunch.runs.client import RunReplies, SocketPlace, ask_all

ANSWER_WITHIN = 1.0  # seconds that the nodes of a job get
_SHOWN = 5  # runs that an error names, nodes that have a line each


class Elsewhere(Struct, frozen=True):
    """A run whose folder is here, since the home is shared, and which goes on on another host."""

    run_id: str
    host: str
    folder: str
    slurm_job: str = ""  # its id in Slurm; "" for none, or while that is not known

    def line(self, words: Sequence[str]) -> str:
        """Return the line to be typed here that runs `ddplaunch WORDS` there."""
        script = os.path.join(os.path.dirname(sys.executable), "ddplaunch")
        return other_host.line(self.host, self.slurm_job, words, (script,) if os.access(script, os.X_OK) else ())


def places(env: Mapping[str, str]) -> Iterator[SocketPlace]:
    """Return where the sockets of this user's runs lie: in their folders, and in the folder of those that lie in none."""
    for folder in folders(env):
        if os.path.lexists(f"{folder}/{run_socket.NAME}"):
            yield SocketPlace(folder, run_socket.NAME)
    with suppress(OSError):
        runtime = run_socket.open_runtime_folder()
        try:
            for name in sorted(os.listdir(runtime)):
                if not name.startswith("."):
                    yield SocketPlace(run_socket.runtime_folder(os.getuid()), name)
        finally:
            os.close(runtime)


def folders(env: Mapping[str, str]) -> list[str]:
    """Return the folders of this user's runs but those with --log-dir, by name."""
    runs = runs_folder(env)
    try:
        names = sorted(os.listdir(runs)) if runs is not None else []
    except OSError:
        return []
    return [f"{runs}/{name}" for name in names if not name.startswith(".")]  # such a one is being removed


def running(env: Mapping[str, str]) -> list[RunReplies]:
    """Ask all runs of this user on this host how they are."""
    return ask_all(list(places(env)), AskStatus(), ANSWER_WITHIN)


def elsewhere(env: Mapping[str, str], here: Sequence[RunReplies]) -> list[Elsewhere]:
    """Return the runs that go on on other hosts; `here` are those of this one."""
    import json
    import socket

    from ddplaunch.report.folders import goes_on

    known = {name_of(replies) for replies in here}
    found = []
    for folder in folders(env):
        if os.path.basename(folder) in known or not goes_on(folder, for_sure=True):
            continue
        for events in (f"{folder}/events.jsonl", f"{folder}/node-0/events.jsonl"):
            with suppress(OSError, ValueError, KeyError, TypeError), open(events, "rb") as file:
                host = json.loads(file.readline(1 << 16))["host"]
                if host != socket.gethostname():
                    found.append(Elsewhere(os.path.basename(folder), str(host), folder, _slurm_job(events)))
                break
    return found


def _slurm_job(events: str) -> str:
    """The id in Slurm of the job whose file of events this is, by the plan beside it."""
    plan = read_json(f"{os.path.dirname(events)}/plan.json")
    job = plan.get("slurm_job") if isinstance(plan, dict) else None
    return job if isinstance(job, str) and job.isdecimal() else ""


def name_of(replies: RunReplies) -> str:
    """Return the name of a run, as far as it is known."""
    if replies.run is not None:
        return replies.run.run_id
    in_folder = replies.place.name == run_socket.NAME
    return os.path.basename(replies.place.folder) if in_folder else replies.place.name.rpartition(".")[0]


def names(env: Mapping[str, str]) -> list[str]:
    """Return the names of the runs that go on here and of those that are kept."""
    return sorted({*map(name_of, running(env)), *map(os.path.basename, folders(env))}, reverse=True)


def workers(env: Mapping[str, str], named: str | None) -> list[tuple[NodeReply, WorkerStatus]]:
    """Return the workers of the run of this name, or of the only one, by rank, each with its node; none if it is not clear."""
    found = [replies for replies in running(env) if named is None or name_of(replies) == named]
    return sorted(workers_of(found[0]), key=lambda pair: pair[1].rank) if len(found) == 1 else []


def workers_of(replies: RunReplies) -> Iterator[tuple[NodeReply, WorkerStatus]]:
    """Return the workers that the nodes of a run have named, each with its node."""
    for node in replies.nodes:
        if isinstance(node.answer, NodeStatus):
            yield from ((node, worker) for worker in node.answer.workers)


def silent(nodes: Iterable[NodeReply]) -> list[str]:
    """Say which nodes have not answered, and why: each in a line of its own, or more than a few for one reason together."""
    by_reason: dict[str, list[NodeReply]] = {}
    for node in nodes:
        if isinstance(node.answer, NoAnswer):
            by_reason.setdefault(node.answer.reason, []).append(node)
    lines = []
    for reason, those in by_reason.items():
        ranks = [node.node_rank for node in those if node.node_rank is not None]
        if len(those) <= _SHOWN:
            lines += [f"{_node(node)} {reason}" for node in those]
        elif len(ranks) == len(those):
            lines.append(f"each of nodes {compress(ranks)} {reason}")
        else:
            lines.append(f"each of {some(map(_node, those), _SHOWN)} {reason}")
    return lines


def _node(node: NodeReply) -> str:
    return node.host if node.node_rank is None else f"node {node.node_rank} ({node.host})"


def choose(env: Mapping[str, str], named: str | None, verb: str, *options: str) -> RunReplies:
    """Return the running job that is meant: by its name, a beginning of it, or its folder; without any, the only one.

    `verb` and `options` are what was typed besides, for hints.

    Raises:
        LaunchError: there is none, or it is not clear which.
    """
    here = running(env)
    if named == "":
        raise LaunchError("no run is named: the argument is empty", hint="`ddplaunch ps` shows what runs")
    if named is None:
        if len(here) == 1:
            return here[0]
        if not here:
            raise _none(env, "none of your jobs runs here", elsewhere(env, here), (verb, *options))
        raise several(f"{len(here)} of your jobs run here", [*map(name_of, here)], verb, *options)
    if os.sep in named:
        return _by_folder(env, named, here)
    exact = [replies for replies in here if name_of(replies) == named]
    has_ended = any(os.path.basename(folder) == named for folder in folders(env))
    removed = removed_run(env, named, exactly=True)
    by_beginning = [] if has_ended or removed else [each for each in here if name_of(each).startswith(named)]
    found = exact or by_beginning
    if len(found) == 1:
        return found[0]
    if found:
        raise several(f"{named} is the beginning of {len(found)} runs", [*map(name_of, found)], verb, *options)
    there = [run for run in elsewhere(env, here) if run.run_id.startswith(named)]
    if has_ended and not there:
        raise LaunchError(f"run {named} has ended", hint=f"`ddplaunch logs {named}` shows its output")
    if not there and (removed := removed_run(env, named)):
        raise removed
    meant = did_you_mean(named, map(name_of, here))
    raise _none(env, f"there is no run {named} here", there, (verb, *options), meant)


def _by_folder(env: Mapping[str, str], named: str, here: Sequence[RunReplies]) -> RunReplies:
    path = os.path.realpath(named)
    for replies in here:
        if replies.run is not None and replies.run.folder:
            folder = os.path.realpath(replies.run.folder)
            if path in (folder, os.path.dirname(folder)):
                return replies
    try:
        owner = os.stat(path).st_uid
    except OSError as error:
        raise LaunchError(f"{named}: {why_failed(error)}", hint="`ddplaunch ps` shows what runs") from None
    place = SocketPlace(path, run_socket.NAME)
    if os.path.lexists(place.path):  # a folder below another home, as that of another XDG_STATE_HOME
        if found := ask_all([place], AskStatus(), ANSWER_WITHIN):
            return found[0]
    elif owner not in (os.getuid(), 0) and os.getuid() != 0:
        raise LaunchError(f"{named} is of another user ({owner})", hint="only that user, or root, can look into it")
    raise LaunchError(f"no job runs in {named}", hint="`ddplaunch ps` shows what runs")


def several(what: str, names: Sequence[str], verb: str, *options: str) -> LaunchError:
    """Return the error where several runs could be meant."""
    return LaunchError(
        f"{what}: {some(names, _SHOWN)}", hint=f"name one: `{shlex.join(('ddplaunch', verb, names[-1], *options))}`"
    )


def removed_run(env: Mapping[str, str], named: str, *, exactly: bool = False) -> LaunchError | None:
    """Return the error for a run that was removed, by its name or, unless `exactly`, a beginning of it; None if there is none."""
    runs = runs_folder(env)
    removed = old_runs.removals(runs) if runs is not None else {}
    found = [removed[named]] if named in removed else []
    if not found and not exactly:
        found = [one for name, one in removed.items() if name.startswith(named)]
    if not found:
        return None
    latest = found[-1]
    what = f"run {latest.name} was removed on {latest.date}: {latest.why}"
    if len(found) > 1:
        what = f"{named} is the beginning of {len(found)} runs that were removed, the latest on {latest.date}"
    return LaunchError(what, hint="`--keep-runs DAYS` or DDPLAUNCH_KEEP_RUNS keeps runs longer, 0 for ever")


def ranks_meant(text: str | None) -> frozenset[int] | None:
    """Read the value of -r; None: all ranks.

    Raises:
        LaunchError: it is no list of ranks.
    """
    try:
        return parse_ranks(text) if text is not None else None
    except BadValue as error:
        raise LaunchError(f"-r {text}: {error}", hint="type for example `-r 3` or `-r 0-2,4`") from None


def no_such_ranks(run: str, ranks: Collection[int], world_size: int) -> LaunchError:
    """Say that a run of so many workers has none of these ranks."""
    has = "rank 0 only" if world_size == 1 else f"ranks 0-{world_size - 1}"
    return LaunchError(f"there is no {these_ranks(ranks)} in {run}: it has {has}", hint="type for example `-r 0`")


def _none(
    env: Mapping[str, str], what: str, there: Sequence[Elsewhere], typed: Sequence[str], meant: str | None = None
) -> LaunchError:
    if there:
        run = there[-1]
        verb, *options = typed
        line = run.line((verb, run.run_id, *options))
        return LaunchError(f"{what}; {run.run_id} runs on {run.host}", hint=f"`{line}`")
    if why := run_socket.problem():
        return LaunchError(
            f"{what}, and {why}", hint="only root can remove it: jobs with --log-dir are reached through it"
        )
    return LaunchError(what, hint=f"did you mean {meant}?" if meant else "`ddplaunch ps` shows what runs")
