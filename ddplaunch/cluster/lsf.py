"""IBM Spectrum LSF: a job script or an interactive job, on the first of its hosts. Agents are started by blaunch."""

from __future__ import annotations

from ddplaunch.cluster import Allocation, allocate, checks, hostlist
from ddplaunch.cluster.facts import ClusterFacts, printable
from ddplaunch.cluster.hostlist import Host
from ddplaunch.errors import LaunchError

NEEDS = "LSB_JOBID with LSB_MCPU_HOSTS or LSB_DJOB_HOSTFILE"


def discover(facts: ClusterFacts) -> Allocation | None:
    """Return the allocation of the LSF job that we run in; None if we run in none.

    Raises:
        LaunchError: its list of hosts is wrong, or it and the flags contradict each other.
    """
    job = facts.value("LSB_JOBID")
    found = hosts(facts) if job else ()
    if job is None or not found:
        return None
    return allocate.allocate(
        facts,
        "lsf",
        allocate.without_slots(found),
        starter="blaunch",
        source=f"LSF job {printable(job)}",
        notes=checks.slots_unused(facts.spec, found),
    )


def hosts(facts: ClusterFacts) -> tuple[Host, ...]:
    """Return the hosts of the job, with their slots; none where nothing lists them.

    Raises:
        LaunchError: what lists them is wrong.
    """
    if listed := facts.value("LSB_MCPU_HOSTS"):  # "hosta 4 hostb 4"
        words = listed.split()
        if len(words) % 2:
            raise LaunchError(f"LSB_MCPU_HOSTS={printable(listed)} is not a list of hosts and numbers")
        pairs = zip(words[::2], words[1::2], strict=True)
        return hostlist.parse_hosts(",".join(map(":".join, pairs)), "LSB_MCPU_HOSTS")
    if path := facts.value("LSB_DJOB_HOSTFILE"):  # where the list is too long for a variable
        origin = f"LSB_DJOB_HOSTFILE={printable(path)}"
        return hostlist.parse_hostfile(facts.text_of(path, origin), origin)
    return ()
