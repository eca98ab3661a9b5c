"""What ssh or a host lacks is one error that names the host and the remedy, before any worker is started anywhere."""

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import PATIENCE, Result
from tests.hosts import over_ssh
from tests.hosts.over_ssh import HOSTS, LOGIN


@pytest.fixture(scope="module")
def three_hosts(make_bed):
    return make_bed(HOSTS)


@pytest.fixture
def ssh_config(bed) -> Iterator[Path]:
    """The user's own, on all hosts."""
    path = bed.home / ".ssh" / "config"
    yield path
    path.unlink(missing_ok=True)


@pytest.fixture
def refused(job, program) -> Callable[..., Result]:
    """Type a command that cannot be carried out; give how it ended."""

    def refused(*args, **options) -> Result:
        over_ssh.start(job, *(args or (program("behave"),)), **options)
        result: Result = job.wait(host=LOGIN)
        print(f"{result.seconds:.1f} s\n{result.err}")
        assert result.status == 121
        lines = result.err.splitlines(keepends=True)
        while re.match(r"ddplaunch: (waiting for node\d(, node\d)*: ssh |\d of \d nodes joined )", lines[0]):
            del lines[0]  # a host that is down, or all on a busy machine, may take longer than it takes to say so
        error = "".join(lines)
        assert error.startswith("error: ")
        assert (error.count("error: "), error.count("hint: "), result.out) == (1, 1, "")
        job.nothing_left(patience=PATIENCE)  # what was just being started on another host learns of the end by its ssh
        assert not list(job.home.glob("signs/*")), "a worker was started"
        return result

    return refused


@pytest.mark.parametrize(
    ("config", "message", "remedy"),
    [
        ("Port 1", "ssh connection refused", "is sshd running there?"),
        ("UserKnownHostsFile /dev/null", "its host key is not in known_hosts", "type `ssh node1` once"),
        ("UserKnownHostsFile {wrong}", "its host key is not the one in known_hosts", "`ssh-keygen -R node1`"),
        ("IdentityFile none", "ssh cannot log in without a password", "`ssh-copy-id node1` puts your key there"),
        ("HostName nowhere", "cannot resolve the host name", "`ssh node1` has to work without a password prompt"),
        ("HostName 192.0.2.1", "no route to host", "is it up?"),
    ],
    ids=["no-sshd", "unknown-key", "other-key", "no-key", "unknown-name", "no-way"],
)
def test_a_host_to_which_ssh_finds_no_way(job, ssh_config, refused, config, message, remedy):
    wrong = job.home / "known_hosts"
    wrong.write_text(f"node1 {(job.bed.home / '.ssh' / 'id_ed25519.pub').read_text()}")
    ssh_config.write_text(f"Host node1\n {config.format(wrong=wrong)}\n")
    result = refused()
    assert f"error: node1: {message}\n" in result.err
    assert remedy in result.err.partition("hint: ")[2]


def test_all_hosts_whose_names_are_wrong_are_counted(job, program):
    names = [f"nowhere{number}" for number in range(100)]
    over_ssh.start(job, program("behave"), nodes=",".join(("node0", *names, "node1")))
    result = job.wait(host=LOGIN)
    assert result.status == 121
    assert "and 92 more (100 of 102 hosts): cannot resolve the host name\n" in result.err
    job.nothing_left(patience=PATIENCE)


def test_a_host_that_is_down(job, refused):
    job.bed.power_cut("node1")
    job.bed.run(LOGIN, ["ip", "neigh", "flush", "all"])  # else ssh knows its card and waits for an answer
    result = refused()
    assert "error: node1: no route to host\n" in result.err
    assert "hint: is it up?" in result.err


# --- the interpreter


def test_an_interpreter_that_only_some_hosts_have(job, program, refused):
    wrapper = job.bed.path("node0", "/srv/python")
    wrapper.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    wrapper.chmod(0o755)
    result = refused("--remote-python", "/srv/python", program("behave"))
    assert "error: node1, node2: /srv/python does not exist there\n" in result.err
    assert "--remote-python PATH" in result.err
