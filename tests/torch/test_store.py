"""A client of the store at MASTER_PORT is served, whoever makes it and whether or not there is a process group."""

import os
from importlib.util import find_spec

import pytest

pytestmark = [
    pytest.mark.usefixtures("light_torch"),
    pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed"),
]


@pytest.fixture(autouse=True)
def surroundings(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def test_rank_0_hosts_it_and_joins_by_it(job, program):
    result = job.run(program("torch_store"))
    assert (result.status, result.out.splitlines()) == (0, ["stored", "joined 1"]), result.err


def test_another_rank_is_served_while_rank_0_has_no_torch_and_all_join_by_the_same_store(job, program):
    os.mkfifo(job.home / "served")
    result = job.run("--nproc-per-node", "2", program("torch_store"), cwd=job.home).expect(0)
    assert sorted(result.out.splitlines()) == ["[0] joined 2", "[0] without torch", "[1] joined 2", "[1] stored"]
