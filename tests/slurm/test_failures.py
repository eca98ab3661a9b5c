"""What fails in Slurm: a worker, an agent, the command, srun, a node. All ends, once and everywhere, with the right status."""

import json
import os
import re
import shutil
import sys
from contextlib import suppress
from signal import SIGKILL, SIGSTOP

import pytest

from tests.conftest import PROGRAMS, until
from tests.slurm.cluster import CTL
from tests.slurm.job import SlurmJob
from tests.slurm.places import PLACE, places
from tests.slurm.started import (
    BEHAVE,
    EACH,
    EVERY_WAY,
    NODES,
    RANKS,
    TASK,
    WORKER,
    agent,
    batch,
    front,
    one_cluster,
    parent,
    ready,
)

__all__ = ["one_cluster"]


@EVERY_WAY
def test_a_worker_that_fails_on_one_node_ends_all_and_gives_the_status(job: SlurmJob, way: str) -> None:
    failed = batch(job, way, BEHAVE, "3=exit3")
    assert (failed.wait(), failed.exit_code()) == ("FAILED", 3), failed.output()
    assert failed.output().count("error: rank 3 on node2 failed") == 1, failed.output()


@pytest.mark.parametrize("host", ["node1", "node2"])
def test_an_agent_that_is_killed_ends_all_nodes(job: SlurmJob, host: str) -> None:
    running = batch(job, "a step of its own", BEHAVE, "all=polite")
    ready(job, running)
    os.kill(agent(job, host), SIGKILL)
    assert (running.wait(), running.exit_code()) == ("FAILED", 122), running.output()
    # reset, if the agent had not read everything
    assert len(re.findall(rf"\({host}\) was lost: connection (closed|reset)", running.output())) == 1, running.output()
    job.nothing_left(10)


@pytest.mark.parametrize("which", ["node 0's agent", "node 1's agent", "the watcher", "the command"])
def test_whatever_is_stopped_of_a_step_all_nodes_end(job: SlurmJob, which: str) -> None:
    """The watcher is what follows the step behind the command."""
    running = batch(
        job, "a step of its own", BEHAVE, "all=polite", flags="--heartbeat-timeout 2s --grace-period 5s", tells=True
    )
    ready(job, running)
    command = front(job, "node1")
    pid = {
        "node 0's agent": lambda: agent(job, "node1"),
        "node 1's agent": lambda: agent(job, "node2"),
        "the watcher": lambda: next(p.pid for p in job.cluster.bed.processes("node1") if parent(p.pid) == command),
        "the command": lambda: command,
    }[which]()
    os.kill(pid, SIGSTOP)
    running.wait()
    assert f"the status is {137 if which == 'the command' else 122}" in running.output()
    job.nothing_left(10)


