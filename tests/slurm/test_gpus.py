"""GPUs that Slurm has granted: how many workers there are, and which device each of them is told."""

from pathlib import Path
from typing import Any

import pytest

from tests.fake_nvml import made_up
from tests.slurm.job import SlurmJob
from tests.slurm.places import PLACE, done, expected, places, seats
from tests.slurm.started import one_cluster

__all__ = ["one_cluster"]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Something in place of NVML."""
    return made_up.library(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def gpus(library: Path) -> dict[str, str]:
    """The variables by which nodes have four GPUs each."""
    return made_up.machine(library, "H200 H200 H200 H200")


def bound(job: SlurmJob) -> list[tuple[Any, ...]]:
    """What each worker was told about GPUs."""
    names = ("LOCAL_RANK", "CUDA_VISIBLE_DEVICES", "DDPLAUNCH_DEVICE")
    return [tuple(place.get(name) for name in names) for place in places(job)]


def test_there_is_a_worker_for_each_gpu_that_was_granted(job: SlurmJob, gpus: dict[str, str]) -> None:
    done(job.sbatch(f"{job.ddplaunch} {PLACE}", "--nodes=2", "--gpus-per-node=3", env=gpus))
    assert seats(job) == expected(2, 3)
    assert bound(job) == [(f"{n}", "0,1,2", f"cuda:{n}") for n in range(3)] * 2


@pytest.mark.parametrize("options", ["--gpus-per-task=1", "--gpus-per-node=4 --gpu-bind=single:1"])
def test_a_task_that_sees_one_gpu_is_told_that_this_is_the_first(job, gpus, options):
    done(job.sbatch(f"srun --ntasks-per-node=4 --ntasks=8 {options} {job.ddplaunch} {PLACE}", "--nodes=2",
                    "--gpus-per-node=4", "--exclusive", env=gpus))  # fmt: skip
    assert seats(job) == expected(2, 4)
    assert bound(job) == [(f"{n}", f"{n}", "cuda:0") for n in range(4)] * 2


def test_tasks_that_see_all_gpus_have_one_each(job: SlurmJob, gpus: dict[str, str]) -> None:
    done(job.sbatch(f"srun --ntasks-per-node=4 {job.ddplaunch} {PLACE}", "--nodes=2", "--ntasks-per-node=4",
                    "--gpus-per-node=4", env=gpus))  # fmt: skip
    assert bound(job) == [(f"{n}", "0,1,2,3", f"cuda:{n}") for n in range(4)] * 2


def test_gpus_without_a_driver_are_an_error_unless_the_job_is_for_the_cpus(job: SlurmJob) -> None:
    failed = job.sbatch(f"{job.ddplaunch} {PLACE}", "--nodes=2", "--gpus-per-node=2")
    assert (failed.wait(), failed.exit_code()) == ("FAILED", 121)
    assert "does not take part: no GPU driver found, although CUDA_VISIBLE_DEVICES=0,1\n" in failed.output()
    assert not places(job)
    output = done(job.sbatch(f"{job.ddplaunch} --devices cpu {PLACE}", "--nodes=2", "--gpus-per-node=2"))
    assert "2 workers on 2 nodes, gloo (no accelerator; warning: no GPU driver found, although " in output
    assert seats(job) == expected(2, 1)
    assert {device for _, _, device in bound(job)} == {"cpu"}
