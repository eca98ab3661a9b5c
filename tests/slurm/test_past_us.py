"""Where Slurm signals all that descends from a task (proctrack/linuxproc): SIGTERM comes to the workers past ddplaunch too."""

from tests.conftest import PROGRAMS
from tests.slurm.job import SlurmJob

BEHAVE, LEAVES = PROGRAMS / "behave.py", PROGRAMS / "leaves.py"


def test_workers_that_slurm_itself_ends_at_the_time_limit_are_no_mystery(job: SlurmJob) -> None:
    running = job.sbatch(f"exec {job.ddplaunch} --nproc-per-node 2 {BEHAVE} all=default", "--time=1")
    job.signs("ready", 2)
    job.cluster.pass_time(95)
    assert running.wait() == "TIMEOUT"
    lines = running.output().splitlines()
    assert [line for line in lines if line.startswith(("error: out of walltime: rank", "ddplaunch: out of walltime: "))]
    assert not [line for line in lines if "came from outside" in line]
    job.nothing_left(10)


def test_workers_that_slurm_itself_tells_leave_and_the_job_goes_back(job: SlurmJob) -> None:
    running = job.sbatch(f"exec {job.ddplaunch} --nproc-per-node 2 --requeue-on TERM {LEAVES} 1=dies", "--time=1")
    job.signs("ready", 2)
    job.cluster.pass_time(95)
    running.wait("PENDING")
    words = f"ddplaunch: job {running.id} is requeued after SIGTERM (requeue 1 of at most 10)"
    assert running.output().splitlines().count(words) == 1, running.output()
    assert job.has_sign("saved-0")
    running.skip_hold()
    assert (running.wait("COMPLETED"), running.restarts()) == ("COMPLETED", 1)
    job.nothing_left(10)
