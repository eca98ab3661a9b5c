"""What `import ddplaunch` offers a script: the same under plain python, torchrun and ddplaunch."""

import json
import re
import signal
import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.conftest import PATIENCE
from tests.torch.example import AFTER_EXCEPTION

pytestmark = [
    pytest.mark.usefixtures("light_torch"),
    pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed"),
]

TWO = ("--nproc-per-node", "2")
TORCH = tuple(map(int, version("torch").split(".")[:2])) if find_spec("torch") else ()
# gloo of torch 2.4 hangs at times where groups are made and destroyed again and again, under torchrun too; 2.9 was tried next
ONCE = ["--once"] if TORCH < (2, 9) else []
FORKED = (*TWO, "--start-method", "forkserver", "--preload", "torch.distributed")  # torch is imported once


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture
def worker():
    """The module that a script's names come from."""
    from ddplaunch.worker import api

    return api


def check(told, world_size):
    """Check what `in_script.py` puts up in each rank."""
    assert [facts["imported"] for facts in told] == [[]] * world_size, "`import ddplaunch` is free of cost"
    assert [facts["place"] for facts in told] == [[rank, world_size, "gloo", "cpu"] for rank in range(world_size)]
    for facts in told:
        assert facts["same_again"]
        assert "there is a process group already" in facts["other_again"]
        assert facts["left"]
        assert facts["totals"] == [float("1" * world_size)] * (1 if ONCE else 4)
        assert facts["stopped_at"] == told[0]["stopped_at"] >= 7
        assert facts["still"] is True
        if world_size > 1:
            assert facts["without_group"].startswith("should_stop() asks all 2 workers, but this one is in no process")
        else:
            assert facts["without_group"] is None


def test_a_script_runs_as_one_process_without_any_launcher(job, program):
    for name in ("tmp", "signs"):
        (job.home / name).mkdir()
    env = {**job.env, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(program("in_script")), "--destroy", *ONCE]
    ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
    check([json.loads(job.sign("facts-0"))], 1)


def test_the_same_script_runs_under_torchrun(job, program):
    for name in ("tmp", "signs"):
        (job.home / name).mkdir()
    env = {**job.env, "OMP_NUM_THREADS": "1", "TMPDIR": str(job.home)}  # it leaves temporary folders
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", *TWO, str(program("in_script")), *ONCE]
    ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert ended.returncode == 0, ended.stderr
    check([json.loads(text) for text in job.signs("facts", 2)], 2)


def test_the_same_script_runs_under_ddplaunch(job, program):
    result = job.run(*TWO, "--init-method", "tcp", program("in_script"), *ONCE)
    job.nothing_left()
    assert result.status == 0, result.err
    assert [line for line in result.err.splitlines() if not line.startswith("ddplaunch: ")] == [], (
        "not even forgetting it"
    )
    check([json.loads(text) for text in job.signs("facts", 2)], 2)


@pytest.mark.parametrize(
    ("signum", "words", "status"),
    [
        pytest.param(
            *(signal.SIGUSR1, ["loaders"], 0),
            id="SIGUSR1, which does not end their data loaders",
            marks=pytest.mark.slow,  # in_script.py sends it to one of its workers
        ),
        pytest.param(signal.SIGTERM, ["loaders"], 128 + 15, id="SIGTERM, which stops the job but not its data loaders"),
    ],
)
def test_after_a_notice_all_save_after_the_same_step(job, program, signum, words, status):
    process = job.start(*FORKED, "--init-method", f"file:{job.home / 'meet'}", program("saves_together"), *words)
    job.signs("ready", 2)
    process.send_signal(signum)
    result = job.wait()
    job.nothing_left()
    assert result.status == status, result.err
    first, second = map(int, job.signs("saved", 2))
    assert first == second > 3
    assert not list(job.home.glob("meet*"))


def test_with_should_stop_in_use_a_failure_ends_the_others_at_once(job, program):
    # longer than this test would wait
    result = job.run(*FORKED, "--grace-period", 600, program("saves_together"), "fail")
    job.nothing_left()
    assert result.status in AFTER_EXCEPTION
    assert re.search(r"^error: rank 1 failed: ValueError: rank 1 has seen a NaN", result.err, re.MULTILINE)
    assert re.search(
        r"rank 0 (then lost contact with it|was stopped|finished)|the other worker was stopped", result.err
    )
    assert not job.has_sign("saved-0")


