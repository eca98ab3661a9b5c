"""The variables by which launchers of MPI, and Slurm, tell a task its place in their job. Pure.

A worker inherits them from the command. They are true of a worker that is such a task: one worker, with the same rank in a job of
the same size. Of others they are not: all workers of a node would be the same task, MPI_Init would fail or wait, and libraries
that look at these variables first would take one rank for all. What a user has set for MPI stays.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct


class _Kind(Struct, frozen=True):
    """The variables of one launcher."""

    rank: str
    size: str = ""  # "": it sets none
    prefixes: tuple[str, ...] = ()
    names: tuple[str, ...] = ()  # complete
    settings: tuple[str, ...] = ()  # prefixes of a user's
    only_with_rank: bool = False  # without the rank, these may be a user's too

    def is_of(self, name: str) -> bool:
        """Whether a variable is one of these."""
        is_named = name in (self.rank, self.size) or name in self.names
        return is_named or (name.startswith(self.prefixes) and not name.startswith(self.settings or "\0"))


def _named(prefix: str, names: str) -> tuple[str, ...]:
    return tuple(f"{prefix}{name}" for name in names.split())


_KINDS = (
    _Kind(  # orterun of Open MPI 4, prterun of 5
        rank="OMPI_COMM_WORLD_RANK",
        size="OMPI_COMM_WORLD_SIZE",
        prefixes=("OMPI_COMM_WORLD_", "OMPI_WORLD_", "OMPI_MCA_ess_base_", "OMPI_MCA_orte_ess_"),
        names=(
            *_named("OMPI_", "UNIVERSE_SIZE APP_CTX_NUM_PROCS FIRST_RANKS NUM_APP_CTX FILE_LOCATION COMMAND ARGV"),
            *_named("OMPI_", "TOOL_NAME VERSION"),
            *_named("OMPI_MCA_", "ess pmix initial_wdir num_procs"),  # `ess` and `pmix` forbid a process to be alone
            *_named("OMPI_MCA_orte_", "hnp_uri local_daemon_uri app_num launch num_nodes num_restarts"),
            *_named("OMPI_MCA_orte_", "bound_at_launch jobfam_session_dir top_session_dir precondition_transports"),
            *("PRTE_LAUNCHED", "PRTE_SHARED_FS"),
        ),
        only_with_rank=True,
    ),
    # a PMIx that was moved is found by PMIX_PREFIX, until version 4 by PMIX_INSTALL_PREFIX
    _Kind(rank="PMIX_RANK", prefixes=("PMIX_",), settings=("PMIX_MCA_", "PMIX_PREFIX", "PMIX_INSTALL_PREFIX")),
    _Kind(  # Hydra, of MPICH and Intel MPI; Cray's PMI; srun --mpi=pmi2
        rank="PMI_RANK",
        size="PMI_SIZE",
        prefixes=("MPI_LOCAL", "PMI_LOCAL_", "PMI_CONTROL_"),
        names=(
            *_named("PMI_", "FD PORT ID JOBID SPAWNED KVS APPNUM UNIVERSE_SIZE PROCESS_MAPPING SHARED_SECRET"),
            *("HYDI_CONTROL_FD", "HYDRA_CONTROL_FD"),
        ),
    ),
    _Kind(rank="MV2_COMM_WORLD_RANK", size="MV2_COMM_WORLD_SIZE", prefixes=("MV2_COMM_WORLD_", "MPISPAWN_")),
    _Kind(rank="JSM_NAMESPACE_RANK", size="JSM_NAMESPACE_SIZE", prefixes=("JSM_NAMESPACE_",)),
    _Kind(
        rank="PALS_RANKID",
        size="PALS_SIZE",
        names=_named("PALS_", "LOCAL_RANKID LOCAL_SIZE NODEID APINFO FD SPOOL_DIR STARTUP_BARRIER"),
    ),
    _Kind(rank="ALPS_APP_PE"),
    _Kind(rank="FLUX_TASK_RANK", size="FLUX_JOB_SIZE", names=("FLUX_TASK_LOCAL_ID",)),
    _Kind(
        rank="SLURM_PROCID",
        size="SLURM_STEP_NUM_TASKS",
        prefixes=("SLURM_PMI_", "SLURM_PMI2_", "SLURM_PMIX_MAPPING_"),
        names=_named("SLURM_", "LOCALID GTIDS TASK_PID"),
    ),
)


def without_other_places(env: Mapping[str, str], rank: int | None, world_size: int) -> dict[str, str]:
    """Return the variables of the command that a worker inherits: none of a place in another job that is not the worker's.

    `rank` is that of the only worker of the command; None: it has several.
    """
    sized = [kind for kind in _KINDS if kind.size and kind.rank in env]
    # a rank without a size, as PMIx has it, is believed as far as the launcher is that has set both
    is_denied = bool(sized) and not any(_is_true(kind, env, rank, world_size) for kind in sized)
    foreign = [kind for kind in _KINDS if (is_denied and not kind.size) or not _is_true(kind, env, rank, world_size)]
    return {name: value for name, value in env.items() if not any(kind.is_of(name) for kind in foreign)}


def _is_true(kind: _Kind, env: Mapping[str, str], rank: int | None, world_size: int) -> bool:
    """Whether what the variables of a launcher say, if they are set at all, holds for the worker."""
    found, size = env.get(kind.rank), env.get(kind.size)
    if found is None and kind.only_with_rank:
        return True
    return rank is not None and found in (None, str(rank)) and size in (None, str(world_size))
