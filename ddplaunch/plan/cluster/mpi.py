"""mpirun, mpiexec, aprun, jsrun or flux run, which started us once for each rank or once for each node.

MPI itself is neither needed nor used: the variables of its launchers tell all but the host of rank 0, and some tell that too.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from ddplaunch.plan.cluster import Allocation, Task, checks, endpoints, listed, slurm
from ddplaunch.plan.cluster.checks import HOW_TO_IGNORE, ClusterFacts, processes_above
from ddplaunch.system.errors import LaunchError

# --- the processes that a launcher has started together, as one of them sees them: which of how many it is
#
# A world of one process counts as none, and so does one that was inherited from another host.


class _Launcher(Struct, frozen=True, kw_only=True):
    """The variables of a launcher; several names where its versions differ."""

    name: str
    rank_variable: str
    size_variables: tuple[str, ...]
    local_rank_variables: tuple[str, ...]
    local_size_variables: tuple[str, ...] = ()
    nodes_variables: tuple[str, ...] = ()


def _of_prefix(name: str, prefix: str) -> _Launcher:
    return _Launcher(
        name=name,
        rank_variable=f"{prefix}_RANK",
        size_variables=(f"{prefix}_SIZE",),
        local_rank_variables=(f"{prefix}_LOCAL_RANK",),
        local_size_variables=(f"{prefix}_LOCAL_SIZE",),
    )


# the special ones first: most of them set PMI_* too
_LAUNCHERS = (
    _of_prefix("Open MPI", "OMPI_COMM_WORLD"),  # docs.open-mpi.org, "Environment variables set for MPI applications"
    _of_prefix("MVAPICH", "MV2_COMM_WORLD"),
    _of_prefix("jsrun", "JSM_NAMESPACE"),
    _Launcher(  # flux-core, src/shell/task.c
        name="Flux",
        rank_variable="FLUX_TASK_RANK",
        size_variables=("FLUX_JOB_SIZE",),
        local_rank_variables=("FLUX_TASK_LOCAL_ID",),
        nodes_variables=("FLUX_JOB_NNODES",),
    ),
    _Launcher(
        name="PALS",
        rank_variable="PALS_RANKID",
        size_variables=("PALS_SIZE", "PMI_SIZE"),
        local_rank_variables=("PALS_LOCAL_RANKID", "PMI_LOCAL_RANK"),
        local_size_variables=("PALS_LOCAL_SIZE", "PMI_LOCAL_SIZE"),
    ),
    _Launcher(  # MPICH's Hydra and Intel MPI; Cray's PMI
        name="PMI",
        rank_variable="PMI_RANK",
        size_variables=("PMI_SIZE",),
        local_rank_variables=("PMI_LOCAL_RANK", "MPI_LOCALRANKID"),
        local_size_variables=("PMI_LOCAL_SIZE", "MPI_LOCALNRANKS"),
    ),
)
_JOB_NAMES = ("PMIX_NAMESPACE", "FLUX_JOB_ID", "PALS_APID", "SLURM_JOB_ID", "LSB_JOBID", "PBS_JOBID")


class World(Struct, frozen=True, kw_only=True):
    """Processes that were started together, and our place among them."""

    launcher: _Launcher
    job: str | None  # the job's id, if it has one
    rank: int
    size: int

    def __str__(self) -> str:
        return f"{self.launcher.name} with {self.size} processes"


def find_world(facts: ClusterFacts) -> World | None:
    """Return the processes that we were started with, None if there are no others.

    Raises LaunchError: a variable does not hold a number.
    """
    if (started_on := facts.value("PMIX_HOSTNAME")) and not endpoints.is_same_host(started_on, facts.hostname):
        return None  # inherited, e.g. by a batch job from the shell that submitted it
    for launcher in _LAUNCHERS:
        rank, size = facts.number(launcher.rank_variable), facts.number(*launcher.size_variables)
        if rank is not None and size is not None and rank < size and size > 1:
            return World(launcher=launcher, job=facts.value(*_JOB_NAMES), rank=rank, size=size)
    return None


# --- the allocation

# whole names of launchers and of their daemons: a script of the user may be called "mpi-job.sh"
_ANY_LAUNCHER = re.compile(
    r"mpi(run|exec)([._-].*)?|orte(run|d)|prte(run|d)?|prun|hydra_.*|pmi_proxy|mpispawn|slurmstepd|srun|flux.*|pals.*|jsrun|jsmd?"
    r"|aprun|apinit|apshepherd|pbs_.*|res|blaunch|sge_.*"
)
_NOTE_WITHOUT_ID = "this job has no id: two such jobs on the same hosts at a time need a --rdzv-id each"


def discover(facts: ClusterFacts) -> Allocation | None:
    """Return the allocation of all processes that the launcher started; None if this process is the only one.

    Raises LaunchError: the variables are incomplete or contradict the flags, or the host of node 0 is not known.
    """
    found = find_world(facts)
    if found is None:
        return None
    why_left_over = _why_left_over(facts, found)
    try:
        return replace(_allocation(facts, found), doubt=why_left_over)
    except LaunchError as error:
        if why_left_over:
            error.hint = f"{error.hint}\n{why_left_over}"
        raise


def may_be_below_launcher(read: Callable[[str], str]) -> bool:
    """Return whether a launcher or a daemon of one is above this process, or may be, as /proc does not show all above."""
    above = processes_above(read)
    return above is None or any(map(_ANY_LAUNCHER.fullmatch, above))


def _why_left_over(facts: ClusterFacts, found: World) -> str:
    """Return why the variables of the launcher may be left over in a shell or a container; "" if they are not.

    In a container the launcher may run outside and not be seen, so this is no reason to refuse.
    """
    if may_be_below_launcher(facts.here.read):
        return ""
    size = next(name for name in found.launcher.size_variables if facts.value(name))
    return (
        f"{size}={found.size} is set, but no launcher of MPI is seen above this process: "
        "if none has started it, add --cluster local"
    )


def _allocation(facts: ClusterFacts, found: World) -> Allocation:
    """Return the allocation of all processes that the launcher started, one on each node or one for each rank.

    Raises LaunchError: variables and flags contradict each other, or the host of node 0 is not known.
    """
    spec = facts.spec
    task = _task(facts, found)
    once_per_node = task.local_world_size == 1
    if not once_per_node:
        hint = "start it once per node (mpirun -N 1), or leave --nproc-per-node out"
        checks.check_one_worker(spec, str(found), hint=hint)
    hint = f"leave --nnodes out, or start it on as many nodes: mpirun -np {spec.nnodes[1]} -N 1 ddplaunch ..."
    nnodes = checks.nnodes(spec, task.nnodes, str(found), hint=hint)
    node_rank = checks.node_rank(spec, task.node_rank, found.launcher.rank_variable)
    checks.refuse_host_filters(spec, f"{found.launcher.name} has started the processes")
    # all agents have to find the same ports: from the id of their job, if the launcher has given one, else fixed ones, which
    # two jobs on one host share, unless a --rdzv-id tells the two apart
    ports = endpoints.ports_of_name(found.job) if found.job else endpoints.ports_beside(endpoints.STATIC_PORT)
    endpoint, rendezvous = endpoints.of_agents(spec, *_addresses(facts, task), ports=ports, coordinator=found.rank == 0)
    notes = () if found.job or spec.rdzv_id else (_NOTE_WITHOUT_ID,)
    return Allocation(
        cluster="mpi",
        # with a process for each worker the number of nodes is fixed
        nnodes=nnodes if once_per_node else (task.nnodes, task.nnodes),
        node_rank=node_rank,
        endpoint=endpoint,
        rendezvous=rendezvous,
        task=None if once_per_node else task,
        identity=f"mpi {found.job}" if found.job else "",
        notes=(*notes, *checks.endpoint_unused(spec, "mpi determines the endpoint")),
    )


def _task(facts: ClusterFacts, world: World) -> Task:
    """Return which task this process is, and on which node, from ranks and sizes alone; each node has as many processes.

    Raises LaunchError: nodes have different numbers of processes, or it is not known how many this one has.
    """
    local_rank = facts.number(*world.launcher.local_rank_variables)
    size = facts.number(*world.launcher.local_size_variables)
    nodes = facts.number(*world.launcher.nodes_variables)
    if nodes and world.size % nodes == 0:  # Flux says how many nodes there are, not how many processes a node has
        size = world.size // nodes
    process = f"{world.launcher.rank_variable} says that this is one of {world.size} processes"
    if local_rank is None or not size or local_rank >= size:
        raise LaunchError(f"{process}, but not how many of them are on this node", hint=HOW_TO_IGNORE)
    if world.size % size:
        raise LaunchError(
            f"{process}, and {size} of them are on this node: others have a different number",
            hint="start ddplaunch once on each node (mpirun -N 1), and let it start the workers",
        )
    nodes = world.size // size
    # Launchers fill one node after the other, or deal ranks round-robin. The local rank tells which: it is the position in a
    # filled node, or the number of the round. If it is neither, Open MPI 5 has filled the node in another order.
    is_position, is_round = local_rank == world.rank % size, local_rank == world.rank // nodes
    round_robin = is_round and not is_position
    return Task(
        rank=world.rank,
        world_size=world.size,
        local_rank=local_rank,
        local_world_size=size,
        node_rank=world.rank % nodes if round_robin else world.rank // size,
        nnodes=nodes,
    )


def started_inside_slurm(facts: ClusterFacts) -> bool:
    """Whether an MPI launcher inside a Slurm job started us, as mpirun in a batch script does."""
    found = find_world(facts)
    if found is None:
        return False
    # srun sets PMI_* as well, to the same as its own variables
    own = (facts.number("SLURM_PROCID"), facts.number("SLURM_STEP_NUM_TASKS"))
    return slurm.step_id(facts) is None or own != (found.rank, found.size)


class _HostOfRank0(NamedTuple):
    """The host on which rank 0 should be, as a launcher or a scheduler tells."""

    addresses: tuple[str, ...]
    origin: str
    is_here: bool  # it is this host


def _addresses(facts: ClusterFacts, task: Task) -> tuple[tuple[str, ...], str]:
    """Return the possible addresses of rank 0 and their origin; LaunchError if nothing tells them, or if they are wrong."""
    if asked := endpoints.first_given(facts.spec, (facts.spec.master_addr, "master_addr")):
        typed, origin = asked
        return (typed,), origin
    if task.nnodes == 1:
        return (endpoints.LOOPBACK,), "a single node"
    if address := facts.value("MASTER_ADDR"):
        return (address,), "MASTER_ADDR"
    found = _manager_host(facts) or _scheduler_host(facts)
    if found is None:
        raise LaunchError(
            f"the host of rank 0 of these {task.world_size} processes is not known",
            hint="add --master-addr HOST, with the host of rank 0",
        )
    if task.rank == 0 and not found.is_here:
        raise LaunchError(
            f"rank 0 is on {facts.hostname}, but the others look for it on {found.addresses[0]}, {found.origin}",
            hint=f"add --master-addr {facts.hostname}",
        )
    return found.addresses, found.origin


def _manager_host(facts: ClusterFacts) -> _HostOfRank0 | None:
    """Return the host of Open MPI's mpirun, which usually has rank 0; None if another launcher started us."""
    # Open MPI 4: "3317891072.0;tcp://10.77.0.12,172.17.0.1:33615", and the same for the daemon of this node
    uri = facts.env.get("OMPI_MCA_orte_hnp_uri", "")
    if found := re.search(r";tcp://([\d.,]+):", uri):
        is_here = facts.env.get("OMPI_MCA_orte_local_daemon_uri") == uri
        return _HostOfRank0(tuple(found[1].split(",")), "the host of mpirun", is_here=is_here)
    # Open MPI 5: the job is called "prterun-HOST-PID@1"
    if found := re.fullmatch(r"prterun-(.+)-\d+@\d+", facts.env.get("PMIX_NAMESPACE", "")):
        is_here = endpoints.is_same_host(found[1], facts.hostname)
        return _HostOfRank0((found[1],), "the host of mpirun", is_here=is_here)
    return None


def _scheduler_host(facts: ClusterFacts) -> _HostOfRank0 | None:
    """Return the first host of the batch job that we run in, where launchers place rank 0; None if it is not known here."""
    if facts.value("SLURM_JOB_ID"):
        host, source = slurm.job_hosts(facts.env)[0], "the first of SLURM_JOB_NODELIST"
    elif path := facts.value("PBS_NODEFILE"):
        try:
            host, source = listed.pbs_hosts(facts, path)[0].address, "the first of PBS_NODEFILE"
        except LaunchError:
            return None  # PBS makes the file on the first node alone
    elif of_lsf := listed.lsf_hosts(facts):
        host, source = of_lsf[0].address, "the first host of the LSF job"
    else:
        return None
    return _HostOfRank0((host,), source, is_here=endpoints.is_same_host(host, facts.hostname))
