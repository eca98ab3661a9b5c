"""Real hosts on one machine: each with its own address, name, processes, clocks and disk, and an sshd, on a switch of their own.

A host is a set of Linux namespaces (host.py); a switch, in another network namespace, holds the bridge into which all are
plugged, so nothing is added to the network of the machine itself, and beds do not meet. Files are shared as on a cluster with
a network file system, but for /run, /dev/shm, /etc, /sys, the sockets of runs in /tmp, and /srv, which is the host's local disk.
All ends with the process that made the bed, killed or not. It needs root.

What a fault looks like to the others: cut and power_cut are silence; crash is a kernel that closes every connection. Faults of
one way between two hosts are those of another switch, in faults.py.
"""

import functools
import os
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from tests.conftest import PATIENCE, until
from tests.hosts import cluster_files, proc
from tests.hosts.addresses import Addresses, Family
from tests.hosts.host import Command, Host, Services, time_namespaces

SLOW_LINK = Path(__file__).parent / "slow_link.py"
CLOCK = Path(__file__).parent / "clock.c"
SSHD_PID = "/run/sshd.pid"
SSH_PORT = 22
SBIN = "/usr/local/sbin:/usr/sbin:/sbin"  # not on every PATH
UPTIME = 1_000_003  # seconds between the monotonic clocks of two neighbours


