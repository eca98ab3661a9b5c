"""Signals in Slurm: how often workers get them, and that nobody kills workers that save."""

import os
import time
from signal import SIGINT, SIGQUIT, SIGSTOP, SIGTERM, SIGUSR1

import pytest

from ddplaunch.reach.repeated_stop import REPEAT_WINDOW
from tests.conftest import until
from tests.slurm.cluster import CTL
from tests.slurm.job import SlurmJob
from tests.slurm.started import (
    BEHAVE,
    EVERY_WAY,
    NODES,
    RANKS,
    SAVES,
    TASK,
    WAYS,
    batch,
    front,
    one_cluster,
    parent,
    ready,
)

__all__ = ["one_cluster"]


def got(job: SlurmJob, number: int = RANKS) -> list[list[str]]:
    """The signals that each worker has had."""
    paths = [job.home / "signs" / f"got-{rank}" for rank in range(number)]
    return [path.read_text().split() if path.exists() else [] for path in paths]


def saved(job: SlurmJob) -> list[bool]:
    """Which workers were given the time to save."""
    return [job.has_sign(f"saved-{rank}") for rank in range(RANKS)]


def all_got(job: SlurmJob, *names: str) -> None:
    """Wait until each worker has had these signals, and no other."""
    until(lambda: all(len(some) >= len(names) for some in got(job)), f"{names} to reach all")
    assert got(job) == [list(names)] * RANKS


# --- of Slurm


@EVERY_WAY
def test_a_signal_for_the_tasks_reaches_each_worker_once_and_the_job_goes_on(job: SlurmJob, way: str) -> None:
    running = batch(job, way, BEHAVE, "all=polite")
    ready(job, running)
    running.cancel("--signal=USR1")
    all_got(job, "SIGUSR1")
    running.cancel("--signal=USR2")
    all_got(job, "SIGUSR1", "SIGUSR2")
    assert running.state() == "RUNNING"
    running.cancel()
    assert running.wait() == "CANCELLED"
    job.nothing_left(10)
    assert got(job) == [["SIGUSR1", "SIGUSR2", "SIGTERM"]] * RANKS
    if way == "a step of its own":
        assert "ddplaunch: cancelled: stopped by SIGTERM" in running.output()


def test_workers_of_a_cancelled_job_may_save(job: SlurmJob) -> None:
    running = batch(job, "a task for each rank", SAVES)  # the other ways: test_ended.py
    ready(job, running)
    running.cancel()
    assert running.wait() == "CANCELLED"
    job.nothing_left(10)
    assert saved(job) == [True] * RANKS
    assert got(job) == [["SIGTERM"]] * RANKS


@pytest.mark.parametrize("script", ["exec {}", "trap 'kill -USR1 $!' USR1\n{} &\nwait $!\nwait $!"])
def test_a_signal_for_the_script_alone_is_passed_on_by_whoever_hears_it(job: SlurmJob, script: str) -> None:
    command = f"{job.ddplaunch} --nproc-per-node 2 {BEHAVE} all=polite"
    running = job.sbatch(script.format(command), f"--nodes={NODES}")
    ready(job, running)
    running.cancel("--batch", "--signal=USR1")
    all_got(job, "SIGUSR1")
    running.cancel()
    running.wait("CANCELLED")
    job.nothing_left(10)


@pytest.mark.parametrize(
    ("way", "to"),
    [  # in the other ways Slurm sends to tasks what scancel does above
        ("a step of its own", "the tasks"),
        ("a step of its own", "the script"),
        ("a task for each node", "the script"),
        pytest.param("a task for each node", "the tasks", marks=pytest.mark.slow),
        pytest.param("a task for each rank", "the tasks", marks=pytest.mark.slow),
        pytest.param("a task for each rank", "the script", marks=pytest.mark.slow),
    ],
)
def test_a_signal_before_the_time_limit_reaches_each_worker_once(job: SlurmJob, way: str, to: str) -> None:
    """The script passes on what is for it alone; srun, to its tasks."""
    before, after, tasks = WAYS[way]
    command = f"{before} {job.ddplaunch} {after} {BEHAVE} all=polite"
    limit = ("--time=3", f"--signal={'B:' if to == 'the script' else ''}USR1@60")
    script = f"trap 'kill -USR1 $!' USR1\n{command} &\nwait $!\nwait $!"
    running = job.sbatch(script, f"--nodes={NODES}", f"--ntasks-per-node={tasks}", *limit)
    ready(job, running)
    job.cluster.pass_time(121)
    all_got(job, "SIGUSR1")
    running.wait("RUNNING")  # not SIGNALING
    running.cancel()
    running.wait("CANCELLED")
    job.nothing_left(10)
    assert {names.count("SIGUSR1") for names in got(job)} == {1}


