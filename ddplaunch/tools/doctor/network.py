"""The name and the addresses of this host, its loopback, its ports and its clock. Sends nothing to another host."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

from msgspec import Struct

from ddplaunch.plan.devices.sysfs import names, read
from ddplaunch.system.net import addresses
from ddplaunch.system.net.addresses import WITHOUT_INTERFACE
from ddplaunch.system.process.linux import clock_state
from ddplaunch.system.process.tree import content
from ddplaunch.system.words import count, duration, some, why_failed
from ddplaunch.tools.doctor import Check, Finding, Subject, Verdict, broken, note, slow

_SLOW_LOOKUP = 1.0  # seconds; every worker looks the name up, some libraries several times
_CROWDED_SHARE = 0.8  # of the ephemeral ports
_FEW_PORTS = 2000  # NCCL and gloo take some for each pair of workers on different nodes
_LARGE_ERROR = 1.0  # seconds of a clock
_TIMEOUT = 2.0  # seconds for a connection to ourselves


# --- the name


class Name(Struct, frozen=True, kw_only=True):
    """What the name of this host resolves to."""

    name: str
    resolved: tuple[str, ...] = ()  # addresses
    problem: str = ""  # why it does not resolve; "" if it does
    seconds: float = 0.0  # that the lookup took
    own_among_resolved: tuple[str, ...] = ()  # those of `resolved` that this host has; loopback counts
    reachable_at: tuple[str, ...] = ()  # addresses by which others may reach this host, the likeliest first


def read_name(_subject: Subject) -> Name:
    """Look up the name of this host, as gloo and others do."""
    name = socket.gethostname()
    began = time.monotonic()
    problem = ""
    resolved: tuple[str, ...] = ()
    try:
        resolved = tuple(dict.fromkeys(str(sockaddr[0]) for *_, sockaddr in socket.getaddrinfo(name, None)))
    except OSError as error:
        problem = why_failed(error)
    return Name(
        name=name,
        resolved=resolved,
        problem=problem,
        seconds=time.monotonic() - began,
        own_among_resolved=tuple(filter(addresses.is_own, resolved)),
        reachable_at=addresses.usable_addresses(),
    )


def judge_name(name: Name) -> Verdict:
    """Judge the name of this host. A job of one node needs no name, so nothing here breaks it."""
    facts = (
        f"{name.name} is {some(name.resolved) or 'not known'}; reachable at {some(name.reachable_at) or 'no address'}"
    )
    return Verdict(facts, tuple(_name_findings(name)))


def _name_findings(name: Name) -> Iterator[Finding]:
    """Yield that the name does not lead to this host as others would reach it, and that its lookup is slow."""
    address = next(iter(name.reachable_at), "")  # the likeliest one
    hint = f"for several nodes name the address of node 0: `ddplaunch --master-addr {address or 'ADDRESS'} ...`"
    in_hosts = f"in /etc/hosts write `{address or 'ADDRESS'} {name.name}`"
    if name.problem:
        yield note(
            f"the name of this host, {name.name}, does not resolve: {name.problem}",
            "programs that look their own name up wait or fail\nother nodes do not find this one by name",
            f"{in_hosts}; {hint}",
        )
    elif name.reachable_at and all(map(addresses.is_loopback, name.resolved)):
        yield note(
            f"the name of this host, {name.name}, resolves to loopback: {some(name.resolved)}",
            "as node 0 of several, this host would send the others to themselves\nddplaunch sets GLOO_SOCKET_IFNAME "
            "and NCCL_SOCKET_IFNAME for its workers",
            f"{hint}; or {in_hosts}",
        )
    elif not name.own_among_resolved:
        yield note(
            f"the name of this host, {name.name}, resolves to the address of another one: {some(name.resolved)}",
            f"its own are {some(name.reachable_at)}" if name.reachable_at else "it has no address but loopback",
            f"{in_hosts}; {hint}",
        )
    if name.seconds > _SLOW_LOOKUP:
        yield slow(
            f"to look up the name of this host takes {duration(name.seconds)}",
            f"getaddrinfo({name.name})",
            f"a name server does not answer (`cat /etc/resolv.conf`)\n{in_hosts}",
        )


# --- interfaces


_INTERFACES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME")


class Interfaces(Struct, frozen=True, kw_only=True):
    """The interfaces of this host, and the variables that choose among them."""

    states: dict[str, str]  # by name: "up", "down", "unknown"
    variables: dict[str, str] = {}
    loopback_problem: str = ""  # why a connection to 127.0.0.1 fails; "" if it works


def read_interfaces(subject: Subject) -> Interfaces:
    """List the interfaces, and connect to ourselves."""
    states = {
        name: read(subject.root, f"/sys/class/net/{name}/operstate") or ""
        for name in names(subject.root, "/sys/class/net")
    }
    chosen = {name: subject.env[name] for name in _INTERFACES if subject.env.get(name)}
    return Interfaces(states=states, variables=chosen, loopback_problem=_connect_to_ourselves())


def _connect_to_ourselves() -> str:
    """Return why workers of this host cannot connect to each other, "" if they can."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as caller:
            caller.settimeout(_TIMEOUT)
            caller.connect(listener.getsockname())
    except OSError as error:
        return why_failed(error)
    return ""


def judge_interfaces(interfaces: Interfaces) -> Verdict:
    """Judge loopback, and whether the variables name interfaces that are there."""
    up = [name for name, state in interfaces.states.items() if state != "down"]
    return Verdict(some(up, 12), tuple(_interface_findings(interfaces)))


