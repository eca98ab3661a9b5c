"""Stacks of real processes, in whatever situation they are; none of them comes to harm by being asked."""

import fcntl
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddplaunch.launcher.look.inspection import Inspection
from ddplaunch.launcher.look.recorder import read_arrivals
from ddplaunch.launcher.look.stacks import Target, capture_stacks
from ddplaunch.record.seen import Sample
from ddplaunch.record.seen.merge import where
from ddplaunch.system.loop.loop import Loop
from ddplaunch.system.process.child import STACKS_FD, STACKS_SIGNAL, RunningWorker, Stdio, handled_signals, start
from ddplaunch.system.process.linux import bounded_file
from ddplaunch.system.process.tree import descendants
from tests.conftest import until

ROOT = Path(__file__).parents[2]
BOOTSTRAP = ROOT / "ddplaunch" / "worker" / "bootstrap.py"
PROGRAM = ROOT / "tests" / "programs" / "asked.py"
LIMIT = 20.0  # seconds, on a machine that is busy

SLEEPING = r"asked\.py:\d+ in sleeps"
OWN_SIGNAL = "the program itself handles signal 59, so its stack cannot be taken"

CASES = {
    "sleeps": SLEEPING,
    "forks": SLEEPING,
    "spawns": SLEEPING,
    "computes": r"asked\.py:\d+ in computes",
    "threads": SLEEPING,
    "handles": OWN_SIGNAL,
    "registers": OWN_SIGNAL,
    "closes": OWN_SIGNAL,
    "blocks": "the program blocks signal 59, so its stack cannot be taken",
    "executes": "no Python, or it has not begun to run its program.*",
    "stops": "suspended",
}
READY = sum({"forks": 2, "spawns": 2}.get(case, 1) for case in CASES)  # processes that say so


@pytest.fixture(scope="module")
def workers() -> Iterator[dict[str, RunningWorker]]:
    """A worker for each case, all of them in it."""
    read, write = os.pipe()
    started = {}
    for rank, case in enumerate(CASES):
        file = bounded_file("ddplaunch-stacks", 1 << 20)
        env = {**os.environ, "DDPLAUNCH_STACKS": f"{STACKS_FD},{STACKS_SIGNAL}"}
        argv = [sys.executable, str(BOOTSTRAP), "script", str(PROGRAM), case]
        child = start(argv, env, Stdio(0, write, 2, file), handled=handled_signals())
        started[case] = RunningWorker(rank, child, time.monotonic(), by_itself=True, stacks=file)
    said = b""
    while said.count(b"\n") < READY:
        said += os.read(read, 4096)
    while not started["stops"].child.has_stopped:
        time.sleep(0.01)
    yield started
    for worker in started.values():
        worker.signal(signal.SIGKILL)
        os.waitid(os.P_PIDFD, worker.ended, os.WEXITED | os.WNOWAIT)
        worker.reap()
    os.close(read)
    os.close(write)


@pytest.fixture
def taken(workers: dict[str, RunningWorker]) -> list[Sample]:
    """What is found in all of them at once, when the child of one is no longer left alone as a new one."""

    def with_child() -> list[Sample] | None:
        found = _taken(workers)
        return found if any(each.child for each in found) else None

    found: list[Sample] = until(with_child, "the child")
    return found


class SilentWorkers:
    def stderr_tail(self, rank: int) -> str:
        return ""


def _taken(workers: dict[str, RunningWorker]) -> list[Sample]:
    loop = Loop()
    inspection = Inspection(loop, "here", {}, SilentWorkers())
    answers: list[list[Sample]] = []
    inspection.capture(
        workers.values(), LIMIT, lambda samples: answers.append(list(samples or ())), convert_samples=tuple
    )
    while not answers:
        loop.run_once()
    assert not loop.asked_pids
    loop.close()
    return answers[0]


def test_each_worker_is_found_where_it_is_and_none_is_harmed(workers, taken):
    own = {sample.rank: sample for sample in taken if not sample.child}
    for rank, (case, expected) in enumerate(CASES.items()):
        assert re.fullmatch(expected, where(own[rank], str(PROGRAM.parent))), case
    assert all(worker.look() is None for worker in workers.values())
    assert list(descendants(workers["spawns"].pid))


