from typing import Any

import pytest

from ddplaunch.plan.cluster import Rendezvous
from tests.unit.builders import refusal
from tests.unit.environments import found

POD = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "KUBERNETES_SERVICE_PORT": "443"}
# as kubeflow/training-operator sets them (pkg/controller.v1/pytorch/envvar.go): up to 1.5, and from 1.6 on
PYTORCH_JOB = {**POD, "MASTER_ADDR": "train-master-0", "MASTER_PORT": "23456", "WORLD_SIZE": "3", "RANK": "2"}
PET = {"nnodes": "PET_NNODES", "nproc_per_node": "PET_NPROC_PER_NODE", "node_rank": "PET_NODE_RANK"}
INDEXED = {**POD, "JOB_COMPLETION_INDEX": "1"}
BESIDE_23456 = tuple(range(23457, 23465))


def test_a_pytorch_job_counts_pods() -> None:
    node = found(PYTORCH_JOB)
    assert (node.cluster, node.nnodes, node.node_rank) == ("kubernetes", (3, 3), 2)
    assert (node.endpoint.address, node.endpoint.address_reason) == ("train-master-0", "MASTER_ADDR")
    assert (node.endpoint.port, node.endpoint.port_reason) == (23456, "MASTER_PORT")
    assert node.rendezvous == Rendezvous(addresses=("train-master-0",), ports=BESIDE_23456, coordinator=False)
    assert node.notes == ("WORLD_SIZE=3 is taken as the number of pods",)


def test_a_pytorch_job_may_say_how_many_workers_a_pod_has() -> None:
    """Then WORLD_SIZE counts workers, and RANK still counts pods."""
    asked: dict[str, Any] = {"nnodes": (3, 3), "nproc_per_node": 8, "node_rank": 2}
    node = found({**PYTORCH_JOB, "WORLD_SIZE": "24"}, **asked, origins=PET)
    assert (node.cluster, node.nnodes, node.node_rank, node.notes) == ("kubernetes", (3, 3), 2, ())
    assert node.endpoint.address == "train-master-0"


def test_an_elastic_pytorch_job_counts_as_many_pods_as_it_may_have() -> None:
    node = found({**PYTORCH_JOB, "RANK": "0"}, nnodes=(1, 4), origins={"nnodes": "PET_NNODES"})
    assert node.nnodes == (1, 4)
    assert node.rendezvous is not None
    assert node.rendezvous.coordinator is True


def test_platforms_may_say_how_many_gpus_a_pod_has() -> None:
    assert found({**PYTORCH_JOB, "NPROC_PER_NODE": "8"}).nproc_per_node == 8
    assert found({**PYTORCH_JOB, "NPROC_PER_NODE": "gpu"}).nproc_per_node is None
    assert found(PYTORCH_JOB).nproc_per_node is None


def test_an_indexed_job_needs_the_number_of_its_nodes_and_an_address() -> None:
    node = found({**INDEXED, "MASTER_ADDR": "train-0.train"}, nnodes=(4, 4))
    assert (node.cluster, node.nnodes, node.node_rank, node.endpoint.port) == ("kubernetes", (4, 4), 1, None)
    assert node.rendezvous == Rendezvous(
        addresses=("train-0.train",), ports=tuple(range(29501, 29509)), coordinator=False
    )


def test_an_index_alone_makes_no_node() -> None:
    job = found(INDEXED, hostname="train-1")
    assert (job.cluster, job.nnodes, job.hosts) == ("local", (1, 1), ("train-1",))
    assert job.notes == (
        "JOB_COMPLETION_INDEX=1 is ignored, since --nnodes is not given: this pod is a job of its own",
    )
    assert found(INDEXED, nnodes=(1, 1)).notes == ()


def test_a_jobset_names_its_first_pod() -> None:
    node = found({**INDEXED, "JOBSET_NAME": "pytorch", "REPLICATED_JOB_NAME": "workers"}, nnodes=(4, 4))
    assert node.endpoint.address == "pytorch-workers-0-0.pytorch"
    assert node.endpoint.address_reason == "JOBSET_NAME and REPLICATED_JOB_NAME"


def test_a_manifest_may_set_the_rank_and_leave_the_number_to_flags() -> None:
    """As examples/pytorch/cnn-mnist of kubernetes-sigs/jobset does."""
    env = {**INDEXED, "MASTER_ADDR": "pytorch-workers-0-0.pytorch", "MASTER_PORT": "3389", "RANK": "1"}
    node = found(env, nnodes=(4, 4))
    assert (node.nnodes, node.node_rank, node.endpoint.port) == ((4, 4), 1, 3389)


