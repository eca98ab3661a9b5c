"""mpirun, mpiexec, aprun, jsrun or flux run, which started us once for each rank or once for each node.

MPI itself is neither needed nor used: the variables of its launchers say all but where rank 0 is, and some say that too.
"""

from __future__ import annotations

import re

from ddplaunch.cluster import Allocation, Task, checks, endpoints, lsf, mpi_world, pbs, slurm
from ddplaunch.cluster.allocate import met
from ddplaunch.cluster.facts import ClusterFacts
from ddplaunch.cluster.mpi_world import World
from ddplaunch.errors import LaunchError

NEEDS = "OMPI_COMM_WORLD_RANK, PMI_RANK, PALS_RANKID, FLUX_TASK_RANK or the like, of several processes"

_NAMELESS = "nothing tells this job from another on the same hosts: two at a time need a --rdzv-id each"


def discover(scene: ClusterFacts) -> Allocation | None:
    """Give the allocation of the processes that we are one of; None if nothing started several.

    Raises:
        LaunchError: the variables are incomplete or contradict the flags, or nothing says where node 0 is.
    """
    found = mpi_world.find(scene)
    if found is None:
        return None
    task = _task(scene, found)
    once_per_node = task.local_world_size == 1
    if not once_per_node:
        hint = "start it once per node (mpirun -N 1), or leave --nproc-per-node out"
        checks.one_worker(scene.spec, str(found), hint=hint)
    hint = f"leave --nnodes out, or start it on as many nodes: mpirun -np {scene.spec.nnodes[1]} -N 1 ddplaunch ..."
    nnodes = checks.nnodes(scene.spec, task.nnodes, str(found), hint=hint)
    node_rank = checks.node_rank(scene.spec, task.node_rank, found.launcher.rank)
    checks.nothing_to_choose(scene.spec, f"{found.launcher.name} has started the processes")
    addresses, reason = _addresses(scene, task)
    return met(
        scene.spec,
        cluster="mpi",
        nnodes=nnodes if once_per_node else (task.nnodes, task.nnodes),
        node_rank=node_rank,
        addresses=addresses,
        reason=reason,
        ports=endpoints.ports_of_name(found.job) if found.job else endpoints.ports_beside(endpoints.STATIC_PORT),
        coordinator=found.rank == 0,
        task=None if once_per_node else task,
        identity=f"mpi {found.job}" if found.job else "",
        notes=() if found.job or scene.spec.rdzv_id else (_NAMELESS,),
    )


def _task(scene: ClusterFacts, found: World) -> Task:
    local_rank, local_size = mpi_world.on_this_node(scene, found)
    nodes = found.size // local_size
    # ranks fill one node after the other, though not always in the order of local ranks (Open MPI 5), or go around the nodes
    around = found.rank // nodes == local_rank and found.rank % local_size != local_rank
    return Task(
        rank=found.rank,
        world_size=found.size,
        local_rank=local_rank,
        local_world_size=local_size,
        node_rank=found.rank % nodes if around else found.rank // local_size,
        nnodes=nodes,
    )


def is_nearer_than_slurm(scene: ClusterFacts) -> bool:
    """Say whether a launcher of MPI stands between Slurm and us, as with mpirun in a batch script."""
    found = mpi_world.find(scene)
    if found is None:
        return False
    # srun sets PMI_* as well: then they say what its own variables say
    own = (scene.number("SLURM_PROCID"), scene.number("SLURM_STEP_NUM_TASKS"))
    return slurm.step_id(scene) is None or own != (found.rank, found.size)


def _addresses(scene: ClusterFacts, task: Task) -> tuple[tuple[str, ...], str]:
    """Where rank 0 may be found, and what says so.

    Raises:
        LaunchError: nothing does.
    """
    if asked := endpoints.first(scene.spec, (scene.spec.master_addr, "master_addr")):
        return asked[:1], asked[1]
    if task.nnodes == 1:
        return (endpoints.LOOPBACK,), "one node needs no other"
    if address := scene.value("MASTER_ADDR"):
        return (address,), "MASTER_ADDR"
    found = _manager_host(scene) or _scheduler_host(scene)
    if found is None:
        raise LaunchError(
            f"nothing says where rank 0 of these {task.world_size} processes is",
            hint="add --master-addr HOST, with the host of rank 0",
        )
    addresses, source, is_here = found
    if task.rank == 0 and not is_here:
        raise LaunchError(
            f"rank 0 is on {scene.hostname}, but the others look for it on {addresses[0]}, {source}",
            hint=f"add --master-addr {scene.hostname}",
        )
    return addresses, source


def _manager_host(scene: ClusterFacts) -> tuple[tuple[str, ...], str, bool] | None:
    """The host of Open MPI's mpirun, which usually has rank 0: its addresses, what says so, and whether it is this one."""
    # Open MPI 4: "3317891072.0;tcp://10.77.0.12,172.17.0.1:33615", and the same for the daemon of this node
    uri = scene.env.get("OMPI_MCA_orte_hnp_uri", "")
    if found := re.search(r";tcp://([\d.,]+):", uri):
        return tuple(found[1].split(",")), "the host of mpirun", scene.env.get("OMPI_MCA_orte_local_daemon_uri") == uri
    # Open MPI 5: the job is called "prterun-HOST-PID@1"
    if found := re.fullmatch(r"prterun-(.+)-\d+@\d+", scene.env.get("PMIX_NAMESPACE", "")):
        return (found[1],), "the host of mpirun", endpoints.is_same_host(found[1], scene.hostname)
    return None


def _scheduler_host(scene: ClusterFacts) -> tuple[tuple[str, ...], str, bool] | None:
    """The first host of the batch job around us, on which process managers begin."""
    if scene.value("SLURM_JOB_ID"):
        host, source = slurm.job_hosts(scene)[0], "the first of SLURM_JOB_NODELIST"
    elif path := scene.value("PBS_NODEFILE"):
        try:
            host, source = pbs.hosts(scene, path)[0].address, "the first of PBS_NODEFILE"
        except LaunchError:
            return None  # only the first node has the file
    elif listed := lsf.hosts(scene):
        host, source = listed[0].address, "the first host of the LSF job"
    else:
        return None
    return (host,), source, endpoints.is_same_host(host, scene.hostname)
