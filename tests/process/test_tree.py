"""The processes below this one: found however deep they are, and whichever of them end meanwhile."""

import inspect
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddplaunch.system.process.tree import descendants, look
from tests.conftest import until

DEPTH = 60


@pytest.fixture
def chain() -> Iterator[int]:
    """The first of DEPTH processes, each the child of the one before; all are one process group."""
    ready, done = os.pipe()
    first = os.fork()
    if first == 0:
        os.setpgid(0, 0)
        for _ in range(DEPTH - 1):
            if os.fork():
                signal.pause()
                os._exit(1)
        os.write(done, b"x")
        signal.pause()
        os._exit(1)
    assert os.read(ready, 1) == b"x"
    os.close(ready)
    os.close(done)
    yield first
    os.killpg(first, signal.SIGKILL)
    os.waitpid(first, 0)


def test_a_chain_of_processes_that_is_deeper_than_pythons_stack_is_found(chain):
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack(0)) + DEPTH // 2)
    try:
        found = [process.parent for process in descendants(os.getpid())]
    finally:
        sys.setrecursionlimit(before)
    assert len(found) >= DEPTH
    assert chain in found


FIRST_THREAD_ENDS = """
import ctypes, os, sys, threading
threading.Thread(target=sys.stdin.read).start()
os.write(1, b"x")
ctypes.CDLL(None).pthread_exit(None)
"""


@pytest.fixture
def headless() -> Iterator[subprocess.Popen[bytes]]:
    """A process whose first thread has ended, while another waits until its standard input is closed."""
    process = subprocess.Popen([sys.executable, "-c", FIRST_THREAD_ENDS], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdin is not None
    assert process.stdout.read(1) == b"x"
    until(lambda: b") Z" in Path(f"/proc/{process.pid}/stat").read_bytes(), "the end of the first thread")
    yield process
    process.stdin.close()
    process.stdout.close()
    process.wait()


def test_a_process_lives_as_long_as_any_of_its_threads(headless):
    assert headless.pid in [process.pid for process in descendants(os.getpid())]
    headless.stdin.close()
    os.waitid(os.P_PID, headless.pid, os.WEXITED | os.WNOWAIT)
    assert headless.pid not in [process.pid for process in descendants(os.getpid())]
    ended = look(headless.pid)
    assert ended is not None
    assert ended.state == "Z"


PARENT_ENDS = """
import os, signal
from ddplaunch.system.process.linux import become_subreaper
from ddplaunch.system.process.tree import descendants
become_subreaper()
ready, done = os.pipe()
parent = os.fork()
if parent == 0:
    if os.fork() == 0:
        os.write(done, str(os.getpid()).encode())
    signal.pause()
child = int(os.read(ready, 20))
found = descendants(os.getpid())
first = next(found).pid
os.kill(parent, signal.SIGKILL)
os.waitid(os.P_PID, parent, os.WEXITED | os.WNOWAIT)
others = [process.pid for process in found]
os.kill(child, signal.SIGKILL)
os.waitpid(child, 0)
assert (first, others) == (parent, [child])
"""


def test_a_process_whose_parent_ends_while_it_is_looked_for_is_found():
    subprocess.run([sys.executable, "-c", PARENT_ENDS], check=True)
