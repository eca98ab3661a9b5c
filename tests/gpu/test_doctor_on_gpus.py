"""The doctor on a machine with GPUs: no false alarm where all is well, and who uses a GPU where somebody does."""

import json
import re
from pathlib import Path

import pytest

from tests.gpu.machine import hold, skip_without

# true of a virtual machine, and no alarm
KNOWN = r"is not in persistence mode"


@pytest.mark.alone
@pytest.mark.claim("the doctor finds nothing broken or slow about healthy GPUs and /dev/shm", page="guides/doctor.md")
def test_a_healthy_machine_has_no_finding(machine, job, told):
    done = machine.verb(job, "doctor", "--only", "gpus,shm,variables", "--json").expect(0)
    found = json.loads(done.out)
    [facts] = [check["facts"] for check in found["checks"] if check["id"] == "gpus"]
    assert re.match(r"\d+ GPUs?: NVIDIA .*, driver [\d.]+, CUDA \d+\.\d+$", facts), facts
    titles = [finding["title"] for finding in found["findings"]]
    assert [title for title in titles if not re.search(KNOWN, title)] == []
    told("; ".join([facts, *titles]))


@pytest.mark.alone
@pytest.mark.claim("the doctor names the process that uses a GPU, with its memory", page="guides/doctor.md")
def test_a_worker_that_holds_memory_is_named(machine, job, told):
    worker = hold(machine, job, gib=4)
    pids = machine.ask()["pids"]
    skip_without(pids, "NVML names no process here")
    skip_without(all(Path(f"/proc/{pid}").exists() for pid in pids), f"NVML's pids are not of this namespace: {pids}")
    said = " ".join(machine.verb(job, "doctor", "--only", "gpus", "-v").expect(0).out.split())
    assert f"GPU 0 is in use by pid {worker}" in said
    held = re.search(rf"pid {worker} has (\S+ GiB) of GPU 0: yours", said)
    assert held, said
    assert f"`kill {worker}`" not in said  # its launcher waits for it
    told(held[1])


@pytest.mark.gpu
@pytest.mark.claim("the doctor's own job of two workers uses the GPU and ends well", page="guides/doctor.md")
def test_the_doctors_job_uses_the_gpu(gpu, job, told):
    done = gpu.verb(job, "doctor", "--only", "all-reduce", "--json")
    found = json.loads(done.out)
    [facts] = [check["facts"] for check in found["checks"]]
    told("; ".join([facts, *(finding["title"] for finding in found["findings"])]))
    assert done.status == 0, done.out
    assert "gloo" in facts, done.out


@pytest.mark.claim(
    "--health-check 'ddplaunch doctor --only gpus,shm,tmp' lets a healthy node in", page="guides/elastic.md"
)
def test_a_health_check_by_the_doctor_passes(machine, job):
    check = " ".join(job.argv("doctor", "--only", "gpus,shm,tmp"))
    script = job.home / "says.py"
    script.write_text("print('it ran')\n")
    done = machine.run(job, "--nproc-per-node", 1, "--health-check", check, script).expect(0)
    assert "it ran" in done.out
