"""--include and --exclude: some of the hosts, or of their devices. Pure.

The grammar is DeepSpeed's, `a@b:0,2` (https://www.deepspeed.ai/getting-started/#resource-configuration-multi-node), and plain
lists of hosts.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from ddplaunch.cluster.hostlist.brackets import expand
from ddplaunch.cluster.hostlist.host import Host, shown, wrong
from ddplaunch.cluster.hostlist.hostfile import parse_devices
from ddplaunch.words import some


def include(hosts: Sequence[Host], text: str, origin: str) -> tuple[Host, ...]:
    """Return those hosts, in their order, that `text` names, with the devices that it names.

    Raises:
        LaunchError: it names a host or a device that is not there.
    """
    named = _named(hosts, text, origin)
    found = []
    for host in hosts:
        if host.name in named:
            devices = named[host.name]
            found.append(host if devices is None else _with(host, devices, text, origin))
    return tuple(found)


def exclude(hosts: Sequence[Host], text: str, origin: str) -> tuple[Host, ...]:
    """Return those hosts, in their order, that `text` does not name, without the devices that it names.

    Raises:
        LaunchError: it names a host or a device that is not there, or nothing is left.
    """
    named = _named(hosts, text, origin)
    found = []
    for host in hosts:
        if host.name not in named:
            found.append(host)
        elif devices := named[host.name]:
            _with(host, devices, text, origin)
            without = frozenset(devices)
            rest = tuple(device for device in _all_devices(host, text, origin) if device not in without)
            if rest:
                found.append(_with(host, rest, text, origin))
    if not found:
        raise wrong(text, origin, "no host is left")
    return tuple(found)


def _named(hosts: Sequence[Host], text: str, origin: str) -> dict[str, tuple[str, ...] | None]:
    """The names of the hosts that the text means, with the devices; None: all."""
    known = {host.address: host.name for host in hosts}
    named: dict[str, tuple[str, ...] | None] = {}
    for piece in text.split("@"):
        names, colon, devices = piece.strip().partition(":")
        chosen = parse_devices(devices, piece, origin) if colon else None
        for name in expand(names, origin):
            if name not in known:
                what = "there is no such host" if name == text else f"there is no host {shown(name)}"
                raise wrong(text, origin, what, hint=f"the hosts are {some(known)}")
            if known[name] in named:
                raise wrong(text, origin, f"{name} is listed twice", hint=f"name it once, as {name}:0,1")
            named[known[name]] = chosen
    return named


def _with(host: Host, devices: tuple[str, ...], text: str, origin: str) -> Host:
    """This host with these devices alone.

    Raises:
        LaunchError: it does not have one of them.
    """
    if host.devices is not None or host.slots is not None:
        known = dict.fromkeys(_all_devices(host, text, origin))
        for device in devices:
            # an index and a UUID may mean the same device
            if device not in known and (device.isdecimal() or host.devices is not None):
                raise wrong(text, origin, f"{host.address} has no device {device}", hint=f"it has {some(known)}")
    return replace(host, devices=devices, slots=None if host.slots is None else len(devices))


def _all_devices(host: Host, text: str, origin: str) -> tuple[str, ...]:
    if host.devices is not None:
        return host.devices
    if host.slots is None:
        what = f"how many devices {host.address} has is not known"
        raise wrong(text, origin, what, hint=f"list it with their number: {host.address}:4")
    return tuple(map(str, range(host.slots)))
