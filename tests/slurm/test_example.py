"""The example's own batch script: its end is announced, it goes back into the queue, and ends well on the second start."""

import os
import re
import shutil

from tests.conftest import until
from tests.slurm.job import SlurmJob
from tests.torch.example import EXAMPLES, LIGHT, LONG, needs_torch_and_digits

pytestmark = needs_torch_and_digits


def test_a_job_whose_end_is_announced_saves_goes_back_into_the_queue_and_goes_on(job: SlurmJob) -> None:
    bin_folder = job.home / "bin"
    bin_folder.mkdir()
    command = bin_folder / "ddplaunch"
    command.write_text(f'#!/bin/sh\nexec {job.ddplaunch} "$@"\n')
    command.chmod(0o755)
    shutil.copy(EXAMPLES / "slurm" / "train.py", job.home)
    env = {"PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}", **LIGHT, "OMP_NUM_THREADS": "1"}
    script = (EXAMPLES / "slurm" / "job.sh").read_text()
    assert "--nproc-per-node 2" in script
    script = script.replace("--nproc-per-node 2", "--nproc-per-node 1")  # half as many that import torch, twice
    batch = job.sbatch(script, "--cpus-per-task=1", env=env)
    until(lambda: "epoch  1: accuracy" in batch.output(), "the first epoch", LONG)
    batch.cancel("--signal=USR1")
    until(lambda: "saved before step" in batch.output(), "the checkpoint", LONG)
    batch.skip_hold()
    assert batch.wait(timeout=LONG) == "COMPLETED"
    output = batch.output()
    assert batch.restarts() == 1
    assert len(re.findall(r"^\[0\] saved before step", output, re.MULTILINE)) == 1
    assert "resumes before step" in output
    assert re.search(r"^\[0\] epoch 12: accuracy 9\d\.\d\d%$", output, re.MULTILINE)
    job.nothing_left(10)
