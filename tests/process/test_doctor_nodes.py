"""The doctor with several nodes on this machine: it waits for none that is gone, and leaves nothing."""

import json
import os
import signal
from typing import Any

import psutil
import pytest

from tests.conftest import PATIENCE, until
from tests.process.terminal import child

SIMULATED = ("doctor", "--json", "--only", "limits", "--simulate", "--nnodes")


def report_of(result: Any) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(result.out)
    return report


def programs(process: Any) -> list[psutil.Process]:
    """The programs that examine nodes, by node rank; the command has the doctor in a child."""
    started = psutil.Process(child(process.pid)).children()
    return [one for one in started if "ddplaunch.tools.doctor.nodes.host" in words(one)]


def words(process: psutil.Process) -> list[str]:
    """The command line of a process; none of one that has just ended."""
    try:
        return list(process.cmdline())
    except psutil.NoSuchProcess:
        return []


def test_simulated_nodes_find_each_other(job):
    report = report_of(job.run(*SIMULATED, 5).expect(0))
    facts = {one["id"]: (one["status"], one["facts"]) for one in report["checks"]}
    assert facts["nodes"] == ("passed", "5 of 5 nodes answered to the end")
    assert facts["network"][1].endswith("in 5 pairs")
    assert len(report["nodes"]) == 1  # they share the machine
    assert [one for one in report["findings"] if one["severity"] != "note"] == []


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP])
def test_a_node_that_dies_or_stops_is_named_and_the_others_go_on(job, signum):
    process = job.start(*SIMULATED, 3)
    until(lambda: len(programs(process)) == 3, "three nodes")
    os.kill(programs(process)[1].pid, signum)
    report = report_of(job.wait())
    (one,) = [one for one in report["findings"] if one["severity"] == "broken"]
    assert one["title"].startswith("node-1: ")
    assert one["hosts"] == ["node-1"]


def test_ctrl_c_ends_it_and_nothing_is_left(job):
    process = job.start(*SIMULATED, 3)
    until(lambda: len(programs(process)) == 3, "three nodes")
    process.send_signal(signal.SIGINT)
    assert job.wait().status in (130, -signal.SIGINT)
    job.nothing_left(PATIENCE)
