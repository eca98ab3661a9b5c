"""Hosts on which we start the agents ourselves: --hosts and --hostfile, PBS, LSF, and simulated ones."""

from typing import Any

import pytest

from ddplaunch.plan.cluster.hostlist import Host
from ddplaunch.plan.cluster.listed import HAS_FAILED
from ddplaunch.system.errors import LaunchError
from tests.unit.builders import refusal
from tests.unit.environments import found

A, B, C = Host(name="a"), Host(name="b", slots=4), Host(name="c")
PBS = {"PBS_JOBID": "84.pbs", "PBS_NODEFILE": "/var/spool/pbs/aux/84.pbs", "PBS_NODENUM": "0", "PBS_TASKNUM": "1"}
PBS_FILE = {PBS["PBS_NODEFILE"]: "n1.example.org\nn2.example.org\n"}
LSF = {"LSB_JOBID": "84", "LSB_HOSTS": "n1 n1 n2 n2", "LSB_MCPU_HOSTS": "n1 2 n2 2 "}


def test_listed_hosts_are_the_nodes() -> None:
    job = found(hosts="a,b:4,c")
    assert (job.cluster, job.starter, job.hosts_to_start_on) == ("ssh", "ssh", (A, B, C))
    assert (job.hosts, job.nnodes, job.rendezvous, job.notes) == (("a", "b", "c"), (3, 3), None, ())
    # ssh may know names that workers do not
    assert (job.endpoint.address, job.endpoint.address_reason) == (None, "chosen by node 0 when the nodes have joined")
    assert (job.endpoint.port, job.endpoint.port_reason) == (None, "a free one is reserved at the start")


def test_a_host_file_lists_hosts_as_well() -> None:
    job = found(hostfile="hosts.txt", files={"hosts.txt": "a\nb slots=4\nu@c\n"})
    assert (job.hosts_to_start_on, job.hosts) == ((A, B, Host(name="u@c")), ("a", "b", "c"))


def test_fewer_nodes_than_hosts_are_the_first() -> None:
    job = found(hosts="a,b:4,c", nnodes=(2, 2))
    assert (job.hosts_to_start_on, job.nnodes) == ((A, B), (2, 2))
    assert job.notes == ("c of --hosts a,b:4,c is not used: --nnodes asks for fewer",)


def test_hosts_may_be_more_than_are_needed() -> None:
    job = found(hosts="a,b:4,c", nnodes=(2, 8))
    assert (job.hosts_to_start_on, job.nnodes, job.notes) == ((A, B, C), (2, 3), ())


def test_hosts_and_devices_may_be_chosen() -> None:
    assert found(hosts="a,b:4,c", include="b:0,1@c").hosts_to_start_on == (
        Host(name="b", slots=2, devices=("0", "1")),
        C,
    )
    assert found(hosts="a,b:4,c", exclude="b").hosts == ("a", "c")


def test_hosts_that_have_failed_are_left_out_where_the_others_are_enough() -> None:
    asked: dict[str, Any] = {"hosts": "a,b:4,c", "origins": {"avoid_bad_nodes": "--avoid-bad-nodes"}}
    job = found(bad=["a"], **asked)
    assert (job.hosts, job.nnodes) == (("b", "c"), (2, 2))
    assert job.warnings == (f"--avoid-bad-nodes leaves out a: {HAS_FAILED}",)
    assert found(bad=["a", "b"], hostname="c", **asked).warnings == (f"--avoid-bad-nodes leaves out a,b: {HAS_FAILED}",)
    assert found(bad=["a"], nnodes=(2, 2), **asked).hosts == ("b", "c")
    assert found(bad=["c"], nnodes=(2, 2), **asked).hosts == ("a", "b")
    assert found(bad=["b"], nnodes=(1, 3), **asked).nnodes == (1, 2)
    for bad, nnodes in ((["a", "b", "c"], (1, 1)), (["a"], (3, 3)), (["a", "b"], (2, 3))):
        with pytest.raises(LaunchError, match=r"--avoid-bad-nodes leaves .* and the job needs"):
            found(bad=bad, nnodes=nnodes, **asked)
    assert found(bad=["b"], spares=1, **asked).nnodes == (1, 2)
    with pytest.raises(LaunchError, match=r"leaves b of .* out, and the job needs 3 nodes, not 2"):
        found(bad=["b"], spares=1, nnodes=(2, 3), **asked)
    with pytest.raises(LaunchError, match=r"leaves a,b of .* out, and the job needs 2 nodes, not 1"):
        found(bad=["a", "b"], spares=1, **asked)