def _interface_findings(interfaces: Interfaces) -> Iterator[Finding]:
    """Yield that loopback does not work, and which variables name no interface of this host."""
    if interfaces.loopback_problem:
        yield broken(
            f"processes of this host cannot reach each other at 127.0.0.1: {interfaces.loopback_problem}",
            "workers of one node meet there",
            "`ip link set lo up`, or let the firewall accept the interface lo",
        )
    for variable, value in interfaces.variables.items():
        if not _chooses_interface(variable, value, interfaces.states):
            yield broken(
                f"{variable}={value} fits no interface of this host",
                f"there are {some(interfaces.states, 12)}",
                WITHOUT_INTERFACE.format(variable=variable),
            )


def _chooses_interface(variable: str, value: str, states: dict[str, str]) -> bool:
    """Return whether a value of this variable leaves an interface of this host; `states` has one entry for each interface.

    NCCL takes the beginnings of names; `=` stands before whole names, `^` before those to leave out. The others take whole names.
    """
    takes_beginnings, leaves_out = variable == "NCCL_SOCKET_IFNAME", False
    if takes_beginnings and value.startswith("^"):
        leaves_out, value = True, value[1:]
    if takes_beginnings and value.startswith("="):
        takes_beginnings, value = False, value[1:]
    # behind a colon NCCL takes the number of a port
    wanted = [name.partition(":")[0].strip() for name in value.split(",") if name.strip()]
    if variable == "GLOO_SOCKET_IFNAME":  # each name makes a device, and one that fails ends the worker
        return all(name in states for name in wanted)
    matches = str.startswith if takes_beginnings else str.__eq__
    named = [name for name in states if any(matches(name, one) for one in wanted)]
    return len(named) < len(states) if leaves_out else bool(named)


# --- ports


class Ports(Struct, frozen=True, kw_only=True):
    """The ephemeral ports, which connections get that ask for no port, and how many are in use."""

    first: int
    last: int
    used: int  # local ports of the range with a connection, or a socket that listens
    waiting: int = 0  # of these, in TIME_WAIT


def read_ports(subject: Subject) -> Ports:
    """Read which ports the kernel may choose for connections, and count those that sockets of /proc/net/tcp have."""
    first, last = (
        int(word) for word in (read(subject.root, "/proc/sys/net/ipv4/ip_local_port_range") or "32768 60999").split()
    )
    used, waiting = set(), 0
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            lines = content(table).splitlines()[1:]
        except OSError:  # a kernel without IPv6
            continue
        for line in lines:
            fields = line.split(maxsplit=4)
            port = int(fields[1].rpartition(b":")[2], 16)  # local address and port: 0100007F:1F90
            if first <= port <= last:
                used.add(port)
                waiting += fields[3] == b"06"  # TCP_TIME_WAIT, include/net/tcp_states.h
    return Ports(first=first, last=last, used=len(used), waiting=waiting)


def judge_ports(ports: Ports) -> Verdict:
    """Judge how many ports are left."""
    facts = f"{ports.first} to {ports.last} for connections, {ports.used} of them in use"
    number = ports.last - ports.first + 1
    if ports.used < _CROWDED_SHARE * number:
        if number >= _FEW_PORTS:
            return Verdict(facts)
        title = f"there are {number} ports for connections only"
        evidence = f"net.ipv4.ip_local_port_range is {ports.first} {ports.last}\na job of many workers needs more"
        return Verdict(
            facts, (note(title, evidence, "`sysctl -w net.ipv4.ip_local_port_range='32768 60999'` as root"),)
        )
    finding = Finding(
        severity="broken" if ports.used >= number else "slow",
        title=f"{ports.used} of the {number} ports for connections are in use",
        evidence=f"{count(ports.waiting, 'port')} in TIME_WAIT\nwithout a free one workers cannot connect",
        hint="`ss -tan state all | awk '{print $4}' | sort | uniq -c | sort -n | tail` shows whose they are\n"
        "`sysctl -w net.ipv4.ip_local_port_range='32768 60999'` is the kernel's own range",
    )
    return Verdict(facts, (finding,))


# --- the clock


class Clock(Struct, frozen=True, kw_only=True):
    """The clock of this machine, as the kernel knows it: adjtimex(2)."""

    is_synchronised: bool
    error: float  # seconds, the largest that the kernel thinks possible


def read_clock(_subject: Subject) -> Clock | None:
    """Ask the kernel; None if it does not tell."""
    state = clock_state()
    if state is None:
        return None
    is_synchronised, error = state
    return Clock(is_synchronised=is_synchronised, error=error)


def judge_clock(clock: Clock | None) -> Verdict:
    """Judge the clock: a note at most, since a job on one machine compares it with no other. None: the kernel does not tell."""
    if clock is None:
        return Verdict("the kernel does not tell")
    if clock.is_synchronised and clock.error < _LARGE_ERROR:
        return Verdict(f"synchronised, within {duration(clock.error)}")
    if clock.is_synchronised:
        why = f"the clock may be off by {duration(clock.error)}"
    else:
        why = "nothing synchronises the clock of this machine"
    evidence = "adjtimex(2)\ntimes in the logs of several nodes do not compare, and certificates and tickets may fail"
    return Verdict(why, (note(why, evidence, "`timedatectl set-ntp true`, or let chronyd or ntpd run"),))


CHECKS = (
    Check(id="hostname", examine=lambda subject: judge_name(read_name(subject)), within=6.0),
    Check(id="interfaces", examine=lambda subject: judge_interfaces(read_interfaces(subject))),
    Check(id="clock", examine=lambda subject: judge_clock(read_clock(subject))),
    Check(id="ports", examine=lambda subject: judge_ports(read_ports(subject))),
)
