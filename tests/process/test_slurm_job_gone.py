"""A shell with the variables of a Slurm job: what is said when the job is not there, and while Slurm does not answer."""

import os
import signal
from pathlib import Path

import pytest

from tests.conftest import Job, until

HERE = os.uname().nodename
JOB = {
    "SLURM_JOB_ID": "4242",
    "SLURM_JOB_NODELIST": f"{HERE},other",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURMD_NODENAME": HERE,
}
STEP = JOB | {
    "SLURM_STEP_ID": "0",
    "SLURM_NTASKS": "2",
    "SLURM_STEP_NODELIST": f"{HERE},other",
    "SLURM_NODEID": "0",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
}
UNKNOWN = "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1"
PENDING = "echo 'JobId=4242 JobName=t UserId=root(0) JobState=PENDING Reason=None'"
HANGS = "exec sleep 600"


def with_scontrol(job: Job, answer: str, env: dict[str, str]) -> dict[str, str]:
    """These variables, and a scontrol that answers so."""
    folder = job.home / "bin"
    folder.mkdir()
    (folder / "scontrol").write_text(f"#!/bin/sh\n{answer}\n")
    (folder / "scontrol").chmod(0o755)
    return env | {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}


@pytest.mark.parametrize("env", [JOB, STEP], ids=["outside of a step", "in a step"])
@pytest.mark.parametrize(("answer", "why"), [(UNKNOWN, "has ended"), (PENDING, "does not run: PENDING")])
@pytest.mark.parametrize("verb", [(), ("plan",)], ids=["run", "plan"])
def test_a_job_that_slurm_denies_is_refused_with_what_runs_here(job, program, env, answer, why, verb):
    refused = job.run(*verb, "--nproc-per-node", 2, program("says"), env=with_scontrol(job, answer, env)).expect(2)
    assert f"error: the Slurm job 4242 of this shell (SLURM_JOB_ID) {why}" in refused.err
    assert "hint: `--cluster local`" in refused.err
    assert job.run("plan", "--cluster", "local", "--nproc-per-node", 2, program("says"), env=env).status == 0


def test_a_controller_that_does_not_answer_delays_a_job_by_seconds_and_leaves_a_doubt(job, program):
    said = Path(job.home) / "err"
    with said.open("w") as err:
        process = job.start("--nproc-per-node", 2, program("says"), env=with_scontrol(job, HANGS, STEP), stderr=err)
    until(lambda: "if it has ended, add --cluster local" in said.read_text(), "a word about the job", 30)
    until(lambda: "waiting for node 1" in said.read_text(), "the meeting")
    process.send_signal(signal.SIGTERM)
    job.wait().expect(143)
    assert "(scontrol timed out after 5 s): if it has ended, add --cluster local" in said.read_text()


@pytest.mark.parametrize("nodes", [{}, {"SLURM_JOB_NODELIST": "gpu[1-"}], ids=["missing", "malformed"])
def test_a_step_needs_no_variable_about_the_nodes_of_its_whole_job(job: Job, nodes: dict[str, str]) -> None:
    alone = {"SLURM_NTASKS": "1", "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1"}
    env = {**STEP, "SLURM_JOB_NODELIST": "", **alone, "SLURM_STEP_NODELIST": HERE, **nodes}
    job.start("--nproc-per-node", 1, "--no-python", "true", env=env)
    job.wait().expect(0)
