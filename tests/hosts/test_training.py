"""Training over gloo on three hosts of which one is lost: the result is that of an undisturbed one, to the last bit."""

import pytest

from tests.conftest import PROGRAMS, Job, until
from tests.hosts import over_ssh
from tests.torch.example import LIGHT, QUICK

HOSTS = ["node0", "node1", "node2"]
STEPS = 20
SILENCE = 2  # seconds, the heartbeat timeout of these jobs


@pytest.fixture
def start(job, program):
    """Start a training, with DistributedDataParallel, with a worker on each of these hosts."""

    def start(*flags, hosts=HOSTS, nnodes=3):
        told = ["--heartbeat-timeout", f"{SILENCE}s", *flags, program("exact_training"), STEPS, "ddp"]
        job.at_endpoint(*told, nnodes=nnodes, hosts=hosts, env=QUICK)

    return start


def are_in_the_last_step(job, generation, number):
    """Wait until all workers but rank 0 are in the last step: they sum up gradients with rank 0, which has not come yet."""
    job.signs(f"waiting-{generation}", number)


def shown(results):
    """What all commands have written to stderr, in full: torch itself may abort a process once in hundreds of runs."""
    return "\n".join(result.err for result in results.values())


def result(job, number):
    """What all workers have found."""
    (weights,) = set(job.signs("weights", number))
    return weights


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """What the training finds in one process that nothing disturbs."""
    job = Job(tmp_path_factory.mktemp("undisturbed"))
    job.start(PROGRAMS / "exact_training.py", STEPS, env=LIGHT)
    (job.home / "signs" / "go").touch()
    assert job.wait().status == 0
    found = job.sign("weights-0")
    assert 0 < float(found.split()[-1]) < 1, "the loss, which is 4781.5 in the beginning"
    return found


@pytest.mark.parametrize("gone", ["node0", "node1"])
def test_a_training_that_loses_a_host_goes_on_from_its_checkpoint_without_it(job, start, program, undisturbed, gone):
    """Workers in a collective are ended for that: torch itself would have them wait for half an hour."""
    if gone == "node0":  # no other node goes on without it, unless another host has started all
        told = ["--nnodes", "2:3", "--nproc-per-node", 1, "--heartbeat-timeout", f"{SILENCE}s"]
        over_ssh.start(job, *told, program("exact_training"), STEPS, "ddp", host="node1", env=QUICK)
    else:
        start("--rdzv-conf", "last_call_timeout=60", nnodes="2:3")
    are_in_the_last_step(job, 0, 3)
    job.bed.power_cut(gone)
    are_in_the_last_step(job, 1, 2)
    assert [int(job.sign(f"from-1-{rank}")) for rank in range(2)] == [STEPS - 1] * 2
    job.put("go")
    results = job.wait_each(hosts=[host for host in job.commands if host != gone])
    assert {result.status for result in results.values()} == {0}, shown(results)
    assert result(job, 2) == undisturbed


def ends_as_undisturbed(job, undisturbed):
    """See that all three hosts have gone on from the checkpoint, and come to the same as a training that lost none."""
    are_in_the_last_step(job, 1, 3)
    assert [int(job.sign(f"from-1-{rank}")) for rank in range(3)] == [STEPS - 1] * 3
    job.put("go")
    results = job.wait_each()
    assert {result.status for result in results.values()} == {0}, shown(results)
    assert result(job, 3) == undisturbed


def test_a_training_that_loses_node_0_goes_on_from_its_checkpoint_when_that_is_back(job, start, undisturbed):
    start("--rdzv-conf", "last_call_timeout=60", nnodes="2:3")
    are_in_the_last_step(job, 0, 3)
    job.bed.power_cut("node0")
    until(lambda: "type its command again on node0" in job.err("node1"), "node 1 to wait for node 0")
    job.bed.boot("node0")
    job.bed.join("node0")
    start("--rdzv-conf", "last_call_timeout=60", nnodes="2:3", hosts=["node0"])
    ends_as_undisturbed(job, undisturbed)


@pytest.mark.slow
def test_a_training_goes_on_from_its_checkpoint_with_another_host_in_place_of_the_lost_one(job, start, undisturbed):
    start("--max-restarts", 1)
    are_in_the_last_step(job, 0, 3)
    job.bed.crash("node1")
    until(lambda: "once 1 more has joined" in job.err("node0"), "node 0 to wait for another one")
    job.bed.boot("node1")
    start("--max-restarts", 1, hosts=["node1"])
    ends_as_undisturbed(job, undisturbed)
