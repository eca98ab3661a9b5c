"""The processes that a launcher of MPI programs started together, as one of them sees them: which of how many it is.

A world of one process counts as none, and so does one that was inherited from another host.
"""

from __future__ import annotations

from msgspec import Struct

from ddplaunch.cluster import endpoints
from ddplaunch.cluster.facts import NOT_HERE, ClusterFacts
from ddplaunch.errors import LaunchError


class _Launcher(Struct, frozen=True, kw_only=True):
    """The variables of a launcher; several names where its versions differ."""

    name: str
    rank: str
    size: tuple[str, ...]
    local_rank: tuple[str, ...]
    local_size: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()


def _of_prefix(name: str, prefix: str) -> _Launcher:
    return _Launcher(
        name=name,
        rank=f"{prefix}_RANK",
        size=(f"{prefix}_SIZE",),
        local_rank=(f"{prefix}_LOCAL_RANK",),
        local_size=(f"{prefix}_LOCAL_SIZE",),
    )


# the special ones first: most of them set PMI_* too
_LAUNCHERS = (
    _of_prefix("Open MPI", "OMPI_COMM_WORLD"),  # docs.open-mpi.org, "Environment variables set for MPI applications"
    _of_prefix("MVAPICH", "MV2_COMM_WORLD"),
    _of_prefix("jsrun", "JSM_NAMESPACE"),
    _Launcher(  # flux-core, src/shell/task.c
        name="Flux",
        rank="FLUX_TASK_RANK",
        size=("FLUX_JOB_SIZE",),
        local_rank=("FLUX_TASK_LOCAL_ID",),
        nodes=("FLUX_JOB_NNODES",),
    ),
    _Launcher(
        name="PALS",
        rank="PALS_RANKID",
        size=("PALS_SIZE", "PMI_SIZE"),
        local_rank=("PALS_LOCAL_RANKID", "PMI_LOCAL_RANK"),
        local_size=("PALS_LOCAL_SIZE", "PMI_LOCAL_SIZE"),
    ),
    _Launcher(  # MPICH's Hydra and Intel MPI; Cray's PMI
        name="PMI",
        rank="PMI_RANK",
        size=("PMI_SIZE",),
        local_rank=("PMI_LOCAL_RANK", "MPI_LOCALRANKID"),
        local_size=("PMI_LOCAL_SIZE", "MPI_LOCALNRANKS"),
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


def find(facts: ClusterFacts) -> World | None:
    """Return the processes that we were started with, None if there are no others.

    Raises:
        LaunchError: a variable does not hold a number.
    """
    if (started_on := facts.value("PMIX_HOSTNAME")) and not endpoints.is_same_host(started_on, facts.hostname):
        return None  # inherited, e.g. by a batch job from the shell that submitted it
    for launcher in _LAUNCHERS:
        rank, size = facts.number(launcher.rank), facts.number(*launcher.size)
        if rank is not None and size is not None and rank < size and size > 1:
            return World(launcher=launcher, job=facts.value(*_JOB_NAMES), rank=rank, size=size)
    return None


def local_rank_and_size(facts: ClusterFacts, world: World) -> tuple[int, int]:
    """Return which of how many of the processes on this node this is.

    Raises:
        LaunchError: the variables do not tell, or nodes have different numbers.
    """
    rank, size = facts.number(*world.launcher.local_rank), facts.number(*world.launcher.local_size)
    nodes = facts.number(*world.launcher.nodes)
    if nodes and world.size % nodes == 0:
        size = world.size // nodes
    process = f"{world.launcher.rank} says that this is one of {world.size} processes"
    if rank is None or not size or rank >= size:
        raise LaunchError(f"{process}, but not how many of them are on this node", hint=NOT_HERE)
    if world.size % size:
        raise LaunchError(
            f"{process}, and {size} of them are on this node: others have a different number",
            hint="start ddplaunch once on each node (mpirun -N 1), and let it start the workers",
        )
    return rank, size
