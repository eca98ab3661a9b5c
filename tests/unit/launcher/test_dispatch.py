"""What is decided about a job before anything is started for it."""

import pytest

from ddplaunch.launcher.start.dispatch import within_outer_grace
from ddplaunch.spec.job import JobSpec, Program, ProgramKind

KILL_WAIT = 30.0  # seconds; the default of both
SPEC = JobSpec(program=Program(kind=ProgramKind.SCRIPT, target="train.py"))


@pytest.mark.parametrize("variable", ["SLURM_JOB_ID", "SLURM_JOBID", "KUBERNETES_SERVICE_HOST"])
def test_workers_of_a_slurm_job_or_a_pod_are_killed_before_slurm_or_kubernetes_kills_the_agents_too(variable):
    assert within_outer_grace(SPEC, {variable: "84"}).grace_period <= KILL_WAIT - 5


def test_a_grace_period_that_was_given_stays_in_a_slurm_job_as_it_is() -> None:
    given = JobSpec(program=SPEC.program, grace_period=30.0, origins={"grace_period": "--shutdown-timeout"})
    assert within_outer_grace(given, {"SLURM_JOB_ID": "84"}) == given


def test_the_grace_period_of_other_jobs_is_that_of_torchrun() -> None:
    assert within_outer_grace(SPEC, {}).grace_period == 30.0
