"""A worker uses up memory, /dev/shm, open files or a disk: the report says which, by what the kernel or Python said."""

import functools
import os
import resource
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

root_only = pytest.mark.skipif(os.geteuid() != 0, reason="limits of our own need root")
CGROUPS = Path("/sys/fs/cgroup")


@pytest.fixture
def exhaust(job, program):
    """Run a job of two workers whose rank 1 uses up `what`, prove that nothing is left, and give its result."""

    def exhaust(*what: object, **popen):
        result = job.run("--nproc-per-node", 2, program("runs_out"), *what, **popen)
        job.nothing_left()
        return result

    return exhaust


@pytest.fixture
def in_small_memory() -> Iterator[Callable[[], object]]:
    """Put this process into a control group with 120 MB, where the kernel kills what needs more."""
    is_v2 = (CGROUPS / "cgroup.controllers").exists()
    group = (CGROUPS if is_v2 else CGROUPS / "memory") / f"ddplaunch-test-{uuid.uuid4().hex}"
    limit = str(120 * 10**6)
    limits = {"memory.max": limit} if is_v2 else {"memory.limit_in_bytes": limit}
    swap = {"memory.swap.max": "0"} if is_v2 else {"memory.memsw.limit_in_bytes": limit}
    try:
        group.mkdir()
        for name, value in {**limits, **swap}.items():
            if name in limits or (group / name).exists():  # not where the kernel does not count swap
                (group / name).write_text(value)
    except OSError as error:
        if group.exists():
            group.rmdir()
        pytest.skip(f"no memory control group can be made here: {error}")
    yield functools.partial((group / "cgroup.procs").write_text, "0")  # who writes that moves itself
    group.rmdir()


def small(place: Path, size: int) -> list[str]:
    """The start of a command line for which a small file system is at `place`, and for nobody else."""
    mount = f'mount -t tmpfs -o size={size} none "$0" && exec "$@"'
    command = ["unshare", "--mount", "sh", "-c", mount, str(place)]
    tried = subprocess.run([*command, "true"], capture_output=True, text=True, check=False)
    if tried.returncode != 0:
        pytest.skip(f"no file system can be mounted here: {tried.stderr.strip()}")
    return command


@pytest.fixture
def in_small(job) -> Callable[[Path], None]:
    """Have the command run with 4 MiB at a place."""

    def in_small(place: Path) -> None:
        prefix, argv = small(place, 4 << 20), job.argv
        job.argv = lambda *args: [*prefix, *argv(*args)]

    return in_small


@root_only
@pytest.mark.parametrize(
    ("what", "status", "head", "hint"),
    [
        ("memory", 137, "killed by SIGKILL", "the kernel's OOM killer ended it (its peak was "),
        (
            "memory_of_child",
            1,
            "subprocess.CalledProcessError: ",
            "OOM killer ended a child process (1 kill meanwhile)",
        ),
    ],
)
def test_a_kill_for_memory_is_counted_by_the_control_group(exhaust, in_small_memory, what, status, head, hint):
    result = exhaust(what, preexec_fn=in_small_memory).expect(status)
    assert f"error: rank 1 failed: {head}" in result.err
    assert hint in result.err
    assert ("its cgroup counts 1 kill" in result.err) is (what == "memory")


@root_only
@pytest.mark.parametrize(
    ("what", "status", "hint"),
    [
        ("shm", 128 + signal.SIGBUS, "/dev/shm is full (0 B of 4 MiB free): "),
        ("unnamed_shm", 128 + signal.SIGBUS, "/dev/shm is small (4 MiB of 4 MiB free now), "),
        ("semaphores", 1, "/dev/shm is full (0 B of 4 MiB free now): "),
    ],
)
def test_a_full_dev_shm_is_told_with_its_room(exhaust, in_small, what, status, hint):
    in_small(Path("/dev/shm"))
    result = exhaust(what).expect(status)
    assert f"hint: {hint}" in result.err


@root_only
def test_a_disk_that_is_full_is_told(exhaust, in_small, job):
    disk = job.home / "disk"
    disk.mkdir()
    in_small(disk)
    result = exhaust("disk", disk).expect(1)
    assert "error: rank 1 failed: OSError: [Errno 28] No space left on device" in result.err
    assert "hint: a file system is full" in result.err


def test_a_worker_without_room_for_another_open_file_still_tells_its_exception(exhaust):
    result = exhaust("files", preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))).expect(1)
    assert "error: rank 1 failed: OSError: [Errno 24] Too many open files: '/dev/null'" in result.err
    assert "kept.append(open(" in result.err
    assert "hint: raise the hard limit" in result.err


WITHOUT_STACKS = "ddplaunch: warning: where workers are cannot be shown, as by `ddplaunch stacks`: "
KIB = 1 << 10


@pytest.mark.parametrize(
    ("limit", "most", "why"),
    [
        (resource.RLIMIT_FSIZE, 512 * KIB, ""),
        (resource.RLIMIT_FSIZE, 32 * KIB, "no file may be larger than 32 KiB (`ulimit -f`)"),
        (resource.RLIMIT_NOFILE, 1024, ""),
        (resource.RLIMIT_NOFILE, 32, "no more than 32 files may be open (`ulimit -n`)"),
    ],
    ids=["files of 512 KiB", "files of 32 KiB", "1,024 files", "32 files"],
)
def test_workers_run_with_small_limits_and_what_they_do_without_is_said_once(job, program, limit, most, why):
    flags = ("--nproc-per-node", 2, program("behave"), "all=done")
    result = job.run(*flags, preexec_fn=lambda: resource.setrlimit(limit, (most, most)))
    assert result.status == 0, result.err
    assert [line for line in result.err.splitlines() if "warning" in line] == (
        [f"{WITHOUT_STACKS}{why}"] if why else []
    )
    job.nothing_left()


# two more are free, for the pipe by which the child says that it could not be started
NO_ROOM_IN_CHILD = """
import os, resource, sys
from ddplaunch.system.process.child import Stdio, start, why_not_started
out = os.open(os.devnull, os.O_RDWR)
lowest = os.dup(0)
os.close(lowest)
resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + 2, lowest + 2))
child = start([sys.executable, "-c", ""], dict(os.environ), Stdio(0, out, out), handled=())
os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
sys.exit(str(why_not_started(child, "python") or ""))
"""


def test_a_worker_that_keeps_our_standard_input_needs_no_further_descriptor_for_it():
    command = [sys.executable, "-c", NO_ROOM_IN_CHILD]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    assert done.stderr == "\n"
