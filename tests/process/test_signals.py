"""Signals to ddplaunch: what reaches the workers, how often, and what the status is."""

import os
import signal
import time
from functools import partial
from pathlib import Path
from signal import SIGCONT, SIGHUP, SIGINT, SIGKILL, SIGQUIT, SIGSTOP, SIGTERM, SIGUSR1, SIGUSR2

import pytest

from ddplaunch.reach.repeated_stop import ECHO_WINDOW
from tests.conftest import PATIENCE, insist, let_the_echo_die, until
from tests.process.terminal import agent_of, held

# of the only task of a step, as Slurm sets them: outside of a step the command would start one
SLURM_STEP = {
    "SLURM_JOB_ID": "84",
    "SLURM_JOB_NODELIST": "localhost",
    "SLURM_STEP_ID": "0",
    "SLURM_NTASKS": "1",
    "SLURM_NODEID": "0",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
}
STOPS = [(SIGINT, 130), (SIGTERM, 143), (SIGHUP, 129), (SIGQUIT, 131)]


@pytest.fixture
def start(job):
    """Start behave.py with 3 workers and wait until all are ready."""
    return partial(job.behave, workers=3)


@pytest.mark.parametrize(("signum", "status"), STOPS, ids=lambda value: getattr(value, "name", ""))
def test_a_stop_signal_reaches_every_worker_once_and_as_it_is(job, start, signum, status):
    start("all=polite").send_signal(signum)
    result = job.wait().expect(status)
    assert [job.got(rank) for rank in range(3)] == [[signum.name]] * 3
    assert f"stopped by {signum.name}" in result.err


@pytest.mark.parametrize(("signum", "status"), [(SIGTERM, 143), (SIGINT, 130), (SIGUSR1, 0)])
def test_what_a_python_program_has_started_is_there_while_it_saves(job, program, signum, status):
    """A data loader that is ended by the signal would take the step during which the worker saves with it."""
    process = job.start("--nproc-per-node", 2, program("loads"))
    job.signs("ready", 2)
    process.send_signal(signum)
    assert job.wait().status == status
    assert {path.name: path.read_text() for path in (job.home / "signs").glob("saved-*")} == {
        "saved-0": "!",
        "saved-1": "!",
    }


def test_a_command_gets_its_signals_with_all_that_it_has_started(job):
    """A shell does not pass signals on to the program that it waits for."""
    inner = "trap 'touch $DDP_TEST_DIR/inner; exit 0' USR1; touch $DDP_TEST_DIR/ready-0; while :; do sleep 0.01; done"
    process = job.start("--no-python", "/bin/sh", "-c", 'trap : USR1; sh -c "$0"; exit 0', inner)
    job.sign("ready-0")
    process.send_signal(SIGUSR1)
    assert job.wait().status == 0
    job.sign("inner")


@pytest.mark.parametrize(("signum", "status"), STOPS, ids=lambda value: getattr(value, "name", ""))
def test_a_sigquit_after_a_stop_signal_kills_at_once(job, start, signum, status):
    process = start("all=stubborn", options=("--grace-period", "600"))
    process.send_signal(signum)
    for rank in range(3):
        job.sign(f"got-{rank}")
    let_the_echo_die()
    insist(process)
    assert job.wait().status == status


SENT_TWICE = [
    (SIGTERM, SIGTERM, "the second SIGTERM counts as the first one"),
    (SIGINT, SIGINT, "the second SIGINT counts as the first one"),
    (SIGINT, SIGTERM, "SIGTERM counts as the same request to stop as SIGINT before it"),
    (SIGHUP, SIGTERM, "SIGTERM counts as the same request to stop as SIGHUP before it"),
]


@pytest.mark.parametrize(("first", "second", "said"), SENT_TWICE, ids=lambda value: getattr(value, "name", ""))
def test_a_second_signal_without_a_terminal_is_the_first_one_and_a_third_kills(job, start, first, second, said):
    """As of uv, LSF's bkill and CI runners; the workers get the first one alone."""
    process = start("all=stubborn", options=("--grace-period", "600"))
    process.send_signal(first)
    for rank in range(3):
        job.sign(f"got-{rank}")
    let_the_echo_die()
    process.send_signal(second)
    until(lambda: len(job.events("signal_received")) == 2, "the second signal")
    time.sleep(ECHO_WINDOW)
    process.send_signal(second)
    result = job.wait().expect(128 + first)
    assert f"ddplaunch: {said}. `kill -QUIT {process.pid}` kills the workers at once\n" in result.err
    assert [job.got(rank) for rank in range(3)] == [[first.name]] * 3
    assert job.events("kill_sent")


