"""Addresses of this host: whose they are, which interface has them, and which another host may reach."""

import functools
import json
import os
import shutil
import subprocess
import sys
from typing import Any

import pytest

from ddplaunch.system.net.addresses import interface_of, is_loopback, is_own, usable_addresses

# a host with two cards, one of which has a second address, a card that is down, and a bridge for containers; the default
# route leads over the card that the kernel lists last
CARDS = """
set -e
mount -t sysfs none /sys
ip link set lo up
ip link add docker0 type bridge
ip link add c0 type veth peer name c1
ip link set c0 master docker0
for card in eth1 eth0 eth2; do ip link add $card type veth peer name to-$card; done
ip address add 172.17.0.1/16 dev docker0
ip address add 10.1.0.5/24 dev eth1
ip address add 10.0.0.5/24 dev eth0
ip address add 10.0.0.6/24 dev eth0 label eth0:1
ip address add 169.254.3.4/16 dev eth0
ip address add 10.2.0.5/24 dev eth2
for link in c0 c1 docker0 eth0 to-eth0 eth1 to-eth1; do ip link set $link up; done
ip route add default via 10.0.0.1
"""
IPV6 = """
ip address add fd01::5/64 dev eth0 nodad
ip address add fe80::5/64 dev eth0 nodad
ip address add fe80::5/64 dev eth1 nodad
ip -6 route add default via fd01::1
"""
# the kernel takes up to a second to say that a link that was just set up runs
RUNNING = """
for link in docker0 eth0 eth1; do
  while [ "$(cat /sys/class/net/$link/operstate)" != up ]; do sleep 0.01; done
done
"""

no_ipv6 = pytest.mark.skipif(not os.path.exists("/proc/net/if_inet6"), reason="this kernel has no IPv6")


@functools.cache
def no_networks_of_our_own() -> str:
    """Why there can be none; empty if there can."""
    if os.geteuid() != 0:
        return "networks of our own need root"
    for command in ("unshare", "ip"):
        if shutil.which(command) is None:
            return f"networks of our own need {command}; `make test-deps` installs it"
    done = run_there(CARDS, "true")
    return f"networks of our own cannot be made here: {done.stderr.strip()}" if done.returncode else ""


def run_there(cards: str, *command: str) -> subprocess.CompletedProcess[str]:
    """Run a command on a host of its own with these cards."""
    script = ["sh", "-c", f'{cards}\nexec "$@"', "sh", *command]
    return subprocess.run(["unshare", "--net", "--mount", *script], capture_output=True, text=True, check=False)


def there(expression: str, cards: str = CARDS) -> Any:
    """What an expression gives on a host of its own with these cards."""
    if why := no_networks_of_our_own():
        pytest.skip(why)
    program = f"import json; from ddplaunch.system.net.addresses import *; print(json.dumps({expression}))"
    done = run_there(cards, sys.executable, "-c", program)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


# --- loopback, which every host has


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1", "127.0.1.1", "127.0.0.3", "::ffff:127.0.0.1"),
        *(pytest.param(address, marks=no_ipv6) for address in ("::1", "0:0::0:1", "::1%lo")),
    ],
)
def test_every_loopback_address_is_our_own_and_on_the_loopback_interface(address):
    """127.0.1.1 is what a host's own name stands for on Debian; no interface lists it."""
    assert is_loopback(address)
    assert is_own(address)
    assert interface_of(address) == "lo"


SOMEBODY_ELSES = ["203.0.113.7", "2001:db8::7", "::ffff:203.0.113.7", "0.0.0.0"]
NOBODYS = ["localhost", "", "127.1", "10.0.0", "127.0.0.1.", "[::1]", "1\x00", "%lo", "127.0.0.256"]


@pytest.mark.parametrize("text", [*SOMEBODY_ELSES, *NOBODYS])
def test_an_address_of_somebody_else_is_not_ours_and_what_is_no_numeric_address_is_nobodys(text):
    assert not is_loopback(text)
    assert not is_own(text)
    assert interface_of(text) is None


def test_usable_addresses_are_our_own_and_never_loopback():
    usable = usable_addresses()
    assert all(map(is_own, usable))
    assert not any(map(is_loopback, usable))
    assert len(set(usable)) == len(usable)


# --- cards


def test_the_address_of_the_default_route_comes_first_and_that_of_containers_last():
    assert there("usable_addresses()", CARDS + RUNNING) == ["10.0.0.5", "10.1.0.5", "10.0.0.6", "172.17.0.1"]


@no_ipv6
def test_ipv6_of_a_default_route_comes_right_after_ipv4():
    assert there("usable_addresses()", CARDS + IPV6 + RUNNING)[:2] == ["10.0.0.5", "fd01::5"]


@no_ipv6
def test_a_host_with_ipv6_alone_has_usable_addresses():
    without_ipv4 = "".join(line for line in CARDS.splitlines(keepends=True) if "10." not in line and "169." not in line)
    without_ipv4 += "ip address del 172.17.0.1/16 dev docker0\n"
    assert there("usable_addresses()", without_ipv4 + IPV6) == ["fd01::5"]


def test_a_host_without_any_network_has_no_usable_address():
    assert there("usable_addresses()", "ip link set lo up") == []


def test_an_interface_is_found_by_each_of_its_addresses():
    addresses = ["10.0.0.5", "10.0.0.6", "169.254.3.4", "10.1.0.5", "::ffff:10.1.0.5", "172.17.0.1"]
    found = there(f"[interface_of(address) for address in {addresses}]")
    assert found == ["eth0", "eth0:1", "eth0", "eth1", "eth1", "docker0"]


@no_ipv6
def test_an_interface_is_found_by_an_ipv6_address_however_it_is_written():
    assert there("[interface_of('fd01::5'), interface_of('FD01:0:0::0005')]", CARDS + IPV6) == ["eth0", "eth0"]


def test_the_address_of_a_card_that_is_down_is_still_our_own():
    assert there("[is_own('10.2.0.5'), interface_of('10.2.0.5')]") == [True, "eth2"]


@no_ipv6
def test_a_scope_decides_between_interfaces_with_the_same_address():
    """Link-local addresses are unique on each link only."""
    scopes = "['eth0', 'eth1', str(socket.if_nametoindex('eth1')), 'eth2', 'none']"
    found = there(f"[interface_of('fe80::5%' + scope) for scope in {scopes}] + [interface_of('fe80::5')]", CARDS + IPV6)
    assert found[:-1] == ["eth0", "eth1", "eth1", None, None]
    assert found[-1] in ("eth0", "eth1")
