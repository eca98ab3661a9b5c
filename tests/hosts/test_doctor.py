"""The doctor names what is wrong on hosts and between them, by name, and waits for none that does not answer."""

import json
import os
import re
import signal
import sys
import sysconfig
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import ddplaunch
from tests.conftest import until
from tests.hosts.over_ssh import HOSTS, LOGIN, NODES

Findings = list[dict[str, Any]]


@pytest.fixture(scope="module")
def three_hosts(make_bed):
    return make_bed(HOSTS, clocks=True)


@pytest.fixture
def examine(job) -> Callable[..., Findings]:
    """Type the command on a host that is none of the nodes; give its findings."""

    def examine(
        *args: object, only: str = "limits", meanwhile: Callable[[], None] | None = None, judges_speed: bool = False
    ) -> Findings:
        job.start("doctor", "--json", "--only", only, "--hosts", ",".join(NODES), *args, host=LOGIN)
        if meanwhile is not None:
            meanwhile()
        result = job.wait(host=LOGIN)
        report = json.loads(result.out)
        print(f"{result.seconds:.1f} s {result.err}", *report["checks"], *report["findings"], sep="\n")
        is_broken = any(one["severity"] == "broken" for one in report["findings"])
        assert result.status == is_broken
        # all hosts of a bed share the processors of this machine, so that a busy one slows any of them
        return [one for one in report["findings"] if one["severity"] != "slow" or judges_speed]

    return examine


def only(found: Findings, check: str) -> dict[str, Any]:
    """The only finding, which is of this check."""
    (one,) = found
    assert one["check"] == check
    return one


def test_on_healthy_hosts_nothing_is_found_and_all_are_good(examine, job):
    assert examine() == []
    job.nothing_left(patience=5)


def test_a_slow_link_is_that_of_its_host(examine, job, bed):
    bed.lag("node2", 20)
    found = examine("--write-hosts", job.home / "good.txt", judges_speed=True)
    one = next(one for one in found if one["hosts"] == ["node2"])
    assert (one["severity"], one["title"]) == ("slow", "the network of node2 is slow")
    # 40 ms and what a busy machine adds
    assert re.search(r"node0 to node2: .* [4-9]\d ms for a round trip, usual here are ", one["evidence"])
    assert "node2" not in (job.home / "good.txt").read_text().split()
    job.start("doctor", "--nodes", host=LOGIN)
    assert re.search(
        "^node2 +was slow in a check .* the network of node2 is slow$", job.wait(host=LOGIN).out, re.MULTILINE
    )


def test_lost_packets_are_counted(examine, bed):
    bed.lag("node1", 0, 5)
    one = next(one for one in examine(judges_speed=True) if one["hosts"] == ["node1"])
    assert one["title"] == "the network of node1 is slow"
    assert "% of the packets were lost on the way" in one["evidence"]


def test_a_firewall_is_told_from_a_cut_link(examine, bed):
    bed.lag("node1", 0, closed="1024-65535")
    one = only(examine(), "network")
    assert one["title"] == "no other node reaches node1, though it reaches others"
    assert "node0 to node1: no answer in 2.5 s" in one["evidence"]


def test_a_closed_port_of_the_job_is_named(examine, bed):
    bed.lag("node2", 0, closed="29511-29511")
    one = only(examine("--master-port", 29511), "network")
    assert one["title"] == "port 29511: it is closed on node2, though other ports are open"


def test_a_host_without_sshd_is_named_and_the_others_are_examined(examine, job, bed):
    (sshd,) = [process for process in bed.daemons("node1") if process.name == "sshd"]
    os.kill(sshd.pid, signal.SIGKILL)
    try:
        one = only(examine("--write-hosts", job.home / "good.txt"), "nodes")
    finally:
        bed.crash("node1")  # it boots with a new one
    assert one["title"] == "node1: ssh connection refused"
    assert "`ssh node1` has to work" in one["hint"]
    assert "node1" not in (job.home / "good.txt").read_text().split()


