"""What a look at the workers sees of what they do: by real processes."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from ddplaunch.system.process.tree import Footprint, footprint
from tests.conftest import until
from tests.process.terminal import stat

CHILD = """
import subprocess, sys
for line in sys.stdin:
    match line.split():
        case ["write", size]:
            with open("/dev/null", "w") as file:
                file.write("x" * int(size))
        case ["compute"]:
            pow(7, 10**6, 10**30_000 + 1)
        case ["start"]:
            child = subprocess.Popen(["sleep", "60"])
        case ["end"]:
            child.kill()
            child.wait()
    print("done", flush=True)
"""


class Child:
    """A process that does what it is told."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.do("nothing")

    def do(self, what: str) -> Footprint:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{what}\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "done\n"
        # only then what it has written counts
        until(lambda: stat(self.process.pid)[0] == "S", "it to wait for the next line")
        return footprint(self.process.pid)


@pytest.fixture
def child() -> Iterator[Child]:
    made = Child()
    yield made
    made.process.kill()
    made.process.communicate()


def test_what_a_process_and_all_below_it_have_done_is_seen(child):
    before = child.do("nothing")
    assert before.pids == {child.process.pid}
    assert not before.is_held
    again = footprint(child.process.pid)
    assert again == before

    written = child.do("write 1000000")
    assert 1_000_000 <= written.transferred - before.transferred < 1_100_000
    computed = child.do("compute")
    assert computed.cpu_seconds > written.cpu_seconds
    started = child.do("start")
    assert len(started.pids) == 2
    assert child.do("end").pids == before.pids


def test_a_process_that_is_stopped_is_held_and_one_that_is_gone_has_done_nothing(child):
    os.kill(child.process.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, child.process.pid, os.WSTOPPED)
    assert footprint(child.process.pid).is_held
    os.kill(child.process.pid, signal.SIGKILL)
    child.process.wait()
    assert footprint(child.process.pid) == Footprint(
        pids=frozenset({child.process.pid}), cpu_seconds=0, transferred=0, is_held=False
    )
