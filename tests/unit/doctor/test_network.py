"""What is said of the name, the interfaces and the ports of a host, from made-up ones."""

from pathlib import Path

import pytest

from ddplaunch.tools.doctor import Subject
from ddplaunch.tools.doctor.network import (
    Clock,
    Interfaces,
    Name,
    Ports,
    judge_clock,
    judge_interfaces,
    judge_name,
    judge_ports,
    read_clock,
    read_interfaces,
    read_name,
    read_ports,
)
from tests.verdicts import found

HERE = Subject(env={}, python="python")


@pytest.mark.parametrize(
    ("name", "finding"),
    [
        (Name(name="a", resolved=("10.0.0.5",), own_among_resolved=("10.0.0.5",), reachable_at=("10.0.0.5",)), None),
        (
            Name(name="a", resolved=("127.0.1.1",), own_among_resolved=("127.0.1.1",)),
            None,
        ),  # no other host can reach this one anyway
        (
            Name(name="a", resolved=("127.0.1.1",), own_among_resolved=("127.0.1.1",), reachable_at=("10.0.0.5",)),
            ("note", "the name of this host, a, resolves to loopback: 127.0.1.1"),
        ),
        (
            Name(name="a", resolved=("10.9.9.9",), reachable_at=("10.0.0.5",)),
            ("note", "the name of this host, a, resolves to the address of another one: 10.9.9.9"),
        ),
        (
            Name(name="a", problem="name or service not known"),
            ("note", "the name of this host, a, does not resolve: name or service not known"),
        ),
        (
            Name(name="a", resolved=("::1",), own_among_resolved=("::1",), seconds=5.0),
            ("slow", "to look up the name of this host takes 5 s"),
        ),
    ],
)
def test_a_name_breaks_no_job_of_one_node(name, finding):
    assert found(judge_name(name)) == ([finding] if finding else [])


@pytest.mark.parametrize(
    ("variable", "value", "fits"),
    [
        ("NCCL_SOCKET_IFNAME", "eth", True),
        ("NCCL_SOCKET_IFNAME", "=eth", False),
        ("NCCL_SOCKET_IFNAME", "=eth0", True),
        ("NCCL_SOCKET_IFNAME", "^lo,docker", True),
        ("NCCL_SOCKET_IFNAME", "^lo,eth", False),
        ("NCCL_SOCKET_IFNAME", "ib0,eth0", True),
        ("GLOO_SOCKET_IFNAME", "eth0", True),
        ("GLOO_SOCKET_IFNAME", "eth", False),
        ("GLOO_SOCKET_IFNAME", "eth0,ib0", False),
    ],
)
def test_a_variable_that_leaves_no_interface_breaks_a_job(variable, value, fits):
    interfaces = Interfaces(states={"lo": "unknown", "eth0": "up"}, variables={variable: value})
    expected = [] if fits else [("broken", f"{variable}={value} fits no interface of this host")]
    assert found(judge_interfaces(interfaces)) == expected


def test_a_loopback_that_does_not_work_breaks_a_job():
    ((severity, title),) = found(
        judge_interfaces(Interfaces(states={"lo": "down"}, loopback_problem="network is unreachable"))
    )
    assert (severity, title) == (
        "broken",
        "processes of this host cannot reach each other at 127.0.0.1: network is unreachable",
    )


@pytest.mark.parametrize(
    ("ports", "finding"),
    [
        (Ports(first=32768, last=60999, used=100), None),
        (
            Ports(first=32768, last=60999, used=25000, waiting=24000),
            ("slow", "25000 of the 28232 ports for connections are in use"),
        ),
        (Ports(first=32768, last=32867, used=100), ("broken", "100 of the 100 ports for connections are in use")),
        (Ports(first=1024, last=65535, used=1), None),
        (Ports(first=32768, last=33767, used=1), ("note", "there are 1000 ports for connections only")),
    ],
)
def test_ports_are_judged_by_how_many_are_left(ports, finding):
    assert found(judge_ports(ports)) == ([finding] if finding else [])


def test_the_ports_of_proc_are_counted(tmp_path: Path):
    folder = tmp_path / "proc/sys/net/ipv4"
    folder.mkdir(parents=True)
    (folder / "ip_local_port_range").write_text("1024\t65535\n")
    subject = Subject(env={}, python="python", root=str(tmp_path))
    ports = read_ports(subject)
    assert (ports.first, ports.last) == (1024, 65535)


def test_this_machine_can_be_read():
    assert read_name(HERE).name
    assert "lo" in read_interfaces(HERE).states
    assert read_interfaces(HERE).loopback_problem == ""


@pytest.mark.parametrize(
    ("clock", "title"),
    [
        (None, ""),
        (Clock(is_synchronised=True, error=0.02), ""),
        (Clock(is_synchronised=False, error=16.0), "nothing synchronises the clock of this machine"),
        (Clock(is_synchronised=True, error=5.0), "the clock may be off by 5 s"),
    ],
)
def test_a_clock_that_nothing_sets_is_noted(clock, title):
    assert found(judge_clock(clock)) == ([("note", title)] if title else [])
    assert read_clock(HERE) is None or judge_clock(read_clock(HERE)).facts
