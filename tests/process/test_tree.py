"""The processes below this one: found however deep they are."""

from __future__ import annotations

import inspect
import os
import signal
import sys
from collections.abc import Iterator

import pytest

from ddplaunch.process.tree import descendants

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
