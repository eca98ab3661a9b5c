"""Which host is put on the list of those whose machine has failed, when the cable of one of them is out."""

import time

import pytest

from ddplaunch.record import bad_nodes
from ddplaunch.record.folders import bad_nodes_file
from tests.conftest import until
from tests.hosts import over_ssh
from tests.hosts.over_ssh import HOSTS, LOGIN, NODES


@pytest.fixture(scope="module")
def three_hosts(make_bed):
    return make_bed(HOSTS)


@pytest.fixture
def start(job, program):
    """Start a worker on each of three nodes, by hand or over ssh, and wait until all are there; by hand again on some."""

    def start(how: str, nnodes: str, *, again_on: str = "") -> None:
        told = ["--nnodes", nnodes, "--nproc-per-node", 1, "--heartbeat-timeout", "2s", program("restarts")]
        told += ["goes_on_until_told"]
        if how == "ssh":
            over_ssh.start(job, *told)
        else:
            rank = ("--node-rank", "{node_rank}", "--master-addr", "node0", "--rdzv-conf", "last_call_timeout=60")
            job.start_each(*rank, *told, hosts=[again_on] if again_on else NODES)
        if not again_on:
            job.signs("place-0", 3)

    return start


@pytest.fixture
def remembered(job):
    """Return the hosts on the list, once all commands have ended."""

    def remembered(how: str) -> list[str]:
        job.wait_each(hosts=[LOGIN] if how == "ssh" else NODES)
        until(lambda: not any(job.bed.processes(host) for host in NODES), "the nodes to be quiet")
        return [one.host for one in bad_nodes.read(bad_nodes_file(job.env), time.time())]

    return remembered


@pytest.mark.parametrize("nnodes", ["3", "2:3"])
@pytest.mark.parametrize("how", ["ssh", "by hand"])
@pytest.mark.parametrize("cut", ["node0", "node1"])
def test_the_host_whose_cable_was_out_is_at_fault_and_no_healthy_one(job, start, remembered, how, nnodes, cut):
    start(how, nnodes)
    job.bed.cut(cut)
    if nnodes == "3":
        others = [LOGIN] if how == "ssh" else [host for host in NODES if host != cut]
        job.wait_each(hosts=others)
    elif (how, cut) != ("by hand", "node0"):  # for which the others wait
        job.signs("place-1", 2)
    waits = (how, nnodes, cut) == ("by hand", "2:3", "node1")
    until(lambda: all(waits and "bootstrap.py" not in one.command for one in job.bed.processes(cut)), "its side to end")
    job.bed.join(cut)
    if (how, nnodes) == ("by hand", "2:3"):
        if cut == "node0":  # which has lost all others, and ends with too few nodes
            assert "type its command again" in job.wait(host=cut).expect(122).err
            start(how, nnodes, again_on=cut)
        job.signs(f"place-{1 if cut == 'node0' else 2}", 3)
    job.put("finish")
    found = set(remembered(how))
    # over ssh a node 0 that is cut off is ended by its front, and nobody else keeps the list of that job
    assert found == {cut} or (found == set() and (how, nnodes, cut) == ("ssh", "3", "node0"))


@pytest.mark.parametrize("how", ["ssh", "by hand"])
def test_a_cable_that_was_out_for_a_moment_puts_no_healthy_host_on_the_list(job, start, remembered, how):
    start(how, "3")
    job.bed.cut("node0")
    time.sleep(2.5)  # as long as it takes one side to give up, and the other one perhaps not
    job.bed.join("node0")
    assert set(remembered(how)) <= {"node0"}
