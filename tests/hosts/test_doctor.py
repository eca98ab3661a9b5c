"""The doctor names what is wrong on hosts and between them, by name, and waits for none that does not answer."""

import json
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

from tests.hosts.over_ssh import HOSTS, LOGIN, NODES

Findings = list[dict[str, Any]]


@pytest.fixture(scope="module")
def three_hosts(make_bed):
    return make_bed(HOSTS, clocks=True)


@pytest.fixture
def examine(job) -> Callable[..., Findings]:
    """Type the command on a host that is none of the nodes; give its findings."""

    def examine(*args: object, nodes: str = ",".join(NODES), status: int | None = None, **popen: Any) -> Findings:
        hosts = ("--hosts", nodes)
        job.start("doctor", "--json", "--only", "limits", *hosts, *args, host=LOGIN, **popen)
        result = job.wait(host=LOGIN)
        report = json.loads(result.out)
        print(f"{result.seconds:.1f} s {result.err}", *report["checks"], *report["findings"], sep="\n")
        found: Findings = report["findings"]
        is_broken = any(one["severity"] == "broken" for one in found)
        assert result.status == (is_broken if status is None else status)
        assert all(one["title"] for one in found)
        return found

    return examine


def only(found: Findings, check: str) -> dict[str, Any]:
    """The only finding, which is of this check."""
    (one,) = found
    assert one["check"] == check
    return one


def test_on_healthy_hosts_nothing_is_found_and_all_are_good(examine, job):
    good = job.home / "good.txt"
    assert examine("--write-hosts", good) == []
    assert good.read_text().split() == list(NODES)
    job.nothing_left(patience=5)


def test_a_slow_link_is_that_of_its_host(examine, job, bed):
    bed.lag("node2", 20)
    one = only(examine("--write-hosts", job.home / "good.txt"), "network")
    assert (one["severity"], one["title"], one["hosts"]) == ("slow", "the network of node2 is slow", ["node2"])
    assert "40 ms for a round trip" in one["evidence"]
    assert (job.home / "good.txt").read_text().split() == ["node0", "node1"]


def test_lost_packets_are_counted(examine, bed):
    bed.lag("node1", 0, 5)
    one = only(examine(), "network")
    assert one["title"] == "the network of node1 is slow"
    assert "% of the packets were lost on the way" in one["evidence"]


def test_a_host_without_sshd_and_one_that_hangs_are_named_and_the_others_examined(examine, bed):
    (sshd,) = [process for process in bed.daemons("node1") if process.name == "sshd"]
    os.kill(sshd.pid, signal.SIGKILL)
    try:
        one = only(examine(), "nodes")
        assert one["title"] == "node1: ssh connection refused"
        assert "`ssh node1` has to work" in one["hint"]
    finally:
        bed.crash("node1")
        bed.boot("node1")
