"""`ddplaunch doctor` as it is typed, with checks that take no time; the driver of the GPUs is made up."""

import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from ddplaunch.tools.doctor import Report
from tests.cli.typed import typed
from tests.conftest import Job
from tests.fake_nvml import made_up
from tests.forks import Commands


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_up.library(tmp_path_factory.mktemp("nvml"))


def test_json_is_the_whole_report_and_the_status_tells_whether_something_is_broken():
    done = typed("doctor", "--json", "--only", "limits,interfaces", NCCL_SOCKET_IFNAME="nope0")
    assert done.exit_code == 1
    report = json.loads(done.stdout)
    assert report["version"] == 1
    assert [one["id"] for one in report["checks"]] == ["limits", "interfaces"]
    assert [one["severity"] for one in report["findings"]] == ["broken"]
    assert msgspec.json.decode(done.stdout, type=Report).is_broken


def test_a_machine_without_findings_takes_one_line():
    done = typed("doctor", "--only", "variables")
    assert done.exit_code == 0, done.stdout
    (line,) = done.stdout.splitlines()
    assert line.startswith(f"{os.uname().nodename}: nothing found; 1 of 1 check passed in ")


def test_variables_of_files_and_secrets_are_handled_as_for_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "job.env").write_text("TORCH_DISTRIBUTED_DEBUG=DETAIL\n")
    (tmp_path / "ddplaunch.toml").write_text('env-file = "job.env"\n')
    monkeypatch.chdir(tmp_path)
    done = typed("doctor", "--only", "variables", "-v", DDPLAUNCH_TOKEN="hush-hush", WANDB_API_KEY="hush-hush")
    assert "slow: TORCH_DISTRIBUTED_DEBUG=DETAIL" in done.stdout
    assert "hush-hush" not in done.stdout


def test_a_process_on_a_gpu_and_a_torch_for_cpus_are_found_by_a_made_up_driver(
    job: Job, commands: Commands, library: Path
):
    machine = made_up.machine(library, "H200 H200 !H200", None)
    holds = [sys.executable, "-c", "input()", "--api-key=hush-hush"]
    with subprocess.Popen(holds, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL) as user:
        done = commands.run(job, "doctor", "--only", "gpus", "-v", env={**machine, "FAKE_GPU_USER": str(user.pid)})
    assert done.status == 1, done.err
    said = " ".join(done.out.split())  # a long sentence goes on in the next line
    assert "broken: GPU 2 has fallen off the bus" in said
    assert "slow: torch 2.13.0+cpu is a build for CPUs, though this machine has 2 accelerators" in said
    assert "hush-hush" not in said
    assert f"pid {user.pid} has 40 GiB of GPUs 0-1: yours" in said
    assert "--api-key=..." in said
    assert "`kill " not in said  # this test waits for it
    assert "driver 580.95.05, CUDA 13.0" in said


def test_a_gpu_that_waits_for_its_nvswitch_is_found(job: Job, commands: Commands, library: Path):
    machine = {**made_up.machine(library, "H200"), "FAKE_FABRIC": "2"}  # in progress
    done = commands.run(job, "doctor", "--only", "gpus", env=machine)
    assert done.status == 1, done.err
    assert "broken: GPU 0 waits for the fabric manager of its NVSwitch" in " ".join(done.out.split())


def test_a_driver_of_another_version_than_its_library_breaks_a_job(job: Job, commands: Commands, library: Path):
    done = commands.run(
        job, "doctor", "--only", "gpus", env={**made_up.machine(library, "H200"), "FAKE_NVML_INIT": "18"}
    )
    assert done.status == 1, done.err
    assert "broken: the NVIDIA driver does not work: " in done.out
