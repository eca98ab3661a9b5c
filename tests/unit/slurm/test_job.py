"""What Slurm says of a job that it has signalled, and what follows; a scontrol of our own stands in for the real one."""

import re
from pathlib import Path
from signal import SIGTERM, SIGUSR1

import pytest
from msgspec.structs import replace

from ddplaunch.reach.slurm import job as slurmjob
from ddplaunch.reach.slurm.job import JobStatus, SlurmRequeue, manual_requeue
from ddplaunch.reach.slurm.scontrol import ScontrolError, parse_jobs


def line(state: str = "RUNNING", reason: str = "None", **fields: object) -> str:
    """What `scontrol show job -o` of Slurm 22.05 says, shortened."""
    values = {"Requeue": 1, "Restarts": 0, "BatchFlag": 1, "ExitCode": "0:0", "TimeLimit": "00:01:00", **fields}
    rest = " ".join(f"{name}={value}" for name, value in values.items())
    return (
        f"JobId=7 JobName=my job=1 UserId=alice(2001) JobState={state} Reason={reason} Dependency=(null) {rest} "
        "Command=/home/alice/a b.sh WorkDir=/home/alice Power= \n"
    )


NOW, BEFORE = "2026-11-21T19:40:54", "2026-11-21T19:40:51"
# measured while the tasks had SIGTERM, if nothing else is said
CONDITIONS = {
    "scancel --signal": (line(), 0, JobStatus.RUNNING),
    "scancel": (line("COMPLETING", ExitCode="0:15", EndTime=NOW, PreemptTime="None"), 0, JobStatus.CANCELLED),
    "scancel, before a step has ended": (line("COMPLETING", EndTime=NOW, PreemptTime="None"), 0, JobStatus.CANCELLED),
    "scancel, when all has ended": (line("CANCELLED"), 0, JobStatus.CANCELLED),
    "scancel, as a newer version may say it": (line("CANCELLED,COMPLETING"), 0, JobStatus.CANCELLED),
    "the time limit": (line("COMPLETING", "TimeLimit", EndTime=NOW), 0, JobStatus.OUT_OF_WALLTIME),
    "the time limit, when all has ended": (line("TIMEOUT", "TimeLimit"), 0, JobStatus.OUT_OF_WALLTIME),
    "preemption by requeue": (line("COMPLETING", Restarts=1, EndTime="Unknown"), 0, JobStatus.REQUEUED),
    "preemption by requeue, the second time": (
        line("COMPLETING", Restarts=2, EndTime="Unknown"),
        1,
        JobStatus.REQUEUED,
    ),
    "a requeued job, when all has ended": (line("PENDING", "BeginTime", Restarts=1), 0, JobStatus.REQUEUED),
    "a requeued job that runs": (line(Restarts=1), 1, JobStatus.RUNNING),
    "a requeued job that is cancelled": (line("COMPLETING", Restarts=1, EndTime=NOW), 1, JobStatus.CANCELLED),
    "preemption with grace": (line(PreemptTime=BEFORE, EndTime="Unknown"), 0, JobStatus.PREEMPTED),
    "preemption with grace, a little later": (line(PreemptTime=BEFORE, EndTime=NOW), 0, JobStatus.PREEMPTED),
    "scancel in the grace": (line("COMPLETING", PreemptTime=BEFORE, EndTime=NOW), 0, JobStatus.CANCELLED),
    "preemption by cancel": (line("COMPLETING", PreemptTime=NOW, EndTime=NOW), 0, JobStatus.PREEMPTED),
    "preemption by cancel, when all has ended": (
        line("PREEMPTED", PreemptTime=NOW, EndTime=NOW),
        0,
        JobStatus.PREEMPTED,
    ),
    "a lost node": (line("COMPLETING", Restarts=1), 0, JobStatus.REQUEUED),
    "a lost node, without requeue": (line("COMPLETING", "NodeDown", Requeue=0), 0, JobStatus.NODE_LOST),
    "a script that its signal has ended": (
        line("COMPLETING", "JobLaunchFailure", ExitCode="0:10"),
        0,
        JobStatus.RUNNING,
    ),
    "a script that its signal has ended, in a newer version": (
        line("COMPLETING", "RaisedSignal:10(User_defined_signal_1)"),
        0,
        JobStatus.RUNNING,
    ),
    "a script that has ended badly, in a newer version": (line("COMPLETING", "NonZeroExitCode"), 0, JobStatus.ENDED),
}


