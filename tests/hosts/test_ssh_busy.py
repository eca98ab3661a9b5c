"""Where sshd has no room for all connections at a time, all hosts are reached all the same, and none is given up for that."""

import json

import pytest

from tests.conftest import until
from tests.hosts import over_ssh
from tests.hosts.cluster_files import SSHD_CONFIG
from tests.hosts.host import Services
from tests.hosts.over_ssh import LOGIN

JUMP = "jump"
NODES = tuple(f"node{number}" for number in range(6))
BUSY = SSHD_CONFIG.replace("MaxStartups 200", "MaxStartups 2")

REFUSED = "past MaxStartups"


@pytest.fixture(scope="module")
def three_hosts(make_bed):
    """Six behind another one, which lets two at a time log in."""
    return make_bed((*NODES, JUMP, LOGIN), services={JUMP: Services(files={"/etc/ssh/sshd_config": (BUSY, 0o644)})})


@pytest.fixture(autouse=True)
def ssh_config(bed):
    """The user's own, on all hosts."""
    path = bed.home / ".ssh" / "config"
    path.write_text(f"Host node*\n ProxyJump {JUMP}\n")
    yield
    path.unlink()


@pytest.mark.parametrize("nnodes", ["6", "2:6"])
def test_all_hosts_behind_a_busy_jump_host_join(job, program, nnodes):
    log = job.bed.path(JUMP, "/run/sshd.log")
    before = log.read_text().count(REFUSED)
    over_ssh.start(job, "--nnodes", nnodes, program("place"), nodes=",".join(NODES))
    result = job.wait(host=LOGIN).expect(0)
    assert "6 workers on 6 nodes" in result.err
    assert "going on without" not in result.err
    until(lambda: log.read_text().count(REFUSED) > before, "a connection that the jump host refused")


def test_the_doctor_examines_all_hosts_behind_a_busy_jump_host(job):
    job.start("doctor", "--json", "--only", "limits", "--hosts", ",".join(NODES), host=LOGIN)
    result = job.wait(host=LOGIN).expect(0)
    assert not [one for one in json.loads(result.out)["findings"] if one["check"] == "nodes"]
