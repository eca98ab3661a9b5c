"""Finds the runs of this user, running ones by their sockets and ended ones by their folders.

Believes no file: a run that does not answer does not run. Whatever a run says of itself, and whatever its folder is called, takes
one line of printable characters here.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress

from msgspec import Struct
from msgspec.structs import replace

from ddplaunch.reach import other_host
from ddplaunch.record import run_socket
from ddplaunch.record.folders import NODE_FOLDER_PREFIXES, first_that_goes_on, runs_folder, short
from ddplaunch.record.log_reader import logs_of
from ddplaunch.record.run import Node, Run
from ddplaunch.record.run_socket import SocketPath
from ddplaunch.record.window.questions import AskStatus, NoAnswer
from ddplaunch.record.window.requests import NodeReply
from ddplaunch.system.fields import host as host_name
from ddplaunch.system.fields import line
from ddplaunch.system.words import compress, duration, some
from ddplaunch.tools.runs.client import RunReplies, ask_all

ANSWER_WITHIN = 1.0  # seconds that the nodes of a job get
_MOST_NODES = 5  # that have a line each
_SRUN_JOB = re.compile(r"[0-9]+(\+[0-9]+)?")
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
    # by which srun reaches that host, as `other_host.job_of_srun` has it; "" for none, or not known yet
    srun_job: str = ""
    is_pod: bool = False  # another host of it is a pod of Kubernetes
    is_indexed: bool = False  # ... of an Indexed Job, where a pod's name is not that of its host

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
        ddplaunch = (script,) if os.access(script, os.X_OK) else ()
        kind = {"is_pod": self.is_pod, "is_indexed": self.is_indexed}
        return other_host.line(self.host, self.srun_job, words, ddplaunch, **kind)

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
        return line(os.path.basename(run_folder_of(replies.socket_path.folder)))
    return line(replies.run.run_id if replies.run is not None else replies.socket_path.name.rpartition(".")[0])


def run_folder_of(folder: str) -> str:
    """Return the folder of a run, given that of one of its nodes."""
    above, name = os.path.split(folder)
    # a run may have the name node-1 itself
    return above if name.startswith(NODE_FOLDER_PREFIXES) and os.path.basename(above) != "runs" else folder


def of_running(replies: RunReplies) -> Known:
    """Return a run that runs here, with what it replied; of one that did not reply in time, its folder tells script and start."""
    run = replies.run
    if run is None:
        return replace(of_folder(run_folder_of(replies.socket_path.folder)), run_id=name_of(replies), replies=replies)
    known = Known(run_id=name_of(replies), replies=replies, folder=run_folder_of(run.folder))
    try:
        script = shlex.split(run.command)[0]
    except (ValueError, IndexError):  # the agent cut a long command, perhaps within quotes
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
    return Known(run_id=line(os.path.basename(run_folder_of(folder))), script=script, began=began, folder=folder)


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
    """Return the folders of this user's runs in the order of their names; those of --log-dir lie elsewhere."""
    runs = runs_folder(env)
    if runs is None:
        return []
    try:
        with os.scandir(runs) as entries:
            names = sorted(entry.name for entry in entries if entry.is_dir())
    except OSError:
        return []
    return [f"{runs}/{name}" for name in names if not name.startswith(".")]  # such a one is being removed


class Found(Struct, frozen=True):
    """The runs of this user that go on."""

    here: list[RunReplies]  # those with a socket on this host
    there: list[Known]  # those that only another host can be asked about


def running(env: Mapping[str, str]) -> list[RunReplies]:
    """Return the status of all runs of this user that can be asked on this host."""
    return [replies for replies in _ask_status_of_all(env) if replies.elsewhere is None]


def look(env: Mapping[str, str]) -> Found:
    """Ask all runs of this user on this host for their status, and find the runs of other hosts.

    Runs of other hosts are known by their folders in a shared home, and by agents here that say which host coordinates them.
    """
    replies_of_all = _ask_status_of_all(env)
    here = [replies for replies in replies_of_all if replies.elsewhere is None]
    names_here = {name_of(replies) for replies in here}
    there = {run.run_id: run for run in _on_other_hosts_by_folder(env, names_here)}
    for coordinated in (replies.elsewhere for replies in replies_of_all):
        if coordinated is not None and coordinated.run_id and coordinated.run_id not in names_here:
            run = Known(
                run_id=line(coordinated.run_id),
                host=coordinated.host,
                srun_job=coordinated.srun_job,
                is_pod=other_host.are_pods(env),
                is_indexed=other_host.are_indexed(env),
            )
            there.setdefault(run.run_id, run)
    return Found(here, list(there.values()))


def _ask_status_of_all(env: Mapping[str, str]) -> list[RunReplies]:
    return ask_all(list(socket_paths(env)), AskStatus(), ANSWER_WITHIN)


def _on_other_hosts_by_folder(env: Mapping[str, str], names_here: Collection[str]) -> list[Known]:
    """Return the runs whose folders show that they go on, on another host; leave those out that have answered on this host."""
    import socket

    found = []
    for folder in folders(env):
        if os.path.basename(folder) in names_here:
            continue
        # the host to ask is that of the command that started all agents, or else of node 0: theirs is the first part
        first = first_that_goes_on(folder)
        start = Node(first).start if first is not None else None
        if start is not None and start.host and start.host != socket.gethostname():
            plan = Run(folder).plan
            job = plan.get("srun_job")
            srun_job = job if isinstance(job, str) and _SRUN_JOB.fullmatch(job) else ""
            is_pod = other_host.are_pods(env) or plan.get("cluster") == "kubernetes"
            # by what a line for that host is to be typed: srun, kubectl or ssh
            how_reached = {"srun_job": srun_job, "is_pod": is_pod, "is_indexed": other_host.are_indexed(env)}
            found.append(replace(of_folder(folder), host=host_name(start.host), **how_reached))
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
        fitting = (name for name in (run.name, run.run_id, run.program) if name.startswith(typed))
        name = next(fitting, "")
        # a shell reads the answer line by line, takes a blank for the end of a word, and click's script for fish a comma
        if _IN_SHELLS.fullmatch(name):
            found.append((name, " ".join(filter(None, (run.program, run.age(now))))))
    return found


def silent(nodes: Iterable[NodeReply]) -> list[str]:
    """Return lines that say which nodes have not answered, and why; more than a few nodes with one reason share a line."""
    by_reason: dict[str, list[NodeReply]] = {}
    for node in nodes:
        if isinstance(node.answer, NoAnswer):
            by_reason.setdefault(node.answer.reason, []).append(node)
    lines = []
    for reason, alike in by_reason.items():
        node_ranks = [node.node_rank for node in alike if node.node_rank is not None]
        all_have_ranks = len(node_ranks) == len(alike)
        if len(alike) <= _MOST_NODES:
            lines += [f"{_node_name(node)} {reason}" for node in alike]
        elif all_have_ranks:
            lines.append(f"each of nodes {compress(node_ranks)} {reason}")
        else:
            lines.append(f"each of {some(map(_node_name, alike), _MOST_NODES)} {reason}")
    return lines


def _node_name(node: NodeReply) -> str:
    return node.host if node.node_rank is None else f"node {node.node_rank} ({node.host})"


def newest_first(runs: Iterable[Known]) -> list[Known]:
    """Return the runs as they are listed: running ones, then ended ones, each with the newest first."""
    return sorted(runs, key=lambda run: (run.replies is None, -run.began, run.run_id))


def heading(run: Known) -> str:
    """Say which run is shown: "k7qx, train.py, running for 3 min"."""
    return ", ".join(filter(None, (run.name, run.program, run.age(time.time()))))
