"""Hosts on which ddplaunch starts the agents: those that --hosts, --hostfile, PBS or LSF list. Pure; starts nothing."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from ddplaunch.plan.cluster import Allocation, by_flags, checks, endpoints, hostlist
from ddplaunch.plan.cluster.checks import ClusterFacts, printable
from ddplaunch.plan.cluster.hostlist import Host
from ddplaunch.spec.job import JobSpec
from ddplaunch.system.errors import LaunchError
from ddplaunch.system.words import count

HAS_FAILED = "the machine has failed there in the last 7 days, as `ddplaunch doctor --nodes` shows"


def allocate(
    facts: ClusterFacts,
    cluster: str,
    hosts: Sequence[Host],
    *,
    starter: str,
    source: str,
    resolvable: bool = True,
    here: str | None = None,
    starts_here_too: bool = False,
    notes: Sequence[str] = (),
) -> Allocation:
    """Return the allocation of as many of `hosts` as the job asks for; for this host alone, no agent has to be started.

    `starter` is how agents are started, `source` what listed the hosts, for messages. `resolvable`: workers can resolve these
    names, which ssh alone may know. `here`: the cluster's name for this host. `starts_here_too`: the agent of this host is never
    this command, but is started like all others, even if there is no other host.
    """
    spec = facts.spec
    if spec.node_rank is not None:
        raise LaunchError(
            f"{spec.typed('node_rank', spec.node_rank)}: ddplaunch starts all nodes of {source} itself, in their order",
            hint="leave --node-rank out",
        )
    hosts, warnings = _choose_hosts(facts, hosts, source)
    least, most = _nnodes(spec, hosts, source)
    chosen = tuple(_with_workers(spec, host) for host in hosts[:most])
    remarks = [*notes]
    if unused := _names(hosts[most:]):
        remarks.append(f"{unused} of {source} is not used: --nnodes asks for fewer")
    first, is_alone = chosen[0], len(chosen) == 1
    is_this_host = first.name == "localhost" or endpoints.is_same_host(first.address, here or facts.hostname)
    has_user = first.name != first.address
    # this command can be the agent of this host, but not as another user, nor with some of its devices only
    is_here = is_alone and is_this_host and not has_user and first.devices is None
    if is_here and not starts_here_too:
        alone = by_flags.of_one_node(spec, first.address, cluster=cluster, nproc_per_node=first.slots, notes=remarks)
        return replace(alone, warnings=warnings)
    if is_alone:
        address: tuple[str | None, str] = endpoints.LOOPBACK, "a single node"
    else:
        address = (first.address, f"the first node of {source}") if resolvable else endpoints.ADDRESS_BY_NODE_0
    return Allocation(
        cluster=cluster,
        nnodes=(least, most),
        hosts=tuple(host.address for host in chosen),
        endpoint=endpoints.of_workers(spec, address=address),
        hosts_to_start_on=chosen,
        starter=starter,
        is_here=is_here,
        notes=(*remarks, *checks.endpoint_unused(spec, "ddplaunch chooses the endpoint of agents that it starts")),
        warnings=warnings,
    )


def _choose_hosts(facts: ClusterFacts, hosts: Sequence[Host], source: str) -> tuple[tuple[Host, ...], tuple[str, ...]]:
    """Return the hosts that --include, --exclude and --avoid-bad-nodes leave, and a warning if the last leaves any out."""
    spec = facts.spec
    if spec.include:
        hosts = hostlist.include(hosts, spec.include, spec.origin("include"))
    elif spec.exclude:
        hosts = hostlist.exclude(hosts, spec.exclude, spec.origin("exclude"))
    bad = [host for host in hosts if any(endpoints.is_same_host(one, host.address) for one in facts.avoided)]
    good = tuple(host for host in hosts if host not in bad)
    if not bad:
        return good, ()
    _check_enough_are_left(spec, good, bad, source)
    return good, (f"{spec.origin('avoid_bad_nodes')} leaves out {_names(bad)}: {HAS_FAILED}",)


def _nnodes(spec: JobSpec, hosts: Sequence[Host], source: str) -> tuple[int, int]:
    """Return the minimum and maximum number of nodes: as asked for, else all hosts."""
    min_nodes, max_nodes = spec.nnodes if checks.has_nnodes_given(spec) else checks.nnodes_of_all(spec, len(hosts))
    if min_nodes > len(hosts):
        raise LaunchError(
            f"{checks.nnodes_as_typed(spec)}, but {source} has {count(len(hosts), 'node')}: {_names(hosts)}",
            hint=f"--nnodes {len(hosts)}, or leave it out to use all",
        )
    return min_nodes, min(max_nodes, len(hosts))


def _check_enough_are_left(spec: JobSpec, hosts: Sequence[Host], bad: Sequence[Host], source: str) -> None:
    """Refuse a job that has too few `hosts` without the `bad` ones, on which a machine has failed."""
    needed = spec.nnodes[0] + spec.spares  # the former is 1 if no number was asked for
    if needed > len(hosts):
        option = spec.origin("avoid_bad_nodes")
        raise LaunchError(
            f"{option} leaves {_names(bad)} of {source} out, and the job needs {count(needed, 'node')}, not {len(hosts)}",
            hint=f"list more hosts, leave {option} out, or type `ddplaunch doctor --forget {bad[0].address}`",
        )


def _names(hosts: Sequence[Host]) -> str:
    return hostlist.compress([host.address for host in hosts])


def _with_workers(spec: JobSpec, host: Host) -> Host:
    """Return this host with as many workers as --nproc-per-node asks for, at most one for each slot that is listed.

    --nproc-per-node may also be a word such as "gpu": then each host counts its workers itself.
    """
    wanted = spec.nproc_per_node
    if wanted is None or host.slots is None:
        return host
    if isinstance(wanted, int) and wanted > host.slots:
        raise LaunchError(
            f"{spec.typed('nproc_per_node', wanted)}, but {host.address} has {count(host.slots, 'slot')}",
            hint=f"list it as {host.address}:{wanted}",
        )
    return replace(host, slots=wanted if isinstance(wanted, int) else None)


# --- who lists them


def discover_ssh(facts: ClusterFacts) -> Allocation | None:
    """Return the allocation of the hosts that --hosts or --hostfile lists; None without these options."""
    spec = facts.spec
    if spec.hosts:
        source = spec.typed("hosts", spec.hosts)
        found = hostlist.parse_hosts(spec.hosts, spec.origin("hosts"))
    elif spec.hostfile:
        source = spec.hostfile
        found = hostlist.parse_hostfile(facts.text_of(source, spec.typed("hostfile", source)), source)
    else:
        return None
    # a name from ~/.ssh/config is one that workers may not resolve
    return allocate(facts, "ssh", found, starter="ssh", source=source, resolvable=False)


def discover_pbs(facts: ClusterFacts) -> Allocation | None:
    """Return the allocation of the PBS job that we run in; None if we run in none."""
    path = facts.value("PBS_NODEFILE")
    if path is None:
        return None
    found = pbs_hosts(facts, path)
    job = f"PBS job {printable(facts.env.get('PBS_JOBID', ''))}".rstrip()
    if len(found) > 1 and (node := facts.number("PBS_NODENUM")):
        raise LaunchError(
            f"PBS_NODENUM={node}: this is not the first node of {job}, from where ddplaunch starts the agents",
            hint="call ddplaunch once, in the job script; or, once on each node: "
            f"--nnodes {len(found)} --node-rank {node} --master-addr {found[0].address}",
        )
    return _of_batch_job(facts, "pbs", found, starter="ssh", source=job)


def pbs_hosts(facts: ClusterFacts, path: str) -> tuple[Host, ...]:
    """Return the hosts of the job, with their slots: the file has a line for each."""
    origin = f"PBS_NODEFILE={printable(path)}"
    return hostlist.parse_hostfile(facts.text_of(path, origin), origin)


def discover_lsf(facts: ClusterFacts) -> Allocation | None:
    """Return the allocation of the LSF job that we run in; None if we run in none, or no variable lists its hosts."""
    job = facts.value("LSB_JOBID")
    found = lsf_hosts(facts) if job else ()
    if job is None or not found:
        return None
    return _of_batch_job(facts, "lsf", found, starter="blaunch", source=f"LSF job {printable(job)}")


def lsf_hosts(facts: ClusterFacts) -> tuple[Host, ...]:
    """Return the hosts of an LSF job with their slots; none if no variable lists hosts."""
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


def _of_batch_job(facts: ClusterFacts, cluster: str, hosts: Sequence[Host], *, starter: str, source: str) -> Allocation:
    """Return the allocation of a batch job, where the slots of a host count CPUs rather than workers."""
    slots = max(host.slots or 1 for host in hosts)
    notes = []
    if slots > 1 and facts.spec.nproc_per_node is None:
        notes = [f"the {slots} slots of a host do not count workers: for as many, add --nproc-per-node {slots}"]
    without_slots = [replace(host, slots=None) for host in hosts]
    return allocate(facts, cluster, without_slots, starter=starter, source=source, notes=notes)
