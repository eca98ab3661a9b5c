from typing import Any

import pytest

from ddplaunch.plan.cluster import Task
from ddplaunch.system.errors import LaunchError
from tests.unit.builders import refusal
from tests.unit.environments import captured, found

HOW_TO_IGNORE = "to ignore these variables: --cluster local, or unset them"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_on_each_node_is_an_agent(rank: int) -> None:
    """`mpirun -npernode 1` from the host of rank 0, Open MPI 4."""
    node = found(captured(f"openmpi4-from-node-0-node-{rank}"), hostname=f"gpu-a-0{rank + 1}")
    assert (node.cluster, node.nnodes, node.node_rank, node.task) == ("mpi", (2, 2), rank, None)
    assert (node.endpoint.address, node.endpoint.address_reason, node.endpoint.port) == (
        "10.77.0.12",
        "the host of mpirun",
        None,
    )
    assert node.identity == "mpi 3317891073"
    assert node.rendezvous is not None
    assert (node.rendezvous.addresses, node.rendezvous.coordinator) == (("10.77.0.12",), rank == 0)


def test_all_processes_of_a_job_meet_at_the_same_ports_and_those_of_another_do_not() -> None:
    first, second = (
        found(captured(f"openmpi4-from-node-0-node-{rank}"), hostname=f"gpu-a-0{rank + 1}") for rank in (0, 1)
    )
    other = found(captured("openmpi4-node-1"), hostname="gpu-a-02")
    assert first.rendezvous and second.rendezvous and other.rendezvous
    assert first.rendezvous.ports == second.rendezvous.ports
    assert not set(first.rendezvous.ports) & set(other.rendezvous.ports)


@pytest.mark.parametrize(
    ("name", "hostname", "rank", "local_rank", "node_rank"),
    [("openmpi4-rank-3", "gpu-a-02", 3, 1, 1), ("mpich-rank-3", "gpu-a-02", 3, 1, 1)],
)
def test_a_process_for_each_rank_is_one_worker(name, hostname, rank, local_rank, node_rank):
    node = found(captured(name), hostname=hostname, master_addr="gpu-a-01")
    assert node.task == Task(
        rank=rank, world_size=4, local_rank=local_rank, local_world_size=2, node_rank=node_rank, nnodes=2
    )
    assert (node.cluster, node.nnodes, node.node_rank) == ("mpi", (2, 2), node_rank)


def test_rank_0_that_is_not_where_the_others_look_for_it_says_so() -> None:
    """mpirun on a host that takes no part: a login node, or the launcher of an MPIJob."""
    with pytest.raises(LaunchError) as raised:
        found(captured("openmpi4-node-0"), hostname="gpu-a-01")
    message = "rank 0 is on gpu-a-01, but the others look for it on 10.77.0.11, the host of mpirun"
    assert (raised.value.message, raised.value.hint) == (message, "add --master-addr gpu-a-01")


def test_open_mpi_5_names_the_host_of_mpirun_in_the_jobs_name() -> None:
    second = found(captured("openmpi5-node-1"), hostname="gpu-a-02")
    assert (second.endpoint.address, second.node_rank) == ("head", 1)
    with pytest.raises(LaunchError, match="rank 0 is on gpu-a-01, but the others look for it on head"):
        found(captured("openmpi5-node-0"), hostname="gpu-a-01")
    started_there = captured("openmpi5-node-0", PMIX_NAMESPACE="prterun-gpu-a-01-37@1")
    assert found(started_there, hostname="gpu-a-01").endpoint.address == "gpu-a-01"


def test_of_several_addresses_node_0_says_which_the_others_reach() -> None:
    uri = "1.0;tcp://10.77.0.12,172.17.0.1:1;tcp6://[fd00::2]:2"
    env = captured("openmpi4-node-0", OMPI_MCA_orte_hnp_uri=uri, OMPI_MCA_orte_local_daemon_uri=uri)
    node = found(env, hostname="gpu-a-01")
    assert (node.endpoint.address, node.endpoint.address_reason) == (
        None,
        "chosen by node 0 when the nodes have joined",
    )
    assert node.rendezvous is not None
    assert node.rendezvous.addresses == ("10.77.0.12", "172.17.0.1")


