"""MASTER_PORT: taken, reserved, kept from strangers while the job runs, and free again afterwards."""

import os
import socket
import sys
from signal import SIGTERM
from subprocess import PIPE, Popen

import pytest

from tests.conftest import Job, until


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


def free_port() -> int:
    """A port that nobody has just now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
    return port


def listener(port: int) -> socket.socket:
    """Listen as a store does, and as what has inherited its socket still does."""
    server = socket.socket()
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    server.bind(("", port))
    server.listen()
    return server


def waiting_job(job: Job, program, *options: object) -> int:
    """Start two workers that wait, and give their MASTER_PORT."""
    job.behave(options=options)
    return job.ports()[-1]


def end(job: Job) -> None:
    """Stop a waiting job."""
    assert job.process is not None
    job.process.send_signal(SIGTERM)
    assert job.wait().status == 143
    job.nothing_left()


def test_a_port_that_is_taken_is_an_error_that_names_its_holder(job, program, listening):
    port = listening.getsockname()[1]
    result = job.run("--master-port", port, program("behave"), "all=done").expect(2)
    assert result.err.startswith(f"error: --master-port {port} is taken by pid {os.getpid()} (")
    assert "hint: leave --master-port out" in result.err
    assert not job.has_sign("ready-0")


def test_the_command_of_a_holder_stays_in_one_line(job, program):
    listen = "import socket, sys\nserver = socket.create_server(('', 0))\nprint(server.getsockname()[1], flush=True)\ninput()"
    holder = Popen([sys.executable, "-c", listen], stdin=PIPE, stdout=PIPE)
    with holder:
        port = int(holder.stdout.readline())
        result = job.run("--master-port", port, program("behave"), "all=done").expect(2)
        holder.stdin.close()
    first, blank, *_ = result.err.splitlines()
    assert first.startswith(f"error: --master-port {port} is taken by pid {holder.pid} (")
    assert (first.endswith("input())"), blank) == (True, "")


def test_without_a_control_channel_another_port_has_to_be_named(job, program, listening):
    port = listening.getsockname()[1]
    words = ["--no-control", "--nnodes", "2", "--node-rank", "0", "--master-addr", "127.0.0.1", "--master-port", port]
    result = job.run(*words, program("behave"), "all=done").expect(2)
    assert result.err.startswith(f"error: --master-port {port} is taken by pid {os.getpid()} (")
    assert "hint: `--master-port` with another one, the same on each node" in result.err


def test_a_port_that_is_taken_is_named_where_it_was_written(job, program, listening):
    port = listening.getsockname()[1]
    result = job.run("--rdzv-endpoint", f"localhost:{port}", program("behave"), "all=done").expect(2)
    assert result.err.startswith(f"error: port {port} (--rdzv-endpoint) is taken by pid {os.getpid()} (")
    assert "hint: name another one there, or" in result.err


def test_a_restart_begins_when_whoever_listens_at_its_port_has_gone(job, program):
    """A process that was killed closes its sockets when its last thread ends, in its own time."""
    port = free_port()
    flags = ("--nproc-per-node", 2, "--max-restarts", 1, "--master-port", port)
    job.start(*flags, program("restarts"), "fails_when_told")
    job.signs("place-0", 2)
    with listener(port):
        (job.home / "signs" / "fail-0").touch()
        until(lambda: job.events("generation_failed"), "the end of the first generation")
    job.signs("place-1", 2)
    (job.home / "signs" / "finish").touch()
    assert job.wait().status == 0


def test_a_restart_whose_port_stays_taken_ends_the_job_and_names_the_holder(job, program):
    port = free_port()
    flags = ("--nproc-per-node", 2, "--max-restarts", 1, "--master-port", port)
    job.start(*flags, program("restarts"), "fails_when_told")
    job.signs("place-0", 2)
    with listener(port):
        (job.home / "signs" / "fail-0").touch()
        result = job.wait()
    assert result.status == 2
    assert f"error: --master-port {port} is taken by pid {os.getpid()} (" in result.err


def test_what_a_worker_leaves_at_its_port_is_gone_before_the_restart_though_its_first_thread_is_dead(job, program):
    flags = ("--nproc-per-node", 2, "--max-restarts", 1, "--grace-period", "1s", "--master-port", free_port())
    assert job.run(*flags, program("restarts"), "leaves_a_listener").status == 0


def test_a_port_that_another_job_has_only_reserved_is_taken(job, another, program):
    port = waiting_job(job, program)
    result = another.run("--master-port", port, program("behave"), "all=done").expect(2)
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
    port = free_port()
    for _ in range(2):
        job.run("--nproc-per-node", 2, "--master-port", port, program("meets")).expect(0)
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
