"""Which variables of MPI's launchers and of Slurm a worker inherits: those that are true of it, and what a user has set."""

import pytest

from ddplaunch.plan.variables import without_other_places
from tests.unit.environments import captured

SETTINGS = {
    "OMPI_MCA_btl": "self,tcp",
    "OMPI_MCA_orte_base_help_aggregate": "0",
    "PMIX_MCA_gds": "hash",
    "PMIX_PREFIX": "/opt/pmix",
    "PMIX_INSTALL_PREFIX": "/opt/pmix",
    "SLURM_PMIX_TIMEOUT": "600",
    "PMI_DEBUG": "1",
    "I_MPI_FABRICS": "shm",
    "MV2_USE_CUDA": "1",
    "FLUX_URI": "local:///f",
    "FLUX_JOB_ID": "ƒ1",
    "PALS_CPU_BIND": "none",
    "UCX_TLS": "tcp",
    "SLURM_JOB_ID": "84",
    "SLURM_NODEID": "0",
    "SLURM_MPI_TYPE": "pmi2",
}
PLACES = {
    "Open MPI": {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_MCA_ess": "^singleton", "PRTE_LAUNCHED": "1"},
    "PMIx": {"PMIX_RANK": "1", "PMIX_NAMESPACE": "slurm.pmix.84.0", "PMIX_SERVER_URI2": "tcp"},
    "PMI": {"PMI_RANK": "1", "PMI_SIZE": "2", "PMI_FD": "6", "MPI_LOCALRANKID": "0", "HYDI_CONTROL_FD": "7"},
    "MVAPICH": {"MV2_COMM_WORLD_RANK": "1", "MV2_COMM_WORLD_SIZE": "2", "MV2_COMM_WORLD_LOCAL_RANK": "0"},
    "jsrun": {"JSM_NAMESPACE_RANK": "1", "JSM_NAMESPACE_SIZE": "2", "JSM_NAMESPACE_LOCAL_RANK": "0"},
    "PALS": {"PALS_RANKID": "1", "PALS_SIZE": "2", "PALS_LOCAL_RANKID": "0"},
    "ALPS": {"ALPS_APP_PE": "1"},
    "Flux": {"FLUX_TASK_RANK": "1", "FLUX_JOB_SIZE": "2", "FLUX_TASK_LOCAL_ID": "0"},
    "Slurm": {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "0", "SLURM_GTIDS": "0,1"},
}  # fmt: skip


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
def test_workers_that_share_a_task_have_none_of_its_place_and_all_that_a_user_has_set(place):
    assert without_other_places({**SETTINGS, **place}, None, 4) == SETTINGS


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
def test_the_only_worker_of_a_task_keeps_its_place_if_that_is_the_rank_in_a_job_of_the_same_size(place):
    env = {**SETTINGS, **place}
    assert without_other_places(env, 1, 2) == env
    assert without_other_places(env, 0, 2) == SETTINGS
    sized = {name for name in place if name.endswith(("_SIZE", "_NUM_TASKS"))}
    assert without_other_places(env, 1, 3) == (SETTINGS if sized else env)


def test_each_launcher_is_judged_by_itself():
    batch_script = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
    assert without_other_places({**batch_script, **PLACES["Open MPI"]}, 1, 2) == PLACES["Open MPI"]


def test_a_rank_without_a_size_is_believed_only_with_one_that_has_a_size():
    mpirun = {
        "OMPI_COMM_WORLD_RANK": "0",
        "OMPI_COMM_WORLD_SIZE": "1",
        "PMIX_RANK": "0",
        "PMIX_NAMESPACE": "prterun-vm-1@1",
    }
    assert without_other_places({**SETTINGS, **mpirun}, 0, 2) == SETTINGS
    assert without_other_places(mpirun, 0, 1) == mpirun
    batch_script = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}
    assert without_other_places({**batch_script, **PLACES["Open MPI"], **PLACES["PMIx"]}, 1, 2) == {
        **PLACES["Open MPI"],
        **PLACES["PMIx"],
    }


def test_what_forbids_a_process_of_open_mpi_to_be_alone_is_a_users_where_no_mpirun_set_it():
    settings = {"OMPI_MCA_ess": "singleton", "OMPI_MCA_pmix": "ext3x"}
    assert without_other_places(settings, None, 4) == settings


@pytest.mark.parametrize("name", ["openmpi4-node-0", "openmpi5-node-0", "mpich-node-1"])
def test_what_real_launchers_set_is_gone(name):
    left = without_other_places(captured(name), None, 4)
    settings = ("OMPI_MCA_", "PMIX_MCA_", "PRTE_MCA_")
    mpi = [each for each in left if each.startswith(("OMPI_", "PMI", "PRTE_", "MPI_", "HYD"))]
    assert [each for each in mpi if not each.startswith(settings)] == []
    assert not {"OMPI_MCA_ess", "OMPI_MCA_pmix", "OMPI_MCA_orte_hnp_uri"} & left.keys()
