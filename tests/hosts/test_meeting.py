"""How hosts find each other at the start, in whatever order they come, and what they say when one does not."""

from __future__ import annotations

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
    job.nothing_left()


def test_hosts_that_lag_meet(job, program):
    for host in HOSTS[1:]:
        job.bed.lag(host, 200, loss_percent=5)
    job.by_hand(program("place"))
    all_end_with(job, 0)
    job.nothing_left()


def test_a_host_that_does_not_come_is_named_on_all_others(job, program):
    job.bed.power_cut("node2")
    job.by_hand("--rdzv-timeout", "5s", program("place"), hosts=HOSTS[:2])  # node 1 comes, on a busy machine too
    for result in all_end_with(job, 121, HOSTS[:2]).values():
        assert "error: the rendezvous timed out: 2 of 3 nodes joined (node0, node1); missing: node 2\n" in result.err
    job.nothing_left()


@pytest.mark.parametrize("state", ["off", "cut", "without ddplaunch"])
def test_hosts_that_do_not_reach_the_first_one_say_why(job, program, state):
    if state != "without ddplaunch":
        {"off": job.bed.power_cut, "cut": job.bed.cut}[state]("node0")
    job.by_hand("--rdzv-timeout", "1.5s", program("place"), hosts=HOSTS[1:])
    for result in all_end_with(job, 121, HOSTS[1:]).values():
        assert "error: node 0 was not reached within 1.5 s at node0, ports 29501 to 29508 (" in result.err
        assert ("connection refused" in result.err) == (state == "without ddplaunch")
        assert "hint: is ddplaunch running on node 0, and does every node use the same address and token?" in result.err
    job.nothing_left()


def test_who_has_another_token_is_kept_out_and_disturbs_nobody(job, program):
    told = [program("behave"), "all=done_when_told"]
    job.by_hand("--rdzv-timeout", "6s", *told, hosts=["node0"], env={"DDPLAUNCH_TOKEN": "one"})
    until(lambda: job.bed.listeners("node0"), "node 0 to listen")
    job.by_hand("--rdzv-timeout", "2s", *told, hosts=["node1"], env={"DDPLAUNCH_TOKEN": "another"})
    (stranger,) = all_end_with(job, 121, ["node1"]).values()
    assert "wrong token, or another job" in stranger.err
    all_end_with(job, 121, ["node0"])
    assert job.err("node0").count(f"refused a connection from {job.bed.address('node1')}: ") == 1
    job.nothing_left()


def test_hosts_may_have_different_numbers_of_workers(job, program):
    for number, host in enumerate(HOSTS):
        job.by_hand("--nproc-per-node", number + 1, program("behave"), "all=done", hosts=[host])
    all_end_with(job, 0)
    job.signs("ready", 6)
    job.nothing_left()
