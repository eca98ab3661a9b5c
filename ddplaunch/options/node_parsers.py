"""The grammars of values about nodes: their number, endpoints, injected faults. Pure, as `parsers` is; resolves no name."""

from __future__ import annotations

import re

from ddplaunch.fields import HOST
from ddplaunch.options.durations import duration, positive_duration
from ddplaunch.options.parsers import MOST, BadValue, digits, quoted, switch
from ddplaunch.spec import Fault

_ENDPOINT = r"(?:\[[\w.:%-]+\]|[\w.-]+)(?::(\d{1,5}))?|[\w.%-]*:[\w.%-]*:[\w.:%-]*"  # the last: bare IPv6
_FAULTS = ("kill", "node", "hang", "slow")
_FAULT = r"([a-z]+):(\d{1,9})@(.+)"
_FAULT_HINT = "type for example kill:5@2s: what, the rank, and the time after the start"


def nnodes(value: str) -> tuple[int, int]:
    """Read N or MIN:MAX."""
    low, colon, high = value.partition(":")
    min_nodes, max_nodes = digits(low), digits(high if colon else low)
    if not min_nodes or not max_nodes:
        raise BadValue("expected a number of nodes, or MIN:MAX")
    if max_nodes > MOST:
        raise BadValue(f"a job has at most {MOST} nodes")
    if min_nodes > max_nodes:
        raise BadValue("MIN exceeds MAX", hint=f"type {max_nodes}:{min_nodes}")
    return min_nodes, max_nodes


def write_nnodes(nodes: tuple[int, int]) -> str:
    """Write the minimum and maximum number of nodes as they are typed: 2 or 2:4."""
    min_nodes, max_nodes = nodes
    return str(max_nodes) if min_nodes == max_nodes else f"{min_nodes}:{max_nodes}"


def host(value: str) -> str:
    """Read a host name or an address without a port; an IPv6 address may be in brackets, as in torchrun."""
    bare = value[1:-1] if value.startswith("[") and value.endswith("]") else value
    if bare.count(":") == 1:
        raise BadValue("expected a host without a port", hint="the port has an option of its own: --master-port")
    if not re.fullmatch(HOST, bare):
        raise BadValue("expected a host name or an address")
    return bare


def endpoint(value: str) -> str:
    """Check HOST, HOST:PORT or [IPV6]:PORT."""
    found = re.fullmatch(_ENDPOINT, value)
    if not found or int(found[1] or 0) > 65535:
        raise BadValue("expected HOST or HOST:PORT")
    return value


def rendezvous_settings(value: str) -> dict[str, str]:
    """Read torchrun's KEY=VALUE,KEY=VALUE and check those that have an effect here; is_host becomes 1 or 0."""
    # quotes that the shell has left, since they begin inside a word of it: --rdzv-conf="'join_timeout=60'"
    quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "'\""
    result = _pairs(value[1:-1] if quoted else value)
    for key, parse in (
        ("join_timeout", positive_duration),
        ("timeout", positive_duration),
        ("last_call_timeout", duration),
        ("is_host", switch),
    ):
        if key in result:
            try:
                found = parse(result[key])
            except BadValue as error:
                raise BadValue(f"{key}: {error}") from None
            if key == "is_host":
                result[key] = str(int(found))
    return result


def _pairs(value: str) -> dict[str, str]:
    result: dict[str, str] = {}
    for part in value.split(","):
        key, _, content = (piece.strip() for piece in part.partition("="))
        if not key or not content:
            raise BadValue("expected KEY=VALUE,KEY=VALUE")
        result[key] = content
    return result


def faults(value: str) -> tuple[Fault, ...]:
    """Read faults, separated by commas.

    Raises:
        BadValue: one of them is malformed.
    """
    return tuple(_fault(part.strip()) for part in value.split(","))


def _fault(part: str) -> Fault:
    found = re.fullmatch(_FAULT, part, re.ASCII)
    if not found:
        raise BadValue(f'"{part}" is not KIND:RANK@TIME', hint=_FAULT_HINT)
    kind, target, after = found.groups()
    if kind not in _FAULTS:
        raise BadValue(f'"{part}": expected {quoted(_FAULTS)}', hint=_FAULT_HINT)
    try:
        return Fault(kind=kind, target=int(target), after=duration(after))
    except BadValue as error:
        raise BadValue(f'"{part}": {error}', hint=_FAULT_HINT) from None