@pytest.mark.parametrize("what", CONDITIONS)
def test_what_slurm_does_with_a_job_is_read_from_what_it_says(what: str) -> None:
    text, restarts, status_of = CONDITIONS[what]
    (job,) = parse_jobs(text)
    assert slurmjob.status_of(job, restarts) is status_of


@pytest.mark.parametrize("text", ["", "slurm_load_jobs error: Invalid job id specified\n", "JobId=7 Name=x\n", "\0\n"])
def test_what_is_no_job_is_left_out(text: str) -> None:
    assert parse_jobs(text) == ()


@pytest.mark.parametrize(
    ("env", "id"),
    [
        ({"SLURM_JOB_ID": "13"}, "13"),
        ({"SLURM_JOB_ID": "13", "SLURM_ARRAY_JOB_ID": "13", "SLURM_ARRAY_TASK_ID": "1"}, "13_1"),
        ({"SLURM_JOB_ID": "17", "SLURM_JOB_ID_HET_GROUP_0": "16", "SLURM_JOB_ID_HET_GROUP_1": "17"}, "16"),
        ({}, ""),
    ],
)
def test_a_job_is_asked_about_under_a_name_that_is_its_own(env: dict[str, str], id: str) -> None:
    assert slurmjob.job_id(env) == id


# --- with a program that is called scontrol

OURS = {"SLURM_JOB_ID": "7"}


def scontrol(tmp_path: Path, said: str = "", *, requeue: str = "exit 0", env: dict[str, str] = OURS) -> SlurmRequeue:
    """The way back in a place where scontrol says this of the job, and does that when it is to requeue it."""
    (tmp_path / "said").write_text(said or line())
    path = tmp_path / "scontrol"
    path.write_text(
        f"#!/bin/sh\nPATH=/bin:/usr/bin; cd {tmp_path}; echo $LC_ALL $* >> asked\n"
        f"case $1 in show) cat said;; requeue) {requeue};; esac\n"
    )
    path.chmod(0o755)
    return SlurmRequeue({**env, "PATH": str(tmp_path)}, 10)


def asked(tmp_path: Path) -> list[str]:
    return (tmp_path / "asked").read_text().splitlines()


def test_a_job_goes_back_under_its_own_name(tmp_path: Path) -> None:
    element = {"SLURM_JOB_ID": "13", "SLURM_ARRAY_JOB_ID": "13", "SLURM_ARRAY_TASK_ID": "1", "SLURM_RESTART_COUNT": "1"}
    way = scontrol(tmp_path, line(Restarts=1), env=element)
    intent = way.decide(SIGUSR1)
    assert (intent.requeues, intent.job) == (True, "13_1")
    assert intent.text == "job 13_1 is requeued after SIGUSR1 (requeue 2 of at most 10)"
    assert way.submit() is None
    assert asked(tmp_path) == ["C show job -o 13_1", "C requeue 13_1"]


STAYS = {
    "was cancelled, and so is not requeued": line("COMPLETING"),
    "is requeued by Slurm itself": line("COMPLETING", Restarts=1),
    "has ended (NonZeroExitCode), and is not requeued": line("COMPLETING", "NonZeroExitCode"),
    "cannot be requeued: only jobs of sbatch can": line(BatchFlag=0),
    "cannot be requeued: submit it with `sbatch --requeue`": line(Requeue=0),
    "cannot be requeued after SIGTERM: cannot parse the output of scontrol": "what?\n",
}


@pytest.mark.parametrize("why", STAYS)
def test_a_job_does_not_go_back_that(why: str, tmp_path: Path) -> None:
    intent = scontrol(tmp_path, STAYS[why]).decide(SIGTERM)
    assert (intent.requeues, intent.text) == (False, f"job 7 {why}")


def test_a_job_goes_back_no_more_often_than_it_may(tmp_path: Path) -> None:
    env = {**OURS, "SLURM_RESTART_COUNT": "10"}
    intent = scontrol(tmp_path, line(Restarts=10), env=env).decide(SIGUSR1)
    assert not intent.requeues
    assert intent.text == ("job 7 has been requeued 10 times, and is not requeued after SIGUSR1 (--max-requeues 10)")


def test_without_scontrol_it_is_said_what_the_script_can_do(tmp_path: Path) -> None:
    intent = SlurmRequeue({**OURS, "PATH": str(tmp_path)}, 10).decide(SIGUSR1)
    assert not intent.requeues
    assert intent.text == (
        "job 7 should be requeued after SIGUSR1, but scontrol is not on PATH; put this after the command in "
        "the batch script: [ $? -ne 138 ] || scontrol requeue $SLURM_JOB_ID"
    )
    element = {"SLURM_ARRAY_JOB_ID": "13", "SLURM_ARRAY_TASK_ID": "1"}
    assert manual_requeue(element, SIGTERM) == (
        "[ $? -ne 143 ] || scontrol requeue ${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}"
    )


