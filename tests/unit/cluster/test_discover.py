from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddplaunch.system.errors import LaunchError
from tests.unit.builders import refusal
from tests.unit.environments import captured, found

SLURM = captured("slurm-node-0")
POD = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "MASTER_ADDR": "a", "WORLD_SIZE": "3", "RANK": "1"}
MPI = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1", "MASTER_ADDR": "a"}
PBS = {"PBS_JOBID": "84", "PBS_NODEFILE": "nodes"}
LSF = {"LSB_JOBID": "84", "LSB_MCPU_HOSTS": "n1 1 n2 1"}
FILES = {"nodes": "n1\nn2\n", "hosts.txt": "a\nb\n"}
STATIC: dict[str, Any] = {"nnodes": (2, 2), "node_rank": 1, "master_addr": "a"}
EVERYWHERE = {**SLURM, **POD, **PBS, **LSF}

ORDER = [
    ({"hosts": "a,b"}, EVERYWHERE, "ssh"),
    ({"hostfile": "hosts.txt"}, EVERYWHERE, "ssh"),
    (STATIC, EVERYWHERE, "static"),
    ({}, EVERYWHERE, "slurm"),
    ({}, {**POD, **MPI, **PBS, **LSF}, "kubernetes"),
    ({}, {**MPI, **PBS, **LSF}, "mpi"),
    ({}, {**PBS, **LSF}, "pbs"),
    ({}, LSF, "lsf"),
    ({}, {}, "local"),
    ({"standalone": True}, EVERYWHERE, "local"),
    ({"cluster": "local"}, EVERYWHERE, "local"),
    ({"simulate": "divide", "nnodes": (2, 2)}, EVERYWHERE, "local"),
]


@pytest.mark.parametrize(("asked", "env", "cluster"), ORDER, ids=[f"{row[2]} {row[0]}" for row in ORDER])
def test_flags_come_first_and_then_what_is_nearest(asked: dict[str, Any], env: dict[str, str], cluster: str) -> None:
    assert found(env, files=FILES, **asked).cluster == cluster


@pytest.mark.parametrize(
    ("cluster", "asked"),
    [("slurm", {}), ("kubernetes", {}), ("pbs", {}), ("lsf", {}), ("ssh", {"hosts": "a,b"}), ("static", STATIC)],
)
def test_a_cluster_may_be_forced(cluster: str, asked: dict[str, Any]) -> None:
    assert found(EVERYWHERE, files=FILES, cluster=cluster, **asked).cluster == cluster


MISSING = {
    "ssh": "it needs --hosts or --hostfile",
    "static": "it needs --nnodes with --node-rank and --master-addr, or with --rdzv-endpoint",
    "slurm": "not inside a job of this kind, which sets SLURM_JOB_ID",
    "kubernetes": "not inside a job of this kind, which sets JOB_COMPLETION_INDEX, or RANK and WORLD_SIZE in a pod",
    "mpi": "not inside a job of this kind, which sets OMPI_COMM_WORLD_RANK, PMI_RANK, PALS_RANKID, FLUX_TASK_RANK or the "
    "like, of several processes",
    "pbs": "not inside a job of this kind, which sets PBS_NODEFILE",
    "lsf": "not inside a job of this kind, which sets LSB_JOBID with LSB_MCPU_HOSTS or LSB_DJOB_HOSTFILE",
}


@pytest.mark.parametrize("cluster", MISSING)
def test_a_forced_cluster_that_is_not_there_is_refused_with_what_it_is_known_by(cluster: str) -> None:
    with pytest.raises(LaunchError) as raised:
        found(cluster=cluster)
    message = f"--cluster {cluster}: {MISSING[cluster]}"
    assert (raised.value.message, raised.value.hint) == (message, "leave --cluster out to see what is found")


@pytest.mark.parametrize("env", [SLURM, POD, MPI, PBS, LSF], ids=["slurm", "kubernetes", "mpi", "pbs", "lsf"])
def test_a_job_that_a_worker_starts_is_another_job(env: dict[str, str]) -> None:
    """The worker has the variables of the job that it is part of."""
    job = found({**env, "TORCHELASTIC_RUN_ID": "20260101-120000-abcd"}, files=FILES)
    assert (job.cluster, job.nnodes, job.notes) == ("local", (1, 1), ())