def test_where_sigquit_is_ignored_the_line_says_what_kills(job, start):
    """As of a command that `sh` starts in the background."""
    process = start("all=slow", preexec_fn=lambda: signal.signal(SIGQUIT, signal.SIG_IGN))
    process.send_signal(SIGINT)
    for rank in range(3):
        job.sign(f"saving-{rank}")
    process.send_signal(SIGTERM)
    until(lambda: len(job.events("signal_received")) == 2, "the second signal")
    (job.home / "signs" / "saved").touch()
    result = job.wait().expect(130)
    assert "as SIGINT before it. SIGTERM once more kills the workers at once\n" in result.err
    assert not job.events("kill_sent")


def test_the_second_sigterm_in_a_slurm_job_leaves_workers_the_time_to_save(job, start):
    """As at the end of the grace time of a preemption; a node alone in its job needs no Slurm to be tried."""
    process = start("all=slow", options=("--grace-period", "600"), env=SLURM_STEP)
    process.send_signal(SIGTERM)
    for rank in range(3):
        job.sign(f"saving-{rank}")
    let_the_echo_die()
    process.send_signal(SIGTERM)
    until(lambda: len(job.events("signal_received")) == 2, "the second signal")
    (job.home / "signs" / "saved").touch()
    result = job.wait()
    assert (result.status, job.events("kill_sent")) == (143, [])
    assert "killing" not in result.err


def test_a_sigint_after_a_sigterm_in_a_slurm_job_is_the_same_request_and_the_next_one_kills(job, start):
    process = start("all=stubborn", options=("--grace-period", "600"), env=SLURM_STEP)
    process.send_signal(SIGTERM)
    for rank in range(3):
        job.sign(f"got-{rank}")
    process.send_signal(SIGINT)
    until(lambda: len(job.events("signal_received")) == 2, "the second signal")
    assert not job.events("kill_sent")
    time.sleep(ECHO_WINDOW)
    process.send_signal(SIGINT)
    assert job.wait().status == 143


def test_workers_that_ignore_a_stop_signal_are_killed_after_the_grace_period(job, start):
    start("all=stubborn", options=("--grace-period", "0.3")).send_signal(SIGTERM)
    assert job.wait().status == 143
    assert job.events("kill_sent")


def test_workers_may_save_before_they_end(job, start):
    start("all=slow").send_signal(SIGTERM)
    for rank in range(3):
        job.sign(f"saving-{rank}")
    (job.home / "signs" / "saved").touch()
    assert job.wait().status == 143
    assert not job.events("kill_sent")


@pytest.mark.parametrize("first", ["front", "agent"])
def test_a_user_signal_to_front_and_agent_at_once_reaches_every_worker_once_and_the_job_goes_on(job, start, first):
    process = start("all=polite")
    pids = [process.pid, agent_of(process.pid)]
    for pid in pids if first == "front" else reversed(pids):
        os.kill(pid, SIGUSR1)
    for rank in range(2):
        until(lambda rank=rank: "SIGUSR1" in job.sign(f"got-{rank}"), "the signal")
    process.send_signal(SIGUSR2)  # what comes after it shows that nothing came between
    for rank in range(2):
        until(lambda rank=rank: "SIGUSR2" in job.sign(f"got-{rank}"), "the next one")
        assert job.sign(f"got-{rank}").split() == ["SIGUSR1", "SIGUSR2"]
    process.send_signal(SIGTERM)
    assert job.wait().status == 143


def test_forward_signals_makes_a_stop_signal_one_that_is_only_passed_on(job, start):
    process = start("all=stubborn", options=("--forward-signals", "HUP", "--grace-period", "0.1"))
    process.send_signal(SIGHUP)
    for rank in range(3):
        assert job.sign(f"got-{rank}") == "SIGHUP"
    assert process.poll() is None
    process.send_signal(SIGTERM)
    assert job.wait().status == 143


def test_signals_to_handle_makes_a_user_signal_one_that_stops(job, start):
    start("all=polite", options=("--signals-to-handle", "SIGTERM,SIGUSR1", "--grace-period", "0.3")).send_signal(
        SIGUSR1
    )
    assert job.wait().status == 128 + SIGUSR1


def test_a_signal_that_was_ignored_at_the_start_stays_ignored(job, start):
    """As under nohup: the hang-up of the terminal means nothing to the job."""
    process = start("all=polite", preexec_fn=lambda: signal.signal(SIGHUP, signal.SIG_IGN))
    process.send_signal(SIGHUP)
    process.send_signal(SIGUSR1)
    assert job.sign("got-0") == "SIGUSR1"
    process.send_signal(SIGTERM)
    assert job.wait().status == 143


def test_a_signal_while_workers_are_still_being_started(job, program):
    process = job.start("--nproc-per-node", 64, program("behave"), "all=default")
    job.process = process
    until(
        lambda: list(job.home.glob("state/ddplaunch/runs/*/events.jsonl")) and job.events("worker_started"), "a start"
    )
    process.send_signal(SIGTERM)
    assert job.wait().status == 143
    assert len(job.events("worker_started")) <= 64


