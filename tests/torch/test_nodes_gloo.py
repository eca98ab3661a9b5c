"""Training over gloo on several nodes: it goes on from its checkpoint after a node is lost, to the same result."""

import os
from importlib.util import find_spec
from signal import SIGKILL

import pytest

from tests.conftest import PROGRAMS, Job
from tests.nodes import Nodes

pytestmark = [
    pytest.mark.usefixtures("light_torch"),
    pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed"),
    pytest.mark.slow,  # tests/hosts/test_training.py loses an agent, test_example_elastic_checkpoint.py a worker
]

STEPS = 4


def weights(nodes: Nodes, number: int) -> str:
    """What has become of the weights, which all ranks must agree on."""
    (found,) = set(nodes.signs("weights", number))
    return found


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The weights after a training in one process that nothing disturbs."""
    job = Job(tmp_path_factory.mktemp("undisturbed"))
    job.start("--nproc-per-node", 1, PROGRAMS / "exact_training.py", STEPS, env={"CUDA_VISIBLE_DEVICES": ""})
    (job.home / "signs" / "go").touch()
    result = job.wait()
    assert result.status == 0, result.err
    found = job.sign("weights-0")
    assert found.rpartition("loss ")[2] != "0"
    return found


@pytest.mark.parametrize("what", ["agent", "worker"])
def test_a_training_that_goes_on_from_its_checkpoint_ends_as_an_undisturbed_one(
    nodes, program, undisturbed, monkeypatch, what
):
    """Without the node that was lost, or on all nodes after the failure of a worker."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    flags = ("--max-restarts", int(what == "worker"), "--rdzv-conf", "last_call_timeout=60")
    started = [
        nodes.node(*nodes.c10d("2:3"), "--node-rank", place, *flags, program("exact_training"), STEPS)
        for place in range(3)
    ]
    for rank in range(3):
        nodes.sign(f"waiting-0-{rank}")
    (worker,) = {event["pid"] for event in nodes.events_of(1, "worker_started")}
    os.kill(started[1].agent if what == "agent" else worker, SIGKILL)
    number = 2 if what == "agent" else 3
    assert [nodes.sign(f"from-1-{rank}") for rank in range(number)] == [str(STEPS - 1)] * number
    (nodes.home / "signs" / "go").touch()
    assert nodes.statuses(timeout=60) == [0, 122 if what == "agent" else 0, 0]
    assert weights(nodes, number) == undisturbed