def test_a_host_that_stops_meanwhile_is_named_and_waited_for_only_so_long(examine, bed):
    def programs() -> list[int]:
        return [process.pid for process in bed.processes("node1") if "doctor.nodes.host" in process.command]

    def stop() -> None:
        until(programs, "the program on node1")
        for pid in programs():
            os.kill(pid, signal.SIGSTOP)

    one = only(examine(meanwhile=stop), "nodes")
    assert one["title"].startswith("node1: ")
    assert one["hosts"] == ["node1"]
    for pid in programs():
        with suppress(ProcessLookupError):  # one that was killed ends those below it
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("ahead", "severity", "title"),
    [(100, "note", "its clock is 1 min 40 s ahead of"), (-4000, "broken", "its clock is 1 h 7 min behind")],
)
def test_a_clock_that_is_wrong(examine, bed, ahead, severity, title):
    """The C library's clock of all programs on the host is moved by a shim."""
    bed.set_clock("node1", ahead)
    one = only(examine(), "clocks")
    assert (one["severity"], one["title"]) == (severity, f"node1: {title} the others")


def test_a_wrong_etc_hosts(examine, bed):
    path = bed.path("node2", "/etc/hosts")
    right = path.read_text()
    path.write_text(right.replace(bed.address("node0"), bed.address("node1")))
    try:
        one = only(examine(), "names")
    finally:
        path.write_text(right)
    assert one["title"] == (
        f"node2: node0, the name of node 0, leads to {bed.address('node1')} there, which is none of its addresses"
    )
    assert "correct node0 there in /etc/hosts" in one["hint"]


def test_a_host_without_torch_another_torch_and_another_ddplaunch(examine, job, bed):
    for host in NODES:
        env = bed.path(host, "/srv/env")
        (env / "bin").mkdir(parents=True)
        (env / "bin" / "python").symlink_to(sys.executable)
        (env / "pyvenv.cfg").write_text(f"version = {sys.version.split()[0]}\n")
    torch = Path(sysconfig.get_path("purelib")) / "torch"
    site = f"/srv/env/lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"
    bed.path("node0", site).mkdir(parents=True)
    bed.path("node0", f"{site}/torch").symlink_to(torch)
    bed.path("node2", f"{site}/torch").mkdir(parents=True)
    bed.path("node2", f"{site}/torch/version.py").write_text("__version__ = '1.2.3+cu99'\n")
    without, other = examine("--python", "/srv/env/bin/python")
    assert without["title"] == "node1: the workers' python has no torch"
    assert (other["severity"], other["check"]) == ("broken", "versions")
    assert "1.2.3+cu99 on node2" in other["evidence"]


def test_another_ddplaunch_on_a_host(examine, bed):
    for host in NODES:
        does = "printf '\\0ddplaunch-remote 1 9.9.9\\n'; cat" if host == "node1" else f'exec {sys.executable} "$@"'
        bed.path(host, "/srv/python").write_text(f"#!/bin/sh\n{does}\n")
        bed.path(host, "/srv/python").chmod(0o755)
    one = only(examine("--remote-python", "/srv/python"), "nodes")
    assert one["title"] == f"node1: ddplaunch there is 9.9.9, here it is {ddplaunch.__version__}"


def test_run_folders_that_are_not_shared_and_a_full_disk(examine, job, bed):
    script = job.home / "train.py"
    script.write_text("print()")
    found = examine("--log-dir", "/srv/runs", script)
    assert [(one["severity"], one["check"]) for one in found] == [("note", "files")]
    assert "the folder of runs is another one than on node0" in found[0]["title"]
    bed.run("node1", ["mkdir", "/srv/runs"])
    bed.run("node1", ["mount", "-t", "tmpfs", "-o", "size=64k", "none", "/srv/runs"])
    bed.run("node1", ["dd", "if=/dev/zero", "of=/srv/runs/full"])
    found = examine("--log-dir", "/srv/runs", script, only="runs", judges_speed=True)
    assert ["node1"] in [one["hosts"] for one in found if "no space left on device" in one["title"]]
    bed.run("node1", ["umount", "/srv/runs"])
