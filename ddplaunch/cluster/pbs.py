"""PBS Pro, OpenPBS and Torque: a job script or an interactive job, on the first of its hosts. Agents are started over ssh."""

from __future__ import annotations

from ddplaunch.cluster import Allocation, allocate, checks, hostlist
from ddplaunch.cluster.facts import ClusterFacts, printable
from ddplaunch.cluster.hostlist import Host
from ddplaunch.errors import LaunchError

NEEDS = "PBS_NODEFILE"


def discover(facts: ClusterFacts) -> Allocation | None:
    """Return the allocation of the PBS job that we run in; None if we run in none.

    Raises:
        LaunchError: its list of hosts cannot be read, or it and the flags contradict each other.
    """
    path = facts.value("PBS_NODEFILE")
    if path is None:
        return None
    found = hosts(facts, path)
    job = f"PBS job {printable(facts.env.get('PBS_JOBID', ''))}".rstrip()
    if len(found) > 1 and (node := facts.number("PBS_NODENUM")):
        raise LaunchError(
            f"PBS_NODENUM={node}: this is not the first node of {job}, from where ddplaunch starts the agents",
            hint="call ddplaunch once, in the job script; or, once on each node: "
            f"--nnodes {len(found)} --node-rank {node} --master-addr {found[0].address}",
        )
    return allocate.allocate(
        facts,
        "pbs",
        allocate.without_slots(found),
        starter="ssh",
        source=job,
        notes=checks.slots_unused(facts.spec, found),
    )


def hosts(facts: ClusterFacts, path: str) -> tuple[Host, ...]:
    """Return the hosts of the job, with their slots: the file has a line for each.

    Raises:
        LaunchError: the file cannot be read, or names none.
    """
    origin = f"PBS_NODEFILE={printable(path)}"
    return hostlist.parse_hostfile(facts.text_of(path, origin), origin)
