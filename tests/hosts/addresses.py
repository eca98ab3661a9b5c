"""Who is called what and where on a bed: names, addresses, /etc/hosts and how network cards are set. Pure."""

from collections.abc import Iterator, Sequence
from typing import Literal

Family = Literal["4", "6"]


class Addresses:
    """The address plan of a bed: network N is 10.(77+N).0.0/24 and fd77:(1+N)::/64; host number I ends in 10+I."""

    def __init__(
        self,
        hosts: Sequence[str],
        networks: int,
        families: Sequence[Family],
        resolved: Sequence[Family],
        loopback: bool,
    ) -> None:
        self.hosts = tuple(hosts)
        self.networks = range(networks)
        self.families = families  # what the cards have
        self.resolved = resolved  # what names stand for
        self.loopback = loopback  # each host's own name stands for 127.0.1.1

    def number(self, host: str) -> int:
        """The place of a host in the list, from 0."""
        return self.hosts.index(host)

    def address(self, host: str, network: int = 0, family: Family | None = None) -> str:
        """The address of a host; of the first family that names stand for, unless told otherwise."""
        last = 10 + self.number(host)
        return f"fd77:{1 + network}::{last}" if (family or self.resolved[0]) == "6" else f"10.{77 + network}.0.{last}"

    def name(self, host: str, network: int = 0) -> str:
        """The name of a host in a network."""
        return host if network == 0 else f"{host}-{'abc'[network]}"

    def port(self, host: str, network: int) -> str:
        """The interface of the switch that a host's card is plugged into."""
        return f"v{network}-{self.number(host)}"

    def known_as(self, host: str) -> list[str]:
        """All names and addresses of a host."""
        found = [self.name(host, network) for network in self.networks]
        return found + [self.address(host, network, family) for network in self.networks for family in self.families]

    def hosts_file(self, host: str) -> str:
        """The /etc/hosts of a host."""
        return "".join(f"{address}\t{name}\n" for address, name in self._entries(host))

    def _entries(self, host: str) -> Iterator[tuple[str, str]]:
        yield "127.0.0.1", "localhost"
        yield "::1", "localhost ip6-localhost"
        for other in self.hosts:
            for network in self.networks:
                if self.loopback and other == host and network == 0:
                    yield "127.0.1.1", other
                else:
                    for family in self.resolved:
                        yield self.address(other, network, family), self.name(other, network)

    def cards(self, host: str) -> str:
        """How a host sets its cards, for `ip -batch`; the way out of the cluster is through the switch."""
        lines = ["link set lo up"]
        for network in self.networks:
            lines.append(f"link set eth{network} up")
            lines += [_set_address(self.address(host, network, f), f"eth{network}", f) for f in self.families]
        lines += [f"route add default via {_gateway(0, family)} dev eth0" for family in self.families]
        return "\n".join(lines)

    def bridges(self) -> str:
        """How the switch makes a bridge for each network."""
        lines = ["link set lo up"]
        for network in self.networks:
            lines.append(f"link add br{network} type bridge stp_state 0 forward_delay 0 mcast_snooping 0")
            lines.append(f"link set br{network} up")
            lines += [_set_address(_gateway(network, family), f"br{network}", family) for family in self.families]
        return "\n".join(lines)

    def plug(self, host: str, network: int, pid: int) -> str:
        """How the switch gives a host, whose process 1 is `pid`, a card in a network."""
        port, mac = self.port(host, network), f"02:00:00:00:{network:02x}:{10 + self.number(host):02x}"
        return (
            f"link add {port} type veth peer name eth{network} address {mac} netns {pid}\n"
            f"link set {port} master br{network} up\n"
        )


def _gateway(network: int, family: Family) -> str:
    return f"fd77:{1 + network}::1" if family == "6" else f"10.{77 + network}.0.1"


def _set_address(address: str, interface: str, family: Family) -> str:
    # nodad: else an address could not be used for its first seconds, while the kernel asks whether somebody else has it
    return f"address add {address}/{'64' if family == '6' else '24'} dev {interface}{' nodad' if family == '6' else ''}"