def test_one_host_that_is_this_one_is_not_called_by_ssh() -> None:
    for name in ("gpu01:4", "gpu01.example.org:4", "localhost:4"):
        job = found(hosts=name, hostname="gpu01.cluster")
        assert (job.cluster, job.hosts_to_start_on, job.endpoint.address, job.nproc_per_node) == (
            "ssh",
            (),
            "127.0.0.1",
            4,
        )
    for name in ("gpu02", "root@gpu01", "10.0.0.1"):
        assert found(hosts=name, hostname="gpu01").starter == "ssh"
    devices = found(hosts="gpu01:4", hostname="gpu01", include="gpu01:2")
    assert devices.hosts_to_start_on == (Host(name="gpu01", slots=1, devices=("2",)),)


def test_a_number_of_workers_beats_slots_as_far_as_they_reach() -> None:
    assert found(hosts="a,b:4", nproc_per_node=2).hosts_to_start_on == (A, Host(name="b", slots=2))
    assert found(hosts="a,b:4", nproc_per_node="gpu").hosts_to_start_on == (A, Host(name="b"))


def test_flags_give_the_address_and_the_port_of_the_workers() -> None:
    job = found(hosts="a,b", master_addr="10.0.0.1", master_port=4000)
    assert (job.endpoint.address, job.endpoint.address_reason, job.endpoint.port) == ("10.0.0.1", "--master-addr", 4000)


BAD = [
    (
        {"hosts": "a,b", "nnodes": (3, 3)},
        "--nnodes 3, but --hosts a,b has 2 nodes: a,b",
        "--nnodes 2, or leave it out to use all",
    ),
    (
        {"hosts": "a,b", "node_rank": 1},
        "--node-rank 1: ddplaunch starts all nodes of --hosts a,b itself, in their order",
        "leave --node-rank out",
    ),
    ({"hosts": "a,b:2", "nproc_per_node": 4}, "--nproc-per-node 4, but b has 2 slots", "list it as b:4"),
    ({"hosts": "a:1,b", "nproc_per_node": 2}, "--nproc-per-node 2, but a has 1 slot", "list it as a:2"),
    ({"hosts": "a,,b"}, '"a,,b" in --hosts: a name is missing beside a comma', "type names such as gpu01,gpu02"),
    ({"hostfile": "hosts.txt"}, "--hostfile hosts.txt: no such file or directory", None),
    (
        {"hosts": "a,b", "no_control": True},
        "--no-control: agents that ddplaunch starts on other hosts need a control channel to this one",
        "leave --no-control out",
    ),
]


@pytest.mark.parametrize(("asked", "message", "hint"), BAD, ids=[row[1] for row in BAD])
def test_a_contradiction_names_both_sides(asked: dict[str, Any], message: str, hint: str | None) -> None:
    assert refusal(lambda: found(**asked)) == (message, hint)


def test_a_pbs_job_is_used_as_a_whole() -> None:
    job = found(PBS, files=PBS_FILE, hostname="n1")
    hosts = ("n1.example.org", "n2.example.org")
    assert (job.cluster, job.starter, job.hosts) == ("pbs", "ssh", hosts)
    assert (job.hosts_to_start_on, job.nnodes, job.notes) == (tuple(Host(name=name) for name in hosts), (2, 2), ())
    assert (job.endpoint.address, job.endpoint.address_reason) == ("n1.example.org", "the first node of PBS job 84.pbs")


def test_slots_of_a_batch_job_count_no_workers() -> None:
    """Torque lists a host once for each CPU (ppn), PBS Pro once for each of mpiprocs."""
    files = {PBS["PBS_NODEFILE"]: "n1\n" * 64 + "n2\n" * 64}
    job = found(PBS, files=files, hostname="n1")
    assert job.hosts_to_start_on == (Host(name="n1"), Host(name="n2"))
    assert job.notes == ("the 64 slots of a host do not count workers: for as many, add --nproc-per-node 64",)
    assert found(PBS, files=files, hostname="n1", nproc_per_node=128).notes == ()


