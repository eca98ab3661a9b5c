"""Hosts given by a user: --hosts and host files. Pure: parses text, opens no file.

The grammar is the union of those in use: DeepSpeed's `HOST slots=N`, Open MPI's `HOST slots=N max_slots=M`, MPICH's
`HOST:N`, a machine file with a line for each slot, and Slurm's lists in place of a host. `gpus=0,2` names devices.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from msgspec import Struct
from msgspec.structs import replace

from ddplaunch.cluster.hostlist.brackets import expand_piece, split
from ddplaunch.cluster.hostlist.host import MAX_HOSTS, MAX_SLOTS, Host, checked, number, shown, too_many, wrong
from ddplaunch.errors import LaunchError

_DEVICE = r"\d{1,9}|(?:GPU|MIG)-[0-9A-Za-z/-]+"
_SLOTS = re.compile(r"(.*):([^:\]]*)", re.DOTALL)
_IPV6 = re.compile(r"((?:[^\[\]]*@)?)\[([^\[\]:]*:[^\[\]]*)\]")
_IGNORED = ("max_slots", "max-slots", "slots-max")  # how far Open MPI may overload a host: we never do


class _Line(Struct, frozen=True):
    """Hosts as one piece of text names them."""

    hosts: tuple[Host, ...]
    piece: str
    origin: str


def parse_hosts(text: str, origin: str) -> tuple[Host, ...]:
    """Read `a,b:4,node[1-3]:2,user@host,[fe80::1]:4`.

    Raises:
        LaunchError: the text names no hosts, or one of them twice in different ways.
    """
    return _merged(_Line(_hosts_of(piece, piece, origin), piece, origin) for piece in split(text, origin))


def parse_hostfile(text: str, path: str) -> tuple[Host, ...]:
    """Read a file with a line `HOST[:N] [slots=N] [gpus=0,2]` for each host; # begins a comment.

    A host that is named by several lines without a number has as many slots.

    Raises:
        LaunchError: a line names no host, or one of them twice in different ways.
    """
    hosts = _merged(_lines(text, path))
    if not hosts:
        raise LaunchError(f"{path}: the file names no host", hint="each line is HOST, HOST:4 or HOST slots=4")
    return hosts


def _lines(text: str, path: str) -> Iterator[_Line]:
    for index, line in enumerate(text.splitlines(), start=1):
        content = re.split(r"(?:^|\s)#", line, maxsplit=1)[0].strip()
        if content:
            yield _line(content, f"{path}:{index}")


def _line(content: str, origin: str) -> _Line:
    names, *settings = "=".join(part.strip() for part in content.split("=")).split()
    hosts: list[Host] = []
    for piece in split(names, origin):
        hosts += _hosts_of(piece, content, origin)
        if len(hosts) > MAX_HOSTS:
            raise too_many(content, origin)
    slots, devices = _settings(settings, content, origin)
    if slots is not None and any(host.slots is not None for host in hosts):
        raise wrong(content, origin, "the number of slots is given twice", hint="leave one of them out")
    found = [Host(name=host.name, slots=slots or host.slots, devices=devices) for host in hosts]
    return _Line(tuple(found), content, origin)


def _settings(settings: Sequence[str], content: str, origin: str) -> tuple[int | None, tuple[str, ...] | None]:
    """The slots and the devices of a line."""
    slots, devices = None, None
    for setting in settings:
        key, _, value = setting.partition("=")
        if key == "slots":
            slots = _slots(value, content, origin)
        elif key == "gpus":
            devices = parse_devices(value, content, origin)
        elif key not in _IGNORED:
            hint = "a line is HOST, HOST:4, HOST slots=4 or HOST gpus=0,2; settings of ssh belong in ~/.ssh/config"
            raise wrong(content, origin, f"{shown(setting)} is not known", hint=hint)
    return slots, devices


def parse_devices(text: str, piece: str, origin: str) -> tuple[str, ...]:
    """Read device indices and GPU-/MIG- UUIDs, separated by commas.

    Raises:
        LaunchError: one of them is not a device, or is listed twice.
    """
    found = [str(int(part)) if part.isdecimal() and part.isascii() else part for part in text.split(",")]
    seen: set[str] = set()
    for device in found:
        if not re.fullmatch(_DEVICE, device, re.ASCII):
            raise wrong(piece, origin, f"{shown(device)} is not a device", hint="type indices or UUIDs such as 0,2")
        if device in seen:
            raise wrong(piece, origin, f"device {device} is listed twice", hint="leave one out")
        seen.add(device)
    return tuple(found)


def _hosts_of(piece: str, line: str, origin: str) -> tuple[Host, ...]:
    """The hosts of one element of a list, such as `node[1-3]:4`."""
    names, slots = piece, None
    if (found := _SLOTS.fullmatch(piece)) and (":" not in found[1] or found[1].endswith("]")):
        names, slots = found[1], _slots(found[2], line, origin)
    if address := _IPV6.fullmatch(names):
        return (Host(name=checked(address[1] + address[2], line, origin), slots=slots),)
    return tuple(Host(name=name, slots=slots) for name in expand_piece(names, origin))


def _slots(text: str, piece: str, origin: str) -> int:
    found = number(text, MAX_SLOTS)
    if not found:
        what = f"{shown(text)} is not a number of slots from 1 to {MAX_SLOTS}"
        raise wrong(piece, origin, what, hint="type for example gpu01:4 for four workers there")
    return found


def _merged(lines: Iterable[_Line]) -> tuple[Host, ...]:
    """Each host once, in order; one that is named again and again has a slot for each time.

    Raises:
        LaunchError: a host is named again, with slots or devices.
    """
    times: dict[str, int] = {}
    hosts: dict[str, Host] = {}
    named = 0
    for line in lines:
        for host in line.hosts:
            if host.name in hosts and not (_is_bare(host) and _is_bare(hosts[host.name])):
                hint = f"name {host.name} once, with all its slots"
                raise wrong(line.piece, line.origin, f"{host.name} is named twice", hint=hint)
            hosts[host.name] = host
            times[host.name] = times.get(host.name, 0) + 1
            named += 1
        if named > MAX_HOSTS:
            raise too_many(line.piece, line.origin)
    if len(hosts) == named:
        return tuple(hosts.values())
    # where one host is named for each of its slots, another that is named once has one
    return tuple(replace(host, slots=times[host.name]) if _is_bare(host) else host for host in hosts.values())


def _is_bare(host: Host) -> bool:
    return host.slots is None and host.devices is None
