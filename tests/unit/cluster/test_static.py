from typing import Any

import pytest

from ddplaunch.plan.cluster import Rendezvous
from tests.unit.builders import refusal
from tests.unit.environments import found

NODES: dict[str, Any] = {"nnodes": (3, 3)}
RESERVED = (None, "a free one is reserved at the start")


def ports(first: int, number: int = 8) -> tuple[int, ...]:
    return tuple(range(first, first + number))


def test_each_node_may_be_told_its_rank_and_where_all_meet() -> None:
    node = found(**NODES, node_rank=1, master_addr="gpu01", master_port=4000)
    assert (node.cluster, node.nnodes, node.node_rank, node.hosts, node.notes) == ("static", (3, 3), 1, (), ())
    assert (node.endpoint.address, node.endpoint.address_reason) == ("gpu01", "--master-addr")
    assert (node.endpoint.port, node.endpoint.port_reason) == (4000, "--master-port")
    assert node.rendezvous == Rendezvous(addresses=("gpu01",), ports=ports(4001), coordinator=False)


def test_without_a_port_the_agents_meet_beside_the_port_of_torchrun_and_reserve_one() -> None:
    node = found(**NODES, node_rank=0, master_addr="10.0.0.1")
    assert (node.endpoint.port, node.endpoint.port_reason) == RESERVED
    assert node.rendezvous == Rendezvous(
        addresses=("10.0.0.1",), ports=ports(29501), coordinator=True, listen="10.0.0.1"
    )


@pytest.mark.parametrize(
    ("port", "candidates"),
    [(65530, ports(65531, 5)), (65535, (65534, 65533, 65532, 65531, 65530, 65529, 65528, 65527))],
)
def test_the_agents_meet_at_ports_that_exist(port: int, candidates: tuple[int, ...]) -> None:
    node = found(**NODES, node_rank=0, master_addr="a", master_port=port)
    assert node.rendezvous is not None
    assert node.rendezvous.ports == candidates


def test_torchruns_variables_say_the_same() -> None:
    """As Kubeflow's trainer sets them."""
    names = {name: f"PET_{name.upper()}" for name in ("nnodes", "node_rank", "master_addr", "master_port")}
    node = found(**NODES, node_rank=2, master_addr="a", master_port=29400, origins=names)
    assert (node.cluster, node.node_rank, node.endpoint.address_reason) == ("static", 2, "PET_MASTER_ADDR")
    assert node.endpoint.port_reason == "PET_MASTER_PORT"


@pytest.mark.parametrize("backend", [{}, {"rdzv_backend": "static"}], ids=str)
def test_a_static_rendezvous_meets_at_the_endpoint_itself(backend: dict[str, Any]) -> None:
    node = found(**NODES, **backend, node_rank=1, rdzv_endpoint="a:4000", master_addr="b", master_port=5000)
    assert (node.endpoint.address, node.endpoint.port, node.node_rank) == ("a", 4000, 1)
    assert node.rendezvous == Rendezvous(addresses=("a",), ports=ports(4001), coordinator=False)


@pytest.mark.parametrize("backend", [{}, {"rdzv_backend": "c10d"}], ids=str)
def test_at_an_endpoint_nodes_count_themselves(backend: dict[str, Any]) -> None:
    node = found(nnodes=(2, 4), **backend, rdzv_endpoint="a:4000")
    assert (node.nnodes, node.node_rank, node.endpoint.address) == ((2, 4), None, None)
    assert (node.endpoint.port, node.endpoint.port_reason) == RESERVED
    assert node.rendezvous == Rendezvous(addresses=("a",), ports=ports(4000), coordinator=None)


@pytest.mark.parametrize(
    ("endpoint", "address", "listen", "first"),
    [
        ("a", "a", None, 29400),
        ("a:0", "a", None, 29400),
        ("10.0.0.1:4000", "10.0.0.1", "10.0.0.1", 4000),
        ("[fe80::1%eth0]:4000", "fe80::1%eth0", "fe80::1%eth0", 4000),
        ("localhost:4000", "localhost", None, 4000),
    ],
)
def test_a_number_is_listened_on_and_a_name_is_not(endpoint: str, address: str, listen: str | None, first: int) -> None:
    node = found(**NODES, rdzv_backend="c10d", rdzv_endpoint=endpoint)
    assert node.rendezvous == Rendezvous(addresses=(address,), ports=ports(first), coordinator=None, listen=listen)


