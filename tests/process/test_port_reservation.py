"""A reserved port: kept from everybody but the worker that meets the others there, generation after generation."""

import contextlib
import os
import resource
import socket

import pytest

from ddplaunch.system.errors import LaunchError
from ddplaunch.system.net.port import reserve
from tests.conftest import until

FIN_WAIT1, FIN_WAIT2, TIME_WAIT = 4, 5, 6  # linux/include/net/tcp_states.h


@pytest.fixture
def reserved():
    """Reservations that are let go after the test."""
    with contextlib.ExitStack() as stack:

        def make(port: int = 0):
            reservation = reserve(port)
            stack.callback(reservation.release)
            return reservation

        yield make


def store(port: int, family: int = socket.AF_INET) -> socket.socket:
    """Listen as a worker's TCPStore does: with SO_REUSEADDR."""
    server = socket.socket(family)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        server.bind(("", port))
        server.listen()
    except OSError:
        server.close()
        raise
    return server


def states(port: int) -> set[int]:
    """The states of all sockets with this local port."""
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        if os.path.exists(table):
            with open(table, encoding="ascii") as file:
                sockets = [line.split() for line in file]
            found |= {int(fields[3], 16) for fields in sockets if fields[1].endswith(f":{port:04X}")}
    return found


def test_two_reservations_at_once_are_two_ports(reserved):
    assert reserved().port != reserved().port


def test_a_reserved_port_is_not_reserved_again_until_it_is_released(reserved):
    first = reserved()
    with pytest.raises(LaunchError) as refused:
        reserve(first.port)
    assert refused.value.message.startswith(
        f"--master-port {first.port} is taken: a process holds it without listening"
    )
    first.release()
    assert reserved(first.port).port == first.port


def test_without_a_descriptor_left_it_is_said_why_none_can_be_reserved():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))  # it is the lowest: none below it is free
    try:
        with pytest.raises(LaunchError) as refused:
            reserve()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert (
        refused.value.message
        == f"a free port cannot be reserved: too many open files, and no more than {free} are allowed"
    )


no_ipv6 = pytest.mark.skipif(not os.path.exists("/proc/net/if_inet6"), reason="this kernel has no IPv6")


@pytest.mark.parametrize("family", [socket.AF_INET, pytest.param(socket.AF_INET6, marks=no_ipv6)], ids=["IPv4", "IPv6"])
def test_the_store_listens_on_a_reserved_port_and_is_reached(reserved, family):
    port = reserved().port
    with store(port, family) as server, socket.create_connection(("127.0.0.1", port)) as client:
        accepted, _ = server.accept()
        with accepted:
            accepted.send(b"hello")
            assert client.recv(5) == b"hello"


def test_no_second_store_gets_the_port_of_the_first(reserved):
    port = reserved().port
    with store(port), pytest.raises(OSError, match="Address already in use"):
        store(port)


def test_a_port_on_which_a_store_still_listens_is_taken(reserved):
    first = reserved()
    with store(first.port):
        first.release()
        with pytest.raises(LaunchError, match=f"--master-port {first.port} is taken by pid {os.getpid()} "):
            reserve(first.port)


def test_a_given_port_serves_each_generation_though_connections_of_the_last_one_linger(reserved):
    port = 0
    for _ in range(3):
        held = reserved(port)
        port = held.port
        with store(port) as server, socket.create_connection(("127.0.0.1", port)) as client:
            server.accept()[0].close()  # who closes first lingers
            assert client.recv(1) == b""
        # a busy kernel takes it later
        until(lambda port=port: TIME_WAIT in states(port), "the last word of the client")
        held.release()


def test_a_given_port_serves_the_next_generation_while_workers_of_the_last_one_are_still_connected(reserved):
    """They may be on another node, which ends them in its own time."""
    first = reserved()
    with store(first.port) as server:
        client = socket.create_connection(("127.0.0.1", first.port))
        accepted, _ = server.accept()
    with client:
        accepted.close()
        first.release()
        assert states(first.port) & {FIN_WAIT1, FIN_WAIT2}
        second = reserved(first.port)
        with store(second.port) as server, socket.create_connection(("127.0.0.1", second.port)):
            server.accept()[0].close()
