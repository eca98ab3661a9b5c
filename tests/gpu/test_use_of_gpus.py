"""What NVML says of a worker's GPU is what plan, ps, top, --live and the report show."""

from __future__ import annotations

import json
import os
import re
import subprocess
import termios
import time
from pathlib import Path

import pytest

from tests.conftest import Job, until
from tests.gpu.machine import ONE, PATIENCE, PROGRAMS, Machine, hold, ps

GIB = 1 << 30


def on_a_terminal(machine: Machine, job: Job, *args: object, until_seen: str, then: bytes = b"") -> str:
    """Run the command on a terminal until all of a text has come that matches; return what came."""
    ours, theirs = os.openpty()
    termios.tcsetwinsize(theirs, (30, 160))
    env = {**Job(job.home, mark=job.mark).env, **machine.env, "TERM": "xterm"}
    (job.home / "tmp").mkdir(exist_ok=True)
    (job.home / "signs").mkdir(exist_ok=True)
    process = subprocess.Popen(
        job.argv(*args), env=env, cwd=job.home, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
    )
    os.close(theirs)
    os.set_blocking(ours, False)
    seen, give_up = b"", time.monotonic() + PATIENCE
    try:
        while not re.search(until_seen, seen.decode(errors="replace"), re.DOTALL):
            assert time.monotonic() < give_up, seen.decode(errors="replace")[-3000:]
            assert process.poll() is None, seen.decode(errors="replace")
            time.sleep(0.1)
            try:
                seen += os.read(ours, 1 << 16)
            except BlockingIOError:
                pass
        os.write(ours, then)
    except BaseException:
        process.kill()
        raise
    finally:
        if not then:
            process.terminate()
        try:
            process.wait(20)
        finally:
            process.kill()
            process.wait()
            os.close(ours)
    return seen.decode(errors="replace")


@pytest.mark.claim("plan names the backend and the GPU of each worker", page="guides/devices.md")
def test_the_plan_names_the_gpu(machine, job, told):
    text = machine.verb(job, "plan", *ONE, PROGRAMS / "holds.py").expect(0).out
    facts = machine.ask()
    assert re.search(r"^backend +nccl +every worker has a GPU of its own", text, re.MULTILINE)
    assert re.search(r"^devices +\d+ +NVML", text, re.MULTILINE)
    assert re.search(rf"^0 +cuda:0 +{facts['uuid'][:12]}", text, re.MULTILINE)
    told(facts["name"])


@pytest.mark.claim(
    "ps shows use and memory of each worker's GPU, and the step with a loss on the GPU", page="guides/running-jobs.md"
)
def test_ps_shows_how_much_the_gpu_computes_and_holds(machine, job, told):
    hold(machine, job)
    least = 50 if machine.is_real else 10
    until(lambda: (ps(machine, job)["gpu"] or 0) >= least, f"a GPU that computes {least}% of the time", PATIENCE)
    worker, facts = ps(machine, job), machine.ask()
    assert 2 * GIB < worker["gpu_memory"] <= facts["total"]
    text = machine.look(job, "ps").expect(0).out
    assert re.search(r"rank .* device +state .* gpu +gpu memory", text), text
    assert re.search(r"cuda:0 +running .*\d+% .*\d+(\.\d)? GiB", text), text
    assert "loss" in text or "step" in text, text
    told(f"{worker['gpu']}%, {worker['gpu_memory'] / GIB:.1f} GiB")


@pytest.mark.claim("top shows use and memory of each worker's GPU", page="guides/running-jobs.md")
def test_top_shows_the_gpu(machine, job):
    hold(machine, job)
    on_a_terminal(machine, job, "top", job.folder.name, until_seen=r"gpu memory.*\d+%.*GiB.*\d+%.*GiB", then=b"q")


@pytest.mark.claim("the row of --live shows use and memory of the GPUs", page="guides/running-jobs.md")
def test_the_live_row_shows_the_gpu(machine, job):
    words = ("--live", *ONE, PROGRAMS / "holds.py", 2, "stays")
    on_a_terminal(machine, job, *words, until_seen=r"GPU \d+%.*GPU memory \d+(\.\d)? GiB")


@pytest.mark.claim("the report and samples.jsonl have the use and memory of each worker's GPU", page="guides/report.md")
def test_the_report_has_curves_of_the_gpu(machine, job, told):
    hold(machine, job)
    file = job.folder / "samples.jsonl"

    def samples() -> list[dict[str, list[float]]]:
        lines = file.read_text().splitlines(keepends=True) if file.exists() else []
        found = [json.loads(line) for line in lines if line.endswith("\n")]
        return [sample for sample in found if max(sample.get("gpu_memory") or [0]) > 2048]

    until(lambda: len(samples()) > 1, "samples of the GPU", PATIENCE)
    last = samples()[-1]
    machine.look(job, "report", "--out", job.home / "report.html").expect(0)
    page = (job.home / "report.html").read_text()
    assert "<figcaption>GPU memory<" in page
    told(f"{last['gpu'][0]}%, {last['gpu_memory'][0] / 1024:.1f} GiB")


@pytest.mark.claim(
    "the launcher imports no torch and opens no CUDA context, and asks NVML in a child", page="guides/devices.md"
)
def test_the_launcher_opens_no_gpu(machine, job):
    worker = hold(machine, job)
    until(lambda: ps(machine, job)["gpu_memory"], "an answer of NVML", PATIENCE)
    users = set(machine.ask()["pids"])
    ours = {pid: _maps(pid) for pid in job.left() if pid != worker and _is_the_launcher(pid)}
    assert ours
    for pid, maps in ours.items():
        assert "libtorch" not in maps, pid
        assert pid not in users
        # NVML opens CUDA's library to know its version, and no GPU
        assert "libcuda.so" not in maps or "libnvidia-ml" in maps, pid
    assert sum("libnvidia-ml" in maps for maps in ours.values()) == 1  # the child that asks it


def _is_the_launcher(pid: int) -> bool:
    text = Path(f"/proc/{pid}/cmdline").read_bytes().decode()
    return "ddplaunch" in text and "holds.py" in text and "bootstrap.py" not in text


def _maps(pid: int) -> str:
    return Path(f"/proc/{pid}/maps").read_text()
