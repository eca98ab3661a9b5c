"""A Slurm for tests, whole again and idle after each of them, and the reason why tests are skipped without."""

import functools
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hosts import conftest as hosts
from tests.hosts.bed import SBIN
from tests.slurm.cluster import Cluster
from tests.slurm.job import SlurmJob


@functools.cache
def missing() -> str | None:
    """Why there can be no Slurm here; None: there can."""
    if reason := hosts.missing():
        return reason
    for command in ("munged", "slurmctld", "slurmd", "sbatch", "gcc"):
        if shutil.which(command) is None and shutil.which(command, path=SBIN) is None:
            return f"a Slurm of our own needs {command}; `make test-deps` installs it"
    with tempfile.TemporaryDirectory() as folder:
        try:
            os.mknod(f"{folder}/gpu0", stat.S_IFCHR | 0o600, os.makedev(1, 3))
        except PermissionError:
            return "a Slurm of our own needs to make device nodes, which is forbidden here"
    return None


@pytest.fixture(scope="module", autouse=True)
def can_be_made() -> None:
    """Skip all that is here where there can be no Slurm."""
    if reason := missing():
        pytest.skip(reason)


@pytest.fixture(scope="module")
def one_cluster(can_be_made: None) -> Iterator[Cluster]:
    """The cluster of this file."""
    made = Cluster()
    yield made
    made.close()


@pytest.fixture
def cluster(one_cluster: Cluster) -> Iterator[Cluster]:
    """A cluster at peace, with idle nodes and nothing in the queue."""
    yield one_cluster
    one_cluster.heal()


@pytest.fixture
def job(cluster: Cluster, tmp_path: Path) -> Iterator[SlurmJob]:
    """A job in Slurm; that the test left something of it is an error."""
    job = SlurmJob(tmp_path, cluster=cluster)
    yield job
    job.nothing_left()