@pytest.mark.parametrize(
    ("fields", "coordinator"),
    [
        ({"rdzv_conf": {"is_host": "1"}}, True),
        ({"rdzv_conf": {"is_host": "0"}}, False),
        ({"node_rank": 0}, True),
        ({"node_rank": 2}, False),
        ({"node_rank": 0, "rdzv_conf": {"is_host": "1"}}, True),
    ],
    ids=str,
)
def test_a_rank_or_is_host_says_who_is_node_0(fields: dict[str, Any], coordinator: bool) -> None:
    node = found(**NODES, rdzv_backend="c10d", rdzv_endpoint="a:4000", **fields)
    assert node.rendezvous is not None
    assert node.rendezvous.coordinator is coordinator
    assert node.node_rank == fields.get("node_rank")


def test_at_an_endpoint_the_address_of_the_workers_is_not_asked_as_with_torchrun() -> None:
    node = found(**NODES, rdzv_backend="c10d", rdzv_endpoint="a:4000", master_addr="a", master_port=4000)
    assert (node.endpoint.address, node.endpoint.port) == (None, None)
    assert node.notes == (
        "--master-addr a has no effect: with --rdzv-endpoint a:4000 node 0 chooses it",
        "--master-port 4000 has no effect: with --rdzv-endpoint a:4000 node 0 chooses it",
    )


def test_node_0_needs_no_address_of_its_own() -> None:
    node = found(**NODES, node_rank=0, hostname="gpu01")
    assert (node.endpoint.address, node.endpoint.address_reason) == (None, "this is node 0")
    assert node.rendezvous == Rendezvous(addresses=("gpu01",), ports=ports(29501), coordinator=True)


REFUSED = [
    (
        {**NODES, "node_rank": 1},
        "--node-rank 1: the address of node 0 is not given",
        "add --master-addr HOST, the name or the address of node 0",
    ),
    (
        {**NODES, "master_addr": "a"},
        "--nnodes 3 and --master-addr a: the rank of this node is not given",
        "add --node-rank: 0 on node 0, 2 on the last; or let node 0 assign the ranks: --rdzv-backend c10d --rdzv-endpoint a",
    ),
    (
        {**NODES, "rdzv_backend": "static", "rdzv_endpoint": "a:1"},
        "--nnodes 3 and --rdzv-endpoint a:1: the rank of this node is not given",
        "add --node-rank: 0 on node 0, 2 on the last; or let node 0 assign the ranks: --rdzv-backend c10d --rdzv-endpoint a:1",
    ),
    (
        {**NODES, "node_rank": 3, "master_addr": "a"},
        "--node-rank 3: ranks go from 0 to 2, since --nnodes 3",
        "give each node a rank of its own, from 0 on",
    ),
    (
        {**NODES, "rdzv_backend": "etcd-v2", "rdzv_endpoint": "a:1"},
        "--rdzv-backend etcd-v2: etcd is not supported",
        "--rdzv-backend c10d --rdzv-endpoint HOST:PORT, with a host of the job",
    ),
    (
        {**NODES, "rdzv_backend": "c10d", "rdzv_endpoint": "a", "node_rank": 1, "rdzv_conf": {"is_host": "1"}},
        "--node-rank 1 and is_host=1 in --rdzv-conf contradict each other: the host of the endpoint is node 0",
        "leave one of them out",
    ),
    (
        {**NODES, "master_addr": "a", "node_rank": 0, "exclude": "b"},
        "--exclude b: each node is started by hand, so there are no hosts to choose from",
        "--hosts or --hostfile lists hosts",
    ),
]


@pytest.mark.parametrize(("fields", "message", "hint"), REFUSED, ids=[row[1] for row in REFUSED])
def test_half_a_rendezvous_is_refused_with_the_other_half(fields: dict[str, Any], message: str, hint: str) -> None:
    assert refusal(lambda: found(**fields)) == (message, hint)


def test_one_node_meets_nobody() -> None:
    node = found(nnodes=(1, 1), node_rank=0, master_addr="a", master_port=4000)
    assert (node.cluster, node.endpoint.address, node.endpoint.port, node.rendezvous) == ("local", "a", 4000, None)