def test_a_spare_takes_the_place_of_a_node_whose_agent_is_killed(job: SlurmJob) -> None:
    told = f"--spares 1 --nproc-per-node {EACH} {PROGRAMS / 'restarts.py'} goes_on_until_told"
    running = job.sbatch(f"{job.ddplaunch} {told}", f"--nodes={NODES + 1}", "--ntasks-per-node=4")
    job.signs("place-0", RANKS)
    names = ("node1", "node2", "node3")
    hosts = [host for host in names if any(WORKER in p.command for p in job.cluster.bed.processes(host))]
    assert len(hosts) == NODES, "the other one is the spare"
    os.kill(agent(job, hosts[-1]), SIGKILL)
    places = [json.loads(place) for place in job.signs("place-1", RANKS)]
    assert [(place["GROUP_RANK"], place["WORLD_SIZE"]) for place in places] == [
        (str(rank // EACH), str(RANKS)) for rank in range(RANKS)
    ]
    (job.home / "signs" / "finish").touch()
    assert (running.wait(), running.exit_code()) == ("COMPLETED", 0), running.output()
    assert f"({hosts[-1]}) is lost: " in running.output()
    job.nothing_left(10)


@pytest.mark.parametrize(
    ("lacks_it", "words"),
    [
        ("node1", "error: node 0 (node1) does not take part: /srv/place.py does not exist\n"),
        ("node2", "error: node 1 (node2) does not take part: /srv/place.py does not exist\n"),
    ],
)
def test_a_node_that_lacks_the_script_ends_the_step_and_says_so_once(job: SlurmJob, lacks_it: str, words: str) -> None:
    """Wherever the command was typed, which has the script; else the others would look for node 0, or it wait for them."""
    for host in {"node1", "node2", CTL} - {lacks_it}:
        shutil.copy(PLACE, job.cluster.bed.path(host, "/srv/place.py"))
    job.cluster.bed.path(lacks_it, "/srv/place.py").unlink(missing_ok=True)
    result = job.salloc(f"{job.ddplaunch} /srv/place.py; echo $?", "--nodelist=node1,node2")
    assert (result.out, result.err.count(words), result.err.count("place.py")) == ("121\n", 1, 1), result.err


def test_a_command_that_is_killed_takes_its_workers_with_it(job: SlurmJob) -> None:
    command = job.start_salloc(f"{job.ddplaunch} --nproc-per-node 2 {BEHAVE} all=polite; echo $?", f"--nodes={NODES}")
    job.signs("ready", RANKS)
    os.kill(front(job), SIGKILL)
    assert job.wait(command=command).out == "137\n"
    job.nothing_left(10)


def test_an_srun_that_is_killed_takes_the_workers_with_it(job: SlurmJob) -> None:
    command = job.start_salloc(f"{job.ddplaunch} --nproc-per-node 2 {BEHAVE} all=polite; echo $?", f"--nodes={NODES}")
    job.signs("ready", RANKS)
    os.kill(min(process.pid for process in job.cluster.bed.processes("ctl") if process.name == "srun"), SIGKILL)
    result = job.wait(command=command)
    assert int(result.out) in (122, 137)
    assert result.err.count("srun, which runs the step of this job, was killed by SIGKILL\n") == 1, result.err
    job.nothing_left(10)


def test_an_srun_that_is_killed_before_its_tasks_begin_is_named(job: SlurmJob) -> None:
    hold = 'srun --nodes=1 --exclusive sleep 60 & hold=$!; until [ -n "$(squeue -hs)" ]; do sleep 0.05; done'
    command = job.start_salloc(
        f"{hold}; {job.ddplaunch} {BEHAVE} all=polite; echo $?; kill $hold; wait", f"--nodes={NODES}"
    )
    step = lambda: [p.pid for p in job.cluster.bed.processes("ctl") if p.name == "srun" and TASK in p.command]  # noqa: E731
    until(step, "the step to be asked for")
    os.kill(min(step()), SIGKILL)
    result = job.wait(command=command)
    assert result.out == "137\n", result
    assert result.err.count("srun, which runs the step of this job, was killed by SIGKILL\n") == 1, result.err


@pytest.mark.parametrize("way", ["a task for each node", "a step of its own"])
def test_a_node_that_is_lost_ends_the_others_and_is_named(job: SlurmJob, way: str) -> None:
    running = batch(job, way, BEHAVE, "all=polite", flags="--heartbeat-timeout 2", options=("--no-kill",))
    ready(job, running)
    job.cluster.bed.power_cut("node2")
    until(lambda: "is lost" in running.output(), "the loss to be told")
    assert "node2" in running.output()
    until(lambda: not [p for p in job.cluster.bed.processes("node1") if p.command.endswith("all=polite")
                       and "bootstrap" in p.command], "the workers to be gone")  # fmt: skip
    if way == "a step of its own":
        # the job itself has not ended before Slurm has missed the node
        running.wait("COMPLETING", "FAILED")
        assert running.exit_code() == 122, running.output()
    else:
        running.cancel()
    job.cluster.bed.boot("node2")


def test_a_node_on_which_everything_is_killed_ends_the_step_though_srun_waits_for_it(job: SlurmJob) -> None:
    """With its slurmstepd gone nobody tells srun that the tasks of that node have ended."""
    running = batch(job, "a step of its own", BEHAVE, "all=polite", flags="--grace-period 0.5")
    ready(job, running)
    for process in job.cluster.bed.processes("node2"):
        with suppress(ProcessLookupError):
            os.kill(process.pid, SIGKILL)
    running.wait("COMPLETING", "FAILED")
    assert running.exit_code() == 122, running.output()
    assert "node 1 (node2) was lost" in running.output()


@EVERY_WAY
def test_a_node_that_is_set_down_is_named_and_ends_all_but_lets_workers_save(job: SlurmJob, way: str) -> None:
    running = batch(job, way, BEHAVE, "all=polite", options=("--no-requeue",), tells=True)
    ready(job, running)
    job.cluster.down("node2")
    assert running.wait() == "NODE_FAIL"
    assert "ddplaunch: node2 was lost (down in Slurm): stopped by SIGTERM after " in running.output()
    assert "the status is 122\n" in running.output()
    job.nothing_left(10)
    got = [(job.home / "signs" / f"got-{rank}").read_text().split().count("SIGTERM") for rank in range(RANKS)]
    assert got == [1] * RANKS


def test_a_job_whose_only_node_is_set_down_is_lost_though_srun_ends_with_0(job: SlurmJob) -> None:
    command = job.start_salloc(f"{job.ddplaunch} --nproc-per-node 2 {BEHAVE} all=polite; echo $?", "--nodes=1")
    job.signs("ready", 2)
    job.cluster.down("node1")
    result = job.wait(command=command)
    assert result.out == "122\n", result
    job.nothing_left(10)


def test_a_job_goes_on_while_slurmd_of_a_node_is_away(job: SlurmJob) -> None:
    running = batch(job, "a step of its own", BEHAVE, "all=done_when_told")
    ready(job, running)
    job.cluster.kill_slurmd("node2")
    job.cluster.start_slurmd("node2")
    (job.home / "signs" / "go").touch()
    assert running.wait() == "COMPLETED", running.output()


def test_the_last_line_of_a_batch_job_with_a_restart_counts_its_time_in_the_queue(job: SlurmJob) -> None:
    (job.home / "steps.py").write_text(
        "import os, ddplaunch\n"
        "for step in range(3):\n"
        "    ddplaunch.progress(step, 3)\n"
        "if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0': raise SystemExit(3)\n"
    )
    command = f"{job.ddplaunch} --nproc-per-node 1 --max-restarts 1 steps.py"
    running = job.sbatch(command, "--nodes=2", "--begin=now+4")
    assert running.wait() == "COMPLETED", running.output()
    assert re.search(r"after 1 restart, effective \d+%: queue \d[\d.]* s, start ", running.output()), running.output()


NOT_EVERYWHERE = "/srv/venv"  # the environment of the command, as a host of its own has it


def with_own_environment(job: SlurmJob, *hosts: str) -> str:
    """Return the command in an environment that these hosts have, and no others."""
    for host in ("node1", "node2", "node3", CTL):
        path = job.cluster.bed.path(host, NOT_EVERYWHERE)
        path.unlink(missing_ok=True)
        if host in hosts:
            path.symlink_to(sys.prefix)
    return f"{NOT_EVERYWHERE}/bin/python -P -m ddplaunch"


@pytest.mark.parametrize(("lacks_it", "rank"), [("node1", 0), ("node2", 1)])
def test_a_node_that_lacks_the_python_of_the_command_ends_the_job_at_once(
    job: SlurmJob, lacks_it: str, rank: int
) -> None:
    command = with_own_environment(job, *{"node1", "node2", CTL} - {lacks_it})
    result = job.salloc(f"{command} --nproc-per-node 1 {PLACE}; echo $?", "--nodelist=node1,node2")
    words = f"error: node {rank} ({lacks_it}) does not take part: its task ended before ddplaunch had joined there: Exited with"
    assert (result.out, result.err.count(words)) == ("121\n", 1), result.err
    assert f"{NOT_EVERYWHERE}/bin/python" in result.err.partition("hint:")[2]


@pytest.mark.parametrize("flags", ["--nnodes 1:2", "--spares 1"])
def test_a_job_that_may_be_smaller_begins_without_the_node_that_lacks_the_python(job: SlurmJob, flags: str) -> None:
    command = with_own_environment(job, "node1", CTL)
    line = f"{command} {flags} --nproc-per-node 1 {PLACE}; echo $?"
    result = job.salloc(line, "--nodelist=node1,node2")
    assert result.out == "0\n", result.err
    assert "node 1 (node2) does not take part: its task ended before" in result.err
    assert [place["WORLD_SIZE"] for place in places(job)] == ["1"]
