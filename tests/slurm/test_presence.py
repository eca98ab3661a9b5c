"""Variables of a job in a shell that is not in it: of one that has ended, of one that runs, and while no controller answers."""

import pytest

from tests.conftest import PROGRAMS
from tests.slurm.job import SlurmJob
from tests.slurm.places import PLACE, expected, seats
from tests.slurm.started import EACH, NODES, one_cluster

__all__ = ["one_cluster"]

DUMP = "env -0 > $DDP_TEST_DIR/env-"


def variables(job: SlurmJob, name: str) -> dict[str, str]:
    """The variables of Slurm that a script has put down."""
    pairs = (entry.partition("=") for entry in (job.home / "signs" / f"env-{name}").read_text().split("\0"))
    return {name: value for name, _, value in pairs if name.startswith("SLURM")}


@pytest.fixture
def yesterdays(job: SlurmJob) -> dict[str, dict[str, str]]:
    """The variables of the batch script and of a task of a job that has ended, and those of salloc's shell."""
    job.sbatch(f"{DUMP}batch; srun sh -c '{DUMP}task-$SLURM_PROCID'", f"--nodes={NODES}").wait("COMPLETED")
    job.salloc(f"{DUMP}salloc", f"--nodes={NODES}").expect(0)
    return {name: variables(job, name) for name in ("batch", "task-0", "task-1", "salloc")}


def test_the_variables_of_a_job_that_has_ended_are_refused_at_once(job: SlurmJob, yesterdays) -> None:
    for env in yesterdays.values():
        refused = job.run("--nproc-per-node", 1, PLACE, env=env).expect(2)
        assert (
            f"error: the Slurm job {env['SLURM_JOB_ID']} of this shell (SLURM_JOB_ID) does not run: COMPLETED"
            in refused.err
        )
        assert "hint: `--cluster local`" in refused.err
        job.run("--nproc-per-node", 1, "--cluster", "local", PLACE, env=env).expect(0)
    unknown = job.run("--nproc-per-node", 1, PLACE, env={**yesterdays["task-1"], "SLURM_JOB_ID": "999999"}).expect(2)
    assert "the Slurm job 999999 of this shell (SLURM_JOB_ID) has ended: Slurm knows it no more" in unknown.err
    other = job.run("--nproc-per-node", 1, PLACE, env={**yesterdays["batch"], "SLURM_CLUSTER_NAME": "another"})
    assert "(it is a job of the cluster another): if it has ended, add --cluster local" in other.err


def test_the_variables_of_a_job_that_runs_start_a_step_in_it_from_any_shell(job: SlurmJob) -> None:
    holder = job.sbatch(
        f"{DUMP}batch; mv $DDP_TEST_DIR/env-batch $DDP_TEST_DIR/env-held; exec sleep 600", f"--nodes={NODES}"
    )
    job.sign("env-held")
    env = variables(job, "held")
    job.run("--nproc-per-node", EACH, PLACE, env=env).expect(0)
    assert seats(job) == expected()
    holder.cancel()
    holder.wait("CANCELLED")


def test_workers_of_a_step_are_no_processes_of_pmi_unless_the_script_asks_for_that(job: SlurmJob) -> None:
    shows = PROGRAMS / "variables.py"
    for asked, workers in (("", 1), ("SLURM_MPI_TYPE=pmi2 ", 2)):
        done = job.sbatch(f"{asked}{job.ddplaunch} --nproc-per-node {workers} {shows}", "--nodes=2")
        assert done.wait() == "COMPLETED", done.output()
        told = job.signs("variables", 2 * workers)
        assert not [
            name
            for text in told
            for name in ("PMI_RANK", "PMI_FD", "SLURM_LOCALID")
            if f'"{name}"' in text and workers == 2
        ]
        assert not [text for text in told if '"PMI_' in text]
