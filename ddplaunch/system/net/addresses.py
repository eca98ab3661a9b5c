"""Finds the addresses of this host, by psutil, and looks up those of a name, in a child, since that may take a minute."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from ddplaunch.system.loop.loop import Loop

if TYPE_CHECKING:
    from ddplaunch.system.loop.loop import Pending

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


Target = tuple[int, tuple[Any, ...]]  # address family and sockaddr, as getaddrinfo gives them
Found = Sequence[Target] | str  # the addresses of a host, or why there are none

_SLOW = 3.0  # seconds after which a line says that a name is being looked up


class Answer(Struct, frozen=True):
    """The addresses of a host, or why there are none."""

    host: str
    targets: tuple[Target, ...] = ()  # with 0 for a port, in the order in which they are to be tried (RFC 6724)
    error: str = ""  # why there is none, as getaddrinfo reports it


class Resolver:
    """The lookup of one host name.

    `answered` is called once: at once, before this object is made, if the name is numeric or the machine has no room for a
    child, else from the loop.
    """

    def __init__(self, loop: Loop, host: str, answered: Callable[[Answer], None]) -> None:
        """Look the host up in a child; `answered` gets the answer."""
        self._host = host
        self._answered = answered
        self._pending: Pending[Found] | None = None
        # an address in digits needs no lookup, and reading it never blocks; for a name, the result is a text that says why not
        numeric = _look_up(host, socket.AI_NUMERICHOST)
        if isinstance(numeric, str):
            killed = "the lookup was killed, or could not be started"
            self._pending = loop.ask(lambda: _look_up(host), killed, self._answer)
        else:
            self._answer(numeric)

    def close(self) -> None:
        """End a lookup that is still under way; `answered` will not be called any more."""
        self._answered = lambda _: None
        if self._pending is not None:
            self._pending.give_up()

    def _answer(self, found: Found) -> None:
        if isinstance(found, str):
            self._answered(Answer(self._host, error=found))
        else:
            self._answered(Answer(self._host, tuple(found)))


def look_up(host: str, slow: Callable[[], None]) -> Answer:
    """Look a host up where no loop runs yet; `slow` is called if that takes seconds."""
    answers: list[Answer] = []
    loop = Loop()
    resolver = Resolver(loop, host, answers.append)
    loop.timer(loop.now() + _SLOW, slow)
    try:
        while not answers:
            loop.run_once()
    finally:
        resolver.close()
        loop.close()
    return answers[0]


def leads_to(host: str, address: str) -> bool:
    """Whether a name of a host leads to this numeric address; may take long. Of this host's addresses only its own names do."""
    if is_own(address):
        return host.partition(".")[0].lower() == socket.gethostname().partition(".")[0].lower()
    found = _look_up(host)
    return not isinstance(found, str) and address in [str(sockaddr[0]) for _, sockaddr in found]


def _look_up(host: str, flags: int = 0) -> Found:
    """Return the addresses of a host, or why there are none; `flags` are those of getaddrinfo."""
    try:
        # ASCII passes as bytes: for a str, Python would load its tables of Unicode
        name = host.encode("ascii" if host.isascii() else "idna")
        found = socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM, flags=flags)
    except OSError as error:
        return error.strerror or str(error)
    except ValueError:  # beyond ASCII, and a label is empty or too long
        return "not a valid host name"
    # a line that is in /etc/hosts twice is found twice
    return tuple(dict.fromkeys((int(family), sockaddr) for family, _, _, _, sockaddr in found))