@pytest.mark.parametrize(
    ("env", "devices", "expected"),
    [
        ({}, {}, "cpu"),
        ({"LOCAL_RANK": "3"}, {}, "cpu"),
        ({}, {"cuda": 4}, "cuda:0"),
        ({"LOCAL_RANK": "3"}, {"cuda": 4}, "cuda:3"),
        ({"LOCAL_RANK": "3"}, {"cuda": 1}, "cuda:0"),
        ({"LOCAL_RANK": "1"}, {"xpu": 2}, "xpu:1"),
        ({"LOCAL_RANK": "1"}, {"cuda": 2, "xpu": 2}, "cuda:1"),
        ({"LOCAL_RANK": "1", "DDPLAUNCH_DEVICE": "cpu"}, {"cuda": 2}, "cpu"),
        ({"LOCAL_RANK": "1", "DDPLAUNCH_DEVICE": "cuda:0"}, {"cuda": 2}, "cuda:0"),
        ({"LOCAL_RANK": "1", "DDPLAUNCH_DEVICE": "cuda"}, {"cuda": 2}, "cuda:1"),
        ({"DDPLAUNCH_DEVICE": "mps"}, {}, "mps"),
        ({"DDPLAUNCH_DEVICE": ""}, {"xpu": 1}, "xpu:0"),
    ],
)
def test_the_device_is_the_one_that_is_told_or_counted(worker, env, devices, expected):
    assert worker.choose(env, lambda kind: devices.get(kind, 0)) == expected


@pytest.mark.parametrize(
    ("env", "devices", "message"),
    [
        (
            {"DDPLAUNCH_DEVICE": "gpu:0"},
            {},
            "DDPLAUNCH_DEVICE is 'gpu:0', which is no device of torch; use cpu, cuda:0",
        ),
        ({"DDPLAUNCH_DEVICE": "cuda:x"}, {"cuda": 1}, "DDPLAUNCH_DEVICE is 'cuda:x', which is no device of torch"),
        ({"DDPLAUNCH_DEVICE": "cuda:2"}, {"cuda": 2}, r"'cuda:2', but torch \S+ sees only 2 of that kind here$"),
        (
            {"DDPLAUNCH_DEVICE": "cuda:0", "CUDA_VISIBLE_DEVICES": ""},
            {},
            r"sees none of that kind here \(CUDA_VISIBLE_DEVICES=\)$",
        ),
        ({"LOCAL_RANK": "2"}, {"cuda": 2}, "LOCAL_RANK is 2, but torch sees only 2 cuda devices here: start at most 2"),
        ({"LOCAL_RANK": "x"}, {"cuda": 2}, "LOCAL_RANK is 'x', which is no number from 0"),
    ],
)
def test_a_device_that_is_not_there_is_an_error(worker, env, devices, message):
    with pytest.raises(ValueError, match=message):
        worker.choose(env, lambda kind: devices.get(kind, 0))


@pytest.mark.parametrize(
    ("kind", "built_with", "expected"),
    [
        ("cuda", {"nccl", "gloo"}, "nccl"),
        ("cuda", {"gloo"}, "gloo"),
        ("xpu", {"xccl", "gloo"}, "xccl"),
        ("xpu", {"gloo"}, "gloo"),
        ("cpu", {"nccl", "gloo"}, "gloo"),
        ("mps", {"gloo"}, "gloo"),
    ],
)
def test_the_backend_suits_the_device_and_the_torch(worker, kind, built_with, expected):
    assert worker.suitable(kind, built_with.__contains__) == expected


def test_a_file_that_an_earlier_run_left_is_recognised(worker, tmp_path, monkeypatch):
    from ddplaunch.worker.notice import Ranks

    path = tmp_path / "meet"
    monkeypatch.setenv("DDPLAUNCH_INIT_METHOD", f"file://{path}")
    killed = worker._new_store(Ranks(1, 2), None)
    with pytest.raises(
        RuntimeError, match=rf"^{re.escape(str(path))} has been used by another worker with rank 1: an ear"
    ):
        worker._new_store(Ranks(1, 2), None)
    del killed


def test_an_init_method_that_is_none_is_an_error(worker, monkeypatch):
    from ddplaunch.worker.notice import Ranks

    monkeypatch.setenv("DDPLAUNCH_INIT_METHOD", "file:meet")
    with pytest.raises(
        ValueError, match=r"^DDPLAUNCH_INIT_METHOD is 'file:meet'; use env://, tcp://HOST:PORT or file:///"
    ):
        worker._new_store(Ranks(0, 2), None)


def test_a_name_that_scripts_are_not_offered_is_an_ordinary_attribute_error():
    import ddplaunch

    with pytest.raises(AttributeError, match="module 'ddplaunch' has no attribute 'lunch'"):
        _ = ddplaunch.lunch
    assert Path(ddplaunch.device.__code__.co_filename).name == "api.py"
