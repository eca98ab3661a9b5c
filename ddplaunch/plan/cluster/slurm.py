"""Slurm: a step that started us, once for each node or once for each rank; or an allocation in which nothing started yet.

SLURM_STEP_ID alone distinguishes them: a batch script has SLURM_PROCID=0 and SLURM_NTASKS=n too. HOSTNAME is the first node's
everywhere, and is not read. Neither are job names, nor any file or command of Slurm: a container may have none of them.
The shell of `srun --pty bash` is a task of a step, but what is typed there is not: the allocation is the shell's to use.

A heterogeneous job has several components, each with nodes of its own. In Slurm 22.05 a step over several of them has its
nodes, and the tasks of each, listed by name, but SLURM_NODEID and SLURM_PROCID count from component to component. A salloc
of such a job sets no variable about all of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from signal import SIGTERM

from msgspec import Struct
from msgspec.structs import replace

from ddplaunch.plan.cluster import Allocation, Rendezvous, Task, by_flags, checks, endpoints, hostlist
from ddplaunch.plan.cluster.checks import HOW_TO_IGNORE, ClusterFacts, printable
from ddplaunch.plan.cluster.hostlist import Host
from ddplaunch.plan.cluster.listed import allocate
from ddplaunch.spec.job import JobSpec
from ddplaunch.spec.options.parsers import digits
from ddplaunch.spec.options.token import RDZV_HOST, RDZV_PORT, TASKS_PER_NODE
from ddplaunch.system.errors import LaunchError
from ddplaunch.system.words import count

# at the start of the grace time of a preemption and at its end: slurm.conf(5), GraceTime
_STOP_SIGNALS_SENT_TWICE = frozenset({SIGTERM})

# slurm.h gives these ids to what is not a step: the batch script, and the shell of an interactive salloc
_FIRST_SPECIAL_STEP = 0xFFFFFFF0
_MAX_COMPONENTS = 128  # of a heterogeneous job: MAX_HET_JOB_COMPS in slurm.h


class _Step(Struct, frozen=True):
    """A step, as one of its tasks sees it."""

    name: str  # "step 0 of Slurm job 84"
    hosts: tuple[str, ...]
    once_per_node: bool  # each node has one task
    task: Task


def discover(facts: ClusterFacts) -> Allocation | None:
    """Return the allocation of the Slurm job that we run in; None if we run in none.

    Raises LaunchError: Slurm and the flags contradict each other.
    """
    job = facts.number("SLURM_JOB_ID", "SLURM_JOBID")
    if job is None:
        return None
    step = step_id(facts)
    if step is not None and facts.value("SLURM_PTY_PORT") and checks.is_typed_in_shell(facts.here.read):
        step = None  # the other tasks of the step are shells too: none of them runs ddplaunch
    found = _outside(facts, job) if step is None else _inside(facts, job, step)
    # in a step that ddplaunch has started, Slurm's variable counts the tasks of the step: one agent on each node
    tasks = facts.number("SLURM_NTASKS_PER_NODE" if step is None else TASKS_PER_NODE)
    requeues = facts.number("SLURM_RESTART_COUNT") or 0
    return replace(found, tasks_per_node=tasks or None, requeues=requeues, sent_again=_STOP_SIGNALS_SENT_TWICE)


def step_id(facts: ClusterFacts) -> int | None:
    """Return the step whose task we are, None outside of one."""
    step = facts.number("SLURM_STEP_ID", "SLURM_STEPID")
    return None if step is None or step >= _FIRST_SPECIAL_STEP else step


def job_hosts(env: Mapping[str, str]) -> tuple[str, ...]:
    """Return the nodes of the job, of all its components; LaunchError if the list is missing or malformed."""
    hosts = [host for part in components(env) for host in part]
    return tuple(hosts) or _hosts(env, "SLURM_JOB_NODELIST", "SLURM_NODELIST")


def components(env: Mapping[str, str]) -> tuple[tuple[str, ...], ...]:
    """Return the nodes of each component of a heterogeneous job; () for any other."""
    text = env.get("SLURM_HET_SIZE") or env.get("SLURM_PACK_SIZE") or "1"
    size = digits(text)
    if not size or size > _MAX_COMPONENTS:
        raise LaunchError(f"SLURM_HET_SIZE={printable(text)} is no number of components", hint=HOW_TO_IGNORE)
    names = ("SLURM_JOB_NODELIST_HET_GROUP_", "SLURM_JOB_NODELIST_PACK_GROUP_")
    return tuple(_hosts(env, *(f"{name}{number}" for name in names)) for number in range(size if size > 1 else 0))


def component_of(env: Mapping[str, str], host: str) -> int | None:
    """Return the number of the component that this host is in; None in a job that is not heterogeneous."""
    holders = (number for number, hosts in enumerate(components(env)) if is_among(host, hosts))
    return next(holders, None)


def is_among(host: str, hosts: Iterable[str]) -> bool:
    """Return whether a host is one of these, with or without its domain."""
    return any(endpoints.is_same_host(one, host) for one in hosts)


def _outside(facts: ClusterFacts, job: int) -> Allocation:
    """Return the allocation for a batch script, or the shell of salloc: ddplaunch starts a step there, on this node too.

    A step because of how Slurm ends a job: the shell of its script ends at once, and where Slurm tracks processes by cgroups,
    all that the script has started is killed without a signal before. The tasks of a step get SIGTERM, and time.
    """
    hosts = job_hosts(facts.env)
    doubt = facts.here.doubt_about_job(hosts)
    found = allocate(
        facts,
        "slurm",
        [Host(name=name) for name in hosts],
        starter="srun",
        source=f"Slurm job {job}",
        here=facts.value("SLURMD_NODENAME"),
        starts_here_too=not facts.spec.no_control,  # an agent in a step needs the control channel to this command
        notes=_tasks_unused(facts),
    )
    return replace(found, doubt=doubt)


def without_step(spec: JobSpec, found: Allocation) -> Allocation:
    """Return the allocation of a job of this node alone, whose agent is this command's own, for one that was to be started."""
    alone = by_flags.of_one_node(spec, found.hosts_to_start_on[0].address, cluster="slurm", notes=found.notes)
    kept = {name: getattr(found, name) for name in ("tasks_per_node", "requeues", "sent_again", "doubt")}
    return replace(alone, **kept)


