"""Which node is put on the list of those whose machine has failed, when the cable of node 0 is out in a job of Slurm."""

import time

import pytest

from ddplaunch.record import bad_nodes
from ddplaunch.record.folders import bad_nodes_file
from tests.conftest import until
from tests.slurm.job import SlurmJob
from tests.slurm.started import BEHAVE, WORKER, ready


@pytest.mark.parametrize("nnodes", ["3", "2:3"])
@pytest.mark.parametrize("way", ["", "srun --kill-on-bad-exit=0"], ids=["a step of its own", "a task for each node"])
def test_no_healthy_node_is_at_fault(job: SlurmJob, way: str, nnodes: str) -> None:
    flags = f"--nnodes {nnodes} --nproc-per-node 1 --heartbeat-timeout 2"
    command = f"{way} {job.ddplaunch} {flags} {BEHAVE} all=done_when_told"
    running = job.sbatch(
        f"trap : TERM\n{command}\necho the status is $?", "--nodes=3", "--ntasks-per-node=1", "--no-kill"
    )
    ready(job, running, 3)
    bed = job.cluster.bed
    cut = "node1" if nnodes == "3" else "node2"  # without node 0, or the host of the command, the job does not go on
    bed.cut(cut)
    until(lambda: not any(WORKER in one.command for one in bed.processes(cut)), "its side to end")
    if nnodes == "2:3":
        job.signs("restart-1", 2)
    bed.join(cut)
    (job.home / "signs" / "go").touch()
    running.wait("COMPLETED", "FAILED", "NODE_FAIL")
    until(lambda: not any(bed.processes(host) for host in ("node1", "node2", "node3")), "the nodes to be quiet")
    found = {one.host for one in bad_nodes.read(bad_nodes_file(job.env), time.time())}
    assert found <= {cut}, running.output()
    assert found or nnodes == "3"