@pytest.mark.parametrize("moment", [0.0, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15])
def test_a_signal_at_any_moment_of_the_start_ends_the_command_and_leaves_nothing(job, program, moment):
    """No synchronisation is possible here: the moments are spread over the start, and every one must do."""
    import time

    process = job.start("--nproc-per-node", 2, program("behave"))
    time.sleep(moment)
    process.send_signal(SIGTERM)
    assert job.wait().status in (143, -SIGTERM)


def test_stopping_the_command_with_sigstop_and_going_on(job, start):
    process = start("all=polite")
    process.send_signal(SIGSTOP)
    process.send_signal(SIGCONT)
    process.send_signal(SIGTERM)
    assert job.wait().status == 143


def test_a_stopped_worker_can_be_stopped_for_good(job, start):
    process = start("all=polite")
    os.kill(int(job.sign("ready-1")), SIGSTOP)
    process.send_signal(SIGTERM)
    assert job.wait(20).status == 143
    assert not job.events("kill_sent")


# --- the command's own processes are killed


KINDS = ("0=stubborn_setsid_child", "1=daemon", "2=stubborn")


def test_when_the_front_is_killed_everything_ends(job, start):
    start(*KINDS, options=("--grace-period", "0.3"), stdout=-3, stderr=-3).kill()
    job.process.wait()
    job.nothing_left(patience=PATIENCE)


def test_when_the_front_is_killed_workers_get_the_grace_period(job, start):
    start("all=slow", stdout=-3, stderr=-3).kill()
    job.process.wait()
    for rank in range(3):
        job.sign(f"saving-{rank}")
    (job.home / "signs" / "saved").touch()
    job.nothing_left(patience=PATIENCE)


def test_when_the_agent_is_killed_everything_ends_and_the_status_is_122(job, start):
    start(*KINDS)
    os.kill(agent_of(job.process.pid), SIGKILL)
    result = job.wait().expect(122)
    assert "was killed by SIGKILL" in result.err
    assert not list(Path("/dev/shm").glob(f"ddplaunch-errors-{job.folder.name}-*"))


def test_when_the_agent_is_killed_a_terminal_that_nobody_reads_does_not_delay_the_end(job, start):
    """The front blocks on its stdout then, and must end the rest all the same."""
    from tests.conftest import PATIENCE, until

    reader, writer = os.pipe()
    process = start("all=chatter", stdout=writer, stderr=-3)
    os.close(writer)
    until(lambda: "pipe_w" in wchan(process.pid), "the front to block")
    os.kill(agent_of(job.process.pid), SIGKILL)
    until(lambda: [pid for pid in job.left() if pid != process.pid] == [], "the workers' end")
    os.close(reader)
    assert process.wait(PATIENCE) == 122


def wchan(pid: int) -> str:
    """What a process waits for in the kernel."""
    with open(f"/proc/{pid}/stack", encoding="ascii") as file:
        return file.read()


def test_when_both_are_killed_at_once_the_workers_are_gone(job, start):
    process = start("all=stubborn", stdout=-3, stderr=-3)
    for pid in (agent_of(job.process.pid), process.pid):
        os.kill(pid, SIGKILL)
    process.wait()
    job.nothing_left(patience=PATIENCE)


def has_taken(pid: int, signum: int) -> bool:
    """Whether a process that sleeps otherwise has handled a signal that was sent to it (proc_pid_status(5))."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return fields["State"].split()[0] == "S" and not int(fields["ShdPnd"], 16) >> (signum - 1) & 1


def test_a_signal_that_comes_twice_at_once_is_no_second_one(job, start):
    """timeout(1) signals the command, then its whole process group; pkill -f front and agent."""
    process = start("all=polite", options=("--grace-period", "600"))
    with held(agent_of(process.pid)):  # a busy machine may need longer from one to the other than those who mean it
        for _ in range(2):
            process.send_signal(SIGTERM)
            until(lambda: has_taken(process.pid, SIGTERM), "the front to pass it on")
    result = job.wait().expect(143)
    assert len(job.events("signal_received")) == 2
    assert "killing" not in result.err
    assert not job.events("kill_sent")


@pytest.mark.parametrize("signum", [SIGINT, SIGTERM])
def test_a_program_that_asks_first_while_a_failure_ends_the_job_reads_of_no_kill(job, signum):
    process = job.behave("0=slow", "1=exit3")
    job.sign("saving-0")
    process.send_signal(signum)
    until(lambda: job.events("signal_received"), "the signal")
    (job.home / "signs" / "saved").touch()
    assert "killing the workers at once" not in job.wait().expect(3).err
