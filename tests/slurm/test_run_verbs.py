"""A job in Slurm is looked into, and stopped, from another step on its first node."""

import json
import os
import re
import shlex

import pytest

from ddplaunch.record import run_socket
from tests.slurm.cluster import CTL
from tests.slurm.job import SlurmJob
from tests.slurm.started import BEHAVE, EACH, NODES, RANKS, batch, one_cluster, ready

__all__ = ["one_cluster"]


@pytest.mark.parametrize("way", ["a step of its own", "a task for each rank"])
def test_all_its_ranks_are_shown_and_stopped_as_by_ctrl_c(job: SlurmJob, way: str) -> None:
    running = batch(job, way, BEHAVE, tells=True, flags=f"--run-id {job.mark}")
    ready(job, running)
    on_the_first = ("--overlap", "--jobid", running.id, "--nodes=1", "--ntasks=1", *job.argv())
    shown = json.loads(job.srun(*on_the_first, "ps", "--json").out)
    [run] = [run for run in shown if run["run_id"] == job.mark]
    assert [worker["rank"] for worker in run["workers"]] == list(range(RANKS))
    assert len({worker["host"] for worker in run["workers"]}) == NODES
    assert {worker["state"] for worker in run["workers"]} == {"running"}
    assert run["nnodes"] == (NODES if way == "a step of its own" else NODES * EACH)
    stopped = job.srun(*on_the_first, "stop", job.mark)
    assert stopped.status == 0, stopped
    status = re.search(r"has ended with status (\d+)", stopped.err)
    assert status is not None, stopped
    running.wait()
    assert f"the status is {status[1]}" in running.output()
    assert status[1] in ("130", "143")  # a script may have SIGINT ignored
    job.nothing_left(10)


@pytest.mark.parametrize(
    ("way", "host", "of_first"),
    [
        ("", CTL, "ssh ctl "),
        ("srun --het-group=1 ", "node2", "srun --overlap --jobid {id} --het-group=1 -N1 -n1 -w node2 "),
    ],
    ids=["a step from a host that is no node", "a step of the second component"],
)
def test_in_a_heterogeneous_job_the_hint_names_the_component_and_none_for_a_host_that_is_no_node(
    job: SlurmJob, way: str, host: str, of_first: str
) -> None:
    started = job.start_salloc(f"echo $SLURM_JOB_ID; {way}{job.ddplaunch} {BEHAVE}", "--nodes=1", ":", "--nodes=2")
    job.signs("ready", 2 if way else 3)
    there = of_first.format(id=job.out(started).split()[0])
    asked = job.run("ps", host="node3")
    hint = re.search(r"runs on (\w+) \(`(.*)`\)", asked.out)
    assert hint is not None, asked
    assert (hint[1], hint[2].startswith(there)) == (host, True), hint
    if way:
        shown = job.wait(command=job.start_on(CTL, "sh", "-c", hint[2]))
        assert "running, 2 workers on 2 nodes" in shown.expect(0).out
    started.terminate()
    job.wait(command=started)


def test_where_the_home_is_shared_the_hint_on_another_host_runs_as_it_is_typed(job: SlurmJob) -> None:
    running = batch(job, "a step of its own", BEHAVE, flags=f"--run-id {job.mark}")
    ready(job, running)
    own = f"mount -t tmpfs -o mode=700 none {run_socket.runtime_folder(os.getuid())}"  # as each host has a /tmp of its own
    asks = f"{own} && exec {shlex.join(job.argv('stacks', '-r', '1', '--json'))}"
    asked = job.wait(command=job.start_on(CTL, "unshare", "--mount", "sh", "-c", asks))
    hint = re.search(r"hint: `(.*)`", asked.err)
    assert hint is not None, asked
    assert "runs on node1\n" in asked.err
    shown = job.wait(command=job.start_on(CTL, "sh", "-c", hint[1]))
    assert shown.status == 0, (hint[1], shown)
    assert {worker["rank"] for worker in json.loads(shown.out)["processes"]} == {1}
    running.cancel()
    running.wait()
    job.nothing_left(10)