def test_a_forked_child_is_found_and_another_program_is_left_alone(workers, taken):
    ranks = {case: rank for rank, case in enumerate(CASES)}
    children = [sample for sample in taken if sample.child]
    assert [sample.rank for sample in children] == [ranks["forks"]]
    assert [frame.function for frame in children[0].main] == ["sleeps", "in_child", "forks", "<module>"]


def test_threads_are_told_apart_from_the_main_one(workers, taken):
    (sample,) = (one for one in taken if one.rank == list(CASES).index("threads"))
    assert len(sample.threads) == 2
    assert sample.main[-1].function == "<module>"


def test_no_worker_is_missing_when_the_time_is_up():
    (sample,) = capture_stacks([Target(0, os.getpid(), None)], until=time.monotonic() - 1)
    assert sample.state


def test_one_who_asks_waits_for_another_who_asks_already(workers):
    worker = workers["sleeps"]
    targets = [Target(worker.rank, worker.pid, worker.stacks)]
    with open(f"/proc/self/fd/{worker.stacks}", "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        (sample,) = capture_stacks(targets, until=time.monotonic() + 0.05)
        assert sample.state.startswith("it does not answer")
    (sample,) = capture_stacks(targets, until=time.monotonic() + LIMIT)
    assert re.fullmatch(SLEEPING, where(sample, str(PROGRAM.parent)))


def test_it_takes_little_of_the_start_of_a_worker():
    def cpu(env: dict[str, str], file: int | None) -> float:
        read, write = os.pipe()
        argv = [sys.executable, str(BOOTSTRAP), "script", os.devnull]
        child = start(argv, {**os.environ, **env}, Stdio(0, write, 2, file), handled=handled_signals())
        _, _, usage = os.wait4(child.pid, 0)
        for fd in (child.pidfd, child.failure, read, write):
            os.close(fd)
        return usage.ru_utime + usage.ru_stime

    file = bounded_file("ddplaunch-stacks", 1 << 20)
    asked = {"DDPLAUNCH_STACKS": f"{STACKS_FD},{STACKS_SIGNAL}"}
    both = list[tuple[float, float]]()

    def little() -> bool:
        """Whether the quickest starts say so: a busy machine makes single ones slower, not quicker."""
        both.extend((cpu(asked, file), cpu({}, None)) for _ in range(5))
        return bool(min(with_it for with_it, _ in both) - min(without for _, without in both) < 0.004)

    until(little, "a start that takes little more")
    os.close(file)


# --- workers that make it hard


@pytest.mark.parametrize("offset", [1 << 30, (1 << 63) - 1])
def test_a_worker_that_moves_the_offset_of_its_memory_file_hides_no_stack_but_its_own(workers, offset):
    moved, other = workers["sleeps"], workers["computes"]
    has_ended = threading.Event()

    def move() -> None:
        while not has_ended.wait(0.0001):
            os.lseek(moved.stacks, offset, os.SEEK_SET)

    mover = threading.Thread(target=move)
    mover.start()
    try:
        targets = [Target(worker.rank, worker.pid, worker.stacks) for worker in (moved, other)]
        found = capture_stacks(targets, until=time.monotonic() + 3)
    finally:
        has_ended.set()
        mover.join()
        os.lseek(moved.stacks, 0, os.SEEK_SET)
    assert re.fullmatch(CASES["computes"], where(found[1], str(PROGRAM.parent)))
    assert [sample.rank for sample in found] == [moved.rank, other.rank]


def test_what_fails_with_one_worker_keeps_no_other_from_being_asked(workers):
    other = workers["computes"]
    targets = [Target(0, os.getpid(), 1 << 20), Target(other.rank, other.pid, other.stacks)]
    failed, found = capture_stacks(targets, until=time.monotonic() + LIMIT)
    assert failed.state == "its stack cannot be read (FileNotFoundError)"
    assert re.fullmatch(CASES["computes"], where(found, str(PROGRAM.parent)))


def test_recorders_that_do_not_answer_or_cannot_be_read_tell_nothing_and_take_no_longer_than_they_may(tmp_path):
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{tmp_path}/0")
        listener.listen()
        os.mkdir(f"{tmp_path}/1")  # no socket, and no file beside it
        found = read_arrivals({0: f"{tmp_path}/0", 1: f"{tmp_path}/1"}, until=time.monotonic() + 0.2, every=1)
    assert found == []
