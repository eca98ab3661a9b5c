"""--mps: a daemon of the job's own, for workers that share a GPU. The GPUs and NVIDIA's command are stand-ins."""

import json
import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ddplaunch.launcher.node.services import START_TIMEOUT
from tests.conftest import PROGRAMS, Job, until
from tests.fake_nvml import made_up
from tests.process.terminal import agent_of

STAND_IN = PROGRAMS / "mps"
PATH = f"{STAND_IN}{os.pathsep}{os.environ['PATH']}"
ASKED = ("--mps", "--workers-per-gpu", 2)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_up.library(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def machine(library: Path) -> Callable[..., dict[str, str]]:
    return partial(made_up.machine, library)


def heard(job: Job) -> list[str]:
    """What the daemon has noted down."""
    return (job.home / "signs" / "mps").read_text().splitlines()


def variables(job: Job) -> list[dict[str, Any]]:
    """The variables of the workers that are about MPS, by rank."""
    files = sorted((job.home / "signs").glob("place-*"))
    found = [json.loads(file.read_text())["variables"] for file in files]
    return [{name: value for name, value in one.items() if name.startswith("CUDA_MPS_")} for one in found]


def test_workers_that_share_gpus_have_a_daemon_of_their_own(job, machine):
    env = {**machine("H200 H200"), "PATH": PATH, "CUDA_VISIBLE_DEVICES": "1,0"}
    job.run(*ASKED, PROGRAMS / "place.py", env=env).expect(0)
    first, *others = variables(job)
    assert len(others) == 3
    assert all(other == first for other in others)
    assert first["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "50"
    folder = Path(first["CUDA_MPS_PIPE_DIRECTORY"]).parent
    assert str(folder).startswith("/dev/shm/ddplaunch-errors-")
    assert not folder.parent.exists()
    assert heard(job) == ["visible all", "quit"]


def test_a_daemon_that_does_not_listen_is_ended(job, machine):
    job.run(*ASKED, PROGRAMS / "place.py", env={**machine("H200"), "PATH": PATH, "FAKE_MPS_IS_DEAF": "1"}).expect(0)
    assert heard(job)[:2] == ["visible all", "quit"]


def test_it_ends_with_a_job_that_fails_and_starts_again_with_it(job, machine, program):
    job.run(
        *ASKED, "--max-restarts", 1, program("behave"), "1=exit:3", "all=default", env={**machine("H200"), "PATH": PATH}
    )
    assert heard(job) == ["visible all", "quit"] * 2


def test_it_ends_when_the_command_is_killed(job, machine, program):
    job.start(*ASKED, program("behave"), "all=default", env={**machine("H200"), "PATH": PATH})
    job.signs("ready", 2)
    job.process.kill()
    job.wait()
    until(lambda: not job.left(), "all to be gone")
    assert heard(job)[0] == "visible all"


def test_its_folder_goes_with_an_agent_that_is_killed(job, machine, program):
    job.start(*ASKED, program("behave"), "all=default", env={**machine("H200"), "PATH": PATH})
    job.signs("ready", 2)
    [folder] = Path("/dev/shm").glob(f"ddplaunch-errors-{job.folder.name}-*")
    assert (folder / "mps-0" / "pipe").is_dir()
    os.kill(agent_of(job.process.pid), signal.SIGKILL)
    job.wait()
    assert not folder.exists()


def test_what_the_user_says_about_the_shares_counts(job, machine):
    env = {**machine("H200"), "PATH": PATH, "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "70"}
    assert job.run(*ASKED, PROGRAMS / "place.py", env=env).status == 0
    assert {one["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] for one in variables(job)} == {"70"}


def test_a_daemon_that_does_not_start_is_an_error_that_says_why(job, machine):
    result = job.run(*ASKED, PROGRAMS / "place.py", env={**machine("H200"), "PATH": PATH, "FAKE_MPS_ERROR": "no GPU"})
    assert "nvidia-cuda-mps-control -d did not start: no GPU" in result.err
    assert result.status == 2
    assert not variables(job)


def test_a_command_that_hangs_holds_no_signal_up(job, machine):
    job.start(*ASKED, PROGRAMS / "place.py", env={**machine("H200"), "PATH": PATH, "FAKE_MPS_HANGS": "1"})
    until((job.home / "signs" / "mps").exists, "the command to hang")
    began = time.monotonic()
    job.process.send_signal(signal.SIGINT)
    assert job.wait().status == 130
    assert time.monotonic() - began < START_TIMEOUT


def test_without_the_command_nothing_starts(job, machine):
    result = job.run(*ASKED, PROGRAMS / "place.py", env=machine("H200")).expect(2)
    assert result.err == (
        "error: --mps: nvidia-cuda-mps-control was not found on PATH\n\n"
        "hint: it comes with NVIDIA's driver; in a container mount it, or leave --mps out\n"
    )