def test_a_worker_may_start_a_job_by_flags() -> None:
    inside = {**SLURM, "TORCHELASTIC_RUN_ID": "1"}
    assert found(inside, hosts="a,b").cluster == "ssh"
    assert found(inside, **STATIC).cluster == "static"
    assert found(inside, cluster="slurm").cluster == "slurm"


def test_several_nodes_of_nothing_known_are_refused() -> None:
    with pytest.raises(LaunchError, match="neither the hosts nor the rank of this node are given"):
        found(nnodes=(3, 3))


def test_nodes_that_do_not_talk_work_out_alike_where_their_workers_meet() -> None:
    first, second = (found(captured(f"slurm-node-{rank}"), no_control=True) for rank in (0, 1))
    assert first.rendezvous is second.rendezvous is None
    assert (
        (first.endpoint.address, first.endpoint.port)
        == (second.endpoint.address, second.endpoint.port)
        == ("node1", 20008)
    )
    assert first.endpoint.port_reason == "without a control channel none is reserved"
    told = found(nnodes=(2, 2), node_rank=1, master_addr="a", master_port=4000, no_control=True)
    assert (told.endpoint.address, told.endpoint.port, told.endpoint.port_reason, told.rendezvous) == (
        "a",
        4000,
        "--master-port",
        None,
    )
    alone = found(no_control=True)
    assert (alone.endpoint.port, alone.nnodes) == (None, (1, 1))


SILENT = [
    (
        {"nnodes": (2, 2), "rdzv_endpoint": "a:1"},
        "--no-control: no coordinator assigns this node its rank",
        "add --node-rank and --master-addr",
    ),
    (
        {"nnodes": (1, 2), "node_rank": 0, "master_addr": "a"},
        "--no-control: without a control channel nodes cannot agree on their number",
        "--nnodes N",
    ),
]


@pytest.mark.parametrize(("asked", "message", "hint"), SILENT)
def test_nodes_that_do_not_talk_have_to_be_told_all(asked: dict[str, Any], message: str, hint: str) -> None:
    assert refusal(lambda: found(no_control=True, **asked)) == (message, hint)


MORE = "JOB_COMPLETION_INDEX JOBSET_NAME FLUX_TASK_RANK FLUX_JOB_SIZE FLUX_TASK_LOCAL_ID FLUX_JOB_NNODES PALS_RANKID LOCAL_RANK"
NAMES = sorted({*EVERYWHERE, *MPI, *captured("openmpi4-rank-3"), *MORE.split(), "SLURM_HET_SIZE"})
VALUES = st.sampled_from(["", "0", "1", "2", "3", "x", "-1", "n[1-3]", "1(x3)", "n1", "nodes", "29500"]) | st.text(
    max_size=8
)
ENVIRONMENTS = st.dictionaries(st.sampled_from(NAMES), VALUES)
FIELDS = st.fixed_dictionaries(
    {},
    optional={
        "nnodes": st.sampled_from([(1, 1), (2, 2), (2, 4)]),
        "node_rank": st.integers(0, 3),
        "master_addr": st.just("a"),
        "rdzv_endpoint": st.sampled_from(["a:1", "localhost"]),
        "rdzv_backend": st.sampled_from(["static", "c10d", "etcd"]),
        "hosts": st.sampled_from(["a,b:2", "here", "n[", "a,a"]),
        "include": st.sampled_from(["a", "n1:0"]),
        "nproc_per_node": st.sampled_from([1, 2, "gpu"]),
        "cluster": st.sampled_from([*MISSING, "local"]),
        "no_control": st.booleans(),
    },
)


@given(
    st.sampled_from([{}, SLURM, captured("slurm-batch"), EVERYWHERE, MPI, captured("openmpi4-rank-3")]),
    ENVIRONMENTS,
    FIELDS,
)
def test_any_variables_and_flags_give_an_allocation_or_an_error(base, env, fields):
    try:
        job = found({**base, **env}, files=FILES, **fields)
    except LaunchError as error:
        assert error.message.isprintable()
        return
    least, most = job.nnodes
    assert 1 <= least <= most
    assert not (job.rendezvous and job.hosts_to_start_on)
    assert bool(job.hosts_to_start_on) == bool(job.starter)
    assert len(job.hosts) in (0, most)
    assert job.node_rank is None or 0 <= job.node_rank < most
    assert most == 1 or job.hosts_to_start_on or job.rendezvous or (job.endpoint.address and job.endpoint.port)
    if job.rendezvous:
        assert job.rendezvous.addresses
        assert job.rendezvous.ports