class Bed:
    """Some hosts and a switch between them.

    networks: 2 gives each host a second card, eth1, in a second network, where it is called HOST-b.
    names: what host names stand for: IPv4 or IPv6 addresses, or both. Cards have both; with "6" there is no IPv4 but on lo.
    own_name_on_loopback: on each host its own name stands for 127.0.1.1, as on Debian.
    clocks: `set_clock` works; every program on the hosts then runs with a shim of the C library's clock.
    services: what hosts are given and run at each boot besides their sshd.
    """

    def __init__(
        self,
        hosts: Sequence[str] = ("node0", "node1", "node2"),
        *,
        networks: int = 1,
        names: Literal["4", "6", "both"] = "4",
        own_name_on_loopback: bool = False,
        clocks: bool = False,
        services: Mapping[str, Services] | None = None,
    ) -> None:
        self.hosts = tuple(hosts)
        self._services = {name: (services or {}).get(name, Services()) for name in hosts}
        self.has_uptimes = time_namespaces()  # the monotonic clock of each host is some days ahead of its neighbour's
        resolved: Sequence[Family] = ("4", "6") if names == "both" else (names,)
        # of the cards
        self.families: Sequence[Family] = ("6",) if names == "6" else ("4", "6") if has_ipv6() else ("4",)
        self._plan = Addresses(hosts, networks, self.families, resolved, own_name_on_loopback)
        self._folder = Path(tempfile.mkdtemp(prefix=f"ddplaunch-bed-{os.getpid()}-"))
        self.home = self._folder / "root"  # root's, on all hosts
        self._switch = Host("switch", self._folder / "switch.log", ends_with_it=self._folder)
        self._hosts = {
            name: Host(name, self._folder / f"{name}.log", (number + 1) * UPTIME if self.has_uptimes else 0)
            for number, name in enumerate(hosts)
        }
        self._slow: dict[tuple[str, int], Command] = {}
        self._carrier: Command | None = None  # of all frames of the first network, in place of its bridge
        self._cut: set[str] = set()
        self._parted: tuple[str, ...] = ()
        self._clocks = dict.fromkeys(hosts, 0.0)  # seconds that a wall clock is ahead of what it should show
        self._passed = 0.0  # seconds that all should be ahead of ours
        self._clock = self._folder / "clock.so" if clocks else None
        try:
            self._set_up(hosts)
        except BaseException:
            self.close()
            raise

    def _set_up(self, names: Sequence[str]) -> None:
        self._switch.power_on()
        for name in names:
            self._hosts[name].power_on()
        self._host_key = cluster_files.make_home(self.home, {name: self._plan.known_as(name) for name in self.hosts})
        if self._clock is not None:
            subprocess.run(["gcc", "-shared", "-fPIC", "-O2", "-Wall", "-Werror", "-o", self._clock, CLOCK], check=True)
        self._switch.wait_here()
        # it forwards although it knows no way out: so it can say at once that there is none
        forward = {f"/proc/sys/net/ipv{family}/{where}": ("1", 0o644) for family, where in _FORWARD.items()}
        self._switch.set_up(
            {path: one for path, one in forward.items() if os.path.exists(path)}, self._plan.bridges(), []
        )
        self._switch.wait_up()
        self._start(names)

    def _start(self, names: Sequence[str]) -> None:
        """Plug in and set up hosts that have been powered on."""
        for name in names:
            self._hosts[name].wait_here()
        self._ip(
            "".join(self._plan.plug(n, network, self._hosts[n].pid) for n in names for network in self._plan.networks)
        )
        for name in names:
            files = cluster_files.files(name, self._plan, self.home, self._host_key)
            if self._clock is not None:
                files["/run/clock"] = (_nanoseconds(self._passed + self._clocks[name]).decode("latin-1"), 0o644)
                files["/etc/ld.so.preload"] = (f"{self._clock}\n", 0o644)
            services = self._services[name]
            sshd = ([str(shutil.which("sshd", path=SBIN)), "-E", "/run/sshd.log"], SSHD_PID)
            self._hosts[name].set_up({**files, **services.files}, self._plan.cards(name), [sshd, *services.daemons])
        for name in names:
            self._hosts[name].wait_up()

    def close(self) -> None:
        """Remove all of it."""
        for host in (*self._hosts.values(), self._switch):
            host.kill()
        for carrier in (*self._slow.values(), *filter(None, [self._carrier])):
            for pipe in filter(None, (carrier.stdin, carrier.stdout)):
                pipe.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    # --- who is who

    def number(self, host: str) -> int:
        """The place of a host in the list, from 0."""
        return self._plan.number(host)

    def address(self, host: str, network: int = 0, family: Family | None = None) -> str:
        """The address of a host; of the first family that names stand for, unless told otherwise."""
        return self._plan.address(host, network, family)

    def name(self, host: str, network: int = 0) -> str:
        """The name of a host in a network."""
        return self._plan.name(host, network)

    @property
    def alive(self) -> list[str]:
        """The hosts that are on."""
        return [name for name in self.hosts if self._hosts[name].is_on]

    # --- what runs

    def start(
        self,
        host: str,
        argv: Sequence[object],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        **popen: Any,
    ) -> Command:
        """Start a program on a host as Popen does, in root's home there, with no input and this process's environment."""
        env = {**os.environ, "HOME": str(self.home)} if env is None else env
        return self._hosts[host].start(argv, env, cwd or self.home, **popen)

    def run(
        self, host: str, argv: Sequence[object], timeout: float = PATIENCE, **popen: Any
    ) -> subprocess.CompletedProcess[str]:
        """Run a program on a host to its end, which has to come within `timeout` seconds."""
        command = self.start(host, argv, **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **popen})
        with command:
            out, err = command.communicate(timeout=timeout)
        return subprocess.CompletedProcess(list(map(str, argv)), command.returncode, _text(out), _text(err))

    def processes(self, host: str) -> list[proc.Process]:
        """What runs on a host, apart from its process 1 and its daemons: what runs in sessions of its sshd is shown."""
        daemons = self.daemons(host)
        return [process for process in proc.processes(self._hosts[host].pid) if process not in daemons]

    def daemons(self, host: str) -> list[proc.Process]:
        """The daemons of a host; with the sshd, its sessions."""
        names = ("sshd", *self._services[host].names)
        return [process for process in proc.processes(self._hosts[host].pid) if process.name.startswith(names)]

    def listeners(self, host: str) -> list[proc.Listener]:
        """Who can be spoken to on a host, apart from its sshd."""
        return [listener for listener in proc.listeners(self._hosts[host].pid) if listener.port != SSH_PORT]

    def path(self, host: str, path: str) -> Path:
        """Where a file of a host, say below its /srv, is found from outside."""
        return self._hosts[host].path(path)

    # --- faults

    def cut(self, host: str) -> None:
        """Pull the network cables of a host out of the switch; it runs on."""
        self._cut.add(host)
        self._ports(host, "down")

    def join(self, host: str) -> None:
        """Plug them in again."""
        self._cut.discard(host)
        self._ports(host, "up")

    def part(self, *hosts: str) -> None:
        """Plug these hosts into a switch of their own: they reach each other, and no other host."""
        self._parted = hosts
        ports = "".join(f"link set {self._plan.port(host, 0)} master apart\n" for host in hosts)
        self._ip(f"link add apart type bridge\nlink set apart up\n{ports}")

    def power_cut(self, host: str) -> None:
        """End a host without a sound."""
        self.cut(host)
        self.crash(host)

    def crash(self, host: str) -> None:
        """Kill everything on a host while its kernel can still close the connections."""
        self._hosts[host].kill()

    def boot(self, host: str) -> None:
        """Start a host that is off: same name, same addresses, empty disk, a link without lag."""
        for network in self._plan.networks:
            self.unlag(host, network)
        # its old network namespace goes some time after its end; the ports of the switch must be free now
        self._ip("".join(f"link del {self._plan.port(host, network)}\n" for network in self._plan.networks), "-force")
        self._hosts[host].power_on()
        self._start([host])

    def lag(
        self, host: str, milliseconds: float, loss_percent: float = 0.0, *, network: int = 0, closed: str = "0-0"
    ) -> None:
        """Delay all packets of a host by this much each way, and lose some, each way too.

        `closed`: no TCP connection from elsewhere begins at these ports of the host, FIRST-LAST, as with a firewall.
        """
        self.unlag(host, network)
        port, near, far = self._plan.port(host, network), *_slow_ends(self.number(host), network)
        self._ip(
            f"link add {near} type veth peer name {far}\n"
            f"link set {far} master br{network} up\nlink set {near} up\nlink set {port} nomaster\n"
        )
        argv = [sys.executable, "-I", "-S", SLOW_LINK, port, near, milliseconds, loss_percent, closed]
        carrier = self._switch.start(argv, os.environ, Path("/"), stdout=subprocess.PIPE)
        self._slow[host, network] = carrier
        assert carrier.stdout is not None
        assert carrier.stdout.readline() == b"ready\n"

    def unlag(self, host: str, network: int = 0) -> None:
        """Make the link of a host as quick as it was."""
        if (carrier := self._slow.pop((host, network), None)) is not None:
            with carrier:
                carrier.kill()
            port, near = self._plan.port(host, network), _slow_ends(self.number(host), network)[0]
            self._ip(f"link del {near}\n")
            if self._hosts[host].is_on:
                self._ip(f"link set {port} master br{network}\n")

    def carry(self, switch: Path) -> Command:
        """Plug all hosts into a program on the switch, in place of the bridge, until they are mended: see faults.py.

        It is told their ports, in the order of the hosts, and has pipes for stdin and stdout.
        """
        ports = [self._plan.port(host, 0) for host in self.hosts]
        self._ip("".join(f"link set {port} nomaster\n" for port in ports))
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._carrier = self._switch.start([switch, *ports], os.environ, Path("/"), **pipes)
        return self._carrier

    def _uncarry(self) -> None:
        """Plug all hosts into the bridge again."""
        if self._carrier is not None:
            with self._carrier:
                self._carrier.kill()
            self._carrier = None
            self._ip("".join(f"link set {self._plan.port(host, 0)} master br0\n" for host in self.hosts))

    def left_of_carriers(self) -> list[str]:
        """What programs that carry frames have left on the switch: processes, their sockets, hosts that are not plugged in."""
        sockets = Path(f"/proc/{self._switch.pid}/net/packet").read_text().splitlines()[1:]
        plugged = self._ip("link show master br0\n")
        ports = (self._plan.port(host, 0) for host in self.hosts)
        return [
            *map(str, proc.processes(self._switch.pid)),
            *(f"packet socket {line}" for line in sockets),
            *(f"port {port} outside the bridge" for port in ports if f" {port}@" not in plugged),
        ]

    def set_clock(self, host: str, ahead: float) -> None:
        """Set the wall clock of a host, also under the programs that run there, `ahead` seconds before the right time."""
        assert self._clock is not None, "a bed whose clocks can be set is made with clocks=True"
        self._clocks[host] = ahead
        if self._hosts[host].is_on:
            with self.path(host, "/run/clock").open("r+b") as file:
                file.write(_nanoseconds(self._passed + ahead))

    def pass_time(self, seconds: float) -> None:
        """Set the wall clocks of all hosts ahead, for good: what waits for a time of day need not wait so long."""
        self._passed += seconds
        for host, ahead in self._clocks.items():
            self.set_clock(host, ahead)

    def mend(self) -> None:
        """Undo all faults; what runs on the hosts runs on."""
        self._uncarry()
        if self._parted:
            ports = "".join(f"link set {self._plan.port(host, 0)} master br0\n" for host in self._parted)
            self._ip(f"{ports}link del apart\n")
            self._parted = ()
        for host in self.hosts:
            for network in self._plan.networks:
                self.unlag(host, network)
            if self._clock is not None:
                self.set_clock(host, 0.0)
            if not self._hosts[host].is_on:
                self.boot(host)
            if host in self._cut:
                self.join(host)

    def heal(self) -> None:
        """Undo all faults and end what still runs on the hosts."""
        self.mend()
        for host in self.hosts:
            self._hosts[host].end_commands()
            until(functools.partial(self._end_processes, host), f"{host} to be quiet")

    def _end_processes(self, host: str) -> bool:
        """Kill what runs on a host; whether nothing did."""
        left = self.processes(host)
        for process in left:
            try:
                os.kill(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        return not left

    # --- the switch

    def _ports(self, host: str, state: str) -> None:
        self._ip("".join(f"link set {self._plan.port(host, network)} {state}\n" for network in self._plan.networks))

    def _ip(self, batch: str, *options: str) -> str:
        """Run `ip` on the switch, and return what it shows."""
        argv = ["nsenter", "--target", str(self._switch.pid), "--net", "--", "ip", *options, "-batch", "-"]
        done = subprocess.run(argv, input=batch, text=True, capture_output=True, check=False)
        assert done.returncode == 0 or "-force" in options, f"{batch}{done.stderr}"
        return done.stdout


_FORWARD = {"4": "ip_forward", "6": "conf/all/forwarding"}


def has_ipv6() -> bool:
    """Whether this kernel speaks IPv6."""
    return os.path.exists("/proc/net/if_inet6")


def _slow_ends(number: int, network: int) -> tuple[str, str]:
    return f"s{network}-{number}", f"b{network}-{number}"


def _nanoseconds(seconds: float) -> bytes:
    return struct.pack("=q", round(seconds * 1e9))


def _text(output: bytes | None) -> str:
    return (output or b"").decode(errors="replace")
