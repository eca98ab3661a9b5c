"""What the README and the examples show, on the GPU."""

import importlib.util
import re

import pytest

from tests.gpu.machine import ONE, REPOSITORY

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(importlib.util.find_spec("sklearn") is None, reason="needs scikit-learn"),
]
EXAMPLE = REPOSITORY / "examples" / "train_ddp.py"


@pytest.mark.claim(
    "examples/train_ddp.py trains under NCCL on the GPU, and resumes from its checkpoint", page="examples/train_ddp.md"
)
def test_the_first_example_trains_under_nccl(gpu, job, told):
    words = ("--checkpoints", job.home / "checkpoints")
    done = gpu.run(job, *ONE, EXAMPLE, "--epochs", 4, *words).expect(0)
    assert "1 worker, nccl (every worker has a GPU of its own)" in done.err
    [accuracy] = re.findall(r"epoch  4: .*accuracy (\d+)", done.out)
    assert int(accuracy) > 80
    again = gpu.run(job, *ONE, EXAMPLE, "--epochs", 6, *words).expect(0)
    assert re.findall(r"epoch +(\d+)", again.out) == ["5", "6"]
    told(f"accuracy {accuracy}% after 4 epochs")


@pytest.mark.claim("the README's demo, four workers, trains on one GPU over gloo", page="README.md")
def test_the_demo_trains(gpu, job):
    where = ("--devices", gpu.ask()["uuid"], "--nproc-per-node", 4)
    done = gpu.run(job, *where, EXAMPLE, "--epochs", 3).expect(0)
    assert re.search(r"epoch +3: loss", done.out)
    assert "4 workers, gloo (4 workers share 1 GPU, which NCCL refuses)" in done.err


@pytest.mark.claim("a check of 8 ranks runs on the CPU of a machine with fewer GPUs", page="guides/simulate.md")
def test_a_check_runs_on_the_cpu(gpu, job, told):
    done = gpu.verb(job, "check", "--world-size", 8, EXAMPLE, "--epochs", 1).expect(0)
    told(done.out.strip().splitlines()[-1])
    assert "agree in" in done.out


@pytest.mark.claim(
    "--nproc-per-node gpu, auto and none at all give a worker for each GPU", page="guides/one-machine.md"
)
@pytest.mark.parametrize("how", ["gpu", "auto", ""])
def test_each_gpu_gets_a_worker(gpu, job, uuids, how):
    words = ("--nproc-per-node", how) if how else ()
    text = gpu.verb(job, "plan", *words, EXAMPLE).expect(0).out
    assert len(re.findall(r"^\d+ +cuda:\d+ +GPU-", text, re.MULTILINE)) == len(uuids)
