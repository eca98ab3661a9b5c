"""The memory of a GPU is free again soon, however a job ends."""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.gpu.machine import agent_of, hold

WITHIN = 3.0  # seconds
GIB = 5

pytestmark = pytest.mark.alone


def dies(machine, job, how, worker):
    """End a job in one way; return the time at which its worker was told to end, or was killed."""
    at = time.monotonic()
    if how == "worker killed":
        os.kill(worker, signal.SIGKILL)
    elif how == "command and agent killed":
        agent = agent_of(worker)
        for pid in {job.process.pid, agent}:
            os.kill(pid, signal.SIGKILL)
    elif how == "command killed":
        os.kill(job.process.pid, signal.SIGKILL)
    elif how == "stop":
        machine.look(job, "stop")
    elif how == "Ctrl-C":
        job.process.send_signal(signal.SIGINT)
    else:
        (job.home / "signs" / "go").touch()
    return at


WAYS = {
    "exit": "exits",
    "exception": "raises",
    "out of memory": "fills",
    "worker killed": "stays",
    "command killed": "stays",
    "command and agent killed": "stays",
    "stop": "stays",
    "Ctrl-C": "stays",
}


@pytest.mark.claim(
    f"the memory of a GPU is free again {WITHIN:g} s after any end, by {', '.join(WAYS)}",
    page="concepts/supervision.md",
)
def test_the_memory_is_free_again_however_a_job_ends(machine, jobs, told):
    running = {how: jobs(how.replace(" ", "-")) for how in WAYS}
    with ThreadPoolExecutor(len(WAYS)) as pool:
        holding = {how: pool.submit(hold, machine, job, WAYS[how], GIB) for how, job in running.items()}
        workers = {how: future.result() for how, future in holding.items()}
    within = WITHIN if machine.is_real else 5 * WITHIN  # the CPUs beside a made-up one are busy with other tests
    late, seconds = [], {}
    for how, job in running.items():
        before = machine.used
        at = dies(machine, job, how, workers[how])
        while (freed := before - machine.used) < 0.9 * (GIB << 30) and time.monotonic() < at + 5 * WITHIN:
            time.sleep(0.05)
        seconds[how] = time.monotonic() - at
        if freed < 0.9 * (GIB << 30) or seconds[how] > within:
            late.append(f"{how}: {freed / (1 << 30):.1f} of {GIB} GiB free after {seconds[how]:.1f} s")
    told(", ".join(f"{how} {took:.1f} s" for how, took in seconds.items()))
    assert not late
