"""Real mpirun, of Open MPI and of MPICH, starts ddplaunch on two hosts over ssh: once for each node, or once for each rank."""

import json
import shutil
from dataclasses import dataclass, field

import pytest

from tests.conftest import PATIENCE
from tests.hosts.job import HostsJob

# what ssh starts has no variables of ours; MPICH passes all on by itself
PASSED = ("XDG_STATE_HOME", "TMPDIR", "DDP_TEST_MARK", "DDP_TEST_DIR", "DDPLAUNCH_TOKEN")
LAUNCHERS = {
    "Open MPI": (
        ["mpirun.openmpi", "--allow-run-as-root", *(word for name in PASSED for word in ("-x", name))],
        ["-host", "node0:2,node1:2"],
        ["-npernode", "1"],
    ),
    "MPICH": (["mpirun.mpich"], ["-hosts", "node0:2,node1:2"], ["-ppn", "1", "-np", "2"]),
}
TOKEN = {"DDPLAUNCH_TOKEN": "of-this-test-alone"}


@dataclass
class MpiJob(HostsJob):
    """A job whose command is started by mpirun."""

    mpirun: list[str] = field(default_factory=list)

    def argv(self, *args: object) -> list[str]:
        """The real command, behind mpirun."""
        return [*self.mpirun, *super().argv(*args)]


@pytest.fixture(params=LAUNCHERS)
def by_mpirun(request, bed, tmp_path):
    """Make a job that mpirun starts on two hosts: for each node, or for each rank."""
    command, hosts, one_each = LAUNCHERS[request.param]
    if shutil.which(command[0]) is None:
        pytest.skip(f"{request.param} is not here; `make test-deps` installs it")

    def by_mpirun(each: str) -> MpiJob:
        number = one_each if each == "node" else ["-np", "4"]
        return MpiJob(tmp_path, bed=bed, mpirun=[*command, *hosts, *number])

    return by_mpirun


# all say where they are before rank 2 fails
SAYS = """
    echo $RANK of $WORLD_SIZE, $LOCAL_RANK on node $GROUP_RANK, at $MASTER_ADDR
    touch $DDP_TEST_DIR/$RANK
    until [ $(ls $DDP_TEST_DIR | wc -l) = 4 ]; do sleep 0.02; done
    [ $RANK = 2 ] && exit 7
    sleep 600
"""


@pytest.mark.parametrize(("each", "options"), [("node", ("--nproc-per-node", 2)), ("rank", ())], ids=["node", "rank"])
def test_ranks_are_those_of_mpirun_and_the_first_failure_gives_the_status(by_mpirun, each, options):
    job = by_mpirun(each)
    result = job.run("--master-addr", "node0", *options, "--no-python", "sh", "-c", SAYS, env=TOKEN)
    places = [f"[{rank}] {rank} of 4, {rank % 2} on node {rank // 2}, at node0" for rank in range(4)]
    assert (result.status, sorted(result.out.splitlines())) == (7, places), result.err
    assert "error: rank 2 on node1 failed: exit status 7" in result.err
    assert "token" not in result.err
    job.nothing_left(patience=PATIENCE)


def test_the_doctor_examines_each_host_once(by_mpirun):
    job = by_mpirun("rank")
    options = ("--json", "--only", "variables", "--master-addr", "node0", "--write-hosts", job.home / "good.txt")
    result = job.run("doctor", *options, env={**TOKEN, "LOCAL_WORLD_SIZE": "2"})
    report = json.loads(result.out)
    assert [one["host"] for one in report["nodes"]] == ["node0", "node1"]
    # mpirun passes the setting to all, and to ssh, or to the first host alone; its own variables are no finding
    [noted] = report["findings"]
    assert noted["evidence"].startswith("LOCAL_WORLD_SIZE=2\n")
    assert noted["hosts"][0] == "node0"  # and not "node-0", by which nobody knows that host
    good = (job.home / "good.txt").read_text().split()
    assert good == ["node0", job.bed.address("node1")]
    assert "2 of 2 nodes answered to the end" in [one["facts"] for one in report["checks"]]
    assert "in 1 pair" in report["checks"][-1]["facts"]
    job.nothing_left(patience=PATIENCE)
