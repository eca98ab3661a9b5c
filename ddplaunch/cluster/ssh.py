"""Hosts that the user lists, with --hosts or --hostfile. Agents are started over ssh."""

from __future__ import annotations

from ddplaunch.cluster import Allocation, allocate, hostlist
from ddplaunch.cluster.facts import ClusterFacts

NEEDS = "--hosts or --hostfile"


def discover(facts: ClusterFacts) -> Allocation | None:
    """Return the allocation of the hosts that were listed; None if none were.

    Raises:
        LaunchError: the list is wrong, or contradicts the other flags.
    """
    spec = facts.spec
    if spec.hosts:
        source = spec.asked("hosts", spec.hosts)
        found = hostlist.parse_hosts(spec.hosts, spec.origin("hosts"))
    elif spec.hostfile:
        source = spec.hostfile
        asked = spec.asked("hostfile", spec.hostfile)
        found = hostlist.parse_hostfile(facts.text_of(spec.hostfile, asked), spec.hostfile)
    else:
        return None
    # a name from ~/.ssh/config is one that workers may not resolve
    return allocate.allocate(facts, "ssh", found, starter="ssh", source=source, resolvable=False)