def test_outside_of_slurm_a_job_is_not_requeued() -> None:
    intent = SlurmRequeue({}, 10).decide(SIGUSR1)
    assert not intent.requeues
    assert intent.text.endswith("not inside a Slurm job (SLURM_JOB_ID is not set)")


@pytest.mark.parametrize(
    "says",
    [
        "Requested operation is presently disabled for job 7",  # ESLURM_DISABLED
        "Access/permission denied for job 7",  # ESLURM_ACCESS_DENIED
        "Invalid user id for job 7",  # ESLURM_USER_ID_MISSING
        "Protocol authentication error for job 7",  # SLURM_PROTOCOL_AUTHENTICATION_ERROR
        "Only batch jobs are accepted or processed for job 7",  # ESLURM_BATCH_ONLY
    ],
)
def test_a_refusal_that_stays_ends_the_requeue_at_once_with_the_message_of_scontrol(says: str, tmp_path: Path) -> None:
    way = scontrol(tmp_path, requeue=f"echo '{says}' >&2; exit 1")
    assert way.submit() == f"job 7 could not be requeued: scontrol: {says}"
    assert asked(tmp_path).count("C requeue 7") == 1


def test_scontrol_may_be_ended_with_the_job_before_its_answer(tmp_path: Path) -> None:
    (tmp_path / "after").write_text(line("COMPLETING", Restarts=1))
    assert scontrol(tmp_path, requeue="cat after > said; kill -KILL $$").submit() is None
    assert "could not be requeued" in str(scontrol(tmp_path, requeue="kill -KILL $$").submit())


def test_sigterm_that_slurm_sends_to_all_of_the_job_does_not_keep_scontrol_from_its_answer(tmp_path: Path) -> None:
    assert scontrol(tmp_path, requeue="kill -TERM $$; exit 0").submit() is None


def test_a_controller_that_does_not_answer_is_not_waited_for(tmp_path: Path) -> None:
    way = scontrol(tmp_path)
    (tmp_path / "scontrol").write_text("#!/bin/sh\nexec /bin/sleep 60\n")
    with pytest.raises(ScontrolError, match=r"scontrol timed out after 0\.1 s"):
        slurmjob.query_job(way.env, 0.1)


def test_what_scontrol_has_said_until_it_is_given_up_is_told_and_of_several_lines_that_about_munge(
    tmp_path: Path,
) -> None:
    """As Slurm 22.05 says it on a node whose munged has ended."""
    way = scontrol(tmp_path)
    said = [
        "scontrol: error: If munged is up, restart with --num-threads=10",
        'scontrol: error: Munge encode failed: Failed to connect to "/run/munge/munge.socket.2": Connection refused',
        "scontrol: error: slurm_send_node_msg: auth_g_create: REQUEST_FED_INFO has authentication error",
    ]
    (tmp_path / "said").write_text("\n".join(said) + "\n")
    (tmp_path / "scontrol").write_text(f"#!/bin/sh\n/bin/cat {tmp_path}/said >&2\nexec /bin/sleep 60\n")
    words = 'timed out after 0.5 s: Munge encode failed: Failed to connect to "/run/munge/munge.socket.2": Connection refused'
    with pytest.raises(ScontrolError, match=re.escape(words)):
        slurmjob.query_job(way.env, 0.5)


@pytest.mark.parametrize(
    "says",
    [
        "slurm_load_jobs error: Unable to contact slurm controller (connect failure)",
        "Slurm backup controller in standby mode",
        "slurm_load_jobs error: Controller is in standby mode, try a different controller",
        "slurm_load_jobs error: Zero Bytes were transmitted or received",
    ],
)
def test_a_controller_that_cannot_be_contacted_is_asked_until_it_replies(says: str, tmp_path: Path) -> None:
    """Also before it is decided whether the job goes back."""
    away = f"echo >> tried; [ $(wc -l < tried) -gt 5 ] || {{ echo '{says}' >&2; exit 1; }}"
    way = replace(scontrol(tmp_path, requeue=f"{away}; exit 0"), retry_after=0.01)
    assert way.submit() is None
    assert asked(tmp_path).count("C requeue 7") == 6
    (tmp_path / "tried").unlink()
    script = tmp_path / "scontrol"
    script.write_text(script.read_text().replace("show) ", f"show) {away}; "))
    assert way.decide(SIGUSR1).requeues
    assert asked(tmp_path).count("C show job -o 7") == 6
