"""How hosts find each other at the start, in whatever order they come, and what they say when one does not."""

import json

import pytest

from tests.conftest import until

HOSTS = ["node0", "node1", "node2"]


def all_end_with(job, status, hosts=HOSTS):
    results = job.wait_each(hosts=hosts)
    assert {host: result.status for host, result in results.items()} == dict.fromkeys(hosts, status), results
    return results


def test_the_first_host_may_come_last(job, program):
    job.bed.power_cut("node0")
    job.by_hand(program("place"), hosts=HOSTS[1:])
    for host in HOSTS[1:]:  # nobody tells them that it is not there
        until(lambda host=host: "looking for node 0" in job.err(host), f"{host} to look for it")
    job.bed.boot("node0")
    job.by_hand(program("place"), hosts=["node0"])
    all_end_with(job, 0)


def test_hosts_that_lag_meet(job, program):
    for host in HOSTS[1:]:
        job.bed.lag(host, 200, loss_percent=5)
    job.by_hand(program("place"))
    all_end_with(job, 0)


def test_workers_of_others_meet_node_0_where_it_is_if_it_was_told_that_it_is_at_localhost(job, program):
    """As older versions of Kubeflow tell the master of a PyTorchJob."""
    for rank, host in enumerate(HOSTS):
        pod = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "RANK": str(rank), "WORLD_SIZE": "3", "MASTER_PORT": "23456"}
        job.start(program("place"), host=host, env={**pod, "MASTER_ADDR": HOSTS[0] if rank else "localhost"})
    all_end_with(job, 0)
    told = [json.loads((job.home / "signs" / f"place-{rank}").read_text())["variables"] for rank in range(3)]
    assert {one["MASTER_ADDR"] for one in told} == {job.bed.address("node0")}


@pytest.mark.parametrize("state", ["off", "cut", "without ddplaunch"])
def test_hosts_that_do_not_reach_the_first_one_say_why(job, program, state):
    if state != "without ddplaunch":
        {"off": job.bed.power_cut, "cut": job.bed.cut}[state]("node0")
    job.by_hand("--rdzv-timeout", "1.5s", program("place"), hosts=HOSTS[1:])
    for result in all_end_with(job, 121, HOSTS[1:]).values():
        assert "error: node 0 was not reached within 1.5 s at node0, ports 29501 to 29508 (" in result.err
        assert ("connection refused" in result.err) == (state == "without ddplaunch")
        assert (
            "hint: is ddplaunch running on node 0, with the same address and token? Type `--node-rank` on all nodes"
            in result.err
        )
