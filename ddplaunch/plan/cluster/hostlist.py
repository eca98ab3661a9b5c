"""Which hosts a text names: Slurm's host lists, --hosts, host files and filters. Pure: text in, values out; resolves no name.

Every parser takes the origin of its text ("--hosts", "SLURM_JOB_NODELIST", "hosts.txt:3"), for error messages. Grammars:

- Slurm's compressed lists, `rack[1-2]n[01-03,7],login` and `5,1(x2)`, with the order of Slurm's own hostlist.c: of several
  brackets in a name the last runs fastest, then the first, then the second and so on; a range is padded as its lower end is.
- Host files, the union of those in use: DeepSpeed's `HOST slots=N`, Open MPI's `HOST slots=N max_slots=M`, MPICH's `HOST:N`,
  a machine file with a line for each slot, and Slurm's lists in place of a host. `gpus=0,2` names devices.
- --include and --exclude: DeepSpeed's `a@b:0,2` (https://www.deepspeed.ai/getting-started/#resource-configuration-multi-node),
  and plain lists of hosts.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from ddplaunch.spec.options.parsers import MOST, digits, is_numeric
from ddplaunch.system.errors import LaunchError
from ddplaunch.system.words import some

MAX_HOSTS = MAX_SLOTS = MOST
MAX_NAME = 512  # characters of a name with a user; DNS allows 253, and 65536 long ones would fill the memory

# no leading "-": ssh would take the name for an option
_USER = r"(?:[A-Za-z0-9_][\w.+-]*@)?"
_NAME = rf"{_USER}[A-Za-z0-9_][\w.-]*"
_IPV6 = rf"{_USER}([0-9A-Fa-f:.]+)(?:%[\w.-]+)?"


class Host(Struct, frozen=True, kw_only=True):
    """A host of the job."""

    name: str  # as ssh takes it: "gpu01", "user@gpu01", "10.0.0.2", "fe80::1"
    slots: int | None = None  # workers; None: not given
    devices: tuple[str, ...] | None = None  # indices or UUIDs to use there; None: not given

    @property
    def address(self) -> str:
        """The name without the user."""
        return self.name.rpartition("@")[2]


def checked(name: str, piece: str, origin: str) -> str:
    """Return the name; LaunchError unless it is the name of a host, or an address."""
    if re.fullmatch(_NAME, name, re.ASCII) or ((found := re.fullmatch(_IPV6, name, re.ASCII)) and is_numeric(found[1])):
        return name
    raise wrong(piece, origin, f"{shown(name)} is not the name of a host", hint="type names such as gpu01,gpu02")


def number(text: str, limit: int) -> int | None:
    """Return the number from 0 to `limit`, None if the text is none."""
    value = digits(text)
    return None if value is None or value > limit else value


def wrong(piece: str, origin: str, what: str, *, hint: str | None = None) -> LaunchError:
    """Make the error that something is wrong with this part of a text."""
    return LaunchError(f"{shown(piece)} in {origin}: {what}", hint=hint)


def too_many(piece: str, origin: str) -> LaunchError:
    """Make the error that a text names more hosts than any job has."""
    return wrong(piece, origin, f"these are more than {MAX_HOSTS} hosts")


def shown(text: str) -> str:
    """Write a text as messages show it."""
    short = text if len(text) <= 60 else f"{text[:57]}..."
    return f'"{short}"' if short.isprintable() else ascii(short)


# --- Slurm's compressed lists


_RANGE = re.compile(r"(\d+)(?:-(\d+))?", re.ASCII)
_COUNT = re.compile(r"(\d+)(?:\(x(\d+)\))?", re.ASCII)
_NUMBERED = re.compile(r"(.*?)(\d{1,8})", re.ASCII | re.DOTALL)
_LARGEST_NUMBER = 999_999_999


class _Range(NamedTuple):
    """Numbers in brackets, such as `01-16`."""

    numbers: range
    width: int  # digits, to which zeros pad each number


def expand(text: str, origin: str) -> tuple[str, ...]:
    """Return the names of a host list, in order."""
    names: list[str] = []
    for piece in split(text, origin):
        names += expand_piece(piece, origin)
        if len(names) > MAX_HOSTS:
            raise too_many(text, origin)
    return tuple(names)


def split(text: str, origin: str) -> list[str]:
    """Split a list at the commas outside of brackets."""
    pieces, depth, start = [], 0, 0
    for position, char in enumerate(f"{text},"):
        if char == "[":
            depth += 1
        elif char == "]":
            depth -= 1
        elif char == "," and not depth:
            pieces.append(text[start:position].strip())
            start = position + 1
        if depth not in (0, 1):
            raise wrong(text, origin, "the brackets do not match", hint="type names such as gpu[01-16]")
    if depth:
        raise wrong(text, origin, "the brackets do not match", hint="type names such as gpu[01-16]")
    if "" in pieces:
        what = "there is no host" if len(pieces) == 1 else "a name is missing beside a comma"
        raise wrong(text, origin, what, hint="type names such as gpu01,gpu02")
    return pieces


def expand_piece(piece: str, origin: str) -> list[str]:
    """Return the names of one element of a list, such as `rack[1-2]n[01-03,7]`."""
    # text and what is in brackets take turns: "rack", "1-2", "n", "01-03,7", ""
    turns = re.split(r"[\[\]]", piece)
    first, *texts = turns[::2]
    brackets = [_ranges(content, piece, origin) for content in turns[1::2]]
    # nothing is expanded yet: a short text may name more hosts than there is memory for
    if math.prod(sum(len(part.numbers) for part in ranges) for ranges in brackets) > MAX_HOSTS:
        raise too_many(piece, origin)
    # near enough, with the first range of each pair of brackets: `checked` measures each name, and a number has some ten digits
    if sum(map(len, turns[::2])) + sum(ranges[0].width for ranges in brackets) > MAX_NAME:
        raise wrong(piece, origin, f"a name has at most {MAX_NAME} characters")
    choices = [[f"{number:0{part.width}}" for part in ranges for number in part.numbers] for ranges in brackets]
    # Slurm varies the last bracket first, then the others from the first on: a1b1c1, a1b1c2, a2b1c1, a2b1c2, a1b2c1, ...
    # `product` varies its last argument first, so the others are handed to it, and taken from it, in reverse.
    names = []
    for numbers in itertools.product(*reversed(choices[:-1]), *choices[-1:]):
        in_order = (*reversed(numbers[:-1]), *numbers[-1:])
        rest = "".join(itertools.chain.from_iterable(zip(in_order, texts, strict=True)))
        names.append(checked(first + rest, piece, origin))
    return names


def _ranges(content: str, piece: str, origin: str) -> list[_Range]:
    """Return the numbers in brackets, such as `01-03,7`; LaunchError if there is anything else."""
    found = []
    for part in content.split(","):
        matched = _RANGE.fullmatch(part.strip())
        low = number(matched[1], _LARGEST_NUMBER) if matched else None
        high = number(matched[2] or matched[1], _LARGEST_NUMBER) if matched else None
        if matched is None or low is None or high is None:
            raise wrong(piece, origin, f"{shown(part)} is not a number or a range such as 01-16")
        if high < low:
            hint = f"type {matched[2]}-{matched[1]}"
            raise wrong(piece, origin, f"the range {part.strip()} runs backwards", hint=hint)
        found.append(_Range(range(low, high + 1), width=len(matched[1])))
    return found


def counts(text: str, origin: str) -> tuple[int, ...]:
    """Return the numbers of a list such as `5,1(x2)`: 5, 1, 1."""
    found: list[int] = []
    for part in text.split(","):
        matched = _COUNT.fullmatch(part.strip())
        value = number(matched[1], _LARGEST_NUMBER) if matched else None
        times = number(matched[2] or "1", MAX_HOSTS) if matched else None
        if value is None or times is None or len(found) + times > MAX_HOSTS:
            raise wrong(text, origin, "this is not a list of numbers such as 5,1(x2)")
        found += [value] * times
    return tuple(found)


def compress(names: Sequence[str]) -> str:
    """Write names so that `expand` reads the same, neighbours with one prefix together: `node[01-03],login`."""
    pieces: list[str] = []
    index = 0
    while index < len(names):
        first, last = index, index
        numbered = _NUMBERED.fullmatch(names[first])
        while numbered and last + 1 < len(names) and _follows(names[last + 1], numbered, last + 1 - first):
            last += 1
        if numbered and last > first:  # neighbours that differ in their last number only
            prefix, lowest = numbered.groups()
            highest = names[last].removeprefix(prefix)
            pieces.append(f"{prefix}[{lowest}-{highest}]")
        else:
            pieces.append(names[first])
        index = last + 1
    return ",".join(pieces)


def _follows(name: str, numbered: re.Match[str], distance: int) -> bool:
    """Whether a name is that of `numbered` (a prefix and a number), with a number higher by `distance`."""
    prefix, digits = numbered.groups()
    return name == f"{prefix}{int(digits) + distance:0{len(digits)}}"


# --- --hosts and host files


_DEVICE = r"\d{1,9}|(?:GPU|MIG)-[0-9A-Za-z/-]+"
_SLOTS = re.compile(r"(.*):([^:\]]*)", re.DOTALL)
_BRACKETED = re.compile(r"((?:[^\[\]]*@)?)\[([^\[\]:]*:[^\[\]]*)\]")
_IGNORED_SETTINGS = ("max_slots", "max-slots", "slots-max")  # how far Open MPI may overload a host: we never do


class _Line(Struct, frozen=True):
    """Hosts as one piece of text names them."""

    hosts: tuple[Host, ...]
    piece: str
    origin: str


def parse_hosts(text: str, origin: str) -> tuple[Host, ...]:
    """Return the hosts of `a,b:4,node[1-3]:2,user@host,[fe80::1]:4`; LaunchError if one is named twice in different ways."""
    return _each_once(_Line(_hosts_of(piece, piece, origin), piece, origin) for piece in split(text, origin))


def parse_hostfile(text: str, path: str) -> tuple[Host, ...]:
    """Read a file with a line `HOST[:N] [slots=N] [gpus=0,2]` for each host; # begins a comment.

    A host that is named by several lines without a number has as many slots.
    """
    lines = (
        (number, re.split(r"(?:^|\s)#", line, maxsplit=1)[0].strip())
        for number, line in enumerate(text.splitlines(), 1)
    )
    hosts = _each_once(_line(content, f"{path}:{number}") for number, content in lines if content)
    if not hosts:
        raise LaunchError(f"{path}: the file names no host", hint="each line is HOST, HOST:4 or HOST slots=4")
    return hosts


def _line(content: str, origin: str) -> _Line:
    """Read a line of a hostfile: names, then slots=N and gpus=LIST in any order."""
    closed_up = "=".join(part.strip() for part in content.split("="))  # people write "slots = 4", too
    names, *settings = closed_up.split()
    hosts: list[Host] = []
    for piece in split(names, origin):
        hosts += _hosts_of(piece, content, origin)
        if len(hosts) > MAX_HOSTS:
            raise too_many(content, origin)
    slots, devices = None, None
    for setting in settings:
        key, _, value = setting.partition("=")
        if key == "slots":
            slots = _slots(value, content, origin)
        elif key == "gpus":
            devices = parse_devices(value, content, origin)
        elif key not in _IGNORED_SETTINGS:
            hint = "a line is HOST, HOST:4, HOST slots=4 or HOST gpus=0,2; settings of ssh belong in ~/.ssh/config"
            raise wrong(content, origin, f"{shown(setting)} is not known", hint=hint)
    if slots is not None and any(host.slots is not None for host in hosts):
        raise wrong(content, origin, "the number of slots is given twice", hint="leave one of them out")
    found = [Host(name=host.name, slots=slots or host.slots, devices=devices) for host in hosts]
    return _Line(tuple(found), content, origin)


def parse_devices(text: str, piece: str, origin: str) -> tuple[str, ...]:
    """Read device indices and GPU-/MIG- UUIDs, separated by commas."""
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
    """Return the hosts of one element of a list, such as `node[1-3]:4`."""
    names, slots = piece, None
    if (found := _SLOTS.fullmatch(piece)) and (":" not in found[1] or found[1].endswith("]")):
        names, slots = found[1], _slots(found[2], line, origin)
    if address := _BRACKETED.fullmatch(names):
        return (Host(name=checked(address[1] + address[2], line, origin), slots=slots),)
    return tuple(Host(name=name, slots=slots) for name in expand_piece(names, origin))


def _slots(text: str, piece: str, origin: str) -> int:
    found = number(text, MAX_SLOTS)
    if not found:
        what = f"{shown(text)} is not a number of slots from 1 to {MAX_SLOTS}"
        raise wrong(piece, origin, what, hint="type for example gpu01:4 for four workers there")
    return found


def _each_once(lines: Iterable[_Line]) -> tuple[Host, ...]:
    """Return each host once, in order; a host that is named bare (without slots or devices) several times has as many slots.

    Raises LaunchError: a host is named again with slots or devices, or there are too many.
    """
    times: dict[str, int] = {}  # how often each host is named
    hosts: dict[str, Host] = {}
    named = 0  # in all
    for line in lines:
        for host in line.hosts:
            before = hosts.get(host.name)
            if before is not None and not (_is_bare(host) and _is_bare(before)):
                hint = f"name {host.name} once, with all its slots"
                raise wrong(line.piece, line.origin, f"{host.name} is named twice", hint=hint)
            hosts[host.name] = host
            times[host.name] = times.get(host.name, 0) + 1
        named += len(line.hosts)
        if named > MAX_HOSTS:
            raise too_many(line.piece, line.origin)
    has_line_per_slot = len(hosts) < named
    if not has_line_per_slot:
        return tuple(hosts.values())
    # in such a list a host that is named once has one slot; in any other its number is not given
    return tuple(replace(host, slots=times[host.name]) if _is_bare(host) else host for host in hosts.values())


def _is_bare(host: Host) -> bool:
    return host.slots is None and host.devices is None


# --- --include and --exclude


def include(hosts: Sequence[Host], text: str, origin: str) -> tuple[Host, ...]:
    """Return those hosts, in their order, that `text` names, with the devices that it names.

    Raises LaunchError: it names a host or a device that is not there.
    """
    named = _named(hosts, text, origin)
    chosen = ((host, named[host.name]) for host in hosts if host.name in named)
    return tuple(host if devices is None else _with_devices(host, devices, text, origin) for host, devices in chosen)


def exclude(hosts: Sequence[Host], text: str, origin: str) -> tuple[Host, ...]:
    """Return the hosts in their order, without the hosts and without the devices that `text` names."""
    named = _named(hosts, text, origin)
    found = []
    for host in hosts:
        if host.name not in named:
            found.append(host)
        elif devices := named[host.name]:  # without devices all of the host is meant
            _check_devices(host, devices, text, origin)
            unwanted = frozenset(devices)
            rest = tuple(device for device in _all_devices(host, text, origin) if device not in unwanted)
            if rest:
                found.append(_with_devices(host, rest, text, origin))
    if not found:
        raise wrong(text, origin, "no host is left")
    return tuple(found)


def _named(hosts: Sequence[Host], text: str, origin: str) -> dict[str, tuple[str, ...] | None]:
    """Return the hosts that a filter such as `a@b:0,2` means, by name, with their devices; None: all of the host's.

    A filter names hosts by address, without the user whom a list of hosts may give (`user@gpu01`).
    """
    name_at = {host.address: host.name for host in hosts}
    named: dict[str, tuple[str, ...] | None] = {}
    for piece in text.split("@"):
        names, colon, devices = piece.strip().partition(":")
        chosen = parse_devices(devices, piece, origin) if colon else None
        for address in expand(names, origin):
            if address not in name_at:
                what = "there is no such host" if address == text else f"there is no host {shown(address)}"
                raise wrong(text, origin, what, hint=f"the hosts are {some(name_at)}")
            if name_at[address] in named:
                raise wrong(text, origin, f"{address} is listed twice", hint=f"name it once, as {address}:0,1")
            named[name_at[address]] = chosen
    return named


def _with_devices(host: Host, devices: tuple[str, ...], text: str, origin: str) -> Host:
    """Return this host with these devices alone; LaunchError if the host is known to lack one."""
    _check_devices(host, devices, text, origin)
    return replace(host, devices=devices, slots=None if host.slots is None else len(devices))


def _check_devices(host: Host, devices: tuple[str, ...], text: str, origin: str) -> None:
    """Check that the host has these devices, as far as its own devices or the number of its slots are given."""
    if host.devices is None and host.slots is None:
        return
    known = dict.fromkeys(_all_devices(host, text, origin))
    for device in devices:
        # of a number of slots only indices are known: a UUID may mean any of them
        if device not in known and (device.isdecimal() or host.devices is not None):
            raise wrong(text, origin, f"{host.address} has no device {device}", hint=f"it has {some(known)}")


def _all_devices(host: Host, text: str, origin: str) -> tuple[str, ...]:
    if host.devices is not None:
        return host.devices
    if host.slots is None:
        what = f"how many devices {host.address} has is not known"
        raise wrong(text, origin, what, hint=f"list it with their number: {host.address}:4")
    return tuple(map(str, range(host.slots)))