def test_a_pbs_job_on_this_host_alone_needs_no_ssh() -> None:
    job = found(PBS, files={PBS["PBS_NODEFILE"]: "n1\nn1\n"}, hostname="n1", nproc_per_node=2)
    assert (job.cluster, job.hosts_to_start_on, job.nnodes, job.nproc_per_node) == ("pbs", (), (1, 1), None)


def test_a_pbs_job_is_started_from_its_first_node() -> None:
    """`pbsdsh ddplaunch` would start all agents from every node."""
    with pytest.raises(LaunchError) as raised:
        found({**PBS, "PBS_NODENUM": "1"}, files=PBS_FILE)
    message = "PBS_NODENUM=1: this is not the first node of PBS job 84.pbs, from where ddplaunch starts the agents"
    assert raised.value.message == message
    assert raised.value.hint is not None
    assert raised.value.hint.endswith("--nnodes 2 --node-rank 1 --master-addr n1.example.org")
    by_hand = found({**PBS, "PBS_NODENUM": "1"}, files=PBS_FILE, nnodes=(2, 2), node_rank=1, master_addr="n1")
    assert by_hand.cluster == "static"


def test_a_node_file_that_is_gone_is_named() -> None:
    with pytest.raises(LaunchError) as raised:
        found(PBS)
    assert raised.value.message == "PBS_NODEFILE=/var/spool/pbs/aux/84.pbs: no such file or directory"
    assert found(PBS, cluster="local").cluster == "local"


def test_an_lsf_job_is_used_as_a_whole() -> None:
    job = found(LSF, hostname="n1")
    assert (job.cluster, job.starter, job.hosts) == ("lsf", "blaunch", ("n1", "n2"))
    assert job.hosts_to_start_on == (Host(name="n1"), Host(name="n2"))
    assert job.notes == ("the 2 slots of a host do not count workers: for as many, add --nproc-per-node 2",)


def test_an_lsf_job_may_list_its_hosts_in_a_file() -> None:
    env = {"LSB_JOBID": "84", "LSB_DJOB_HOSTFILE": "/lsf/84"}
    assert found(env, files={"/lsf/84": "n1\nn1\nn2\n"}).hosts == ("n1", "n2")
    with pytest.raises(LaunchError, match="LSB_DJOB_HOSTFILE=/lsf/84: no such file or directory"):
        found(env)


def test_an_lsf_list_that_is_none_is_refused() -> None:
    with pytest.raises(LaunchError) as raised:
        found({**LSF, "LSB_MCPU_HOSTS": "n1 2 n2"})
    assert raised.value.message == "LSB_MCPU_HOSTS=n1 2 n2 is not a list of hosts and numbers"
    with pytest.raises(LaunchError) as raised:
        found({**LSF, "LSB_MCPU_HOSTS": "n1 x"})
    assert raised.value.message == '"n1:x" in LSB_MCPU_HOSTS: "x" is not a number of slots from 1 to 65536'


@pytest.mark.parametrize("env", [{"LSB_JOBID": "84"}, {"LSB_MCPU_HOSTS": "n1 2 n2 2"}, {"PBS_JOBID": "84"}], ids=str)
def test_half_a_batch_job_is_none(env: dict[str, str]) -> None:
    assert found(env).cluster == "local"


def test_simulated_nodes_are_as_many_as_are_asked_for() -> None:
    job = found(simulate="divide", nnodes=(3, 3))
    nodes = ("node-0", "node-1", "node-2")
    assert (job.cluster, job.starter, job.hosts) == ("local", "simulate", nodes)
    assert (job.hosts_to_start_on, job.nnodes) == (tuple(Host(name=name) for name in nodes), (3, 3))
    assert (job.endpoint.address, job.rendezvous) == ("127.0.0.1", None)
    elastic = found(simulate="share", nnodes=(2, 4))
    assert (elastic.nnodes, len(elastic.hosts_to_start_on)) == ((2, 4), 4)


def test_one_simulated_node_is_a_node() -> None:
    job = found(simulate="divide")
    assert (job.hosts_to_start_on, job.endpoint.address) == ((Host(name="node-0"),), "127.0.0.1")
