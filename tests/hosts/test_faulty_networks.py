"""A network that fails one way, is late, doubles, reorders and loses: nobody is lost who is only slow, and no two parts train."""

import itertools
import json
import os
import signal
import time

import pytest

from ddplaunch.reach.channel.peer import sends_again_each_second
from tests.conftest import until
from tests.hosts import over_ssh, proc
from tests.hosts.over_ssh import HOSTS, LOGIN, NODES

SILENCE = 2  # seconds, the heartbeat timeout of most of these jobs
ENOUGH = 60.0  # seconds until a generation trains
ONE_WAY = TO_NODE_0, FROM_NODE_0 = ("node1", "node0"), ("node0", "node1")
OTHERS = ("node0", "node2")


@pytest.fixture(scope="module")
def three_hosts(make_bed):
    return make_bed(HOSTS)


@pytest.fixture
def job(job):
    """A job on the hosts, what it has said is shown if the test has failed, and no two generations of it have trained at once."""
    yield job
    print("".join(f"--- {host}\n{job.err(host)}" for host in job.commands))
    assert not list((job.home / "signs").glob("overlap-*")), generations(job)


@pytest.fixture
def start(job, program):
    """Type the command on each node, or on some, with the address of node 0 and a folder for runs of its own.

    Workers of stubborn hosts take longer to save than anybody waits.
    """

    def start(nnodes, *flags, hosts=NODES, silence=SILENCE, steps=1, stubborn=()):
        told = ["--nnodes", nnodes, "--node-rank", "{node_rank}", "--master-addr", job.bed.address(NODES[0])]
        limit = ["--heartbeat-timeout", f"{silence}s"] if silence else []
        for host in hosts:
            env = {"XDG_STATE_HOME": str(job.home / f"state-{host}")}
            worker = (program("alone"), steps, 600 if host in stubborn else 0)
            job.start_each(*told, "--nproc-per-node", 1, *limit, *flags, *worker, hosts=[host], env=env)

    return start


def generations(job):
    """The hosts of each generation that has trained, in order, by its term."""
    found = {}
    for sign in (job.home / "signs").glob("trains-*"):
        if not sign.suffix:  # which it has while it is written
            term, rank = map(int, sign.name.split("-")[1:])
            place = json.loads(sign.read_text())
            found.setdefault(term, [None] * place["world_size"])[rank] = place["host"]
    return {term: found[term] for term in sorted(found) if None not in found[term]}


def newest(job, hosts):
    """Wait until the newest generation has trained on these hosts; return its term."""

    def term():
        found = generations(job)
        return max(found) if found and {*found[max(found)]} == {*hosts} else None

    return until(term, f"{hosts} to train", ENOUGH)


def errors(result):
    """The errors that a command has shown, each in a line."""
    lines = result.err.splitlines()
    return [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]


def kill_agent(job, host):
    """Kill the agent on a host, which is the parent of the worker."""
    processes = job.bed.processes(host)
    (worker,) = (process.pid for process in processes if "bootstrap.py" in process.command)
    (agent,) = (process.pid for process in processes if worker in proc.children(process.pid))
    os.kill(agent, signal.SIGKILL)


def finish(job, hosts=NODES):
    """Have the newest generation end, and the commands on these hosts with 0."""
    job.put("finish")
    results = job.wait_each(hosts=hosts)
    assert {host: result.status for host, result in results.items()} == dict.fromkeys(hosts, 0), results
    return results


def nobody_is_lost(job, hosts=NODES):
    """Have all end well: they have trained together from the beginning to the end."""
    results = finish(job, hosts)
    assert list(generations(job).values()) == [[*NODES]]
    for result in results.values():
        assert "lost: " not in result.err


# --- one way


@pytest.mark.parametrize("way", ONE_WAY, ids=" to ".join)
def test_a_node_that_is_cut_off_one_way_has_no_worker_when_the_others_begin_and_comes_back(job, start, faults, way):
    start("1:3", stubborn=["node1"])
    first = newest(job, NODES)
    faults.cut(*way)
    second = newest(job, OTHERS)
    faults.heal()
    third = newest(job, NODES)
    assert first < second < third
    finish(job)


