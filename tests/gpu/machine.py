"""The machine that a test of GPUs runs on: a real one, or, as far as that can play, one that is made up."""

from __future__ import annotations

import fcntl
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.conftest import Job, until

PROGRAMS = Path(__file__).parent / "programs"
REPOSITORY = Path(__file__).parents[2]
PATIENCE = 50.0  # seconds until a test gives up: a start takes ten, and the machine is rented by the minute
ONE = ("--nproc-per-node", 1)


@dataclass(frozen=True)
class Machine:
    """A machine with a GPU: the variables by which commands see it, and what NVML says of it."""

    env: dict[str, str]
    is_real: bool
    ask: Callable[[], dict[str, Any]]  # facts of its first GPU, as of now

    @property
    def used(self) -> int:
        """The bytes of its memory that are in use."""
        return int(self.ask()["used"])

    def start(self, job: Job, *args: object, **variables: str) -> None:
        """Start the command on this machine."""
        job.start(*args, env={**self.env, **variables})

    def run(self, job: Job, *args: object, **variables: str) -> Any:
        """Run the command on this machine to its end."""
        self.start(job, *args, **variables)
        return job.wait(PATIENCE)

    def look(self, job: Job, verb: str, *args: object, **variables: str) -> Any:
        """Run a verb that is about this job, among others, as from another shell."""
        return self.verb(job, verb, *args, job.folder.name, **variables)

    def verb(self, job: Job, *args: object, **variables: str) -> Any:
        """Run a verb that is about no job."""
        other = Job(job.home, mark=job.mark)
        (job.home / "tmp").mkdir(exist_ok=True)
        return _ended(other, args, {**self.env, **variables})


def _ended(other: Job, args: tuple[object, ...], env: dict[str, str]) -> Any:
    import subprocess

    from tests.conftest import Result

    began = time.monotonic()
    done = subprocess.run(
        other.argv(*args), env={**other.env, **env}, cwd=other.home, capture_output=True, timeout=PATIENCE, check=False
    )
    out, err = (text.decode(errors="replace") for text in (done.stdout, done.stderr))
    return Result(done.returncode, out, err, time.monotonic() - began)


def sign(job: Job, name: str) -> str:
    """Wait until the worker has put up this sign, and give its content; fail with all that was said if the command ends first."""
    process = job.process
    assert process is not None
    until(lambda: job.has_sign(name) or process.poll() is not None, f"the sign {name}", PATIENCE)
    if not job.has_sign(name):
        ended = job.wait()
        pytest.fail(f"status {ended.status} before the sign {name}\n{ended.out}{ended.err}")
    return job.sign(name)


def hold(machine: Machine, job: Job, how: str = "stays", gib: int = 2, *options: object, **variables: str) -> int:
    """Start a worker that has so much of a GPU and computes there; return its pid."""
    machine.start(job, *ONE, *options, PROGRAMS / "holds.py", gib, how, **variables)
    return int(sign(job, "holds"))


def ps(machine: Machine, job: Job) -> dict[str, Any]:
    """What `ddplaunch ps --json` says of the job's only worker."""
    done = machine.look(job, "ps", "--json").expect(0)
    workers: list[dict[str, Any]] = list(_workers(json.loads(done.out)))
    assert len(workers) == 1, done.out
    return workers[0]


def _workers(value: Any) -> Iterator[dict[str, Any]]:
    """Yield the workers in what ps says, wherever they stand."""
    if isinstance(value, dict):
        if "rank" in value and "pid" in value:
            yield value
        else:
            for inner in value.values():
                yield from _workers(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _workers(inner)


def real_gpu() -> dict[str, Any]:
    """Ask NVML for the first GPU."""
    import pynvml  # type: ignore[import-untyped]  # it ships no annotations

    pynvml.nvmlInit()
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
        return {
            "uuid": pynvml.nvmlDeviceGetUUID(handle),
            "name": pynvml.nvmlDeviceGetName(handle),
            "total": memory.total,
            "used": memory.used,
            "pids": [found.pid for found in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)],
        }
    finally:
        pynvml.nvmlShutdown()


def made_up_gpu(env: dict[str, str]) -> dict[str, Any]:
    """Ask the stand-in for NVML for the first GPU, in a process that has it."""
    import subprocess

    code = "import json; from tests.gpu.machine import real_gpu; print(json.dumps(real_gpu()))"
    path = os.pathsep.join([env["PYTHONPATH"], str(REPOSITORY), *sys.path[1:]])
    asked = [sys.executable, "-c", code]
    done = subprocess.run(asked, env={**os.environ, **env, "PYTHONPATH": path}, capture_output=True, check=True)
    facts: dict[str, Any] = json.loads(done.stdout)
    return facts


def agent_of(worker: int) -> int:
    """The pid of the agent that started this worker."""
    return int(psutil.Process(worker).ppid())


@contextmanager
def room(*, alone: bool) -> Iterator[None]:
    """Have the GPU together with other tests, also those of other processes, or alone: who wants that waits for no newcomers."""
    folder = Path(tempfile.gettempdir()) / f"ddplaunch-gpu-tests-{os.getuid()}"
    folder.mkdir(exist_ok=True)
    with open(folder / "door", "w") as door, open(folder / "room", "w") as inside:
        fcntl.flock(door, fcntl.LOCK_EX)
        fcntl.flock(inside, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(door, fcntl.LOCK_UN)
        yield


def skip_without(condition: object, reason: str) -> None:
    """Skip the test with this reason unless there is what it needs."""
    if not condition:
        pytest.skip(reason)
