"""The disk of the run folder does not answer any more: whatever happens meanwhile is seen, and the command ends."""

import json
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import PATIENCE, Job, until
from tests.nodes import catches
from tests.process.disk import Disk, missing
from tests.process.terminal import agent_of, stat

HUNG = "does not answer"


@dataclass
class JobOnDisk(Job):
    """A job whose run folders lie on a disk of its own."""

    disk: Any = None

    def argv(self, *args: object) -> list[str]:
        return [*self.disk.prefix, *super().argv("--log-dir", self.disk.place / "logs", *args)]

    def written(self, pattern: str) -> list[Path]:
        """The files of the run, or of those of all nodes."""
        return sorted((self.disk.seen / "logs").glob(f"**/{pattern}"))


@pytest.fixture(scope="session")
def can_hang(tmp_path_factory: pytest.TempPathFactory) -> str | None:
    return missing(tmp_path_factory.mktemp("can-hang"))


@pytest.fixture
def job(tmp_path: Path, can_hang: str | None) -> Iterator[JobOnDisk]:
    if can_hang:
        pytest.skip(can_hang)
    job = JobOnDisk(tmp_path, disk=Disk(tmp_path))
    yield job
    job.kill_all()
    job.disk.close()
    job.nothing_left(patience=PATIENCE)


def statuses(job: JobOnDisk) -> list[int]:
    return [json.loads(file.read_text())["status"] for file in job.written("summary.json")]


@pytest.mark.parametrize(
    "nodes", [("--nproc-per-node", 2), ("--nnodes", 2, "--simulate")], ids=["one node", "two nodes"]
)
def test_a_worker_that_fails_ends_the_job_and_what_waited_is_written_later(job, program, nodes):
    job.start(*nodes, program("behave"), "all=raises_when_told")
    job.signs("ready", 2)
    until(lambda: "world_size" in "".join(file.read_text() for file in job.written("events.jsonl")), "the first event")
    job.disk.freeze()
    (job.home / "signs" / "fail-1").touch()
    result = job.wait().expect(1)
    assert "failed: ValueError: boom of rank 1" in result.err
    assert f"the log folder {job.disk.place}/logs/" in result.err
    assert HUNG in result.err
    assert statuses(job) == []
    job.disk.thaw()
    job.nothing_left(patience=PATIENCE)
    assert set(statuses(job)) == {1}
    assert any("boom of rank 1" in file.read_text() for file in job.written("attempt_0/*/error.json"))
    assert any("boom of rank 1" in file.read_text() for file in job.written("attempt_0/*/stderr.log"))


def test_a_job_starts_and_can_be_stopped_where_the_folder_cannot_be_made(job):
    job.disk.freeze()
    process = job.behave("all=default")
    process.send_signal(signal.SIGTERM)
    result = job.wait().expect(143)
    assert HUNG in result.err
    job.disk.thaw()
    job.nothing_left(patience=PATIENCE)
    assert statuses(job) == [143]


def test_a_job_is_stopped_while_the_folder_is_being_made(job, program):
    job.disk.freeze()
    process = job.start("--nproc-per-node", 2, program("behave"), "all=default")
    agent = Path(f"/proc/{agent_of(process.pid)}")
    until(lambda: catches(agent, signal.SIGINT), "an agent that waits for the folder")  # before, it imports its modules
    process.send_signal(signal.SIGINT)
    assert job.wait().status == 130
    assert not job.has_sign("ready-0")
    job.disk.thaw()


LEAVES = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    file = open(sys.argv[1], "wb", buffering=0)
    with open("signs/child.part", "w") as sign:
        sign.write(str(os.getpid()))
    os.rename(sign.name, "signs/child")
    while not os.path.exists("signs/frozen"): time.sleep(0.002)
    file.write(b"x")
time.sleep(1000)
"""


def test_what_waits_for_the_disk_when_the_agent_is_killed_ends_when_that_answers(job):
    script = job.home / "leaves.py"
    script.write_text(LEAVES)
    process = job.start(script, job.disk.place / "file")
    waiting = int(job.sign("child"))
    job.disk.freeze()
    (job.home / "signs" / "frozen").touch()
    until(lambda: stat(waiting)[0] == "D", "uninterruptible sleep")
    os.kill(agent_of(process.pid), signal.SIGKILL)
    result = job.wait().expect(122)
    assert f"could not be ended: pid {waiting} (python) in uninterruptible sleep\n" in result.err
    job.disk.thaw()
    job.nothing_left(patience=PATIENCE)


def test_nothing_is_lost_if_the_disk_answers_again(job):
    script = job.home / "prints.py"
    script.write_text(
        "import os, time\n"
        "rank = os.environ['RANK']\n"
        "def wait(name):\n"
        "    open(f'signs/before-{name}-{rank}', 'w').close()\n"
        "    while not os.path.exists(f'signs/{name}'): time.sleep(0.002)\n"
        "wait('frozen')\n"
        "for at in range(20_000): print(rank, at)\n"
        "wait('end')\n"
    )
    job.start("--nproc-per-node", 2, "--output", "none", script)
    job.signs("before-frozen", 2)
    job.disk.freeze()
    (job.home / "signs" / "frozen").touch()
    assert job.process is not None
    while HUNG not in (line := job.process.stderr.readline().decode()):
        assert line
    job.signs("before-end", 2)
    job.disk.thaw()
    while "answers again" not in (line := job.process.stderr.readline().decode()):
        assert line
    (job.home / "signs" / "end").touch()
    job.wait().expect(0)
    for rank in range(2):
        (log,) = job.written(f"attempt_0/{rank}/stdout.log")
        assert log.read_text() == "".join(f"{rank} {at}\n" for at in range(20_000))
    (summary,) = job.written("summary.json")
    assert json.loads(summary.read_text())["dropped_log_lines"] == 0
