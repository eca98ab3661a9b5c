"""Whether this process belongs to the Slurm job that its variables name: a shell may outlive its job, or be on another host.

Slurm's own processes above this one, or the job's cgroup, show it without a question. Else Slurm is asked, once and for a few
seconds. In a container neither may be seen: there nothing is refused that Slurm itself does not deny.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from msgspec import Struct

from ddplaunch.plan.cluster import endpoints
from ddplaunch.plan.cluster.checks import printable, processes_above
from ddplaunch.reach.slurm.scontrol import (
    JobRecord,
    ScontrolError,
    ScontrolMissing,
    UnknownJob,
    is_unconfigured,
    node_host_name,
    parse_config,
    scontrol,
    show_jobs,
)
from ddplaunch.system.errors import LaunchError

_ANSWER_WITHIN = 5.0  # seconds for each of three questions at most, of which the first is mostly the only one
# what starts tasks, batch scripts and shells; whole names, since a script of the user may begin with "slurm"
_OF_SLURM = frozenset(("slurmstepd", "slurm_script", "srun", "salloc", "scrun"))
_GOING_STATES = frozenset(
    ("RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED", "STOPPED", "RESIZING", "SIGNALING", "STAGE_OUT")
)
# the first namespaces, include/linux/proc_ns.h
_NAMESPACES = {"uts": "uts:[4026531838]", "pid": "pid:[4026531836]"}
_HINT = "`--cluster local` runs it on this machine alone, and a new shell has no such variables"


class Host(Struct, frozen=True, kw_only=True):
    """This host, and what the variables say of it."""

    names: tuple[str, ...]  # its own, and Slurm's if that is another one
    node: str | None  # the node of Slurm that it is: SLURMD_NODENAME; None in a shell of salloc, which may be anywhere
    nodes: tuple[str, ...]  # of the job
    uid: int
    is_container: bool  # its name may be another than the host's, and processes outside are not seen


class Answer(Struct, frozen=True, kw_only=True):
    """What Slurm says about the job."""

    jobs: tuple[JobRecord, ...] = ()  # (): there is no such job, or `problem`
    problem: str = ""  # why Slurm cannot be asked
    has_no_slurm: bool = False  # why: Slurm is not installed or not configured here, so it cannot answer later either


def confirm(env: Mapping[str, str], nodes: Sequence[str], hostname: str, read: Callable[[str], str]) -> str:
    """Return why the job of these variables, with these nodes, may not be this process's, a doubt; "" if it certainly is.

    `read` returns the text of a file of /proc. Of tasks in containers only the first returns a doubt, for all.

    Raises LaunchError: it certainly is not.
    """
    job_id = env.get("SLURM_JOB_ID") or env.get("SLURM_JOBID") or ""
    names_above = processes_above(read) or ()  # None: /proc does not show them
    if is_within(job_id, names_above, _text_or_empty(read, "/proc/self/cgroup")):
        return ""
    answer = _ask_slurm(env, job_id)
    node = env.get("SLURMD_NODENAME")
    names: tuple[str, ...] = (hostname,)
    if node and answer.jobs and not endpoints.is_same_host(node, hostname):
        with suppress(ScontrolError):  # a node's name need not be that of its host: Slurm knows both
            host_name = node_host_name(env, node, _ANSWER_WITHIN)
            if endpoints.is_same_host(host_name, hostname):
                names = (hostname, node)
    host = Host(names=names, node=node or None, nodes=tuple(nodes), uid=os.geteuid(), is_container=_is_container())
    if why := why_not(job_id, host, answer):
        raise LaunchError(why, hint=_HINT)
    is_other_task = env.get("SLURM_PROCID", "0") != "0"
    if host.is_container and is_other_task:
        return ""  # the first task says it once for all
    return doubt(job_id, host, answer)


def is_within(job_id: str, above: Sequence[str], cgroups: str) -> bool:
    """Whether the names of the processes above, or the cgroups of this one, show that it is in a job of Slurm."""
    return not _OF_SLURM.isdisjoint(above) or f"/job_{job_id}/" in f"{cgroups.strip()}/".replace("\n", "/\n")


def why_not(job_id: str, host: Host, answer: Answer) -> str:
    """Return why this process cannot be one of the job's; "" if it may be."""
    job = f"the Slurm job {printable(job_id)} of this shell (SLURM_JOB_ID)"
    if not answer.jobs and not answer.problem:
        return f"{job} has ended: Slurm knows it no more"
    states = {state for record in answer.jobs for state in record.states}
    if answer.jobs and not states & _GOING_STATES:
        return f"{job} does not run: {', '.join(sorted(states))}"
    if owner := next((record.user for record in answer.jobs if host.uid not in (0, record.uid)), ""):
        return f"{job} is {owner}'s"
    is_name_unsure = host.is_container  # which may have a name of its own
    may_answer_later = answer.problem and not answer.has_no_slurm
    if is_name_unsure or may_answer_later:
        return ""
    node = host.node
    if node is not None and not _is_any(node, host.names):
        return f"{job} runs this process on {node} (SLURMD_NODENAME), but this host is {host.names[0]}"
    # a shell of salloc may be on any host with Slurm's commands, from where it can start a step
    if node is None and answer.has_no_slurm and not any(_is_any(one, host.names) for one in host.nodes):
        return f"{job} has other nodes than this host, {host.names[0]}, where no step can be started: {answer.problem}"
    return ""


def doubt(job_id: str, host: Host, answer: Answer) -> str:
    """Return why the job may have ended all the same; "" if Slurm says that it runs, or nothing would wait for its nodes."""
    if answer.jobs or (answer.has_no_slurm and len(host.nodes) == 1):
        return ""
    where = "in this container" if host.is_container else "here"
    return (
        f"whether the Slurm job {printable(job_id)} (SLURM_JOB_ID) still runs cannot be seen {where} ({answer.problem}): "
        "if it has ended, add --cluster local"
    )


def _is_any(node: str, names: Sequence[str]) -> bool:
    return node == "localhost" or any(endpoints.is_same_host(node, name) for name in names)


def _ask_slurm(env: Mapping[str, str], job_id: str) -> Answer:
    """Ask Slurm's controller for the job; one of another cluster than the job's cannot say anything about it."""
    jobs: tuple[JobRecord, ...] = ()
    try:
        with suppress(UnknownJob):
            jobs = show_jobs(env, job_id, _ANSWER_WITHIN)
        is_going = any(record.states & _GOING_STATES for record in jobs)
        if not is_going and (cluster := _other_cluster(env)):
            return Answer(problem=f"it is a job of the cluster {printable(cluster)}")
    except ScontrolError as error:
        return Answer(problem=str(error), has_no_slurm=isinstance(error, ScontrolMissing) or is_unconfigured(error))
    return Answer(jobs=jobs)


def _other_cluster(env: Mapping[str, str]) -> str:
    """Return the cluster of the job if scontrol asks the controller of another one, which may have a job of the same id."""
    name = env.get("SLURM_CLUSTER_NAME")
    asked = parse_config(scontrol(env, ("show", "config"), _ANSWER_WITHIN)).get("ClusterName") if name else None
    return name if name and asked and name != asked else ""


def _is_container() -> bool:
    """Whether this process sees another host name, or other processes, than those of the machine, as far as known."""
    try:
        return any(os.readlink(f"/proc/self/ns/{name}") != first for name, first in _NAMESPACES.items())
    except OSError:
        return True


def _text_or_empty(read: Callable[[str], str], path: str) -> str:
    try:
        return read(path)
    except (OSError, UnicodeDecodeError):
        return ""
