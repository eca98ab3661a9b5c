"""Finds the addresses of this host and the interfaces that have them. Asks the kernel, by psutil; sends nothing."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import suppress

from msgspec import Struct

_FAMILIES = (socket.AF_INET, socket.AF_INET6)
_LOOPBACK6 = socket.inet_pton(socket.AF_INET6, "::1")
_MAPPED = bytes(10) + b"\xff\xff"  # an IPv4 address in IPv6's terms begins so: ::ffff:a.b.c.d
# RFC 5737 and RFC 3849 keep these for documentation, so that only the default route leads there
_FAR_AWAY = ((socket.AF_INET, "198.51.100.1"), (socket.AF_INET6, "2001:db8::1"))


class _Own(Struct, frozen=True):
    """An address of this host."""

    interface: str  # eth0:1 is the label of a further address of eth0
    text: str
    packed: bytes
    is_up: bool


def interface_of(address: str) -> str | None:
    """Return the name of the interface that has this numeric address; None for names and for unknown addresses.

    A scope (fe80::1%eth0) decides between interfaces that have the same address. Of 127.0.0.0/8 the loopback
    interface has every address, whether it is listed or not.
    """
    packed, scope = _pack(address)
    if packed is None:
        return None
    for own in _own():
        if own.packed == packed and scope in ("", own.interface):
            return own.interface
    if is_loopback(address):
        return next((own.interface for own in _own() if is_loopback(own.text)), None)
    return None


def is_own(address: str) -> bool:
    """Whether this numeric address is one of this host's; never so for a name."""
    return is_loopback(address) or interface_of(address) is not None


def is_numeric(address: str) -> bool:
    """Whether this is an address, and no name."""
    return _pack(address)[0] is not None


def is_loopback(address: str) -> bool:
    """Whether this numeric address leads back to this host, whichever host it is; never so for a name."""
    packed, _ = _pack(address)
    return packed is not None and (packed == _LOOPBACK6 or (len(packed) == 4 and packed[0] == 127))


def usable_addresses() -> tuple[str, ...]:
    """Return this host's addresses that other hosts may reach, the likeliest first.

    That is the one from which the default route is used, IPv4 before IPv6, then those of network cards and the like,
    then those of bridges, which mostly lead to containers of this host. Loopback and link-local addresses are left out,
    and those of interfaces that are down.
    """
    from ipaddress import ip_address  # few jobs need it

    usable = [
        own for own in _own() if own.is_up and not is_loopback(own.text) and not ip_address(own.text).is_link_local
    ]
    preferred = []
    for family, address in _FAR_AWAY:
        # connecting a UDP socket chooses the address, and sends nothing; an error: a kernel without this family, or no route
        with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))
            preferred.append(probe.getsockname()[0])

    def unlikelihood(own: _Own) -> tuple[int, bool]:
        position = preferred.index(own.text) if own.text in preferred else len(preferred)
        return position, os.path.isdir(f"/sys/class/net/{own.interface}/bridge")

    return tuple(dict.fromkeys(own.text for own in sorted(usable, key=unlikelihood)))


def _own() -> Iterator[_Own]:
    """Yield all addresses of this host in the kernel's order: an interface's IPv4 ones come first."""
    import psutil  # 9 ms, and a job of one node needs no address of its host

    states = psutil.net_if_stats()
    for name, addresses in psutil.net_if_addrs().items():
        is_up = name not in states or states[name].isup  # which says that it has a carrier, too
        for found in addresses:
            if found.family in _FAMILIES:
                text = found.address.partition("%")[0]
                yield _Own(name, text, socket.inet_pton(found.family, text), is_up)


def _pack(address: str) -> tuple[bytes | None, str]:
    """Return the bytes of a numeric address, and its scope as the name of an interface, "" for none.

    None for the bytes: the text is no numeric address. An IPv4 address in IPv6's form gives the bytes of the IPv4 address.
    """
    text, _, scope = address.partition("%")
    for family in _FAMILIES:
        try:
            packed = socket.inet_pton(family, text)
        except (OSError, ValueError):  # ValueError: a zero byte
            continue
        with suppress(OSError, ValueError, OverflowError):  # a scope that is no number is a name
            scope = socket.if_indextoname(int(scope))
        return packed.removeprefix(_MAPPED) if len(packed) == 16 else packed, scope
    return None, ""


# what the doctor advises too, who looks at the variables before a job
WITHOUT_INTERFACE = "`unset {variable}`, and ddplaunch sets it to the interface by which the nodes reach each other"
