"""Why Slurm is ending the job that we are part of, and which of its nodes it has lost. It asks `scontrol`, and changes nothing.

What `scontrol show` said once node2 of node[1-3] was lost and the tasks had got SIGTERM (Slurm 22.05, jobs with `--no-requeue`):

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
from ddplaunch.slurm import scontrol as slurmctld
from ddplaunch.slurm.job import Condition, ask, condition, restarts
from ddplaunch.slurm.scontrol import Unknown, scontrol
from ddplaunch.supervise.outcome import OUT_OF_WALLTIME, PREEMPTED, ClusterEnding

CONTROLLER = 5.0  # seconds that the controller gets for an answer while the other nodes of the job wait

# what a job's end is called before all else that is said of it
_LABELS = {
    Condition.REQUEUED: "requeued by Slurm",
    Condition.PREEMPTED: PREEMPTED,
    Condition.OUT_OF_WALLTIME: OUT_OF_WALLTIME,
    Condition.CANCELLED: "cancelled",
}


def why_ending(env: Mapping[str, str], patience: float) -> ClusterEnding:
    """Say why Slurm is ending this job; nothing if it is not, or if nobody knows. `patience`: seconds for each answer."""
    try:
        job = ask(env, patience)
    except Unknown:
        # newer versions set it when the job starts: somebody may have moved the end since
        ends_at = env.get("SLURM_JOB_END_TIME", "")
        is_over = ends_at.isdecimal() and time.time() >= int(ends_at)
        return ClusterEnding(OUT_OF_WALLTIME) if is_over else ClusterEnding()
    found = condition(job, restarts(env))
    if found is not Condition.NODE_LOST:
        return ClusterEnding(_LABELS.get(found, ""))
    return ClusterEnding(_who_was_lost(env, job.nodes, patience), (NODE_LOST, "node_lost"))


def gone(given: str, left: str) -> tuple[str, ...]:
    """Give the nodes that a job has no longer, from the host lists of those that it was given and of those that it has."""
    try:
        still = hostlist.expand(left, "NodeList") if left else ()
        return tuple(node for node in hostlist.expand(given, "SLURM_JOB_NODELIST") if node not in still)
    except LaunchError:
        return ()


def down(said: str) -> tuple[str, ...]:
    """Give the nodes that are down, from what `scontrol show nodes -o` says."""
    nodes = slurmctld.parse(said, "NodeName")
    return tuple(node["NodeName"] for node in nodes if "DOWN" in re.split(r"[^A-Z_]", node.get("State", "")))


def _who_was_lost(env: Mapping[str, str], left: str, patience: float) -> str:
    given = env.get("SLURM_JOB_NODELIST", "")
    lost: Sequence[str] = gone(given, left)
    if len(lost) != 1 and given:
        among = hostlist.compress(lost) if lost else given
        try:
            lost = down(scontrol(env, ("show", "nodes", "-o", among), patience))
        except Unknown:
            lost = ()
    if not lost:
        return "a node of the job was lost"
    return f"{hostlist.compress(lost)} {'was' if len(lost) == 1 else 'were'} lost (down in Slurm)"
