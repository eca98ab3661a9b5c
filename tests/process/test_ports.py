"""MASTER_PORT: taken, reserved, kept from strangers while the job runs, and free again afterwards."""

from __future__ import annotations

import os
import socket
from signal import SIGTERM

import pytest

from tests.conftest import Job


@pytest.fixture
def another(tmp_path):
    """A second invocation beside the first, with a home of its own."""
    (tmp_path / "another").mkdir()
    job = Job(tmp_path / "another")
    yield job
    job.kill_all()


@pytest.fixture
def listening():
    """A socket of this process that listens, as any server's would."""
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("", 0))
        server.listen()
        yield server


def bind(port: int, family: int = socket.AF_INET) -> None:
    """Bind a port as a program that knows nothing of reservations does."""
    with socket.socket(family) as stranger:
        stranger.bind(("", port))


def waiting_job(job: Job, program, *options: object) -> int:
    """Start two workers that wait, and give their MASTER_PORT."""
    job.start("--nproc-per-node", 2, *options, program("behave"))
    job.signs("ready", 2)
    return job.ports()[-1]


def end(job: Job) -> None:
    """Stop a waiting job."""
    assert job.process is not None
    job.process.send_signal(SIGTERM)
    assert job.wait().status == 143
    job.nothing_left()


def test_a_port_that_is_taken_is_an_error_that_names_its_holder(job, program, listening):
    port = listening.getsockname()[1]
    result = job.run("--master-port", port, program("behave"), "all=done")
    assert result.status == 2
    assert result.err.startswith(f"error: --master-port {port} is taken by pid {os.getpid()} (")
    assert "hint: leave --master-port out" in result.err
    assert not job.has_sign("ready-0")
    job.nothing_left()


def test_without_a_control_channel_another_port_has_to_be_named(job, program, listening):
    port = listening.getsockname()[1]
    words = ["--no-control", "--nnodes", "2", "--node-rank", "0", "--master-addr", "127.0.0.1", "--master-port", port]
    result = job.run(*words, program("behave"), "all=done")
    assert result.status == 2
    assert result.err.startswith(f"error: --master-port {port} is taken by pid {os.getpid()} (")
    assert "hint: `--master-port` with another one, the same on each node" in result.err
    job.nothing_left()


def test_a_port_that_is_taken_is_named_where_it_was_written(job, program, listening):
    port = listening.getsockname()[1]
    result = job.run("--rdzv-endpoint", f"localhost:{port}", program("behave"), "all=done")
    assert result.status == 2
    assert result.err.startswith(f"error: port {port} (--rdzv-endpoint) is taken by pid {os.getpid()} (")
    assert "hint: name another one there, or" in result.err
    job.nothing_left()


def test_a_taken_port_is_an_error_also_where_its_holder_cannot_be_looked_for(job, program, listening):
    port = listening.getsockname()[1]
    (job.home / "psutil.py").write_text("raise ImportError('not here', name='psutil')\n")
    result = job.run("--master-port", port, program("behave"), "all=done", env={"PYTHONPATH": str(job.home)})
    assert result.status == 2
    assert result.err.startswith(f"error: --master-port {port} is taken\n")
    job.nothing_left()


def test_a_port_that_another_job_has_only_reserved_is_taken(job, another, program):
    port = waiting_job(job, program)
    result = another.run("--master-port", port, program("behave"), "all=done")
    assert result.status == 2
    assert f"error: --master-port {port} is taken: a process holds it without listening" in result.err
    another.nothing_left()
    end(job)


def test_two_jobs_at_once_meet_at_different_ports(job, another, program):
    assert waiting_job(job, program) != waiting_job(another, program)
    end(job)
    end(another)


no_ipv6 = pytest.mark.skipif(not os.path.exists("/proc/net/if_inet6"), reason="this kernel has no IPv6")


@pytest.mark.parametrize("family", [socket.AF_INET, pytest.param(socket.AF_INET6, marks=no_ipv6)], ids=["IPv4", "IPv6"])
def test_no_stranger_gets_the_port_while_the_job_runs_and_anybody_afterwards(job, program, family):
    port = waiting_job(job, program)
    with pytest.raises(OSError, match="Address already in use"):
        bind(port, family)
    end(job)
    bind(port, family)


def test_a_given_port_can_be_used_again_at_once_though_its_connections_linger(job, program):
    """The workers' store leaves sockets in TIME_WAIT, which belong to nobody."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    for _ in range(2):
        result = job.run("--nproc-per-node", 2, "--master-port", port, program("meets"))
        assert result.status == 0, result.err
        assert lingering(port)
        job.nothing_left()


def lingering(port: int) -> list[list[str]]:
    """The sockets in TIME_WAIT that have this local port."""
    with open("/proc/net/tcp", encoding="ascii") as file:
        sockets = [line.split() for line in file]
    return [fields for fields in sockets if fields[1].endswith(f":{port:04X}") and fields[3] == "06"]


def test_each_generation_has_a_port_of_its_own_unless_it_was_given(job, program):
    options = ("--nproc-per-node", 2, "--max-restarts", 2)
    assert job.run(*options, program("behave"), "1=exit3").status == 3
    first, second, third = job.ports()
    assert len({first, second, third}) > 1  # the kernel may hand one out twice, though it hardly ever does
    assert job.run(*options, "--master-port", first, program("behave"), "1=exit3").status == 3
    assert [event["master_port"] for event in job.events("generation_started")] == [first] * 3
    job.nothing_left()
