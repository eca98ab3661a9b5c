"""NCCL's RAS service, played by a real process of this user that listens as a rank does."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from ddplaunch.launcher.look.recorder import ask_ras
from ddplaunch.launcher.look.stacks import Target, capture_stacks
from ddplaunch.record.seen.collectives import describe
from ddplaunch.record.window.questions import NodeStacks

SERVER = """
import os, socket, sys
if "NCCL_RAS_ADDR" not in os.environ:
    family = socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET
    listener = socket.create_server((sys.argv[1], 0), family=family)
    listener.set_inheritable(True)
    where = f"localhost:{listener.getsockname()[1]}"
    again = [*sys.orig_argv[:-3], str(listener.fileno()), *sys.argv[2:]]
    os.execve(sys.executable, again, {**os.environ, "NCCL_RAS_ADDR": where})
listener = socket.socket(fileno=int(sys.argv[1]))
print(listener.getsockname()[1], flush=True)
while True:
    asked, _ = listener.accept()
    assert asked.recv(100) == b"verbose status\\n"
    if sys.argv[2] == "silent":
        asked.recv(1)
    asked.sendall((sys.argv[2] * int(sys.argv[3])).encode())
    asked.close()
"""


@pytest.fixture
def serve() -> Iterator[object]:
    started = []

    def start(answer: str, times: int = 1, host: str = "127.0.0.1") -> tuple[int, int]:
        process = subprocess.Popen(
            [sys.executable, "-c", SERVER, host, answer, str(times)], stdout=subprocess.PIPE, text=True
        )
        started.append(process)
        assert process.stdout is not None
        return process.pid, int(process.stdout.readline())

    yield start
    for process in started:
        process.kill()
        process.communicate()


def told(pids: dict[int, int], port: int | None = None, within: float = 20.0) -> dict[int, str]:
    found: dict[int, str] = {}
    for _ in ask_ras(pids, found, until=time.monotonic() + within, port=port):
        time.sleep(0.001)
    return found


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "::1", "::"])
def test_the_worker_that_listens_is_asked(serve, host):
    pid, port = serve("Job summary\nlaunch counts mismatch\n", host=host)
    assert told({0: os.getpid(), 3: pid}, port) == {3: "Job summary\nlaunch counts mismatch"}


def test_whoever_takes_stacks_gets_its_state_from_where_the_variable_of_nccl_says(serve):
    pid, _ = serve("Job summary\nlaunch counts mismatch\n")
    rank_0, rank_3 = Target(0, os.getpid(), None), Target(3, pid, None)
    _, sample = capture_stacks([rank_0, rank_3], until=time.monotonic() + 20, ras=True)
    assert NodeStacks.of([sample], threads=False).samples("here")[0].ras == "Job summary\nlaunch counts mismatch"
    assert describe([sample], "").locations[1:] == (
        "NCCL's RAS service, asked at rank 3:",
        "  Job summary",
        "  launch counts mismatch",
    )


def test_nccl_is_asked_where_that_is_wanted_and_on_one_node_of_the_job(serve):
    pid, _ = serve("Job summary")
    (elsewhere,) = capture_stacks([Target(3, pid, None)], until=time.monotonic() + 20, ras=True)
    (unasked,) = capture_stacks([Target(0, pid, None)], until=time.monotonic() + 20)
    assert (elsewhere.ras, unasked.ras) == ("", "")


def test_who_is_no_worker_is_not_asked(serve):
    _, port = serve("not ours")
    assert told({0: os.getpid()}, port) == {}


def test_where_nobody_listens_nothing_is_waited_for():
    assert told({0: os.getpid()}, 1) == {}


def test_one_that_never_answers_is_left_when_the_time_is_up(serve):
    pid, port = serve("silent")
    assert told({0: pid}, port, within=0.05) == {}


def test_an_endless_answer_is_cut(serve):
    pid, port = serve("x" * 1000, times=30)
    assert told({0: pid}, port) == {0: "x" * 20_000}
