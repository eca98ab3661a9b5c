from typing import Any

import pytest

from ddplaunch.plan.cluster.by_flags import discover_local as discover
from ddplaunch.plan.cluster.endpoints import split_endpoint
from ddplaunch.spec.job import JobSpec
from ddplaunch.system.errors import LaunchError
from tests.unit.builders import spec

RESERVED = (None, "a free one is reserved at the start")


def test_it_is_one_node_of_rank_0() -> None:
    here = discover(spec(), "gpu01")
    assert (here.cluster, here.hosts, here.node_rank, here.notes) == ("local", ("gpu01",), 0, ())


MEETING_POINTS = [
    ({}, ("127.0.0.1", "a single node"), RESERVED),
    ({"master_port": 0}, ("127.0.0.1", "a single node"), RESERVED),
    ({"master_addr": "10.0.0.1"}, ("10.0.0.1", "--master-addr"), RESERVED),
    ({"master_port": 4000}, ("127.0.0.1", "a single node"), (4000, "--master-port")),
    ({"rdzv_endpoint": "a:4000"}, ("a", "--rdzv-endpoint"), (4000, "--rdzv-endpoint")),
    ({"rdzv_endpoint": "a"}, ("a", "--rdzv-endpoint"), RESERVED),
    ({"rdzv_endpoint": "a", "master_port": 4000}, ("a", "--rdzv-endpoint"), (4000, "--master-port")),
    ({"rdzv_endpoint": "a:0", "master_port": 4000}, ("a", "--rdzv-endpoint"), (4000, "--master-port")),
    (
        {"rdzv_endpoint": "a:4000", "master_addr": "b", "master_port": 5000, "rdzv_backend": "static"},
        ("a", "--rdzv-endpoint"),
        (4000, "--rdzv-endpoint"),
    ),
    ({"rdzv_endpoint": "[::1]:4000"}, ("::1", "--rdzv-endpoint"), (4000, "--rdzv-endpoint")),
    ({"rdzv_endpoint": "localhost:29400", "rdzv_backend": "c10d"}, ("127.0.0.1", "a single node"), RESERVED),
    ({"rdzv_endpoint": "localhost:29400", "standalone": True}, ("127.0.0.1", "a single node"), RESERVED),
]


@pytest.mark.parametrize(("fields", "address", "port"), MEETING_POINTS, ids=[str(point[0]) for point in MEETING_POINTS])
def test_the_workers_meet_where_they_were_told_to(fields, address, port):
    here = discover(spec(**fields), "gpu01")
    assert (here.endpoint.address, here.endpoint.address_reason) == address
    assert (here.endpoint.port, here.endpoint.port_reason) == port


def test_a_variable_is_named_as_the_origin() -> None:
    here = discover(spec(origins={"master_port": "PET_MASTER_PORT"}, master_port=4000), "gpu01")
    assert here.endpoint.port_reason == "PET_MASTER_PORT"


@pytest.mark.parametrize(
    "fields", [{"rdzv_backend": "c10d"}, {"rdzv_backend": "etcd-v2"}, {"standalone": True}], ids=str
)
def test_an_endpoint_for_agents_is_said_to_have_no_effect(fields: dict[str, Any]) -> None:
    assert discover(spec(rdzv_endpoint="a:29400", **fields), "gpu01").notes == (
        "--rdzv-endpoint a:29400 has no effect: it is for a job of several nodes",
    )


def test_a_place_among_several_nodes_is_refused() -> None:
    with pytest.raises(LaunchError) as raised:
        discover(spec(node_rank=1), "gpu01")
    assert raised.value.message == "--node-rank 1: the job has one node, and its rank is 0"
    assert raised.value.hint == "leave --node-rank out"


def test_there_are_no_hosts_to_choose_from() -> None:
    with pytest.raises(LaunchError) as raised:
        discover(spec(origins={"include": "PET_INCLUDE"}, include="a"), "gpu01")
    message = "PET_INCLUDE=a: the job runs on this machine, so there are no hosts to choose from"
    assert (raised.value.message, raised.value.hint) == (message, "--hosts or --hostfile lists hosts")


def test_a_choice_of_hosts_in_a_file_may_mean_a_list_that_is_not_used_now() -> None:
    assert discover(spec(origins={"exclude": "ddplaunch.toml"}, exclude="a"), "gpu01").hosts == ("gpu01",)


FOUR_WAYS = """give them in one of four ways:
  over ssh:         ddplaunch --hosts a,b,c SCRIPT
  in a Slurm job:   srun --nodes 3 --ntasks-per-node 1 ddplaunch SCRIPT
  on each by hand:  ddplaunch --nnodes 3 --node-rank 0 --master-addr HOST SCRIPT
  on this machine:  ddplaunch --nnodes 3 --simulate SCRIPT"""


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (spec(nnodes=(3, 3)), "--nnodes 3: neither the hosts nor the rank of this node are given"),
        (
            spec(origins={"nnodes": "PET_NNODES"}, nnodes=(1, 3)),
            "PET_NNODES=1:3: neither the hosts nor the rank of this node are given",
        ),
    ],
)
def test_several_nodes_about_which_nothing_is_known_are_refused_with_all_ways_out(asked: JobSpec, message: str) -> None:
    with pytest.raises(LaunchError) as raised:
        discover(asked, "gpu01")
    ways = FOUR_WAYS
    if "1:3" in message:
        ways = ways.replace("--nnodes 3", "--nnodes 1:3").replace("a,b,c", "a,b,c --nnodes 1:3")
        ways = ways.replace("1 ddplaunch SCRIPT", "1 ddplaunch --nnodes 1:3 SCRIPT")
    assert (raised.value.message, raised.value.hint, raised.value.status) == (message, ways, 2)


@pytest.mark.parametrize("fields", [{"nnodes": (1, 1)}, {"node_rank": 0}], ids=str)
def test_one_node_of_rank_0_may_be_asked_for(fields: dict[str, Any]) -> None:
    assert discover(spec(**fields), "gpu01").node_rank == 0


@pytest.mark.parametrize(
    ("endpoint", "parts"),
    [
        ("", ("", None)),
        ("a", ("a", None)),
        ("a:1", ("a", 1)),
        ("10.0.0.1:29500", ("10.0.0.1", 29500)),
        ("[fe80::1]:1", ("fe80::1", 1)),
        ("[fe80::1]", ("fe80::1", None)),
        ("fe80::1", ("fe80::1", None)),
    ],
)
def test_an_endpoint_is_split(endpoint: str, parts: tuple[str, int | None]) -> None:
    assert split_endpoint(endpoint) == parts
