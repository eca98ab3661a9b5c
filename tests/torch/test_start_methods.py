"""A script finds the same process in both start methods, down to what torch's import has left in it."""

from __future__ import annotations

import json
from importlib.util import find_spec

import pytest

pytestmark = pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed")


def test_a_worker_finds_what_a_fresh_process_does_and_has_random_numbers_of_its_own(job, program):
    workers = []
    for method in ("spawn", "forkserver"):
        options = (
            "--nproc-per-node",
            2,
            "--run-id",
            "facts",
            "--start-method",
            method,
            "--threads",
            1,
            "--cpu-bind",
            "cores",
        )
        result = job.run(*options, "--preload", "torch,numpy", program("process_facts"), method)
        assert result.status == 0, result.err
        workers += [json.loads(text) for text in job.signs(method, 2)]
    fresh, forked = workers[1]["same"], workers[3]["same"]
    for name, found in fresh.items():
        assert forked[name] == found, name
    assert forked["computing"][-1] == 1, "OpenMP and OpenBLAS have no more threads than they were given"
    assert len({number for worker in workers for number in worker["own"]}) == 4 * 4
    job.nothing_left()
