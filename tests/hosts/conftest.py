"""Hosts for tests, whole again after each of them, and the reason why tests are skipped without."""

import functools
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.hosts.bed import SBIN, Bed, has_ipv6
from tests.hosts.faults import Faults
from tests.hosts.job import HostsJob

SWITCH = Path(__file__).parent / "switch.c"


@functools.cache
def missing() -> str | None:
    """Why there can be no hosts here; None: there can."""
    if os.geteuid() != 0:
        return "hosts of our own need root"
    for command in ("unshare", "nsenter", "ip", "ssh", "ssh-keygen", "sshd"):
        if shutil.which(command, path=SBIN if command == "sshd" else None) is None:
            return f"hosts of our own need {command}; `make test-deps` installs it"
    namespaces = ["unshare", "--net", "--uts", "--ipc", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    try_out = "ip link add br0 type bridge && ip link add v0 type veth && mount -t sysfs sysfs /sys && mount -t tmpfs srv /srv"
    done = subprocess.run([*namespaces, "sh", "-c", try_out], capture_output=True, text=True, check=False)
    return f"hosts of our own cannot be made here: {done.stderr.strip()}" if done.returncode else None


@pytest.fixture(scope="module", autouse=True)
def can_be_made() -> None:
    """Skip all that is here where there can be no hosts."""
    if reason := missing():
        pytest.skip(reason)


@pytest.fixture(scope="module")
def make_bed() -> Iterator[Callable[..., Bed]]:
    """Make a bed for the tests of this file; for what it takes see Bed."""
    made: list[Bed] = []

    def make_bed(*args: Any, **options: Any) -> Bed:
        if options.get("clocks") and shutil.which("gcc") is None:
            pytest.skip("clocks that can be set need gcc; `make test-deps` installs it")
        if options.get("names", "4") != "4" and not has_ipv6():
            pytest.skip("this kernel has no IPv6")
        made.append(Bed(*args, **options))
        return made[-1]

    yield make_bed
    for bed in made:
        bed.close()


@pytest.fixture(scope="module")
def three_hosts(make_bed: Callable[..., Bed]) -> Bed:
    """The bed of this file; a file that wants another one has a fixture of this name."""
    return make_bed()


@pytest.fixture
def bed(three_hosts: Bed) -> Iterator[Bed]:
    """Three hosts, all on, at peace and with nothing running."""
    yield three_hosts
    left = {host: three_hosts.processes(host) for host in three_hosts.alive}
    three_hosts.heal()
    assert not any(left.values()), f"the test left {left}"


@pytest.fixture(scope="session")
def switch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compile the switch whose links have faults."""
    if shutil.which("gcc") is None:
        pytest.skip("a switch with faults needs gcc; `make test-deps` installs it")
    program = tmp_path_factory.mktemp("switch") / "switch"
    subprocess.run(["gcc", "-O2", "-Wall", "-Wextra", "-Werror", "-o", program, SWITCH], check=True)
    return program


@pytest.fixture
def faults(bed: Bed, switch: Path) -> Iterator[Faults]:
    """The faults of the links between the hosts, which are all well at first and at the end."""
    faults = Faults(bed, switch)
    yield faults
    faults.close()


@pytest.fixture
def job(bed: Bed, tmp_path: Path) -> Iterator[HostsJob]:
    """A job on the hosts; whatever the test leaves of it is an error, and is ended by `bed`."""
    job = HostsJob(tmp_path, bed=bed)
    yield job
    job.nothing_left()
