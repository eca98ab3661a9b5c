"""Scripts and libraries that know torchrun find a torchrun job."""

import json
import os
import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.torch.example import AFTER_EXCEPTION

pytestmark = pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed")

FORKED = ("--start-method", "forkserver", "--preload")  # it is imported once
NOT_EQUAL = {  # variables of torchrun's workers whose values are each launcher's own
    "MASTER_ADDR",
    "MASTER_PORT",
    "OMP_NUM_THREADS",  # torchrun: always 1
    "TORCHELASTIC_ERROR_FILE",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_USE_AGENT_STORE",  # torchrun's agent hosts the store, here rank 0 does
}
NOT_FOR_WORKERS = {"TORCHELASTIC_SIGNALS_TO_HANDLE"}  # torchrun's note to itself
OURS = {
    "DDPLAUNCH_BACKEND": "gloo",
    "DDPLAUNCH_DEVICE": "cpu",
    "DDPLAUNCH_INIT_METHOD": "env://",
    "NODE_RANK": "0",
    "PYTHONUNBUFFERED": "1",
}


@pytest.fixture(autouse=True)
def surroundings(monkeypatch, tmp_path):
    """These tests are about gloo, also where there are GPUs; torch keeps its compiler's cache after a program's end."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))


def told(job, what):
    """What both ranks have put up."""
    return [json.loads(text) for text in job.signs(what, 2)]


TORCH = tuple(map(int, version("torch").split(".")[:2])) if find_spec("torch") else ()


def needs(*packages):
    missing = [package for package in packages if find_spec(package) is None]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")


@pytest.mark.usefixtures("light_torch")
def test_workers_have_the_variables_that_torchrun_gives(job, program, tmp_path):
    args = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "3", "--role", "trainer"]
    job.run(*args, program("variables")).expect(0)
    ours = told(job, "variables")

    signs = tmp_path / "torchrun"
    signs.mkdir()
    there = {**job.env, "DDP_TEST_DIR": str(signs), "TMPDIR": str(signs)}  # it leaves temporary folders
    subprocess.run([sys.executable, "-m", "torch.distributed.run", *args, program("variables")], env=there, check=True)
    theirs = [json.loads((signs / f"variables-{rank}").read_text()) for rank in range(2)]

    for own, other in zip(ours, theirs, strict=True):
        names = {name for name in other if other[name] != there.get(name)} - NOT_FOR_WORKERS
        assert len(names) >= 17  # else the comparison has become void
        assert names <= own.keys()
        assert {name: own[name] for name in names - NOT_EQUAL} == {name: other[name] for name in names - NOT_EQUAL}
        assert {name: own[name] for name in OURS} == OURS
        assert own["MASTER_ADDR"] == "127.0.0.1"
        assert int(own["MASTER_PORT"]) == job.ports()[0]
        assert own["TORCHELASTIC_USE_AGENT_STORE"] == "False"
        assert own["TORCHELASTIC_RUN_ID"] == own["DDPLAUNCH_RUN_ID"] == job.folder.name
        assert own["DDPLAUNCH_LOG_DIR"] == str(job.folder)
        assert own["TORCHELASTIC_ERROR_FILE"]  # it is gone with the job; the next test but one has it written


@pytest.mark.usefixtures("light_torch")
def test_torch_sees_a_torchrun_job_meets_by_env_and_by_tcp_on_one_port_and_has_the_threads_of_the_caller(job, program):
    threads = len(os.sched_getaffinity(0))  # torch takes no more than that
    args = (
        "--nproc-per-node",
        2,
        *FORKED,
        "torch.distributed",
        "--init-method",
        "tcp",
        program("torch_facts"),
        "env://",
    )
    result = job.run(*args, env={"OMP_NUM_THREADS": str(threads)}).expect(0)
    tcp = f"tcp://127.0.0.1:{job.ports()[0]}"
    for rank, facts in enumerate(told(job, "facts")):
        assert facts == {
            "torchelastic": True,
            "threads": threads,
            "meetings": [
                {"method": method, "rank": rank, "backend": "gloo", "total": 11.0} for method in ("env://", tcp)
            ],
            "loaded": 4950,
            "spawned": 7.0 if rank == 0 else None,
        }
    assert "gloo (no accelerator)" in result.err


@pytest.mark.usefixtures("light_torch")
def test_a_failure_that_record_saw_is_in_the_error_file_and_reported_once(job, program):
    log_dir = job.home / "logs"
    result = job.run("--nproc-per-node", 2, *FORKED, "torch.distributed", "--log-dir", log_dir, program("torch_record"))
    assert result.status in AFTER_EXCEPTION
    _, _, report = result.err.rpartition("error: ")
    assert report.startswith("rank 1 failed: ValueError: rank 1 cannot learn   (exit status 1, ")
    assert report.count("rank 1 cannot learn") == 1
    assert 'torch_record.py:8 in train\n    raise ValueError(f"rank {RANK} cannot learn")\n' in report
    assert result.err.count("ValueError: rank 1 cannot learn") == 2  # there, and where Python printed it
    (file,) = log_dir.glob("*/attempt_0/1/error.json")
    message = json.loads(file.read_text())["message"]
    assert message["message"] == "ValueError: rank 1 cannot learn"
    assert message["extraInfo"]["py_callstack"].count("in train\n") == 1
    assert int(message["extraInfo"]["timestamp"]) > 1.7e9


@pytest.mark.slow  # transformers' Trainer is accelerate's
@needs("accelerate")
def test_accelerates_own_test_script_passes(job):
    spec = find_spec("accelerate")
    assert spec is not None and spec.origin is not None
    script = Path(spec.origin).parent / "test_utils" / "scripts" / "test_script.py"
    result = job.run("--nproc-per-node", 2, script, env={"ACCELERATE_USE_CPU": "1"}, timeout=120).expect(0)
    for rank in range(2):
        assert f"[{rank}] Distributed environment: DistributedType.MULTI_CPU  Backend: gloo" in result.out
        assert f"[{rank}] Process index: {rank}" in result.out
    assert "**Breakpoint trigger test**" in result.out  # the last of its parts
