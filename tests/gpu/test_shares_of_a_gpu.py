"""Several workers on one GPU: what they may, and what they are told."""

import json
import re
import shutil

import pytest

from tests.conftest import PROGRAMS as MISBEHAVE
from tests.gpu.machine import PROGRAMS

TRAINS = PROGRAMS / "trains.py"


@pytest.mark.claim("the plan of two workers on one GPU has gloo, and says why", page="guides/devices.md")
def test_the_backend_of_shared_gpus_is_gloo(machine, job):
    where = ("--devices", machine.ask()["uuid"], "--workers-per-gpu", 2)
    text = machine.verb(job, "plan", *where, TRAINS, 20).expect(0).out
    assert re.search(r"^backend +gloo +2 workers share 1 GPU, which NCCL refuses", text, re.MULTILINE), text
    assert len(re.findall(r"^\d +cuda:0 +GPU-", text, re.MULTILINE)) == 2


@pytest.mark.claim("more GPUs for each worker than there are is an error before the start", page="guides/devices.md")
def test_more_gpus_than_there_are_is_an_error(machine, job):
    where = ("--devices", machine.ask()["uuid"], "--gpus-per-worker", 2)
    done = machine.verb(job, "plan", *where, TRAINS, 20).expect(2)
    assert "--gpus-per-worker 2: 1 worker needs 2 GPUs, but the job has only 1" in done.err


@pytest.mark.claim("simulated nodes share the GPUs, and the backend is gloo", page="guides/simulate.md")
def test_simulated_nodes_share_the_gpu(machine, job):
    where = ("--devices", machine.ask()["uuid"], "--nnodes", 2, "--simulate")
    text = machine.verb(job, "plan", *where, TRAINS, 20).expect(0).out
    assert re.search(r"^backend +gloo +the simulated nodes share their devices", text, re.MULTILINE), text


@pytest.mark.claim("an empty CUDA_VISIBLE_DEVICES, or --devices cpu, makes a job of the CPU", page="guides/devices.md")
@pytest.mark.parametrize("how", ["empty", "cpu"])
def test_a_job_may_use_the_cpu(machine, job, how):
    words, env = (("--devices", "cpu"), {}) if how == "cpu" else ((), {"CUDA_VISIBLE_DEVICES": ""})
    text = machine.verb(job, "plan", *words, TRAINS, 20, **env).expect(0).out
    assert re.search(r"^backend +gloo", text, re.MULTILINE), text
    assert re.search(r"^0 +cpu", text, re.MULTILINE), text


@pytest.mark.gpu
@pytest.mark.claim("two workers train on one GPU, over gloo", page="guides/devices.md")
def test_two_workers_train_on_one_gpu(gpu, job):
    where = ("--devices", gpu.ask()["uuid"], "--workers-per-gpu", 2)
    done = gpu.run(job, *where, TRAINS, 20).expect(0)
    for rank in (0, 1):
        assert len(re.findall(rf"rank {rank} gloo cuda:0 step \d+", done.out)) == 20


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.claim(
    "with --mps, workers on one GPU train under a daemon of their own, each with its share", page="guides/devices.md"
)
def test_workers_train_under_mps(gpu, job):
    if shutil.which("nvidia-cuda-mps-control") is None:
        pytest.skip("there is no nvidia-cuda-mps-control here")
    where = ("--devices", gpu.ask()["uuid"], "--workers-per-gpu", 2, "--mps")
    done = gpu.run(job, *where, TRAINS, 20).expect(0)
    assert len(re.findall(r"rank \d gloo cuda:0 step \d+", done.out)) == 40
    gpu.run(job, *where, MISBEHAVE / "place.py").expect(0)
    files = sorted((job.home / "signs").glob("place-*"))
    shares = [json.loads(file.read_text())["variables"]["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] for file in files]
    assert shares == ["50", "50"]


@pytest.mark.claim("--mps without nvidia-cuda-mps-control is an error before the start", page="guides/devices.md")
def test_mps_without_its_command_is_an_error(machine, job, tmp_path):
    where = ("--devices", machine.ask()["uuid"], "--workers-per-gpu", 2, "--mps")
    done = machine.run(job, *where, TRAINS, 20, PATH=str(tmp_path))
    assert done.status != 0
    assert "--mps: nvidia-cuda-mps-control was not found on PATH" in done.err