def _tasks_unused(facts: ClusterFacts) -> list[str]:
    """Note that a number of tasks for the whole job does not count workers, where the user may expect that."""
    tasks, nodes = facts.number("SLURM_NTASKS"), facts.number("SLURM_JOB_NUM_NODES", "SLURM_NNODES") or 1
    # then there is a worker for each GPU
    has_gpus = any(name.startswith(("SLURM_GPUS", "SLURM_JOB_GPUS")) for name in facts.env)
    has_number_per_node = facts.spec.nproc_per_node is not None or facts.value("SLURM_NTASKS_PER_NODE")
    if tasks is None or tasks <= nodes or has_gpus or has_number_per_node:
        return []
    each = -(-tasks // nodes)  # rounded up
    return [
        f"the {tasks} tasks of the job (SLURM_NTASKS) do not count workers, and there is one on each node: "
        f"for more, add --nproc-per-node {each}"
    ]


def _inside(facts: ClusterFacts, job: int, number: int) -> Allocation:
    """Return the allocation inside step `number` of a job: one agent on each node, or one task for each worker."""
    spec, step = facts.spec, _step(facts, job, number)
    port = facts.number(RDZV_PORT)  # the ddplaunch command that has started the step, if one has, coordinates it there
    is_ours, is_alone = port is not None, step.task.world_size == 1
    # variables left over from another job do no harm where no other task is waited for; those of a step of ours are new
    doubt = "" if is_ours or is_alone else facts.here.doubt_about_job(step.hosts)
    number_of_nodes = len(step.hosts)
    checks.refuse_host_filters(spec, f"{step.name} is running already")
    hint = f"leave --nnodes out, or start as many: srun --nodes {spec.nnodes[1]} --ntasks-per-node 1 ddplaunch ..."
    nnodes = checks.nnodes(spec, number_of_nodes, step.name, hint=hint)
    node_rank = checks.node_rank(spec, step.task.node_rank, "SLURM_NODEID")
    if is_alone and not is_ours:
        return by_flags.of_one_node(spec, step.hosts[0], cluster="slurm")
    if not step.once_per_node:
        checks.check_one_worker(spec, step.name, hint="srun --ntasks-per-node 1, or leave --nproc-per-node out")
    # then the user has placed the tasks: rank 0 may be on any node, and only the agent there knows that
    is_placed_by_user = not step.once_per_node and facts.value("SLURM_DISTRIBUTION") == "arbitrary"
    addresses = step.hosts if is_placed_by_user else step.hosts[:1]
    if number_of_nodes == 1:
        addresses = (endpoints.LOOPBACK,)
    endpoint, rendezvous = endpoints.of_agents(
        spec,
        addresses,
        f"the first node of {step.name}" if number_of_nodes > 1 else "a single node",
        ports=endpoints.ports_of(job, number),
        coordinator=(step.task.node_rank if step.once_per_node else step.task.rank) == 0,
    )
    if port is not None:
        # by name and by address: this node may not know the name of the command's host
        of_command = (facts.value(RDZV_HOST), facts.value("SLURM_LAUNCH_NODE_IPADDR"))
        rendezvous = Rendezvous(
            addresses=tuple(filter(None, of_command)), ports=endpoints.ports_from(port), coordinator=False
        )
    return Allocation(
        cluster="slurm",
        # with a task for each worker the number of nodes is fixed
        nnodes=nnodes if step.once_per_node else (number_of_nodes, number_of_nodes),
        node_rank=node_rank,
        hosts=step.hosts,
        endpoint=endpoint,
        rendezvous=rendezvous,
        task=None if step.once_per_node else step.task,
        has_front=is_ours,  # the command that has started the step, and coordinates it
        identity="" if is_ours else f"slurm {job}.{number}",  # agents of a step of ours know each other by the port
        notes=tuple(checks.endpoint_unused(spec, "slurm determines the endpoint")),
        doubt=doubt,
    )


def _step(facts: ClusterFacts, job: int, number: int) -> _Step:
    """Return the step of which this process is a task, from the variables of the task; LaunchError if these contradict."""
    named = _hosts(facts.env, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    tasks = facts.needed("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS")
    layout = facts.value("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE") or f"1(x{len(named)})"  # or "4(x2),3"
    counts = hostlist.counts(layout, "SLURM_STEP_TASKS_PER_NODE")
    # in a heterogeneous job SLURM_NODEID counts the nodes of one component after the other
    hosts, per_node = _in_nodeid_order(components(facts.env), named, counts)
    node, rank, local_rank = (facts.needed(name) for name in ("SLURM_NODEID", "SLURM_PROCID", "SLURM_LOCALID"))
    name = f"step {number} of Slurm job {job}"
    if len(per_node) != len(hosts) or sum(per_node) != tasks or node >= len(hosts) or rank >= tasks:
        raise LaunchError(
            f"the variables of {name} contradict each other: {tasks} tasks, {layout} on {count(len(hosts), 'node')}, "
            f"and this is task {rank} on node {node}",
            hint=HOW_TO_IGNORE,
        )
    task = Task(
        rank=rank,
        world_size=tasks,
        local_rank=local_rank,
        local_world_size=per_node[node],
        node_rank=node,
        nnodes=len(hosts),
        node_cpus=facts.number("SLURM_CPUS_ON_NODE"),
    )
    return _Step(name, hosts, once_per_node=all(tasks == 1 for tasks in per_node), task=task)


def _in_nodeid_order(
    components: tuple[tuple[str, ...], ...], hosts: tuple[str, ...], counts: tuple[int, ...]
) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Put the nodes of a step, and the numbers of their tasks, into the order in which SLURM_NODEID counts them."""
    index_of = {host: index for index, host in enumerate(host for part in components for host in part)}
    if len(counts) != len(hosts) or not index_of.keys() >= set(hosts):
        return hosts, counts
    pairs = sorted(zip(hosts, counts, strict=True), key=lambda pair: index_of[pair[0]])
    return tuple(host for host, _ in pairs), tuple(tasks for _, tasks in pairs)


def _hosts(env: Mapping[str, str], *names: str) -> tuple[str, ...]:
    name = next((name for name in names if env.get(name)), None)
    if name is None:
        raise LaunchError(f"{names[0]} is not set, though this is a Slurm job", hint=HOW_TO_IGNORE)
    return hostlist.expand(env[name], name)
