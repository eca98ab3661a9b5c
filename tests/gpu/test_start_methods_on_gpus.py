"""Workers that are forked from a fork server use the GPU as fresh ones do, and come to the same losses, bit by bit."""

import os
import re
import shutil
import sys
from subprocess import run

import pytest

from tests.gpu.machine import ONE, PATIENCE, PROGRAMS, sign

pytestmark = pytest.mark.gpu
TRAINS = PROGRAMS / "trains.py"
SAME = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


def losses(text: str) -> list[str]:
    """The losses of each step, as they were printed, by backend and device."""
    found = re.findall(r"(rank 0 nccl cuda:0 step \d+: \S+)", text)
    assert len(found) == 20, text
    return found


@pytest.mark.claim(
    "the losses under NCCL are the same under spawn, forkserver, keep-warm and torchrun",
    page="concepts/start-methods.md",
)
def test_the_losses_are_the_same_in_all_start_methods(gpu, job, told):
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "1",
        str(TRAINS),
        "20",
    ]
    env = {**{name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}, **gpu.env, **SAME}
    ended = run(torchrun, env=env, text=True, capture_output=True, timeout=PATIENCE, check=False)
    assert ended.returncode == 0, ended.stderr
    expected = losses(ended.stdout)
    for how in ("spawn", "forkserver"):
        done = gpu.run(job, *ONE, "--start-method", how, TRAINS, 20, **SAME).expect(0)
        assert losses(done.out) == expected, how
        assert "fresh" not in done.err, done.err
    for _ in range(2):
        kept = gpu.run(job, *ONE, "--keep-warm", TRAINS, 20, **SAME)
        gpu_lines = losses(kept.expect(0).out)
        assert gpu_lines == expected
    told((kept.err.strip().splitlines() or ["-"])[-1][:160])
    gpu.verb(job, "warm", "--stop")


@pytest.mark.claim("--start-method auto starts fresh processes on a node with GPUs", page="concepts/start-methods.md")
def test_auto_forks_nothing_where_there_are_gpus(gpu, job):
    many = len(os.sched_getaffinity(0)) + 1
    text = gpu.verb(job, "plan", "--start-method", "auto", "--nproc-per-node", many, TRAINS, 20).expect(0).out
    assert "fork server" not in text, text


@pytest.mark.claim(
    "nothing is forked from a server whose modules have opened a GPU, and a line says why",
    page="concepts/start-methods.md",
)
def test_a_preloaded_module_that_opens_the_gpu_makes_workers_fresh(gpu, job, told):
    for name in ("trains.py", "opens_gpu.py"):
        shutil.copy(PROGRAMS / name, job.home / name)
    words = ("--start-method", "forkserver", "--preload", "torch,torch.distributed,opens_gpu")
    done = gpu.run(job, *ONE, *words, job.home / "trains.py", 20).expect(0)
    assert len(losses(done.out)) == 20
    said = [line for line in done.err.splitlines() if "an imported module has" in line]
    assert said, done.err
    told(said[0][:200])


@pytest.mark.claim(
    "the fork server imports torch without opening a GPU, so workers are forked", page="concepts/start-methods.md"
)
def test_workers_are_forked_where_the_import_opens_no_gpu(gpu, job):
    gpu.start(job, *ONE, "--start-method", "forkserver", TRAINS, 100_000, 0.05)
    sign(job, "trains-0")
    gpu.look(job, "stop")
    assert "fresh" not in job.wait().err
