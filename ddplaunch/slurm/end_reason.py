"""Why Slurm is ending the job that we are part of, and which of its nodes it has lost. Runs `scontrol`, and changes nothing.

The output of `scontrol show` once node2 of node[1-3] was lost and the tasks had got SIGTERM (Slurm 22.05, `--no-requeue`):

| what happened | the job's NodeList | State of node2 |
| --- | --- | --- |
| its slurmd was killed, SlurmdTimeout before | node[1,3] | DOWN+NOT_RESPONDING, in older versions DOWN* |
| `scontrol update state=down` | node[1,3] | DOWN; IDLE half a second later, for its slurmd lived (ReturnToService=2) |
| `scontrol update state=fail` | node[1-3]; it runs on | MIXED+FAIL |

Nodes on which nothing of the job is left disappear from the list as well.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence

from ddplaunch.cluster import hostlist
from ddplaunch.errors import LaunchError
from ddplaunch.exitcodes import NODE_LOST
from ddplaunch.slurm.job import JobStatus, query_job, restarts, status_of
from ddplaunch.slurm.scontrol import ScontrolError, parse_records, scontrol
from ddplaunch.supervise.outcome import OUT_OF_WALLTIME, PREEMPTED, ClusterEnding

CONTROLLER_TIMEOUT = 5.0  # seconds for a reply of slurmctld while the other nodes of the job wait

# how the report of such an end begins
_LABELS = {
    JobStatus.REQUEUED: "requeued by Slurm",
    JobStatus.PREEMPTED: PREEMPTED,
    JobStatus.OUT_OF_WALLTIME: OUT_OF_WALLTIME,
    JobStatus.CANCELLED: "cancelled",
}


def why_ending(env: Mapping[str, str], timeout: float) -> ClusterEnding:
    """Say why Slurm is ending this job; empty if it is not, or if that is unknown. `timeout`: seconds for each query."""
    try:
        job = query_job(env, timeout)
    except ScontrolError:
        # newer versions set it when the job starts: the time limit may have been changed since
        ends_at = env.get("SLURM_JOB_END_TIME", "")
        is_over = ends_at.isdecimal() and time.time() >= int(ends_at)
        return ClusterEnding(OUT_OF_WALLTIME) if is_over else ClusterEnding()
    found = status_of(job, restarts(env))
    if found is not JobStatus.NODE_LOST:
        return ClusterEnding(_LABELS.get(found, ""))
    return ClusterEnding(_describe_lost(env, job.nodes, timeout), (NODE_LOST, "node_lost"))


def lost_nodes(given: str, left: str) -> tuple[str, ...]:
    """Return the nodes that a job has lost, from the host lists of those that it was given and of those that are left."""
    try:
        still = hostlist.expand(left, "NodeList") if left else ()
        return tuple(node for node in hostlist.expand(given, "SLURM_JOB_NODELIST") if node not in still)
    except LaunchError:
        return ()


def down_nodes(output: str) -> tuple[str, ...]:
    """Return the nodes that are down, from the output of `scontrol show nodes -o`."""
    nodes = parse_records(output, "NodeName")
    return tuple(node["NodeName"] for node in nodes if "DOWN" in re.split(r"[^A-Z_]", node.get("State", "")))


def _describe_lost(env: Mapping[str, str], left: str, timeout: float) -> str:
    given = env.get("SLURM_JOB_NODELIST", "")
    lost: Sequence[str] = lost_nodes(given, left)
    if len(lost) != 1 and given:
        among = hostlist.compress(lost) if lost else given
        try:
            lost = down_nodes(scontrol(env, ("show", "nodes", "-o", among), timeout))
        except ScontrolError:
            lost = ()
    if not lost:
        return "a node of the job was lost"
    return f"{hostlist.compress(lost)} {'was' if len(lost) == 1 else 'were'} lost (down in Slurm)"
