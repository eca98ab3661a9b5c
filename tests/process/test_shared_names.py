"""What workers share by name, such as a file in /dev/shm, is gone before the next generation, and at the end of the job."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from ddplaunch.system.process.tree import descendants, end_all, look, others_by_group, tidies
from tests.conftest import PATIENCE, insist, until
from tests.process.terminal import agent_of

TRACKER = "from multiprocessing.resource_tracker import main;main(0)"
SHARES = """
import sys
from multiprocessing import shared_memory
block = shared_memory.SharedMemory(sys.argv[1], create=True, size=4096)
print(end="x", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def name(job) -> Iterator[str]:
    """A name in /dev/shm that no other test has."""
    yield f"shared-{job.mark}"
    for path in Path("/dev/shm").glob(f"shared-{job.mark}*"):
        path.unlink()


def names(name: str) -> list[str]:
    """What is shared by this name, or by one that begins so."""
    return sorted(path.name for path in Path("/dev/shm").glob(f"{name}*"))


@pytest.mark.parametrize("method", ["spawn", "fork"])
@pytest.mark.parametrize("children", [(), ("children",)], ids=["alone", "with children"])
def test_a_worker_that_is_killed_leaves_no_name_to_the_next_generation(job, program, name, method, children):
    how = ("--start-method", method, "--max-restarts", 1, "--grace-period", "0.5s")
    job.start("--nproc-per-node", 2, *how, program("shares_names"), name, "fails", *children)
    job.signs("ready", 2)
    assert names(name) == [f"{name}-0", f"{name}-1"]
    (job.home / "signs" / "fail").touch()
    result = job.wait().expect(0)
    assert "FileExistsError" not in result.err
    assert names(name) == []


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP], ids=lambda signum: signum.name)
@pytest.mark.parametrize("wrapped", [False, True], ids=["python", "wrapped"])
def test_a_signal_that_stops_the_workers_leaves_the_names_to_be_removed(job, program, name, signum, wrapped):
    command = (program("shares_names"), name)
    if wrapped:
        script = 'trap "" TERM HUP; "$@"; exit $?'
        command = ("--no-python", "bash", "-c", script, "bash", sys.executable, *command)
    process = job.start("--nproc-per-node", 2, "--grace-period", "0.5s", *command)
    job.signs("ready", 2)
    process.send_signal(signum)
    job.wait().expect(128 + signum)
    assert names(name) == []


@pytest.mark.parametrize("killed", ["a worker", "the agent", "the front", "both"])
def test_whatever_is_killed_from_outside_leaves_no_name(job, program, name, killed):
    process = job.start("--nproc-per-node", 2, "--grace-period", "0.5s", program("shares_names"), name)
    job.signs("ready", 2)
    agent = agent_of(process.pid)
    victims = {"a worker": [job.pids()[1]], "the agent": [agent], "the front": [process.pid]}
    for pid in victims.get(killed, [process.pid, agent]):
        os.kill(pid, signal.SIGKILL)
    job.wait()
    until(lambda: not names(name), "the end of what removes the names")
    job.nothing_left(PATIENCE)


def test_a_second_stop_signal_kills_at_once_and_leaves_no_name(job, program, name):
    process = job.start("--nproc-per-node", 2, program("shares_names"), name)
    job.signs("ready", 2)
    process.send_signal(signal.SIGINT)
    until(lambda: job.events("stop_sent"), "the stop")
    insist(process)
    job.wait().expect(130)
    assert names(name) == []


def test_a_simulated_node_that_is_lost_leaves_no_name_as_a_real_one_would_not(job, program, name):
    where = ("--simulate", "--nnodes", 2, "--nproc-per-node", 1, "--grace-period", "0.5s")
    job.start(*where, "--chaos", "node:1@1500ms", program("shares_names"), name)
    job.signs("ready", 2)
    job.wait().expect(122)
    until(lambda: not names(name), "the end of what removes the names")


# --- who tidies


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Processes that are ended with the test, and their groups."""
    processes: list[subprocess.Popen[bytes]] = []
    yield processes
    for process in processes:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def test_the_resource_tracker_of_a_group_is_known_and_no_other_process(started, job, name):
    for argv in ([sys.executable, "-c", SHARES, name], [sys.executable, "-c", "input()", TRACKER], ["sleep", "600"]):
        started.append(subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True))
    assert started[0].stdout is not None
    assert started[0].stdout.read(1) == b"x"
    until(lambda: any(map(tidies, descendants(os.getpid()))), "the start of the tracker")
    below = list(descendants(os.getpid()))
    [tracker] = [process for process in below if tidies(process)]
    assert (tracker.parent, tracker.group) == (started[0].pid, started[0].pid)
    others = {group: [one.pid for one in found] for group, found in others_by_group(below).items()}
    assert others == {started[0].pid: [started[0].pid]}


def test_a_tracker_that_is_stopped_goes_on_and_one_that_does_not_end_is_killed(started, job, name):
    kept, write = os.pipe()  # nothing is written, and it stays open
    for stdin in (subprocess.PIPE, kept):
        started.append(subprocess.Popen([sys.executable, "-c", TRACKER], stdin=stdin, start_new_session=True))
    ends, hangs = started
    assert ends.stdin is not None
    ends.stdin.write(f"REGISTER:/{name}:shared_memory\n".encode())
    Path(f"/dev/shm/{name}").touch()
    ends.send_signal(signal.SIGSTOP)
    until(lambda: (found := look(ends.pid)) is not None and found.state == "T", "the stop of a tracker")
    ends.stdin.close()
    trackers = [found for process in started if (found := look(process.pid)) is not None]
    end_all(trackers, 0.5)
    os.close(kept)
    os.close(write)
    assert (ends.wait(), hangs.wait()) == (0, -signal.SIGKILL)
    assert names(name) == []
