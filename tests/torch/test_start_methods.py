"""A script finds the same process in both start methods, down to what torch's import has left in it."""

import json
import os
import signal
from importlib.util import find_spec

import pytest

from tests.conftest import PATIENCE

pytestmark = [
    pytest.mark.usefixtures("light_torch"),
    pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed"),
]


def test_a_worker_finds_what_a_fresh_process_does_and_has_random_numbers_of_its_own(job, program):
    workers = []
    given = ("--nproc-per-node", 2, "--run-id", "facts", "--threads", 1, "--cpu-bind", "cores")
    options = (*given, "--preload", "torch,numpy")
    for method in ("--start-method=spawn", "--start-method=forkserver", "--keep-warm=1"):
        result = job.run(*options, method, program("process_facts"), "facts").expect(0)
        assert "fresh process" not in result.err
        assert "imports again" not in result.err
        workers += [json.loads(text) for text in job.signs("facts", 2)]
    fresh, forked, from_warm = (worker["same"] for worker in workers[1::2])
    for name, found in fresh.items():
        assert forked[name] == found, name
        assert from_warm[name] == found, name
    assert forked["computing"][-1] == 1, "OpenMP and OpenBLAS have no more threads than they were given"
    assert len({number for worker in workers for number in worker["own"]}) == 4 * 6
    (kept,) = job.left()
    os.kill(kept, signal.SIGKILL)
    job.nothing_left(patience=PATIENCE)
