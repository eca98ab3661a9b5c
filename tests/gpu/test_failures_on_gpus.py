"""What ends a worker on a GPU is named, with a hint that helps."""

import re

import pytest

from tests.gpu.machine import ONE, PROGRAMS

SHARED = ("--nproc-per-node", 2)
# how, who; what the first line says; what the hint says
PLAYABLE = {
    "out_of_memory": (
        "out of memory on the GPU",
        r"(torch\.OutOfMemoryError|RuntimeError): CUDA out of memory\. Tried to allocate",
        r"cuda:0 is full: a smaller batch per worker",
    ),
    "outside_the_table": (
        "an index outside a table, which a kernel notices",
        r"(torch\.AcceleratorError|RuntimeError): CUDA error: device-side assert triggered",
        r"the line shown may be a later one: `--env CUDA_LAUNCH_BLOCKING=1`",
    ),
    "no_such_device": (
        "an invalid device ordinal",
        r"(torch\.AcceleratorError|RuntimeError): CUDA error: invalid device ordinal",
        r"this worker has no such device, its own is cuda:0: use LOCAL_RANK",
    ),
    "fork_after_cuda": (
        "CUDA in a process forked after its use",
        r"RuntimeError: Cannot re-initialize CUDA in forked subprocess",
        r"the GPU was used before a fork",
    ),
}


@pytest.mark.parametrize(
    ("how", "first", "hint"),
    [
        pytest.param(how, first, hint, marks=pytest.mark.claim(f"hint for {what}", page="reference/causes.md"), id=how)
        for how, (what, first, hint) in PLAYABLE.items()
    ],
)
def test_an_error_of_cuda_is_named_with_a_hint(machine, job, told, how, first, hint):
    done = machine.run(job, *ONE, PROGRAMS / "fails.py", how)
    assert done.status != 0
    says(done.err, first, hint, told)


def says(err, first, hint, told):
    """Prove that the report of a failure begins and ends so."""
    [error] = re.findall(r"^error: .*", err, re.MULTILINE)
    [advice] = re.findall(r"^hint: .*", err, re.MULTILINE)
    assert re.match(rf"error: rank \d failed: {first}", error), err
    assert re.search(hint, advice), err
    told(error[:160])


@pytest.mark.gpu
@pytest.mark.claim("hint for two workers on one GPU, which NCCL refuses", page="reference/causes.md")
def test_nccl_refuses_two_ranks_on_one_gpu(gpu, job, told):
    where = ("--devices", gpu.ask()["uuid"], *SHARED)
    done = gpu.run(job, *where, PROGRAMS / "fails.py", "two_ranks_on_one")
    assert done.status != 0
    says(done.err, r".*", r"NCCL needs a GPU for each worker", told)


@pytest.mark.gpu
@pytest.mark.claim("hint where NCCL's watchdog ends a worker whose collective is late", page="reference/causes.md")
def test_the_watchdog_of_nccl_ends_a_worker_whose_collective_is_late(gpu, job, told):
    # torch waits four times as long for what it writes down of a late collective: a minute by default
    patience = {"TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "2000"}
    done = gpu.run(job, *ONE, PROGRAMS / "fails.py", "collective_too_late", **patience)
    assert done.status != 0
    says(done.err, r".*", r"a rank did not call the same collective", told)


@pytest.mark.gpu
@pytest.mark.claim(
    "a job is started again after an error of CUDA, and uses the GPU again", page="guides/stopping-and-restarting.md"
)
def test_a_job_is_restarted_after_an_error_of_cuda(gpu, job):
    script = job.home / "once.py"
    script.write_text(
        "import os, torch\n"
        "index = 10**6 if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0' else 3\n"
        "table = torch.ones(10, 4, device='cuda')\n"
        "print(torch.nn.functional.embedding(torch.tensor([index], device='cuda'), table).sum().item())\n"
    )
    done = gpu.run(job, *ONE, "--max-restarts", 1, "--restart-on", "cuda", script).expect(0)
    assert "4.0" in done.out