SCHEDULERS = [
    ({"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "gpu-a-[01-02]"}, "the first of SLURM_JOB_NODELIST"),
    ({"PBS_JOBID": "7.pbs", "PBS_NODEFILE": "/pbs/7"}, "the first of PBS_NODEFILE"),
    ({"LSB_JOBID": "7", "LSB_MCPU_HOSTS": "gpu-a-01 8 gpu-a-02 8"}, "the first host of the LSF job"),
]


@pytest.mark.parametrize(("scheduler", "reason"), SCHEDULERS, ids=[row[1] for row in SCHEDULERS])
def test_in_a_batch_job_rank_0_is_looked_for_on_its_first_host(scheduler: dict[str, str], reason: str) -> None:
    env = {**captured("mpich-node-1"), **scheduler}
    files = {"/pbs/7": "gpu-a-01.example.org\ngpu-a-02.example.org\n"}
    node = found(env, hostname="gpu-a-02", files=files)
    assert (node.cluster, node.endpoint.address_reason, node.node_rank) == ("mpi", reason, 1)
    assert (node.endpoint.address or "").partition(".")[0] == "gpu-a-01"
    with pytest.raises(LaunchError, match="rank 0 is on gpu-a-02, but the others look for it on gpu-a-01"):
        found({**env, "PMI_RANK": "0"}, hostname="gpu-a-02", files=files)


def test_where_nothing_tells_the_address_it_has_to_be_said() -> None:
    for env in (captured("mpich-node-1"), {**captured("mpich-node-1"), "PBS_NODEFILE": "/not/on/this/node"}):
        with pytest.raises(LaunchError) as raised:
            found(env)
        message = "the host of rank 0 of these 2 processes is not known"
        assert (raised.value.message, raised.value.hint) == (message, "add --master-addr HOST, with the host of rank 0")
    assert found(captured("mpich-node-1", MASTER_ADDR="gpu-a-01")).endpoint.address_reason == "MASTER_ADDR"
    assert found(captured("mpich-node-1"), master_addr="gpu-a-01").endpoint.address_reason == "--master-addr"


MANAGERS = [
    ("MVAPICH", {"MV2_COMM_WORLD_RANK": "5", "MV2_COMM_WORLD_SIZE": "8", "MV2_COMM_WORLD_LOCAL_RANK": "1",
                 "MV2_COMM_WORLD_LOCAL_SIZE": "4"}),
    ("Intel MPI", {"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}),
    ("Cray", {"PMI_RANK": "5", "PMI_SIZE": "8", "PMI_LOCAL_RANK": "1", "PMI_LOCAL_SIZE": "4"}),
    ("PALS", {"PALS_RANKID": "5", "PMI_RANK": "5", "PMI_SIZE": "8", "PALS_LOCAL_RANKID": "1", "PMI_LOCAL_SIZE": "4"}),
    ("Flux", {"FLUX_TASK_RANK": "5", "FLUX_JOB_SIZE": "8", "FLUX_TASK_LOCAL_ID": "1", "FLUX_JOB_NNODES": "2"}),
    ("jsrun", {"JSM_NAMESPACE_RANK": "5", "JSM_NAMESPACE_SIZE": "8", "JSM_NAMESPACE_LOCAL_RANK": "1",
               "JSM_NAMESPACE_LOCAL_SIZE": "4"}),
]  # fmt: skip


@pytest.mark.parametrize("env", [row[1] for row in MANAGERS], ids=[row[0] for row in MANAGERS])
def test_process_managers_of_all_kinds_are_known(env: dict[str, str]) -> None:
    node = found(env, master_addr="a")
    assert node.task == Task(rank=5, world_size=8, local_rank=1, local_world_size=4, node_rank=1, nnodes=2)


def test_ranks_may_go_around_the_nodes() -> None:
    """`--map-by node`, on three nodes: rank 4 is the second on the second node."""
    around = {"PMI_RANK": "4", "PMI_SIZE": "6", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
    node = found(around, master_addr="a")
    assert node.task == Task(rank=4, world_size=6, local_rank=1, local_world_size=2, node_rank=1, nnodes=3)


def test_local_ranks_may_be_in_another_order_than_ranks() -> None:
    """As with Open MPI 5 on a host with fewer cores than processes: ranks 0 to 3 are local ranks 0, 2, 1, 3."""
    mixed = {"OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}
    places = []
    for rank in range(8):
        local_rank = (0, 2, 1, 3)[rank % 4]
        env = {**mixed, "OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_LOCAL_RANK": str(local_rank)}
        places.append(found(env, master_addr="a").node_rank)
    assert places == [0, 0, 0, 0, 1, 1, 1, 1]


def test_several_processes_on_this_host_alone_meet_here() -> None:
    env = captured("mpich-rank-3", MPI_LOCALNRANKS="4", MPI_LOCALRANKID="3")
    node = found(env)
    assert (node.nnodes, node.endpoint.address) == ((1, 1), "127.0.0.1")
    assert node.rendezvous is not None
    assert (node.rendezvous.addresses, node.rendezvous.listen) == (("127.0.0.1",), "127.0.0.1")
    assert node.rendezvous.ports[0] == 29501
    nameless = "this job has no id: two such jobs on the same hosts at a time need a --rdzv-id each"
    assert (node.identity, node.notes) == ("", (nameless,))
    assert found(env, rdzv_id="first").notes == ()


STALE = [
    ("a world of one", {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0",
                        "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}),
    ("a rank without a world", {"PMI_RANK": "0"}),
    ("a world without a rank", {"PMI_SIZE": "4"}),
    ("a rank outside of its world", {"PMI_RANK": "4", "PMI_SIZE": "4"}),
    ("empty", {"PMI_RANK": "", "PMI_SIZE": ""}),
    ("settings of MPI", {"I_MPI_FABRICS": "shm", "OMPI_MCA_btl": "self,tcp", "MPI_HOME": "/opt/mpi"}),
]  # fmt: skip


@pytest.mark.parametrize("env", [row[1] for row in STALE], ids=[row[0] for row in STALE])
def test_variables_that_name_no_other_process_say_nothing(env: dict[str, str]) -> None:
    assert (found(env).cluster, found(env).nnodes) == ("local", (1, 1))


def test_variables_that_were_inherited_from_another_host_say_nothing() -> None:
    """As by a batch job from the shell that submitted it: Open MPI wrote down where it started the process."""
    assert found(captured("openmpi4-rank-3"), hostname="login1").cluster == "local"


MPIRUN_IN_SLURM = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
                   "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}  # fmt: skip


@pytest.mark.parametrize("name", ["slurm-batch", "slurm-salloc", "slurm-node-0"])
def test_mpirun_inside_a_slurm_job_wins_over_slurm(name: str) -> None:
    """On other nodes than the first its processes have the variables of the step that started its daemons."""
    node = found(captured(name, **MPIRUN_IN_SLURM))
    assert node.cluster == "mpi"
    assert node.task is not None
    assert (node.task.rank, node.task.world_size) == (1, 4)


def test_variables_of_mpi_that_srun_sets_are_slurms_own() -> None:
    """`srun --mpi=pmi2`."""
    env = captured("slurm-rank-5", PMI_RANK="5", PMI_SIZE="12", PMI_FD="9")
    assert found(env).cluster == "slurm"


CONFLICTS: list[tuple[dict[str, str], dict[str, Any], str, str]] = [
    (
        {},
        {"nnodes": (3, 3)},
        "--nnodes 3, but PMI with 2 processes has 2 nodes",
        "leave --nnodes out, or start it on as many nodes: mpirun -np 3 -N 1 ddplaunch ...",
    ),
    (
        {},
        {"node_rank": 0},
        "--node-rank 0, but PMI_RANK says that this is node 1",
        "leave --node-rank out; or add --master-addr, then only flags count",
    ),
    (
        {"PMI_SIZE": "4", "MPI_LOCALNRANKS": "2"},
        {"nproc_per_node": 2},
        "--nproc-per-node 2, but PMI with 4 processes started ddplaunch once for each rank",
        "start it once per node (mpirun -N 1), or leave --nproc-per-node out",
    ),
    (
        {"MPI_LOCALNRANKS": ""},
        {},
        "PMI_RANK says that this is one of 2 processes, but not how many of them are on this node",
        HOW_TO_IGNORE,
    ),
    (
        {"PMI_SIZE": "5", "MPI_LOCALNRANKS": "3"},
        {},
        "PMI_RANK says that this is one of 5 processes, and 3 of them are on this node: others have a different number",
        "start ddplaunch once on each node (mpirun -N 1), and let it start the workers",
    ),
    ({"PMI_RANK": "one"}, {}, "PMI_RANK=one is not a number", HOW_TO_IGNORE),
    (
        {},
        {"include": "a"},
        "--include a: PMI has started the processes, so there are no hosts to choose from",
        "--hosts or --hostfile lists hosts",
    ),
]


@pytest.mark.parametrize(("changes", "asked", "message", "hint"), CONFLICTS, ids=[row[2] for row in CONFLICTS])
def test_a_contradiction_names_both_sides(changes, asked, message, hint):
    assert refusal(lambda: found(captured("mpich-node-1", **changes), **asked)) == (message, hint)


def above(*names: str) -> dict[str, str]:
    """The files of /proc by which a process sees those above it, the next one first; process 1 is the last."""
    parents = [*range(4711, 4711 + len(names) - 1), 1, 0]
    ours = {"/proc/self/stat": f"4000 (ddplaunch) S {parents[0]} 4000 4000"}
    return ours | {
        f"/proc/{pid}/stat": f"{pid} ({name}) S {parent} 1 1"
        for pid, name, parent in zip(parents, names, parents[1:], strict=False)
    }


LEFT_OVER = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "8",
}
DOUBT = (
    "OMPI_COMM_WORLD_SIZE=8 is set, but no launcher of MPI is seen above this process: "
    "if none has started it, add --cluster local"
)


@pytest.mark.parametrize("names", [("bash", "tmux: server", "systemd"), ("bash (of a user)", "tini"), ("sh",)])
def test_variables_of_a_launcher_that_is_nowhere_above_are_doubted(names):
    assert found(LEFT_OVER, files=above(*names)).doubt == DOUBT
    _, hint = refusal(lambda: found(LEFT_OVER, files=above(*names), nproc_per_node=8))
    assert hint is not None
    assert hint.endswith(f"\n{DOUBT}")


@pytest.mark.parametrize("name", ["mpirun", "orted", "prted", "hydra_pmi_proxy", "slurmstepd", "flux-shell-3", "jsmd"])
def test_variables_of_a_launcher_that_is_above_are_not_doubted(name):
    assert found(LEFT_OVER, files=above("bash", name, "sshd", "systemd")).doubt == ""
    _, hint = refusal(lambda: found(LEFT_OVER, files=above(name, "systemd"), nproc_per_node=8))
    assert hint is not None
    assert "left" not in hint
    assert "--cluster local" not in hint