@pytest.mark.parametrize("link", ["tcp://10.1.2.3:29500", "tcp://[fd00::3]:29500", "udp://10.1.2.3:53"])
def test_the_address_of_a_service_called_master_is_no_port(link: str) -> None:
    linked = {"MASTER_SERVICE_HOST": "10.1.2.3", "MASTER_PORT_29500_TCP_ADDR": "10.1.2.3"}
    node = found({**PYTORCH_JOB, **linked, "MASTER_PORT": link})
    assert (node.endpoint.address, node.endpoint.port) == ("train-master-0", None)
    assert node.rendezvous is not None
    assert node.rendezvous.ports == tuple(range(29501, 29509))


@pytest.mark.parametrize("port", ["tcp://10.1.2.3", "http://10.1.2.3:29500", "tcp://a:1/b", "10.1.2.3:29500"])
def test_what_looks_like_the_address_of_a_service_and_is_none_is_refused(port: str) -> None:
    message, _ = refusal(lambda: found({**PYTORCH_JOB, "MASTER_PORT": port}))
    assert message == f"MASTER_PORT={port} is not a number"


def test_flags_beat_the_address_and_the_port() -> None:
    node = found(PYTORCH_JOB, master_addr="10.0.0.5", master_port=4000)
    assert (node.cluster, node.endpoint.address, node.endpoint.port) == ("kubernetes", "10.0.0.5", 4000)
    assert node.rendezvous is not None
    # the number may be that of a service, which is no interface of the pod
    assert (node.rendezvous.ports[0], node.rendezvous.listen) == (4001, None)


def test_a_rank_beats_an_index_that_each_job_of_a_jobset_counts_anew() -> None:
    node = found({**INDEXED, "MASTER_ADDR": "a"}, nnodes=(8, 8), node_rank=5)
    assert node.node_rank == 5


@pytest.mark.parametrize(
    "env",
    [
        {key: value for key, value in PYTORCH_JOB.items() if not key.startswith("KUBERNETES")},
        {**PYTORCH_JOB, "LOCAL_RANK": "0"},
        {**POD, "MASTER_ADDR": "a", "MASTER_PORT": "1"},
        {**PYTORCH_JOB, "WORLD_SIZE": "1", "RANK": "0"},
        POD,
    ],
    ids=["no pod", "a worker's variables", "no rank", "a world of one", "a pod"],
)
def test_what_speaks_of_no_other_pods_makes_a_job_of_its_own(env: dict[str, str]) -> None:
    assert (found(env).cluster, found(env).nnodes) == ("local", (1, 1))


HOW_TO_IGNORE = "to ignore these variables: --cluster local, or unset them"
CONFLICTS = [
    (PYTORCH_JOB, {"nnodes": (2, 2)}, "--nnodes 2, but RANK says that this is node 2", HOW_TO_IGNORE),
    (
        PYTORCH_JOB,
        {"nnodes": (4, 4)},
        "--nnodes 4, but WORLD_SIZE=3 counts other pods",
        "leave --nnodes out, or unset WORLD_SIZE",
    ),
    (
        {**PYTORCH_JOB, "WORLD_SIZE": "24"},
        {"nnodes": (3, 3), "nproc_per_node": 4},
        "--nnodes 3, but WORLD_SIZE=24 counts other pods",
        "leave --nnodes out, or unset WORLD_SIZE",
    ),
    (
        PYTORCH_JOB,
        {"node_rank": 1},
        "--node-rank 1, but RANK says that this is node 2",
        "leave --node-rank out; or add --master-addr, then only flags count",
    ),
    ({**PYTORCH_JOB, "RANK": "3"}, {}, "WORLD_SIZE=3, but RANK says that this is node 3", HOW_TO_IGNORE),
    ({**PYTORCH_JOB, "RANK": "x"}, {}, "RANK=x is not a number", HOW_TO_IGNORE),
    (
        {**PYTORCH_JOB, "MASTER_PORT": "70000"},
        {},
        "MASTER_PORT=70000 is not a port",
        "unset it, or give another with --master-port",
    ),
    (
        {**INDEXED, "MASTER_ADDR": "a"},
        {"nnodes": (1, 1), "node_rank": 1},
        "--node-rank 1: the job has one node, and its rank is 0",
        "leave --node-rank out",
    ),
    (
        INDEXED,
        {"nnodes": (4, 4)},
        "the address of node 0 is not known: MASTER_ADDR is not set in this pod",
        "add --master-addr train-0.SERVICE, where SERVICE is the headless service of the job (its subdomain)",
    ),
    (
        PYTORCH_JOB,
        {"exclude": "a"},
        "--exclude a: the pods are running already, so there are no hosts to choose from",
        "--hosts or --hostfile lists hosts",
    ),
]


@pytest.mark.parametrize(("env", "asked", "message", "hint"), CONFLICTS, ids=[row[2] for row in CONFLICTS])
def test_a_contradiction_names_both_sides(env: dict[str, str], asked: dict[str, Any], message: str, hint: str) -> None:
    assert refusal(lambda: found(env, hostname="train-1", **asked)) == (message, hint)