# --- of people


def test_a_ctrl_c_in_the_shell_of_an_allocation_reaches_each_worker_once(job: SlurmJob) -> None:
    command = job.start_salloc(f"{job.ddplaunch} --nproc-per-node 2 {SAVES}; echo $?", f"--nodes={NODES}")
    job.signs("ready", RANKS)
    os.kill(front(job), SIGINT)
    result = job.wait(command=command)
    assert (result.out, saved(job), got(job)) == ("130\n", [True] * RANKS, [["SIGINT"]] * RANKS), result
    assert result.err.count("stopped by SIGINT") == 1
    assert f"stopping the workers on {NODES} nodes, up to 25 s; Ctrl-C again kills" in result.err


def test_a_sigint_after_which_a_sigterm_comes_lets_workers_save_and_sigquit_kills(job: SlurmJob) -> None:
    command = job.start_salloc(
        f"{job.ddplaunch} --grace-period 600 --nproc-per-node 2 {BEHAVE} all=stubborn; echo $?", f"--nodes={NODES}"
    )
    job.signs("ready", RANKS)
    pid = front(job)
    os.kill(pid, SIGINT)
    all_got(job, "SIGINT")
    os.kill(pid, SIGTERM)
    time.sleep(1)  # nothing is to happen in this time
    assert command.poll() is None
    os.kill(pid, SIGQUIT)
    result = job.wait(command=command)
    assert result.out == "130\n"
    assert "SIGTERM counts as the same request to stop as SIGINT before it. `kill -QUIT " in result.err


def test_srun_is_not_told_to_end_while_workers_save_nor_does_a_second_sigterm_kill_them(job: SlurmJob) -> None:
    command = job.start_salloc(f"{job.ddplaunch} --nproc-per-node 2 {SAVES}; echo $?", f"--nodes={NODES}")
    job.signs("ready", RANKS)
    pid = front(job)
    os.kill(pid, SIGTERM)
    all_got(job, "SIGTERM")
    time.sleep(2 * REPEAT_WINDOW)  # as much later as a second one that is meant
    os.kill(pid, SIGTERM)
    result = job.wait(command=command)
    assert (result.out, saved(job), got(job)) == ("143\n", [True] * RANKS, [["SIGTERM"]] * RANKS), result
    assert "srun: forcing" not in result.err


def srun_of_the_step(job: SlurmJob) -> bool:
    """Whether ddplaunch has started its srun."""
    return any(p.name == "srun" and TASK in p.command for p in job.cluster.bed.processes(CTL))


def test_a_stopped_parent_of_srun_does_not_hold_up_the_end_of_the_job(job: SlurmJob) -> None:
    command = job.start_salloc(
        f"{job.ddplaunch} --nproc-per-node 2 {BEHAVE} all=done_when_told; echo $?", f"--nodes={NODES}"
    )
    job.signs("ready", RANKS)
    sruns = {p.pid for p in job.cluster.bed.processes(CTL) if p.name == "srun"}
    (above,) = {parent(pid) for pid in sruns} - sruns
    os.kill(above, SIGSTOP)
    (job.home / "signs" / "go").touch()
    result = job.wait(command=command)
    assert result.out == "0\n", result
    assert f"{RANKS} workers on {NODES} nodes finished" in result.err


def test_a_stop_before_anything_runs_ends_the_step(job: SlurmJob) -> None:
    """Its node is taken by another job, so that the step waits."""
    hold = "until [ -e $DDP_TEST_DIR/go ]; do sleep 0.05; done"
    command = job.start_salloc(
        f"srun --nodes=1 --exclusive sh -c 'touch $DDP_TEST_DIR/held; {hold}' & "
        f"{job.ddplaunch} --nproc-per-node 2 {BEHAVE} all=polite; echo $?; touch $DDP_TEST_DIR/go; wait",
        "--nodes=3",
    )
    job.sign("held")
    until(lambda: srun_of_the_step(job), "the step to be asked for")  # an interpreter that just starts ends with 1
    os.kill(front(job), SIGINT)
    assert job.wait(command=command).out == "130\n"


def test_a_signal_for_the_command_in_a_script_reaches_workers_of_all_nodes(job: SlurmJob) -> None:
    running = batch(job, "a step of its own", BEHAVE, "all=polite")
    ready(job, running)
    os.kill(front(job, "node1"), SIGUSR1)
    all_got(job, "SIGUSR1")
    os.kill(front(job, "node1"), SIGTERM)
    assert (running.wait(), running.exit_code()) == ("FAILED", 143)
    assert got(job) == [["SIGUSR1", "SIGTERM"]] * RANKS