@pytest.mark.parametrize("way", ONE_WAY, ids=" to ".join)
def test_a_job_of_a_fixed_size_that_is_cut_one_way_says_on_both_sides_which_way_nothing_comes(job, start, faults, way):
    start(3, silence=2 * SILENCE)  # time enough for a kernel to send again, a few times
    newest(job, NODES)
    faults.cut(*way)
    results = job.wait_each()
    assert {host: result.status for host, result in results.items()} == dict.fromkeys(NODES, 122), results
    (said,) = {error.removeprefix("node 1 (node1) was lost: ") for host in OTHERS for error in errors(results[host])}
    (alone,) = errors(results["node1"])
    silent, hears_nothing = f"silent for {2 * SILENCE} s", "hears nothing from here"
    if way == TO_NODE_0:
        assert said == silent
        assert alone == f"the coordinator (node 0) was lost: {silent}, and {hears_nothing}"
    else:  # node 1 tells node 0, which may have found node 1 silent by then: a connection soon carries nothing either way
        assert said in (silent, "has heard nothing from here for too long")
        assert alone == f"the coordinator (node 0) was lost: {silent}"


# --- both ways


@pytest.mark.parametrize("is_elastic", [False, True], ids=["fixed", "elastic"])
def test_nobody_is_lost_where_a_round_trip_takes_1_8_s(job, start, faults, is_elastic):
    faults.everywhere(delay=900)
    start("1:3" if is_elastic else 3, silence=0)
    newest(job, NODES)
    nobody_is_lost(job)


@pytest.mark.parametrize("is_elastic", [False, True], ids=["fixed", "elastic"])
def test_nobody_is_lost_where_frames_come_twice_out_of_order_or_not_at_all(job, start, faults, is_elastic):
    faults.everywhere(jitter=20, loss=5, doubles=20)
    start("1:3" if is_elastic else 3, silence=0, steps=40)
    newest(job, NODES)
    nobody_is_lost(job)


@pytest.mark.skipif(not sends_again_each_second(), reason="this kernel waits ever longer before it sends again")
def test_nobody_is_lost_who_is_cut_off_again_and_again_for_less_than_the_heartbeat_timeout(job, start, faults):
    start("1:3", silence=5)
    newest(job, NODES)
    for _ in range(3):
        faults.part(["node0", "node2"], ["node1"])
        time.sleep(1.5)
        faults.heal()
        time.sleep(1.5)  # what was sent in vain is sent again
    nobody_is_lost(job)


def test_a_node_0_that_is_typed_again_where_it_is_cut_off_does_not_train_beside_the_others(job, start, faults):
    start("1:3", stubborn=["node1", "node2"])
    first = newest(job, NODES)
    faults.part(["node0"], ["node1", "node2"])
    kill_agent(job, "node0")
    assert job.wait(host="node0").status == 122
    start("1:3", "--rdzv-conf", "last_call_timeout=0.1", hosts=["node0"])
    assert first < newest(job, ["node0"])
    for host in ("node1", "node2"):  # they wait, for as long as their parts are apart
        assert "to come back: type its command again on 10.77.0.10, " in job.err(host)
        job.commands[host].send_signal(signal.SIGINT)
        assert job.wait(host=host).status == 130
    finish(job, ["node0"])


# --- where one command has started all


@pytest.mark.parametrize(
    ("ways", "left"),
    [
        ([*itertools.product(["node0"], ["node1", "node2"])], ["node1", "node2"]),
        ([("node0", "node1")], ["node0", "node2"]),
        ([("node1", "node0")], ["node0", "node2"]),
        ([("node0", "node1"), ("node1", "node0")], ["node0", "node2"]),
    ],
    ids=["node 0 and the others", "node 0 to node 1", "node 1 to node 0", "node 0 and node 1"],
)
def test_of_nodes_that_lose_each_other_the_larger_part_goes_on_where_the_command_hears_all(
    job, program, faults, ways, left
):
    told = ["--nnodes", "1:3", "--nproc-per-node", 1, "--heartbeat-timeout", f"{SILENCE}s"]
    over_ssh.start(job, *told, program("alone"), 1, 1)
    first = newest(job, NODES)
    for way in ways:
        faults.cut(*way)
    assert first < newest(job, left)
    results = finish(job, [LOGIN])
    assert "error: " not in results[LOGIN].err
